"""The pipelines themselves: mirror, index, invalidate, replicate, observe and transition."""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.pipelines.jobs.index import search_index
    from upriver.pipelines.jobs.mirror import open_table, table_differences

__all__ = [
    "open_table",
    "search_index",
    "table_differences",
]

__getattr__ = late_imports(
    __name__,
    index="search_index",
    mirror="open_table table_differences",
)
