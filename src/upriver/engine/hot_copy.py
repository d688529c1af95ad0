"""A copy of a data directory while a node uses it.

LMDB lets other processes read while one writes. So a copy needs nothing from the node, not even that it runs: it holds
what was on disk at the moment at which it began, as after a crash at that moment, and is marked as a copy.
"""

import os
from pathlib import Path

import lmdb

from upriver.engine.lmdb_pages import Damaged, check_pages
from upriver.engine.lmdb_storage import DATA_FILE, LOCK_FILE, LmdbStorage
from upriver.errors import CorruptData, ForeignData, StorageError


def hot_copy(path: str | os.PathLike[str], target: str | os.PathLike[str], *, check: bool = False) -> None:
    """Copy a data directory to an empty one; ``check`` reads every block first, against its checksum."""
    storage = _Reader(path)
    try:
        if check:
            storage.check()
        storage.backup(os.fspath(target))
    finally:
        storage.close()


class _Reader(LmdbStorage):
    """A data directory that somebody else may hold: it is only read."""

    def check(self) -> None:
        """Read everything; ``CorruptData`` if something is not as it was written."""
        self.descriptions()
        for _ in self.groups():
            pass
        for _ in self.all_blocks():
            pass

    def _occupy(self) -> int:
        directory = Path(self.path)
        if not directory.is_dir():
            raise StorageError(self.path, "there is no such directory")
        if not (directory / LOCK_FILE).exists() or not (directory / DATA_FILE).exists():
            raise ForeignData(self.path, "this is no data directory of a node")
        return os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)

    def _open(self) -> lmdb.Environment:
        try:
            check_pages(Path(self.path, DATA_FILE))
            env = lmdb.open(self.path, map_size=self._map_bytes, max_dbs=8, readonly=True)
            self._main = env.open_db(None)
            tables = (env.open_db(name, create=False) for name in (b"facts", b"descriptions", b"groups", b"blocks"))
            self._meta, self._descriptions, self._groups, self._blocks = tables
        except (Damaged, lmdb.Error) as error:
            raise CorruptData(self.path, f"{DATA_FILE} cannot be read: {error}") from None
        except OSError as error:
            raise StorageError(self.path, f"cannot be opened: {error}") from error
        return env

    def _upgrade(self, facts: dict[str, object]) -> dict[str, object]:
        raise StorageError(self.path, f"is in the old format {facts['format']}: start a node with it once")
