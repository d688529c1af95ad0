"""Tables: edits, conflicts with other writers, crashes, and what other readers see."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from tests.support.depth import examples
from tests.support.failing_storage import FailingStorage
from tests.support.killed_process import each_kill
from tests.support.object_store import ObjectStore, object_store
from tests.support.sample_tables import (
    SCHEMA,
    arrow_rows,
    assert_all_see,
    data_file,
    new_table,
    numbered,
    rows_seen,
)
from upriver.errors import (
    FilesLost,
    ForeignData,
    NewerFormat,
    OldLayout,
    StorageError,
    TableConflict,
    UnsupportedTable,
)
from upriver.tables.actions import Add, CommitInfo, Protocol, Remove, Txn, encode
from upriver.tables.deletion_vectors import HIDDEN, vector_path
from upriver.tables.log import commit_path, load, read_commit
from upriver.tables.reading import arrow_schema, read_rows
from upriver.tables.schema import Column, TableSchema
from upriver.tables.storage import TableStorage
from upriver.tables.table import (
    CHECKPOINT_COMMITS,
    CHECKPOINT_COMMITS_MAX,
    ChangedRows,
    Edit,
    Table,
    clean_log,
    write_checkpoint,
)

__all__ = ["object_store"]

TEN = {key: key for key in range(10)}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Keys 0 to 9 in a.parquet, 10 to 19 in b.parquet."""
    table = new_table(tmp_path / "table")
    files = [
        data_file(table.storage, TEN, "a.parquet"),
        data_file(table.storage, {key: key for key in range(10, 20)}, "b.parquet"),
    ]
    table.commit(Edit("WRITE", files, txn=("upriver-q", 0)))
    return table


def update(table: Table, rows: Mapping[int, int], batch: int | None = None) -> Edit:
    """An edit that puts these rows in the place of those with the same keys."""
    edit = Edit("WRITE", [data_file(table.storage, rows)], txn=None if batch is None else ("upriver-q", batch))
    dead = {path: BitMap([key - start for key in rows if start <= key < start + 10]) for path, start in FIRST.items()}
    return replace(edit, dead={path: positions for path, positions in dead.items() if positions})


FIRST = {"a.parquet": 0, "b.parquet": 10}


def put_foreign(table: Table, *actions: Any, operation: str = "FOREIGN") -> int:
    """Commit as another program does."""
    storage = TableStorage.of(table.storage.url, table.storage.options)
    snapshot = load(storage)
    assert snapshot is not None
    content = encode([CommitInfo(1, operation, engine="other/1"), *actions])
    assert storage.put_if_absent(commit_path(snapshot.version + 1), content)
    return snapshot.version + 1


def delta_rs(table: Table) -> DeltaTable:
    return DeltaTable(table.storage.url, storage_options=table.storage.options or None)


# What is there


def test_nothing(tmp_path: Path) -> None:
    storage = TableStorage.of(tmp_path / "table")
    assert Table.find(storage) is None
    with pytest.raises(StorageError, match="there is no table"):
        Table.open(storage)


@pytest.mark.parametrize("vectors", [True, False])
def test_create(tmp_path: Path, vectors: bool) -> None:
    table = new_table(tmp_path, vectors=vectors, query="q")
    assert table.vectors == vectors
    assert table.schema.columns == SCHEMA.columns
    assert table.properties["upriver.query"] == "q"
    assert Table.open(table.storage).snapshot == table.snapshot
    assert_all_see(table.storage, [])
    protocol = delta_rs(table).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == ((3, 7) if vectors else (1, 2))


def test_two_that_create_at_the_same_time(tmp_path: Path) -> None:
    storage = FailingStorage.of(tmp_path)
    storage.before = lambda: new_table(tmp_path, query="first")
    assert new_table(storage, query="second").properties["upriver.query"] == "first"


def test_the_layouts_before_are_refused_or_replaced(tmp_path: Path) -> None:
    rows = arrow_rows(TEN).append_column("upriver_part", pa.array([0] * 10, pa.int32()))
    write_deltalake(str(tmp_path / "delta"), rows, partition_by=["upriver_part"])
    (tmp_path / "parquet" / "v1").mkdir(parents=True)
    pq.write_table(rows, tmp_path / "parquet" / "v1" / "p0000.parquet")
    (tmp_path / "parquet" / "current").symlink_to("v1")
    for path in (tmp_path / "delta", tmp_path / "parquet"):
        storage = TableStorage.of(path)
        with pytest.raises(OldLayout, match=rf"upriver run mirror --\w+ --to {path} …"):
            Table.find(storage)
        table = Table.find(storage, replaceable=True)
        assert table is not None
        assert not table.snapshot.files
        table.commit(Edit("WRITE", [data_file(storage, {1: 1})], schema=SCHEMA))
        assert_all_see(storage, [(1, 1)])


