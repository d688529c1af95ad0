"""The pipelines themselves: mirror, index, invalidate, replicate, observe and transition."""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.pipelines.jobs.index import search_index

__all__ = [
    "search_index",
]

__getattr__ = late_imports(
    __name__,
    index="search_index",
)
