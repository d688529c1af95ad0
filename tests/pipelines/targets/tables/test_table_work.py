"""Merging files, and writing them again, as tasks do it."""

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap

from tests.support.table_parts import SEED, PartTable, number
from upriver.pipelines.core.workers import LocalWorkers
from upriver.pipelines.targets.tables.table_work import FileWork, merged_groups, rewritten
from upriver.tables import Column, TableSchema


def some_table(tmp_path: Path) -> PartTable:
    """Keys a to f, two in each of three files; b is deleted, d is changed."""
    table = PartTable(tmp_path)
    for first, second in ("ab", "cd", "ef"):
        table.add([(0, first.encode(), number(1)), (1, second.encode(), number(2))])
    table.add([(1, b"b", None), (1, b"d", number(3))])
    return table


def test_groups_are_merged(tmp_path: Path) -> None:
    table = some_table(tmp_path)
    files = list(table.table.snapshot.files.values())
    work = pickle.loads(pickle.dumps(FileWork(table.storage, table.table.schema, SEED)))
    merged = merged_groups(work, [files[:2], files[2:]], LocalWorkers())
    assert [[each.path for each in found.inputs] for found in merged] == [
        [file.path for file in files[:2]],
        [file.path for file in files[2:]],
    ]
    before = table.contents()
    for found in merged:
        assert found.file is not None
        table.commit_merged(found)
    assert table.contents() == before
    assert len(table.table.snapshot.files) == 2
    assert all(not file.dead for file in table.table.snapshot.files.values())


def test_files_are_written_again_without_dead_rows(tmp_path: Path) -> None:
    table = some_table(tmp_path)
    files = table.table.snapshot.files
    wide = TableSchema([Column("n", "float")])
    hidden = next(path for path, file in files.items() if file.dead)
    dead = {**dict.fromkeys(files, BitMap()), hidden: BitMap([0])}
    found = rewritten(FileWork(table.storage, wide, SEED), table.table, dead, LocalWorkers())
    # Of one file the second row is dead by its vector, and the first one now, so nothing is left of it.
    assert sorted(file.rows for file in found) == [1, 1, 2]
    assert not {file.path for file in found} & files.keys()
    for file in found:
        path = table.storage.local(file.path)
        assert path is not None
        assert pq.read_schema(path).field("n").type == pa.float64()