def test_a_table_that_is_replaced(table: Table) -> None:
    other = Table.replace(table.storage, SCHEMA, {"upriver.query": "other"})
    assert other.properties["upriver.query"] == "other"
    assert_all_see(table.storage, [])
    with pytest.raises(ForeignData, match="has taken the place"):
        table.commit(update(table, {3: 103}))


def test_foreign_data_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "delta"), arrow_rows(TEN))
    with pytest.raises(ForeignData, match="not an Upriver mirror"):
        Table.find(TableStorage.of(tmp_path / "delta"))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ForeignData, match="not empty"):
        Table.find(TableStorage.of(tmp_path))


def test_a_later_layout_is_refused(tmp_path: Path) -> None:
    new_table(tmp_path).commit(Edit("SET", properties={"upriver.layout": "3"}))
    with pytest.raises(NewerFormat, match="layout 3"):
        Table.open(TableStorage.of(tmp_path))


# Edits


def test_all_readers_see_updates_and_deletions(table: Table) -> None:
    assert_all_see(table.storage, [(key, key) for key in range(20)])
    table.commit(update(table, {3: 103, 14: 114, 99: 199}, 1))
    expected = {key: key for key in range(20)} | {3: 103, 14: 114, 99: 199}
    assert_all_see(table.storage, expected.items())
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([0, 4])}))
    assert_all_see(table.storage, {key: n for key, n in expected.items() if key not in (0, 4)}.items())


@pytest.mark.parametrize(
    "dead",
    [
        BitMap([0]),
        BitMap([99_999]),
        BitMap(range(10, 99_000)),  # a run
        BitMap(range(0, 100_000, 2)),  # a bitmap in two containers
        BitMap([*range(5), *range(70_000, 70_300, 3)]),
    ],
)
def test_all_readers_read_all_kinds_of_bitmaps(tmp_path: Path, dead: BitMap) -> None:
    table = new_table(tmp_path)
    rows = {key: key for key in range(100_000)}
    file = data_file(table.storage, rows)
    table.commit(Edit("WRITE", [file], dead={file.path: dead}))
    assert_all_see(table.storage, [(key, key) for key in rows if key not in dead])


def test_the_log_of_a_vector(table: Table) -> None:
    before = table.snapshot.files["a.parquet"]
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([1])}))
    middle = table.snapshot.files["a.parquet"]
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([1, 2])}))
    after = table.snapshot.files["a.parquet"]
    assert [file.dead for file in (before, middle, after)] == [0, 1, 2]
    assert after.statistics == {**before.statistics, "numRecords": 10, "tightBounds": False}
    lines = [json.loads(line) for line in table.storage.read(commit_path(3)).splitlines()]
    (removed,) = [line["remove"] for line in lines if "remove" in line]
    assert middle.deletion_vector is not None
    assert removed["deletionVector"] == middle.deletion_vector.as_json()
    assert after.deletion_vector is not None
    assert (vector_path(after.deletion_vector, table.storage) or "").startswith(f"{HIDDEN}/")


def test_the_vectors_of_a_commit_are_in_one_file(table: Table) -> None:
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([1]), "b.parquet": BitMap([1])}))
    assert len(list(table.storage.list(f"{HIDDEN}/"))) == 1


def test_a_file_without_live_rows_leaves_the_table(table: Table) -> None:
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap(range(9))}))
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([9]), "b.parquet": BitMap(range(10))}))
    assert not table.snapshot.files
    assert_all_see(table.storage, [])
    file = data_file(table.storage, TEN)
    table.commit(Edit("WRITE", [file], dead={file.path: BitMap(range(10))}))
    assert not table.snapshot.files


def test_rows_that_are_dead_already(table: Table) -> None:
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([1])}))
    file = table.snapshot.files["a.parquet"]
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([1])}, txn=("upriver-q", 1)))
    assert table.snapshot.files["a.parquet"] == file
    assert table.snapshot.txns["upriver-q"] == 1


def test_a_compaction(table: Table) -> None:
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([1])}))
    rows = {key: key for key in range(20) if key != 1}
    file = data_file(table.storage, rows)
    table.commit(Edit("OPTIMIZE", [file], removed=["a.parquet", "b.parquet"], data_change=False))
    assert not read_commit(table.storage, 3).changes_data
    assert list(table.snapshot.files) == [file.path]
    assert_all_see(table.storage, rows.items())


