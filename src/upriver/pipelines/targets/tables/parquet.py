"""The latest state as Parquet files: a link ``current`` to a directory, replaced atomically.

A batch makes a new directory with links to the unchanged files and with the new files; then ``current`` is pointed to
it. The previous directory stays for a while, for its readers.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from upriver.errors import ForeignData
from upriver.files import sync, write_atomically
from upriver.pipelines.targets.tables.table import DataFile, TableTarget
from upriver.pipelines.targets.target import TargetProgress

_STATE: Final = "_upriver.json"
_SCHEMA: Final = "_schema"
#: Number of earlier directories to keep for their readers.
KEPT: Final = 2


class ParquetTable(TableTarget):
    """A Parquet table in a directory with a link ``current``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        if not self._link.is_symlink() and any(path.iterdir()):
            raise ForeignData(str(path), "not an Upriver mirror, and not empty; choose another directory")
        self._fresh: Path | None = None
        #: The directory that was current when the files were listed.
        self._known = self._version
        super().__init__()

    @property
    def _link(self) -> Path:
        return self.path / "current"

    @property
    def _version(self) -> int:
        return int(os.readlink(self._link).removeprefix("v")) if self._link.is_symlink() else 0

    def close(self) -> None:
        """Nothing to close."""

    def _discard(self) -> None:
        self._fresh = None

    def _schema(self) -> pa.Schema | None:
        return pq.read_schema(self._link / _SCHEMA) if self._link.is_symlink() else None

    def _stored_progress(self) -> TargetProgress:
        return (
            TargetProgress.of_text((self._link / _STATE).read_text()) if self._link.is_symlink() else TargetProgress()
        )

    def _stored_files(self) -> Iterable[DataFile]:
        if self._link.is_symlink():
            directory = self._link.resolve()
            for path in sorted(directory.glob("p*.parquet")):
                yield DataFile(int(path.name[1:5]), path)

    def _new_path(self, part: int, name: str) -> Path:
        return self._next() / f"p{part:04}-{name}"

    def _next(self) -> Path:
        """The next current directory."""
        if self._fresh is None:
            if self._version != self._known:
                raise ForeignData(str(self.path), "another process writes to it: stop one of the two, and start again")
            self._fresh = self.path / f"v{self._known + 1:012}"
            shutil.rmtree(self._fresh, ignore_errors=True)  # from an unfinished attempt
            self._fresh.mkdir()
        return self._fresh

    def _exchange_files(
        self,
        added: Sequence[DataFile],  # noqa: ARG002 (they are in the new directory already)
        removed: Sequence[DataFile],
        schema: pa.Schema,
        progress: TargetProgress,
    ) -> None:
        directory = self._next()
        staying = []
        for file in self._files:
            if file not in removed:
                os.link(file.path, directory / file.path.name)
                staying.append(DataFile(file.part, directory / file.path.name, file.rows))
        pq.write_metadata(schema, directory / _SCHEMA)
        write_atomically(directory / _STATE, progress.as_text().encode())
        link = self.path / ".next"
        link.unlink(missing_ok=True)
        link.symlink_to(directory.name)
        os.replace(link, self._link)
        sync(self.path)
        self._fresh = None
        self._known += 1
        # The files now have names in the new directory.
        self._files = [*removed, *staying]
        for old in sorted(self.path.glob("v*"))[: -KEPT - 1]:
            shutil.rmtree(old)
