"""The Spark data source ``upriver``: planning, reading ranges, offsets, options and writing.

Modules that need Spark are imported on first use, so that reading an offset does not import Spark.

Spark looks its formats up with the Python in ``PYSPARK_PYTHON``, which is ``python3`` by default. In a virtual
environment that is not activated that is another Python, without this package. So importing this package names the
running Python there, unless the user has named one. It must be imported before the session starts, because Spark's JVM
inherits the variable.
"""

import os
import shutil
import sys
from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.spark.batch_planner import Range, Rules, SourceState, ranges
    from upriver.spark.cluster_view import BucketIdentity, ClusterView
    from upriver.spark.data_source import UpriverDataSource
    from upriver.spark.dataframes import changes, latest, with_event_time
    from upriver.spark.offsets import Offset, VbucketOffset, describe_offset
    from upriver.spark.options import DIALECTS, ReadOptions, WriteOptions, as_address
    from upriver.spark.range_reader import RangeReader, Reading, close_readers, reader_for
    from upriver.spark.range_rows import packed_ranges, unpacked_ranges
    from upriver.spark.row_writer import RowWriter, WriteOutcome
    from upriver.spark.rows import FIELDS, ROWS, RowMaker, unsigned

__all__ = [
    "DIALECTS",
    "FIELDS",
    "ROWS",
    "BucketIdentity",
    "ClusterView",
    "Offset",
    "Range",
    "RangeReader",
    "ReadOptions",
    "Reading",
    "RowMaker",
    "RowWriter",
    "Rules",
    "SourceState",
    "UpriverDataSource",
    "VbucketOffset",
    "WriteOptions",
    "WriteOutcome",
    "as_address",
    "changes",
    "close_readers",
    "describe_offset",
    "latest",
    "packed_ranges",
    "ranges",
    "reader_for",
    "unpacked_ranges",
    "unsigned",
    "with_event_time",
]

__getattr__ = late_imports(
    __name__,
    batch_planner="Range Rules SourceState ranges",
    cluster_view="BucketIdentity ClusterView",
    data_source="UpriverDataSource",
    dataframes="changes latest with_event_time",
    offsets="Offset VbucketOffset describe_offset",
    options="DIALECTS ReadOptions WriteOptions as_address",
    range_reader="RangeReader Reading close_readers reader_for",
    range_rows="packed_ranges unpacked_ranges",
    row_writer="RowWriter WriteOutcome",
    rows="FIELDS ROWS RowMaker unsigned",
)


def _name_this_python() -> None:
    """Let Spark use the running Python, if the user has not said which, and ``python3`` is that of another place.

    On a cluster ``python3`` may be elsewhere on each machine, so a path is named only where it makes a difference.
    """
    default = shutil.which("python3")
    if "PYSPARK_PYTHON" in os.environ or not sys.executable:
        return
    if default is None or os.path.dirname(default) != os.path.dirname(sys.executable):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


_name_this_python()