def test_properties_and_schema(table: Table) -> None:
    wider = TableSchema([*SCHEMA.columns, Column("text", "text")])
    table.commit(Edit("SET", properties={"upriver.a": "1", "upriver.b": "2"}, data_change=False))
    table.commit(Edit("SET", properties={"upriver.a": None}, schema=wider, data_change=False))
    found = Table.open(table.storage)
    assert "upriver.a" not in found.properties
    assert found.properties["upriver.b"] == "2"
    assert found.schema.columns == wider.columns
    assert_all_see(table.storage, [(key, key) for key in range(20)])


def test_a_schema_never_loses_a_column(table: Table) -> None:
    with pytest.raises(AssertionError, match="lacks n"):
        table.commit(Edit("SET", schema=TableSchema([])))


def test_vectors_that_are_off(tmp_path: Path) -> None:
    table = new_table(tmp_path, vectors=False)
    table.commit(Edit("WRITE", [data_file(table.storage, TEN, "a.parquet")]))
    with pytest.raises(StorageError, match="vectors are off"):
        table.commit(Edit("DELETE", dead={"a.parquet": BitMap([1])}))
    rest = {key: key for key in range(1, 10)}
    table.commit(Edit("DELETE", [data_file(table.storage, rest)], removed=["a.parquet"]))
    assert_all_see(table.storage, rest.items())
    assert delta_rs(table).to_pyarrow_table().num_rows == 9


def test_vectors_that_the_protocol_does_not_allow(tmp_path: Path) -> None:
    table = new_table(tmp_path, vectors=False)
    table.commit(Edit("SET", properties={"delta.enableDeletionVectors": "true"}, data_change=False))
    assert not table.vectors


def test_a_position_beyond_the_file(table: Table) -> None:
    with pytest.raises(AssertionError, match="has 10 rows"):
        table.commit(Edit("DELETE", dead={"a.parquet": BitMap([10])}))


def test_a_foreign_file_without_statistics(table: Table) -> None:
    file = data_file(table.storage, {50: 50, 51: 51})
    put_foreign(table, replace(file, stats=None))
    table.refresh()
    table.commit(Edit("DELETE", dead={file.path: BitMap([0])}))
    assert table.snapshot.files[file.path].rows == 2
    assert_all_see(table.storage, [*((key, key) for key in range(20)), (51, 51)])


def test_a_file_that_the_table_does_not_have(table: Table) -> None:
    for edit in (Edit("DELETE", dead={"c.parquet": BitMap([1])}), Edit("DELETE", removed=["c.parquet"])):
        with pytest.raises(TableConflict, match=r"c\.parquet is not in version 1"):
            table.commit(edit)


@pytest.mark.parametrize(("folder", "name"), [("a b", "a b"), ("ä#?&=+", "ä#?&=+"), ("x", "a%20b")])
def test_names_with_special_characters(tmp_path: Path, folder: str, name: str) -> None:
    """Polars 2.1 cannot read such names, and delta-rs 1.6 no folder like a%20b."""
    table = new_table(tmp_path / folder)
    file = data_file(table.storage, TEN, f"{name}.parquet")
    table.commit(Edit("WRITE", [file], dead={file.path: BitMap([1])}))
    assert write_checkpoint(table.storage)
    assert Table.open(table.storage).snapshot.checkpoint == 1
    for reader in ("upriver", "delta-rs", "duckdb"):
        assert rows_seen(table.storage, reader) == [(key, key) for key in TEN if key != 1]


# Other writers


def test_a_refresh_reports_each_commit_once(table: Table) -> None:
    assert table.refresh() == []
    put_foreign(table, Txn("other", 1))
    write_deltalake(table.storage.url, arrow_rows({50: 50}), mode="append")
    commits = table.refresh()
    assert [(commit.foreign, commit.changes_data) for commit in commits] == [(True, False), (True, True)]
    assert table.refresh() == []


def test_a_foreign_append_is_a_conflict(table: Table) -> None:
    edit = update(table, {3: 103}, 1)
    write_deltalake(table.storage.url, arrow_rows({3: 999}), mode="append")
    with pytest.raises(TableConflict, match=r"version 2 .* changed rows") as caught:
        table.commit(edit)
    (commit,) = caught.value.commits
    assert [(rows.path, rows.positions) for rows in table.changed_rows(commit)] == [(commit.added[0].path, None)]
    assert table.refresh() == [], "the conflict has reported it"
    located = {**edit.dead, commit.added[0].path: BitMap([0])}
    table.commit(replace(edit, dead=located))
    assert_all_see(table.storage, ({key: key for key in range(20)} | {3: 103}).items())


def test_a_compaction_does_not_mind_an_append_which_is_reported_later(table: Table) -> None:
    rows = {key: key for key in range(20)}
    write_deltalake(table.storage.url, arrow_rows({50: 50}), mode="append")
    table.commit(
        Edit("OPTIMIZE", [data_file(table.storage, rows)], removed=["a.parquet", "b.parquet"], data_change=False)
    )
    assert_all_see(table.storage, [*rows.items(), (50, 50)])
    assert [commit.version for commit in table.refresh()] == [2]


def test_an_optimize_of_files_that_an_edit_needs(table: Table) -> None:
    edit = update(table, {3: 103}, 1)
    delta_rs(table).optimize.compact()
    with pytest.raises(TableConflict, match=r"changed a\.parquet"):
        table.commit(edit)
    (moved,) = table.snapshot.files.values()
    with table.storage.open(moved.path) as file:
        position = pq.read_table(file)["_key"].to_pylist().index("k3")
    table.commit(replace(edit, dead={moved.path: BitMap([position])}))
    assert_all_see(table.storage, ({key: key for key in range(20)} | {3: 103}).items())


def test_an_optimize_of_other_files_is_no_conflict(table: Table) -> None:
    """The moved rows have no key of the batch, or the batch would need their file."""
    edit = update(table, {3: 103}, 1)
    moved = data_file(table.storage, {key: key for key in range(10, 20)})
    old = table.snapshot.files["b.parquet"]
    put_foreign(table, *_moved([old], moved), operation="OPTIMIZE")
    assert table.commit(edit) == 3
    assert_all_see(table.storage, ({key: key for key in range(20)} | {3: 103}).items())
    assert [commit.info.operation for commit in table.refresh()] == ["OPTIMIZE"]


def _moved(old: list[Add], new: Add) -> list[Any]:
    return [*(Remove.of(file, 1, data_change=False) for file in old), replace(new, data_change=False)]


def test_transactions_of_others(table: Table) -> None:
    put_foreign(table, Txn("other", 5))
    assert table.commit(update(table, {3: 103}, 1)) == 3
    put_foreign(table, Txn("upriver-q", 2))
    with pytest.raises(TableConflict, match="same query"):
        table.commit(update(table, {4: 104}, 2))
    assert table.snapshot.txns == {"other": 5, "upriver-q": 2}


def test_a_foreign_column_is_kept(table: Table) -> None:
    edit = replace(update(table, {3: 103}), schema=TableSchema([*SCHEMA.columns, Column("ours", "text")]))
    delta_rs(table).alter.add_columns([Field("theirs", PrimitiveType("date"))])
    with pytest.raises(TableConflict, match="schema"):
        table.commit(edit)
    assert table.schema.foreign == ("theirs",)
    table.commit(replace(edit, schema=table.schema.with_columns([Column("ours", "text")])))
    names = [field.name for field in delta_rs(table).schema().fields]
    assert names[-2:] == ["theirs", "ours"]
    assert_all_see(table.storage, ({key: key for key in range(20)} | {3: 103}).items())


@pytest.mark.parametrize("feature", ["rowTracking", "inCommitTimestamp", "somethingNew"])
def test_a_feature_that_somebody_switches_on(table: Table, feature: str) -> None:
    put_foreign(table, Protocol(3, 7, ["deletionVectors"], ["deletionVectors", feature]))
    table.refresh()
    with pytest.raises(UnsupportedTable, match=feature):
        table.commit(update(table, {3: 103}))
    with pytest.raises(UnsupportedTable, match=feature):
        Table.open(table.storage)


def test_properties_that_somebody_switches_on(table: Table) -> None:
    delta_rs(table).alter.set_table_properties({"delta.appendOnly": "true"}, raise_if_not_exists=False)
    with pytest.raises(TableConflict, match="properties"):
        table.commit(update(table, {3: 103}))
    with pytest.raises(UnsupportedTable, match="appendOnly"):
        table.commit(update(table, {3: 103}))


def test_constraints_of_delta_rs(table: Table) -> None:
    delta_rs(table).alter.add_constraint({"positive": "n >= 0"})
    with pytest.raises(UnsupportedTable, match="constraint positive"):
        Table.open(table.storage)


FOREIGN_CHANGES: dict[str, Callable[[DeltaTable], object]] = {
    "delete": lambda table: table.delete("n = 3"),
    "update": lambda table: table.update({"n": "77"}, predicate="n = 3"),
    "merge": lambda table: (
        table.merge(pa.table({"_key": ["k3"], "n": [77]}), "s._key = t._key", "s", "t")
        .when_matched_update({"n": "s.n"})
        .execute()
    ),
    "insert": lambda table: write_deltalake(table, arrow_rows({77: 77}), mode="append"),
    "overwrite": lambda table: write_deltalake(table, arrow_rows({77: 77}), mode="overwrite"),
    "restore": lambda table: table.restore(1),
}


@pytest.mark.parametrize("name", FOREIGN_CHANGES)
def test_foreign_changes_name_the_touched_rows(table: Table, name: str) -> None:
    """delta-rs rewrites files; it writes no vectors, but respects ours."""
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([1, 2])}))
    before = dict(table.snapshot.files)
    FOREIGN_CHANGES[name](delta_rs(table))
    (commit,) = table.refresh()
    assert commit.foreign
    assert commit.changes_data
    changed = {rows.path: rows.positions for rows in table.changed_rows(commit)}
    expected: dict[str, BitMap | None] = dict.fromkeys(before.keys() ^ table.snapshot.files.keys())
    if name == "restore":
        expected = {"a.parquet": BitMap([1, 2])}
    assert changed == expected
    assert changed


def test_foreign_vectors_name_the_touched_positions(table: Table) -> None:
    """As delta-spark deletes rows."""
    table.commit(Edit("DELETE", dead={"a.parquet": BitMap([1, 2])}))
    other = Table.open(TableStorage.of(table.storage.url))
    other.commit(Edit("DELETE", dead={"a.parquet": BitMap([2, 7]), "b.parquet": BitMap([5])}))
    (commit,) = table.refresh()
    assert table.changed_rows(commit) == [
        ChangedRows("a.parquet", BitMap([7])),
        ChangedRows("b.parquet", BitMap([5])),
    ]


def test_a_foreign_optimize_changes_no_rows(table: Table) -> None:
    delta_rs(table).optimize.compact()
    (commit,) = table.refresh()
    assert commit.foreign
    assert not commit.changes_data
    assert table.changed_rows(commit) == []


def test_foreign_changes_are_reported_again_after_a_crash(table: Table) -> None:
    delta_rs(table).delete("n = 3")
    assert [commit.version for commit in table.refresh()] == [2]
    # A compaction may pass, but nothing counts as a repair until a batch follows.
    table.commit(Edit("OPTIMIZE", data_change=False))
    again = Table.open(table.storage)
    with pytest.raises(TableConflict, match="changed rows") as caught:
        again.commit(Edit("WRITE", txn=("upriver-q", 1)))
    assert [commit.version for commit in caught.value.commits] == [2]
    again.commit(Edit("WRITE", txn=("upriver-q", 1)))
    assert Table.open(table.storage).refresh() == []


def test_a_log_that_does_not_go_back_to_our_newest_batch(table: Table) -> None:
    assert not Table.open(table.storage).is_log_cut
    delta_rs(table).delete("n = 3")
    delta_rs(table).create_checkpoint()
    table.storage.delete([commit_path(1)])
    again = Table.open(table.storage)
    assert again.is_log_cut
    assert [commit.version for commit in again.refresh()] == [2]
    again.commit(Edit("WRITE", txn=("upriver-q", 1)))
    assert not Table.open(table.storage).is_log_cut


def test_commits_that_nothing_was_done_about_are_reported_again(table: Table) -> None:
    delta_rs(table).delete("n = 3")
    commits = table.refresh()
    delta_rs(table).delete("n = 4")
    table.report_again(commits)
    assert [commit.version for commit in table.refresh()] == [2, 3]


def test_a_file_that_is_gone_before_it_is_added(table: Table) -> None:
    edit = update(table, {3: 103}, 1)
    (file,) = edit.added
    table.storage.delete([file.path])
    with pytest.raises(FilesLost, match="was deleted before the commit"):
        table.commit(edit)
    assert table.snapshot.version == 1
    assert table.lost_files() == []


def test_a_vector_that_another_program_adds_while_vectors_are_switched_off(table: Table) -> None:
    other = Table.open(table.storage)
    other.commit(Edit("DELETE", dead={"a.parquet": BitMap([1])}))
    with pytest.raises(TableConflict, match="has a vector now"):
        table.commit(Edit("DISABLE VECTORS", vectors=False, data_change=False))


def test_an_edit_of_an_older_version(table: Table) -> None:
    edit = replace(update(table, {3: 103}), base=table.snapshot.version)
    table.commit(Edit("OPTIMIZE", data_change=False))
    table.commit(edit)
    with pytest.raises(TableConflict, match="version 3"):
        table.commit(replace(update(table, {4: 104}), base=2))


def test_another_table_in_the_same_place(table: Table, tmp_path: Path) -> None:
    root = tmp_path / "table"
    shutil.rmtree(root)
    new_table(root)
    with pytest.raises(StorageError, match="no longer has version 1"):
        table.refresh()


def test_another_table_with_commits_of_the_same_size(table: Table, tmp_path: Path) -> None:
    root = tmp_path / "table"
    content = table.storage.read(commit_path(1))
    assert content.count(b'"txnId":"') == 1
    start = content.index(b'"txnId":"') + 9
    table.storage.delete([commit_path(1)])
    table.storage.write(commit_path(1), content[:start] + b"0" * 36 + content[start + 36 :])
    assert root.exists()
    with pytest.raises(StorageError, match="no longer has version 1"):
        table.refresh()


def test_another_writer_that_is_faster(tmp_path: Path) -> None:
    storage = FailingStorage.of(tmp_path)
    table = new_table(storage)
    storage.before = lambda: put_foreign(table, Txn("other", 1))
    assert table.commit(Edit("WRITE", [data_file(storage, TEN)], txn=("upriver-q", 0))) == 2
    storage.before = lambda: put_foreign(table, data_file(storage, {3: 4}))
    with pytest.raises(TableConflict):
        table.commit(Edit("WRITE", [data_file(storage, {4: 5})]))
    assert len(rows_seen(storage)) == 11


def raise_timeout() -> None:
    raise StorageError("table", "timed out")


def test_a_put_that_fails_after_it_has_succeeded(tmp_path: Path) -> None:
    storage = FailingStorage.of(tmp_path)
    table = new_table(storage)
    storage.after = raise_timeout
    assert table.commit(Edit("WRITE", [data_file(storage, TEN)])) == 1
    assert table.refresh() == []
    assert len(rows_seen(storage)) == 10


def test_a_put_that_fails(tmp_path: Path) -> None:
    storage = FailingStorage.of(tmp_path)
    table = new_table(storage)
    edit = Edit("WRITE", [data_file(storage, TEN)], txn=("upriver-q", 0))
    storage.before = raise_timeout
    with pytest.raises(StorageError, match="timed out"):
        table.commit(edit)
    assert table.commit(edit) == 1


def test_a_put_that_takes_effect_after_the_timeout(tmp_path: Path) -> None:
    """The request is still on its way when the caller tries again: the batch counts once."""
    storage = FailingStorage.of(tmp_path)
    table = new_table(storage)
    edit = Edit("WRITE", [data_file(storage, TEN)], txn=("upriver-q", 0))
    late = Table.open(TableStorage.of(tmp_path))
    storage.before = raise_timeout
    with pytest.raises(StorageError):
        table.commit(edit)
    storage.before = lambda: late.commit(edit)
    with pytest.raises(TableConflict, match="same query"):
        table.commit(edit)
    assert table.snapshot.txns == {"upriver-q": 0}


def test_writers_in_threads(tmp_path: Path) -> None:
    """Each update of one of them takes effect once, whichever wins."""
    new_table(tmp_path)
    errors = list[BaseException]()

    def write(number: int) -> None:
        try:
            table = Table.open(TableStorage.of(tmp_path))
            for round_ in range(5):
                edit = Edit("WRITE", [data_file(table.storage, {number * 100 + round_: 1})], txn=(f"w{number}", round_))
                while True:
                    try:
                        table.commit(edit)
                        break
                    except TableConflict:
                        continue
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    expected = [(number * 100 + round_, 1) for number in range(3) for round_ in range(5)]
    assert_all_see(TableStorage.of(tmp_path), expected)


# Log checkpoints


def test_a_log_checkpoint_every_ten_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.tables.table.CHECKPOINT_SHARE", float("inf"))
    table = new_table(tmp_path)
    file = data_file(table.storage, {key: key for key in range(100)})
    table.commit(Edit("WRITE", [file]))
    for number in range(2 * CHECKPOINT_COMMITS):
        table.commit(Edit("DELETE", dead={file.path: BitMap([number])}))
    found = sorted(path.name[:20] for path in tmp_path.glob("_delta_log/*.checkpoint.parquet"))
    assert [int(version) for version in found] == [9, 19]
    shutil.rmtree(tmp_path / "_delta_log" / commit_path(0), ignore_errors=True)
    for version in range(19):
        (tmp_path / commit_path(version)).unlink()
    assert_all_see(table.storage, [(key, key) for key in range(20, 100)])
    assert Table.open(table.storage).snapshot.files == table.snapshot.files


