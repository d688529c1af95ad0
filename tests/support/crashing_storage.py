"""A table's storage whose process ends at one of its operations, so that nothing takes place from then on."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from upriver.tables import TableStorage


class StorageCrash(BaseException):
    """The process is gone. Not an ``Exception``, so no code handles it."""


class CrashingStorage:
    """Passes everything on. Before the operation of this number, and before all later ones, it crashes."""

    def __init__(self, storage: TableStorage, crash_before: int | None = None) -> None:
        self._storage = storage
        self._left = crash_before

    @classmethod
    def of(cls, storage: TableStorage, crash_before: int | None = None) -> Any:
        """Typed as anything, because it takes the place of a storage."""
        return cls(storage, crash_before)

    def beside(self, storage: TableStorage) -> Any:
        """Another storage of the same process, with the same count of operations."""
        other = CrashingStorage(storage)
        other.step = self.step  # type: ignore[method-assign]
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return TableStorage.of, (self._storage.url, self._storage.options)

    def step(self) -> None:
        """An operation that changes files is next."""
        if self._left is not None:
            if self._left <= 0:
                raise StorageCrash
            self._left -= 1

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self.step()
        done = self._storage.put_if_absent(path, data)
        self.step()
        return done

    def write(self, path: str, data: bytes) -> None:
        self.step()
        self._storage.write(path, data)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.step()
            self._storage.delete([path])

    @contextlib.contextmanager
    def new_file(self, path: str, *, durable: bool = True, cache: Path | None = None) -> Iterator[Path]:
        with self._storage.new_file(path, durable=durable, cache=cache) as file:
            yield file
            self.step()
