"""Vacuum: what goes, what stays, and that a crash does no harm."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import polars
import pytest
from deltalake import DeltaTable
from pyroaring import BitMap

from tests.support.killed_process import each_kill
from tests.support.object_store import ObjectStore, object_store
from tests.support.sample_tables import assert_all_see, data_file, new_table, rows_seen
from upriver.errors import OptionError
from upriver.tables.actions import Add
from upriver.tables.deletion_vectors import HIDDEN, vector_path
from upriver.tables.key_index import sidecar_path
from upriver.tables.storage import TableStorage
from upriver.tables.table import Edit, Table, write_checkpoint
from upriver.tables.vacuum import table_retention_s, vacuum_table

__all__ = ["object_store"]

DAY_S = 86_400.0
TEN = {key: key for key in range(10)}


def names(table: Table) -> set[str]:
    """The files of a table besides its log."""
    return {file.path for file in table.storage.list() if not file.path.startswith("_delta_log/")}


def vector_file(table: Table, file: Add) -> str:
    assert file.deletion_vector is not None
    path = vector_path(file.deletion_vector, table.storage)
    assert path is not None
    return path


def written(table: Table, path: str, *, days_ago: float) -> None:
    """Change when a file was written."""
    local = table.storage.local(path)
    assert local is not None
    then = time.time() - days_ago * DAY_S
    os.utime(local, (then, then))


def aged(table: Table, days: float, paths: Iterable[str] | None = None) -> None:
    for path in names(table) if paths is None else paths:
        written(table, path, days_ago=days)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Two files with sidecars; one of them has had two vectors."""
    table = new_table(tmp_path)
    files = [data_file(table.storage, TEN, f"{name}.parquet") for name in "ab"]
    for file in files:
        table.storage.write(sidecar_path(file.path), b"index")
    table.commit(Edit("WRITE", files))
    for position in (1, 2):
        table.commit(Edit("DELETE", dead={"a.parquet": BitMap([position])}))
    return table


def test_nothing_to_do(table: Table) -> None:
    before = names(table)
    found = vacuum_table(table)
    assert (found.paths, found.size, found.data_files, found.vectors) == ((), 0, 0, 0)
    assert names(table) == before


def test_files_of_versions_within_the_retention_stay(table: Table) -> None:
    """However old the files are: the versions that have them were current until just now."""
    table.commit(Edit("OPTIMIZE", [data_file(table.storage, TEN, "c.parquet")], removed=["a.parquet", "b.parquet"]))
    aged(table, days=30)
    before = names(table)
    assert vacuum_table(table).paths == ()
    assert names(table) == before
    for version, rows in ((1, 20), (2, 19), (3, 18), (4, 10)):
        assert polars.scan_delta(table.storage.url, version=version).select(polars.len()).collect().item() == rows


def test_files_of_older_versions_go(table: Table) -> None:
    first, second = (file for file in names(table) if file.endswith(".bin"))
    current = vector_file(table, table.snapshot.files["a.parquet"])
    table.commit(Edit("OPTIMIZE", [data_file(table.storage, TEN, "c.parquet")], removed=["b.parquet"]))
    table.storage.write(f"{HIDDEN}/batch-7.keys", b"key list")
    now_s = time.time() + 8 * DAY_S
    old = {"b.parquet", sidecar_path("b.parquet"), f"{HIDDEN}/batch-7.keys", *{first, second} - {current}}
    planned = vacuum_table(table, dry_run=True, now_s=now_s)
    assert set(planned.paths) == old
    assert (planned.data_files, planned.vectors) == (1, 1)
    assert planned.size == sum(table.storage.size(path) for path in old)
    assert old < names(table), "a dry run deletes nothing"
    before = names(table)
    assert vacuum_table(table, now_s=now_s) == planned
    assert names(table) == before - old
    assert_all_see(table.storage, [*((key, key) for key in TEN if key not in (1, 2)), *TEN.items()])


def test_files_of_running_attempts_stay(table: Table) -> None:
    data_file(table.storage, TEN, "running.parquet")
    data_file(table.storage, TEN, "abandoned.parquet")
    table.storage.write(f"{HIDDEN}/running.keys", b"")
    written(table, "abandoned.parquet", days_ago=8)
    assert vacuum_table(table).paths == ("abandoned.parquet",)
    assert {"running.parquet", f"{HIDDEN}/running.keys"} < names(table)


def test_files_of_running_attempts_stay_without_a_retention(table: Table) -> None:
    data_file(table.storage, TEN, "running.parquet")
    data_file(table.storage, TEN, "abandoned.parquet")
    written(table, "abandoned.parquet", days_ago=0.05)
    table.commit(Edit("OPTIMIZE", [data_file(table.storage, TEN, "c.parquet")], removed=["b.parquet"]))
    found = set(vacuum_table(table, retention_s=0, now_s=time.time() + 1).paths)
    assert {"abandoned.parquet", "b.parquet", sidecar_path("b.parquet")} < found
    assert "running.parquet" not in found


def test_unfinished_files_go(table: Table) -> None:
    for path in (".a.parquet.1f.new", "_delta_log/.00000000000000000009.json.1f.new"):
        table.storage.write(path, b"x")
        written(table, path, days_ago=8)
    assert len(vacuum_table(table).paths) == 2


def test_files_of_others_stay(table: Table) -> None:
    others = (
        "notes.txt",
        "_delta_index/x.parquet",
        "_SUCCESS",
        ".hidden/x.parquet",
        "_delta_log/x.crc",
        "sub/.x.parquet",
    )
    for path in others:
        table.storage.write(path, b"x")
        written(table, path, days_ago=80)
    assert vacuum_table(table).paths == ()


