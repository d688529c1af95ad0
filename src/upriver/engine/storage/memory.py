"""Storage for buckets in memory: commits succeed, and nothing can be read back."""

from collections.abc import Iterator
from typing import Any

from upriver.engine.storage.interface import Block, Storage, WriteBatch
from upriver.errors import StorageError


class MemoryStorage(Storage):
    """Stores nothing; the tables hold everything."""

    keeps_records = False
    path = ":memory:"

    def facts(self) -> dict[str, Any]:
        return {}

    def descriptions(self) -> dict[int, dict[str, Any]]:
        return {}

    def blocks(self, vbucket: int, after: int = 0, max_bytes: int = 2**63) -> list[Block]:  # noqa: ARG002
        return []

    def all_blocks(self) -> Iterator[tuple[int, memoryview]]:
        return iter(())

    def groups(self) -> Iterator[tuple[int, memoryview]]:
        return iter(())

    def commit(self, batch: WriteBatch) -> None:
        pass

    def backup(self, path: str) -> None:
        raise StorageError(path, "a bucket in memory cannot be backed up")

    def size_bytes(self) -> int:
        return 0

    def blocks_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass
