"""Delete the files that no version of a table needs any more.

A version is needed for the retention (seven days) after the next one replaced it: queries may still read it. Its data
files, their sidecars and its deletion vectors stay. A file that no version references may belong to a batch that is
still running, so it stays for the same time after it was written, and for an hour at least. The log is cleaned up too:
commits before a log checkpoint, after the table's log retention.

Only files that a table can have are deleted: Parquet files, deletion vectors, unfinished files, and everything in our
hidden folder. Hidden folders of other programs stay.
"""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from upriver.errors import OptionError
from upriver.files import UNFINISHED
from upriver.tables.actions import Add, Remove
from upriver.tables.deletion_vectors import HIDDEN, vector_path
from upriver.tables.log import removed_since
from upriver.tables.storage import StoredFile, TableStorage
from upriver.tables.table import Table, clean_log

#: The property with the retention.
RETENTION_PROPERTY: Final = "delta.deletedFileRetentionDuration"
#: How long a file stays that no version has referenced yet, however short the retention is.
ATTEMPT_S: Final = 3600.0
_INTERVAL: Final = re.compile(r"(?:interval\s+)?(\d+)\s+(second|minute|hour|day|week)s?", re.IGNORECASE)
_SECONDS: Final = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
_DEFAULT_S: Final = 604_800.0
_VECTOR: Final = re.compile(r"deletion_vector_[0-9a-f-]{36}\.bin")
#: Number of files to delete with one request.
_DELETED_AT_ONCE: Final = 1000


@dataclass(frozen=True)
class Vacuumed:
    """What vacuum deleted, or would delete."""

    paths: tuple[str, ...]
    size: int

    @property
    def data_files(self) -> int:
        """Number of data files."""
        return sum(path.endswith(".parquet") for path in self.paths)

    @property
    def vectors(self) -> int:
        """Number of files with deletion vectors."""
        return sum(_is_vector(path) for path in self.paths)


def vacuum_table(
    table: Table, *, retention_s: float | None = None, dry_run: bool = False, now_s: float | None = None
) -> Vacuumed:
    """Delete files that no version within the retention references and that are older than it.

    The retention is the table's, or a shorter one. A short one endangers queries that are running.
    """
    kept_s = table_retention_s(table)
    if retention_s is None:
        retention_s = kept_s
    if retention_s > kept_s:
        raise OptionError(
            "retention",
            f"{retention_s:g} s",
            f"the table remembers removed files for {kept_s:g} s only; set its property {RETENTION_PROPERTY} first",
        )
    now_s = time.time() if now_s is None else now_s
    before_s = now_s - retention_s
    # In this order: a file that is removed from the table meanwhile is in the snapshot or among the removed ones.
    listing = [file for file in table.storage.list() if file.modified < before_s and _may_go(file.path)]
    table.read_log()
    removed = removed_since(table.storage, 0, table.snapshot.version)
    needed = _paths(table, [*table.snapshot.files.values(), *(file for file in removed if _is_since(file, before_s))])
    replaced, attempts_s = _paths(table, removed), now_s - max(retention_s, ATTEMPT_S)
    found = [
        file for file in listing if file.path not in needed and (file.path in replaced or file.modified < attempts_s)
    ]
    if not dry_run:
        _delete(table.storage, found)
    return Vacuumed(tuple(file.path for file in found), sum(file.size for file in found))


def table_retention_s(table: Table) -> float:
    """How long a table keeps files that it no longer references."""
    found = _INTERVAL.fullmatch(table.properties.get(RETENTION_PROPERTY, "").strip())
    return float(int(found[1]) * _SECONDS[found[2].lower()]) if found else _DEFAULT_S


def _may_go(path: str) -> bool:
    """Whether a file of this name belongs to tables."""
    *folders, name = path.split("/")
    if name.startswith(".") and name.endswith(UNFINISHED):
        return True
    if folders[:1] == [HIDDEN]:
        return True
    hidden = any(part.startswith(("_", ".")) for part in (*folders, name))
    return not hidden and (name.endswith(".parquet") or _is_vector(path))


def _is_vector(path: str) -> bool:
    return _VECTOR.fullmatch(path.rpartition("/")[2]) is not None


def _is_since(file: Remove, since_s: float) -> bool:
    return file.deleted_ms >= int(since_s * 1000)


def _paths(table: Table, files: Iterable[Add | Remove]) -> set[str]:
    """Data files with their sidecars and vectors."""
    from upriver.tables.key_index import sidecar_path

    found = set[str]()
    for file in files:
        found.add(file.path)
        found.add(sidecar_path(file.path))
        vector = file.deletion_vector and vector_path(file.deletion_vector, table.storage)
        if vector:
            found.add(vector)
    return found


def _delete(storage: TableStorage, files: list[StoredFile]) -> None:
    for start in range(0, len(files), _DELETED_AT_ONCE):
        storage.delete([file.path for file in files[start : start + _DELETED_AT_ONCE]])
    clean_log(storage)
