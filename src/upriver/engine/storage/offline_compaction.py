"""Gives the free space of a data file back to the file system, while no node uses it.

LMDB reuses free pages but never returns them. A compact copy takes the place of the file, in one step: a crash leaves
the old file or the new one.
"""

import os
import shutil
from pathlib import Path

import lmdb

from upriver.engine.storage.lmdb import COMPACTING, DATA_FILE, LOCK_FILE, LmdbStorage, number_commits
from upriver.errors import ForeignData, StorageError
from upriver.files import sync


def compact(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Compact the file of a data directory; returns its size before and after."""
    directory = Path(path)
    if not directory.is_dir():
        raise StorageError(os.fspath(path), "the directory does not exist")
    if not (directory / LOCK_FILE).exists() or not (directory / DATA_FILE).exists():
        raise ForeignData(os.fspath(path), "this is not a data directory of a node")
    storage = _Compactor(path)
    try:
        before = storage.size_bytes()
        storage.compact()
        return before, storage.size_bytes()
    finally:
        storage.close()


class _Compactor(LmdbStorage):
    """A data directory whose file is replaced; afterwards it can only be closed."""

    def compact(self) -> None:
        directory = Path(self.path)
        copy = directory / COMPACTING
        try:
            copy.mkdir()
            self._env.copy(str(copy), compact=True)
            number_commits(str(copy), self._map_bytes)
            sync(copy / DATA_FILE)
            self._env.close()
            os.replace(copy / DATA_FILE, directory / DATA_FILE)
            sync(directory)
        except (lmdb.Error, OSError) as error:
            raise StorageError(self.path, f"cannot be compacted: {error}") from error
        finally:
            shutil.rmtree(copy, ignore_errors=True)
