"""A table's storage on which a test can let operations fail, or act while one is under way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from upriver.tables import TableStorage


class FailingStorage:
    """Passes everything on; ``before`` and ``after`` run around puts, once each, and may raise."""

    def __init__(self, storage: TableStorage) -> None:
        self._storage = storage
        self.before: Callable[[], object] | None = None
        self.after: Callable[[], object] | None = None

    @classmethod
    def of(cls, path: Path) -> Any:
        """Typed as anything, because it takes the place of a storage."""
        return cls(TableStorage.of(path))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        before, self.before = self.before, None
        if before is not None:
            before()
        done = self._storage.put_if_absent(path, data)
        after, self.after = self.after, None
        if after is not None:
            after()
        return done
