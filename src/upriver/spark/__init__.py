"""Spark reads and writes a change stream: ``spark.read.format("upriver")`` and what belongs to it.

What needs Spark itself is imported when it is first used, so that looking at an offset does not start anything.
"""

from typing import TYPE_CHECKING, Any

from upriver.spark.offsets import describe_offset

if TYPE_CHECKING:
    from upriver.spark.dataframes import changes, latest, with_event_time

__all__ = ["changes", "describe_offset", "latest", "with_event_time"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from upriver.spark import dataframes

        return getattr(dataframes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
