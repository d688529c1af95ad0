"""The Spark data source ``upriver``: planning, reading ranges, offsets, options and writing.

Modules that need Spark are imported on first use, so that reading an offset does not import Spark.
"""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.spark.batch_planner import Range, Rules, SourceState, ranges
    from upriver.spark.cluster_view import ClusterView
    from upriver.spark.data_source import UpriverDataSource
    from upriver.spark.dataframes import changes, latest, with_event_time
    from upriver.spark.offsets import Offset, VbucketOffset, describe_offset
    from upriver.spark.options import DIALECTS, ReadOptions, WriteOptions, as_address
    from upriver.spark.range_reader import RangeReader, Reading
    from upriver.spark.row_writer import RowWriter, WriteOutcome
    from upriver.spark.rows import FIELDS, ROWS, RowMaker, unsigned

__all__ = [
    "DIALECTS",
    "FIELDS",
    "ROWS",
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
    "describe_offset",
    "latest",
    "ranges",
    "unsigned",
    "with_event_time",
]

__getattr__ = late_imports(
    __name__,
    batch_planner="Range Rules SourceState ranges",
    cluster_view="ClusterView",
    data_source="UpriverDataSource",
    dataframes="changes latest with_event_time",
    offsets="Offset VbucketOffset describe_offset",
    options="DIALECTS ReadOptions WriteOptions as_address",
    range_reader="RangeReader Reading",
    row_writer="RowWriter WriteOutcome",
    rows="FIELDS ROWS RowMaker unsigned",
)
