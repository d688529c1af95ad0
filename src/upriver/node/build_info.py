"""Which parts of the node run compiled here, and which fall back to plain Python.

Every compiled part has a twin in plain Python that does the same, four to a hundred times slower. The twin serves where
there was no C compiler, and also where what was built is older than the sources and lacks something: nobody should have
to find that out from a benchmark.
"""

import importlib.util
from collections.abc import Mapping

from upriver.engine import backend
from upriver.wire.codec import columns, frame_runs, tap_records


def compiled_parts() -> Mapping[str, bool]:
    """Each part that can be compiled, and whether it is what serves."""
    return {
        "item table": backend.COMPILED,
        "request loop": backend.COMPILED and importlib.util.find_spec("upriver.node._fast_path") is not None,
        "columnar codec": columns.CODEC == "compiled",
        "frames": frame_runs.change_run is not frame_runs.plain_change_run,
        "tap records": tap_records.lay_out is not tap_records.plain_lay_out,
    }


def plain_parts() -> list[str]:
    """The names of those that plain Python serves."""
    return [name for name, compiled in compiled_parts().items() if not compiled]
