"""Tables as targets: the work of tasks, the driver's commits, compaction, the history and verification."""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.pipelines.targets.tables.compactor import Compactor, compact_table
    from upriver.pipelines.targets.tables.description import TableDescription, describe_table
    from upriver.pipelines.targets.tables.verification import table_differences

__all__ = [
    "Compactor",
    "TableDescription",
    "compact_table",
    "describe_table",
    "table_differences",
]

__getattr__ = late_imports(
    __name__,
    compactor="Compactor compact_table",
    description="TableDescription describe_table",
    verification="table_differences",
)