def test_slow_checkpoints_are_written_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[int]()
    monkeypatch.setattr("upriver.tables.table.CHECKPOINT_SHARE", 1e-12)
    table = new_table(tmp_path)
    monkeypatch.setattr("upriver.tables.table.write_checkpoint", lambda _: written.append(table.snapshot.version))
    for _ in range(CHECKPOINT_COMMITS + CHECKPOINT_COMMITS_MAX + 5):
        table.commit(Edit("WRITE", data_change=False))
    assert written == [CHECKPOINT_COMMITS - 1, CHECKPOINT_COMMITS + CHECKPOINT_COMMITS_MAX - 1]


def test_a_failing_checkpoint_does_not_fail_the_commit(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    for failure in (OSError("disk full"), PanicException("bug"), KeyboardInterrupt()):
        monkeypatch.setattr("upriver.tables.table._delta_rs", Mock(side_effect=failure))
        if isinstance(failure, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                write_checkpoint(table.storage)
        else:
            assert not write_checkpoint(table.storage)
            assert not clean_log(table.storage)


# Crashes


def test_a_create_that_is_killed_anywhere(tmp_path: Path) -> None:
    roots = [tmp_path / str(number) for number in range(20)]
    outcomes = set[bool]()
    for number in each_kill(lambda: new_table(roots[0])):
        found = Table.find(TableStorage.of(roots.pop(0)))
        outcomes.add(found is not None)
        table = found or new_table(tmp_path / str(number))
        table.commit(Edit("WRITE", [data_file(table.storage, TEN)]))
        assert len(rows_seen(table.storage)) == 10
    assert outcomes == {True, False}


def test_a_commit_that_is_killed_anywhere(tmp_path: Path) -> None:
    """Files, vectors and commit: afterwards the batch is there completely or not at all, and can be repeated."""

    def run() -> None:
        table = Table.open(TableStorage.of(root))
        table.commit(update(table, {3: 103, 14: 114}, 1))

    def fresh(number: int) -> Path:
        table = new_table(tmp_path / str(number))
        files = [
            data_file(table.storage, {key: key for key in range(start, start + 10)}, name)
            for name, start in FIRST.items()
        ]
        table.commit(Edit("WRITE", files, txn=("upriver-q", 0)))
        return tmp_path / str(number)

    root = fresh(0)
    before = {key: key for key in range(20)}
    after = before | {3: 103, 14: 114}
    outcomes = set[bool]()
    for number in each_kill(run):
        table = Table.open(TableStorage.of(root))
        done = table.snapshot.txns["upriver-q"] == 1
        outcomes.add(done)
        assert rows_seen(table.storage) == sorted((after if done else before).items())
        if not done:
            table.commit(update(table, {3: 103, 14: 114}, 1))
        assert rows_seen(table.storage) == sorted(after.items())
        root = fresh(number + 1)
    assert outcomes == {True, False}


def test_a_commit_names_only_files_that_are_on_disk(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, and the folder with its name, is synced before the commit appears."""
    synced, link, fsync = set[str](), os.link, os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.add(path)
        if os.path.isdir(path):
            synced.update(f"{path}/{name} is listed" for name in os.listdir(path))

    def check(source: Any, target: Any) -> None:
        named = [json.loads(line) for line in Path(source).read_text().splitlines()]
        for file in [Add.of_json(line["add"]) for line in named if "add" in line]:
            paths = [file.path] if file.deletion_vector is None else [vector_path(file.deletion_vector, table.storage)]
            for path in paths:
                assert f"{table.storage.url}/{path} is listed" in synced
        assert str(source) in synced
        link(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "link", check)
    table.commit(update(table, {3: 103, 14: 114}, 1))
    assert f"{table.storage.url}/{commit_path(2)} is listed" in synced


# Object stores


def test_a_table_in_an_object_store(object_store: ObjectStore) -> None:
    table = new_table(object_store.new_storage())
    file = data_file(table.storage, TEN)
    table.commit(Edit("WRITE", [file]))
    for number in range(CHECKPOINT_COMMITS):
        table.commit(update(table, {100 + number: 1}))
    table.commit(Edit("DELETE", dead={file.path: BitMap([1, 2])}))
    expected = [
        *((key, key) for key in range(10) if key not in (1, 2)),
        *((100 + n, 1) for n in range(CHECKPOINT_COMMITS)),
    ]
    assert_all_see(table.storage, expected)
    assert any("checkpoint.parquet" in file.path for file in table.storage.list("_delta_log/"))
    assert Table.open(table.storage).snapshot.files == table.snapshot.files


def test_writers_race_in_an_object_store(object_store: ObjectStore) -> None:
    storage = object_store.new_storage()
    new_table(storage)
    barrier = threading.Barrier(2)
    conflicts = list[str]()

    def write(name: str) -> None:
        table = Table.open(TableStorage.of(storage.url, storage.options))
        for round_ in range(5):
            edit = Edit("WRITE", [data_file(table.storage, {round_: len(name)})])
            barrier.wait()
            try:
                table.commit(edit)
            except TableConflict:
                conflicts.append(name)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "bb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Table.open(storage).snapshot.version + len(conflicts) == 10
    assert len(rows_seen(storage)) == 10 - len(conflicts)


def test_an_object_store_without_conditional_writes(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = object_store.new_storage()

    def overwrite(path: str, data: bytes) -> bool:
        storage.write(path, data)
        return True

    monkeypatch.setattr(storage, "put_if_absent", overwrite)
    with pytest.raises(StorageError, match="ignores conditional writes"):
        new_table(storage)


# Everything together

OURS = ("update", "delete", "compact")
THEIRS = ("append", "optimize", "their delete", "checkpoint", "reopen")
KEYS = st.sets(st.integers(0, 30), min_size=1, max_size=8)
#: What happens, with which keys, and what another writer does with which keys before our commit.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(OURS), KEYS, st.sampled_from([None, *THEIRS[:-1]]), KEYS),
        st.tuples(st.sampled_from(THEIRS), KEYS, st.none(), KEYS),
    ),
    min_size=1,
    max_size=10,
)


class Mirror:
    """Follows the rules of the module: locates keys in the snapshot, and again after a conflict."""

    def __init__(self, path: Path) -> None:
        self.table = new_table(path)
        self.rows: dict[int, int] = {}
        self.batch = 0

    def located(self, keys: set[int]) -> dict[str, BitMap]:
        found = {}
        for path in self.table.snapshot.files:
            with self.table.storage.open(path) as file:
                held = pq.read_table(file, columns=["_key"])["_key"].to_pylist()
            positions = BitMap(position for position, key in enumerate(held) if int(key[1:]) in keys)
            if positions:
                found[path] = positions
        return found

    def commit(self, edit: Callable[[], Edit], meanwhile: Callable[[], object]) -> None:
        first = edit()
        meanwhile()
        try:
            self.table.commit(first)
        except TableConflict:
            self.table.commit(edit())

    def change(self, keys: set[int], new: dict[int, int], meanwhile: Callable[[], object]) -> None:
        self.batch += 1
        added = [data_file(self.table.storage, new)] if new else []
        batch = ("upriver-q", self.batch)
        self.commit(lambda: Edit("WRITE", added, self.located(keys), txn=batch), meanwhile)
        self.rows = {key: n for key, n in self.rows.items() if key not in keys} | new

    def compacted(self) -> Edit:
        files = self.table.snapshot.files
        schema = arrow_schema(self.table.snapshot.metadata.schema)
        tables = [read_rows(self.table.storage, file, schema) for file in files.values()]
        held = pa.concat_tables([schema.empty_table(), *tables])
        rows = dict(numbered(zip(held["_key"].to_pylist(), held["n"].to_pylist(), strict=True)))
        added = [data_file(self.table.storage, rows)] if rows else []
        return Edit("OPTIMIZE", added, removed=list(files), data_change=False)

    def step(self, name: str, keys: set[int], theirs: str | None, their_keys: set[int]) -> None:
        def meanwhile() -> None:
            if theirs is not None:
                self.step(theirs, their_keys, None, set())

        match name:
            case "update":
                self.change(keys, dict.fromkeys(keys, self.batch), meanwhile)
            case "delete":
                self.change(keys, {}, meanwhile)
            case "compact":
                self.commit(self.compacted, meanwhile)
            case "append":
                new = {key: -1 for key in keys if key not in self.rows}
                if new:
                    write_deltalake(self.table.storage.url, arrow_rows(new), mode="append")
                self.rows |= new
            case "optimize":
                delta_rs(self.table).optimize.compact()
            case "their delete":
                names = ", ".join(f"'k{key}'" for key in keys)
                delta_rs(self.table).delete(f"_key in ({names})")
                self.rows = {key: n for key, n in self.rows.items() if key not in keys}
            case "checkpoint":
                write_checkpoint(self.table.storage)
            case "reopen":
                self.table = Table.open(self.table.storage)


@settings(max_examples=examples(60))
@given(steps=STEPS)
def test_any_sequence_of_edits_and_foreign_commits(tmp_path_factory: pytest.TempPathFactory, steps: Any) -> None:
    mirror = Mirror(tmp_path_factory.mktemp("table"))
    for step in steps:
        mirror.step(*step)
    assert_all_see(mirror.table.storage, mirror.rows.items())
    mirror.table.refresh()
    snapshot = load(mirror.table.storage)
    assert snapshot is not None
    assert snapshot.files == mirror.table.snapshot.files