def test_foreign_files_go_when_they_are_unused(table: Table) -> None:
    """As OPTIMIZE and DELETE of other programs leave them."""
    DeltaTable(table.storage.url).optimize.compact()
    theirs = "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    table.storage.write(theirs, b"x")
    written(table, theirs, days_ago=8)
    assert vacuum_table(table).paths == (theirs,)
    gone = set(vacuum_table(table, now_s=time.time() + 8 * DAY_S).paths)
    assert {"a.parquet", "b.parquet"} < gone
    assert_all_see(table.storage, [*((key, key) for key in TEN if key not in (1, 2)), *TEN.items()])


def test_a_checkpoint_remembers_removed_files(table: Table) -> None:
    table.commit(Edit("DELETE", removed=["b.parquet"]))
    assert write_checkpoint(table.storage)
    table.storage.delete(f"_delta_log/{version:020}.json" for version in range(4))
    aged(table, days=30)
    table = Table.open(table.storage)
    assert vacuum_table(table).paths == ()
    assert "b.parquet" in vacuum_table(table, now_s=time.time() + 8 * DAY_S).paths


def test_a_file_that_is_removed_during_the_vacuum_stays(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    aged(table, days=30)
    listed = table.storage.list

    def list_then_remove(prefix: str = "", after: str = "") -> object:
        found = list(listed(prefix, after))
        if not prefix:
            other = Table.open(TableStorage.of(table.storage.url))
            other.commit(Edit("DELETE", removed=["b.parquet"]))
        return iter(found)

    monkeypatch.setattr(table.storage, "list", list_then_remove)
    assert "b.parquet" not in vacuum_table(table).paths


def test_the_retention(table: Table) -> None:
    assert table_retention_s(table) == 7 * DAY_S
    data_file(table.storage, TEN, "abandoned.parquet")
    written(table, "abandoned.parquet", days_ago=2)
    assert not vacuum_table(table).paths
    assert vacuum_table(table, retention_s=DAY_S, dry_run=True).paths == ("abandoned.parquet",)
    with pytest.raises(OptionError, match="deletedFileRetentionDuration"):
        vacuum_table(table, retention_s=8 * DAY_S)
    for text, seconds in (("interval 1 week", 7 * DAY_S), ("interval 36 hours", 1.5 * DAY_S), ("nonsense", 7 * DAY_S)):
        table.commit(Edit("SET", properties={"delta.deletedFileRetentionDuration": text}, data_change=False))
        assert table_retention_s(table) == seconds


def test_the_log_is_cleaned_up(table: Table) -> None:
    for _ in range(3):
        table.commit(Edit("WRITE", data_change=False))
    write_checkpoint(table.storage)
    table.commit(Edit("WRITE", data_change=False))
    for file in table.storage.list("_delta_log/"):
        written(table, file.path, days_ago=8)
    vacuum_table(table, dry_run=True)
    assert table.storage.size("_delta_log/00000000000000000000.json")
    vacuum_table(table)
    commits = sorted(file.path[-7:-5] for file in table.storage.list("_delta_log/") if file.path.endswith(".json"))
    assert commits == ["06", "07"]
    assert table.refresh() == []
    assert Table.open(table.storage).snapshot.files == table.snapshot.files


def test_a_foreign_vacuum_keeps_our_vectors(table: Table) -> None:
    before = names(table)
    DeltaTable(table.storage.url).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert {path for path in before if path.startswith(HIDDEN)} <= names(table)
    table.refresh()
    assert_all_see(table.storage, [*((key, key) for key in TEN if key not in (1, 2)), *TEN.items()])


def test_a_vacuum_that_is_killed_anywhere(table: Table) -> None:
    """Also after commits that were killed: live files stay, and in the end everything unused is gone."""

    def write() -> None:
        Table.open(table.storage).commit(
            Edit("WRITE", [data_file(table.storage, TEN)], dead={"b.parquet": BitMap([3])}, data_change=False)
        )

    for _ in each_kill(write):
        pass
    later_s = time.time() + 8 * DAY_S
    expected = rows_seen(table.storage)
    kills = 0
    for _ in each_kill(lambda: vacuum_table(Table.open(table.storage), now_s=later_s)):
        kills += 1
        assert rows_seen(table.storage) == expected
    assert kills > 5
    table = Table.open(table.storage)
    assert vacuum_table(table, now_s=later_s).paths == ()
    assert_all_see(table.storage, expected)
    needed = {path for file in table.snapshot.files.values() for path in (file.path, sidecar_path(file.path))}
    vectors = {vector_file(table, file) for file in table.snapshot.files.values() if file.deletion_vector}
    assert names(table) <= needed | vectors


def test_an_object_store(object_store: ObjectStore) -> None:
    table = new_table(object_store.new_storage())
    file = data_file(table.storage, TEN)
    table.commit(Edit("WRITE", [file]))
    for position in range(3):
        table.commit(Edit("DELETE", dead={file.path: BitMap([position])}))
    orphan = data_file(table.storage, TEN)
    assert not vacuum_table(table).paths
    found = vacuum_table(table, now_s=time.time() + 8 * DAY_S)
    assert (found.data_files, found.vectors) == (1, 2)
    assert orphan.path in found.paths
    assert_all_see(table.storage, [(key, key) for key in range(3, 10)])
