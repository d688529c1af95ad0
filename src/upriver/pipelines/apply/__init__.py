"""What a batch of changes does to a target: which rows it writes, and what a rollback repairs."""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.pipelines.apply.rereading import NodeReader

__all__ = [
    "NodeReader",
]

__getattr__ = late_imports(
    __name__,
    rereading="NodeReader",
)
