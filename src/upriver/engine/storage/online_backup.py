"""A backup of a data directory while a node uses it.

LMDB lets other processes read while one writes. So a backup needs nothing from the node, which need not even run. The
backup holds what was on disk when it began, as after a crash at that moment, and is marked as a copy.
"""

import os
from pathlib import Path
from typing import Final

import lmdb

from upriver.engine.storage.lmdb import DATA_FILE, LOCK_FILE, LmdbStorage
from upriver.engine.storage.lmdb_check import Contents, Damaged, MetaPage, check_commit, check_file, meta_pages
from upriver.errors import CorruptData, ForeignData, StorageError

#: How often newer commits may overwrite a meta page while we read it.
ATTEMPTS: Final = 1000


def online_backup(path: str | os.PathLike[str], target: str | os.PathLike[str], *, check: bool = False) -> None:
    """Copy a data directory to an empty one; with ``check``, verify every checksum first."""
    storage = _Reader(path)
    try:
        if check:
            storage.check()
        storage.backup(os.fspath(target))
    finally:
        storage.close()


class _Reader(LmdbStorage):
    """A data directory that a node may be using: it is only read."""

    def check(self) -> None:
        """Read everything; raises ``CorruptData`` if a checksum is wrong."""
        self.descriptions()
        for _ in self.groups():
            pass
        for _ in self.all_blocks():
            pass

    def _occupy(self) -> int:
        directory = Path(self.path)
        if not directory.is_dir():
            raise StorageError(self.path, "the directory does not exist")
        if not (directory / LOCK_FILE).exists() or not (directory / DATA_FILE).exists():
            raise ForeignData(self.path, "this is not a data directory of a node")
        return os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)

    def _open(self) -> lmdb.Environment:
        file = Path(self.path, DATA_FILE)
        try:
            meta_pages(file)
            env = lmdb.open(self.path, map_size=self._map_bytes, max_dbs=8, readonly=True)
        except (Damaged, lmdb.Error) as error:
            raise CorruptData(self.path, f"{DATA_FILE} cannot be read: {error}") from None
        except OSError as error:
            raise StorageError(self.path, f"cannot be opened: {error}") from error
        try:
            self._numbered = self._check_shown(env, file).number is not None
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

    def _check_shown(self, env: lmdb.Environment, file: Path) -> Contents:
        """Check the pages of the last commit; LMDB does not reuse them while a transaction reads that commit.

        The commit after the next overwrites its meta page, so the page counts only if no other commit came while it was
        read. LMDB needs only the meta pages to begin a transaction.
        """
        for _ in range(ATTEMPTS):
            with env.begin() as txn:
                metas = meta_pages(file)
                if metas[0].transaction == txn.id() == env.info()["last_txnid"]:
                    return self._check_last(file, metas)
        raise StorageError(self.path, "the data changes too quickly to be checked: try again")

    def _check_last(self, file: Path, metas: list[MetaPage]) -> Contents:
        """Check the commit of the first meta page; of the other one too, unless a writer has gone on."""
        try:
            return check_file(file)
        except Damaged:
            if meta_pages(file) == metas:
                raise
        return check_commit(file, metas[0])

    def _upgrade(self, facts: dict[str, object]) -> dict[str, object]:
        raise StorageError(self.path, f"has the old format {facts['format']}: start a node on it once to upgrade it")
