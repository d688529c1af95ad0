"""A copy of a data directory while a node uses it.

LMDB lets other processes read while one writes. So a copy needs nothing from the node, not even that it runs: it holds
what was on disk at the moment at which it began, as after a crash at that moment, and is marked as a copy.
"""

import os
from pathlib import Path
from typing import Final

import lmdb

from upriver.engine.storage.lmdb import DATA_FILE, LOCK_FILE, LmdbStorage
from upriver.engine.storage.lmdb_check import Damaged, check_pages, heads
from upriver.errors import CorruptData, ForeignData, StorageError

#: How often the head of a commit may be overtaken by the next ones while it is read.
ATTEMPTS: Final = 1000


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
        file = Path(self.path, DATA_FILE)
        try:
            heads(file)
            env = lmdb.open(self.path, map_size=self._map_bytes, max_dbs=8, readonly=True)
        except (Damaged, lmdb.Error) as error:
            raise CorruptData(self.path, f"{DATA_FILE} cannot be read: {error}") from None
        except OSError as error:
            raise StorageError(self.path, f"cannot be opened: {error}") from error
        try:
            self._check_shown(env, file)
            self._main = env.open_db(None)
            tables = (env.open_db(name, create=False) for name in (b"facts", b"descriptions", b"groups", b"blocks"))
            self._meta, self._descriptions, self._groups, self._blocks = tables
        except (Damaged, lmdb.Error) as error:
            env.close()
            raise CorruptData(self.path, f"{DATA_FILE} cannot be read: {error}") from None
        except BaseException:
            env.close()
            raise
        return env

    def _check_shown(self, env: lmdb.Environment, file: Path) -> None:
        """Look at the pages of the last commit, of which none is used again while a transaction reads it.

        Its head is overwritten by the next commit but one, so it counts only if no other has come by the time that it
        was read. To begin a transaction LMDB needs nothing but the heads.
        """
        for _ in range(ATTEMPTS):
            with env.begin() as txn:
                found = [head for head in heads(file) if head.transaction == txn.id()]
                if found and env.info()["last_txnid"] == txn.id():
                    check_pages(file, found[0])
                    return
        raise StorageError(self.path, "changes too quickly to be looked at: try again")

    def _upgrade(self, facts: dict[str, object]) -> dict[str, object]:
        raise StorageError(self.path, f"is in the old format {facts['format']}: start a node with it once")
