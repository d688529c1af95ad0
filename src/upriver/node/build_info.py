"""Which parts of Upriver run compiled here.

The node does not start without the item table and the request loop. Each of the other parts has a twin in plain Python
that does the same, four to a hundred times slower. The twin is used where there was no C compiler, and where the
compiled part is older than the sources and lacks something.
"""

import importlib
from collections.abc import Mapping

from upriver.wire.codec import compiled_codecs


def compiled_parts() -> Mapping[str, bool]:
    """Each part that can be compiled, and whether its compiled form is in use."""
    return {
        "item table": _imports("upriver.engine.table"),
        "request loop": _imports("upriver.node._fast_path"),
        **compiled_codecs(),
    }


def plain_parts() -> list[str]:
    """The names of the parts that are not compiled."""
    return [name for name, compiled in compiled_parts().items() if not compiled]


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
