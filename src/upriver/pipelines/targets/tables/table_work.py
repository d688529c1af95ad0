"""Work on the data files of a table that needs no nodes: merging files, and writing them again. It runs in tasks."""

import pickle
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyroaring import BitMap

from upriver.pipelines.core.workers import Done, Workers, ignored
from upriver.pipelines.targets.tables.table_task import cache_directory
from upriver.tables import (
    Add,
    Merged,
    NewFile,
    Table,
    TableSchema,
    TableStorage,
    files_expected,
    merge,
    merge_plain,
    read_vector,
    rewrite,
)


@dataclass(frozen=True)
class FileWork:
    """What tasks do with data files; the new files have the columns of the schema."""

    storage: TableStorage
    schema: TableSchema
    seed: bytes

    def merge(self, item: bytes) -> bytes:
        """Merge files into one."""
        files: Sequence[Add] = pickle.loads(item)
        path = _new_path()
        with files_expected(self.storage):
            return merge(self.storage, files, self.schema, self.seed, path=path, cache=cache_directory()).to_bytes()

    def rewrite(self, item: bytes) -> bytes:
        """Write a file again without some rows."""
        path, dead = pickle.loads(item)
        positions = BitMap.deserialize(dead)
        to, cache = _new_path(), cache_directory()
        with files_expected(self.storage):
            return pickle.dumps(rewrite(self.storage, path, positions, self.schema, self.seed, path=to, cache=cache))


@dataclass(frozen=True)
class PlainFileWork:
    """What tasks do with data files of an append-only table, such as a history."""

    storage: TableStorage
    columns: pa.Schema

    def merge(self, item: bytes) -> bytes:
        """Merge files into one."""
        return merge_plain(self.storage, pickle.loads(item), self.columns, path=_new_path()).to_bytes()


def merged_groups(
    work: FileWork | PlainFileWork, groups: Iterable[Sequence[Add]], workers: Workers, done: Done = ignored
) -> list[Merged]:
    """Merge each group of files into one file."""
    return [Merged.of_bytes(each) for each in workers.map(work.merge, [pickle.dumps(group) for group in groups], done)]


def rewritten(work: FileWork, table: Table, dead: Mapping[str, BitMap], workers: Workers) -> list[NewFile]:
    """Write these files of a table again, without the rows that are dead now or hidden by their vectors."""
    files = table.snapshot.files
    items = []
    for path, positions in dead.items():
        gone = positions | read_vector(table.storage, files[path].deletion_vector)
        items.append(pickle.dumps((path, bytes(gone.serialize()))))
    found = [pickle.loads(each) for each in workers.map(work.rewrite, items)]
    return [each for each in found if each is not None]


def _new_path() -> str:
    return f"{uuid.uuid4().hex}.parquet"
