"""The log: snapshots from commits and checkpoints, whichever of them are there."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyroaring import BitMap

from tests.support.sample_tables import data_file, new_table
from upriver.errors import CorruptData, StorageError, UnsupportedTable
from upriver.tables.actions import Action, Add, CommitInfo, Remove, Txn, decode, encode
from upriver.tables.deletion_vectors import write_vectors
from upriver.tables.log import LOG, Commit, TableSnapshot, commit_path, load, newer, read_commit, removed_since
from upriver.tables.storage import TableStorage
from upriver.tables.table import Edit, Table, write_checkpoint

VERSIONS = 6


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Six commits: files with and without vectors, a removed file, transactions."""
    table = new_table(tmp_path)
    files = [data_file(table.storage, {key: key for key in range(number, number + 10)}) for number in range(3)]
    for number, file in enumerate(files):
        table.commit(Edit("WRITE", [file], txn=("app", number)))
    table.commit(Edit("WRITE", dead={files[0].path: BitMap([1, 2]), files[1].path: BitMap([9])}, txn=("other", 7)))
    table.commit(Edit("WRITE", dead={files[0].path: BitMap([3])}))
    table.commit(Edit("DELETE", removed=[files[2].path]))
    assert table.snapshot.version == VERSIONS
    return table


def loaded(storage: TableStorage) -> TableSnapshot:
    snapshot = load(storage)
    assert snapshot is not None
    return snapshot


def same(found: TableSnapshot, expected: TableSnapshot) -> None:
    assert found.version == expected.version
    assert found.files == expected.files
    assert found.txns == expected.txns
    assert found.metadata == expected.metadata
    assert found.protocol == expected.protocol


def test_a_snapshot_from_commits(table: Table) -> None:
    snapshot = loaded(table.storage)
    same(snapshot, table.snapshot)
    assert snapshot.txns == {"app": 2, "other": 7}
    assert sorted(file.dead for file in snapshot.files.values()) == [1, 3]


def test_a_snapshot_from_a_checkpoint_and_later_commits(table: Table) -> None:
    assert write_checkpoint(table.storage)
    assert loaded(table.storage).checkpoint == VERSIONS
    same(loaded(table.storage), table.snapshot)
    table.commit(Edit("WRITE", [data_file(table.storage, {99: 1})]))
    table.storage.delete(commit_path(version) for version in range(VERSIONS + 1))
    same(loaded(table.storage), table.snapshot)


def test_a_snapshot_from_a_checkpoint_alone(table: Table) -> None:
    write_checkpoint(table.storage)
    table.storage.delete(commit_path(version) for version in range(VERSIONS + 1))
    snapshot = loaded(table.storage)
    same(snapshot, table.snapshot)
    assert newer(table.storage, snapshot) == []


def split(storage: TableStorage, version: int, parts: int) -> list[str]:
    """Turn a checkpoint into one of several parts."""
    path = f"{LOG}{version:020}.checkpoint.parquet"
    with storage.open(path) as file:
        rows = pq.read_table(file)
    paths = [f"{LOG}{version:020}.checkpoint.{part:010}.{parts:010}.parquet" for part in range(1, parts + 1)]
    for number, part in enumerate(paths):
        with storage.new_file(part) as new:
            pq.write_table(rows.take(pa.array(range(number, len(rows), parts))), new)
    storage.delete([path])
    return paths


def test_a_checkpoint_of_several_parts(table: Table) -> None:
    write_checkpoint(table.storage)
    parts = split(table.storage, VERSIONS, 3)
    table.storage.delete(commit_path(version) for version in range(VERSIONS))
    same(loaded(table.storage), table.snapshot)
    table.storage.delete(parts[1:2])
    with pytest.raises(CorruptData, match="version 0 is missing"):
        load(table.storage)


def test_an_incomplete_checkpoint_is_ignored(table: Table) -> None:
    write_checkpoint(table.storage)
    table.storage.delete(split(table.storage, VERSIONS, 2)[:1])
    same(loaded(table.storage), table.snapshot)


def test_a_damaged_checkpoint_does_no_harm_while_the_log_has_what_came_before(table: Table) -> None:
    write_checkpoint(table.storage)
    table.commit(Edit("WRITE", [data_file(table.storage, {99: 1})]))
    write_checkpoint(table.storage)
    older, newer_ = (f"{LOG}{version:020}.checkpoint.parquet" for version in (VERSIONS, VERSIONS + 1))
    table.storage.write(newer_, table.storage.read(newer_)[:-100])
    same(loaded(table.storage), table.snapshot)
    table.storage.delete(commit_path(version) for version in range(VERSIONS))
    same(loaded(table.storage), table.snapshot)
    table.storage.delete([older])
    with pytest.raises(CorruptData, match="checkpoint cannot be read"):
        load(table.storage)


@pytest.mark.parametrize("hint", [None, b"", b"nonsense", b"[]", b'{"version":1,"size":9}', b'{"version":77,"size":9}'])
def test_the_hint_may_be_missing_or_wrong(table: Table, hint: bytes | None) -> None:
    write_checkpoint(table.storage)
    table.storage.delete(commit_path(version) for version in range(VERSIONS))
    table.storage.delete([f"{LOG}_last_checkpoint"])
    if hint is not None:
        table.storage.write(f"{LOG}_last_checkpoint", hint)
    same(loaded(table.storage), table.snapshot)


def test_an_old_hint_finds_the_newer_checkpoint(table: Table) -> None:
    hint = f"{LOG}_last_checkpoint"
    write_checkpoint(table.storage)
    old = table.storage.read(hint)
    table.commit(Edit("WRITE", [data_file(table.storage, {99: 1})]))
    write_checkpoint(table.storage)
    table.storage.write(hint, old)
    assert loaded(table.storage).checkpoint == VERSIONS + 1


def test_a_checkpoint_keeps_vectors(table: Table) -> None:
    write_checkpoint(table.storage)
    table.storage.delete(commit_path(version) for version in range(VERSIONS))
    vectors = {path: file.deletion_vector for path, file in loaded(table.storage).files.items()}
    assert vectors == {path: file.deletion_vector for path, file in table.snapshot.files.items()}
    assert any(vectors.values())


def test_a_checkpoint_of_another_writer_without_json_statistics(tmp_path: Path) -> None:
    text, number = pa.string(), pa.int64()
    schema = pa.schema(
        {
            "protocol": pa.struct({"minReaderVersion": number, "minWriterVersion": number}),
            "metaData": pa.struct({"id": text, "schemaString": text, "configuration": pa.map_(text, text)}),
            "add": pa.struct(
                {
                    "path": text,
                    "partitionValues": pa.map_(text, text),
                    "size": number,
                    "modificationTime": number,
                    "dataChange": pa.bool_(),
                    "stats_parsed": pa.struct({"numRecords": number}),
                    "partitionValues_parsed": pa.struct({"x": number}),
                }
            ),
        }
    )
    add = {"path": "a%20b", "partitionValues": [], "size": 1, "modificationTime": 2, "dataChange": True}
    rows = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": {"id": "id", "schemaString": "{}", "configuration": [("delta.x", "1")]}},
        {"add": {**add, "stats_parsed": {"numRecords": 10}, "partitionValues_parsed": {"x": 1}}},
    ]
    storage = TableStorage.of(tmp_path)
    with storage.new_file(f"{LOG}{5:020}.checkpoint.parquet") as file:
        pq.write_table(pa.Table.from_pylist(rows, schema), file)
    snapshot = loaded(storage)
    assert snapshot.metadata.properties == {"delta.x": "1"}
    assert snapshot.files["a b"].rows == 10
    assert snapshot.files["a b"].others == {}


def test_new_checkpoints_alone_are_refused(table: Table) -> None:
    table.storage.delete(commit_path(version) for version in range(3))
    table.storage.write(f"{LOG}{3:020}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json", b"{}")
    with pytest.raises(UnsupportedTable, match="v2Checkpoint"):
        load(table.storage)


def test_nothing_is_not_a_table(tmp_path: Path) -> None:
    assert load(TableStorage.of(tmp_path)) is None
    assert load(TableStorage.of(tmp_path / "missing")) is None


def test_a_gap_in_the_log(table: Table) -> None:
    table.storage.delete([commit_path(3)])
    with pytest.raises(CorruptData, match="version 3 is missing"):
        load(table.storage)


def test_a_commit_that_is_not_one(table: Table) -> None:
    for content in (b"nonsense", b"[1]", b'{"add":{"size":1}}'):
        table.storage.write(commit_path(3), content)
        with pytest.raises(CorruptData, match=r"00003\.json: not a commit"):
            read_commit(table.storage, 3)


def test_commits_that_vanish_while_the_log_is_read(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program writes a checkpoint and cleans up just after we have listed the log."""
    listed = table.storage.list
    calls = list[str]()

    def list_then_clean(prefix: str = "", after: str = "") -> Any:
        found = list(listed(prefix, after))
        if not calls:
            write_checkpoint(table.storage)
            table.storage.delete(commit_path(version) for version in range(VERSIONS))
        calls.append(prefix)
        return iter(found)

    monkeypatch.setattr(table.storage, "list", list_then_clean)
    same(loaded(table.storage), table.snapshot)
    assert len(calls) > 1


def test_newer_commits(table: Table) -> None:
    before = loaded(table.storage)
    assert newer(table.storage, before) == []
    table.commit(Edit("WRITE", [data_file(table.storage, {99: 1})], txn=("app", 3)))
    table.commit(Edit("COMPACT", data_change=False))
    commits = newer(table.storage, before)
    assert [(commit.version, commit.info.operation) for commit in commits] == [(7, "WRITE"), (8, "COMPACT")]
    after = before
    for commit in commits:
        after = after.after(commit)
    same(after, table.snapshot)
    assert before.txns["app"] == 2, "a snapshot does not change"


def test_a_refresh_reads_only_new_commits(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = loaded(table.storage)
    table.commit(Edit("WRITE", [data_file(table.storage, {99: 1})]))
    read, reads = table.storage.read, list[str]()

    def recorded(path: str) -> bytes:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(table.storage, "read", recorded)
    monkeypatch.setattr(table.storage, "list", None)
    newer(table.storage, snapshot)
    assert reads == [commit_path(VERSIONS + number) for number in range(3)]  # the first only to recognise the table


def test_a_log_that_was_replaced_or_cleaned_up(table: Table) -> None:
    snapshot = loaded(table.storage)
    path = commit_path(VERSIONS)
    content = table.storage.read(path)
    table.storage.write(path, content + b"\n")
    with pytest.raises(StorageError, match="no longer has version 6"):
        newer(table.storage, snapshot)
    table.storage.delete([path])
    with pytest.raises(StorageError, match="no longer has version 6"):
        newer(table.storage, snapshot)


def test_a_file_is_its_path_and_its_vector(table: Table) -> None:
    """Lines of a commit have no order, and a removed file with another vector is another file."""
    file = next(file for file in table.snapshot.files.values() if file.deletion_vector)
    vector = write_vectors(table.storage, {file.path: BitMap([1, 2, 3, 4])})[file.path]
    changed = Add(file.path, file.size, 1, deletion_vector=vector)
    orders: list[list[Action]] = [
        [changed, Remove.of(file, 1, data_change=True)],
        [Remove.of(file, 1, data_change=True), changed],
        [Remove.of(changed, 1, data_change=True), changed],
    ]
    for actions in orders:
        assert table.snapshot.after(Commit(7, tuple(actions))).files[file.path] == changed
    other = Commit(7, (Remove(file.path, 1),))
    assert table.snapshot.after(other).files[file.path] == file
    gone = Commit(7, (Remove.of(file, 1, data_change=True),))
    assert file.path not in table.snapshot.after(gone).files


def test_what_a_commit_says() -> None:
    ours = Commit(1, tuple(read_actions("upriver/1.0", Add("a", 1, 1, data_change=False), Txn("app", 1))))
    assert not ours.foreign
    assert not ours.changes_data
    assert not ours.changes_metadata
    assert ours.txns == {"app": 1}
    theirs = Commit(1, tuple(read_actions("delta-rs", Remove("a", 1))))
    assert theirs.foreign
    assert theirs.changes_data
    assert Commit(1, ()).foreign, "a commit without a name is not ours"


def read_actions(engine: str, *actions: Any) -> list[Any]:
    return decode(encode([CommitInfo(1, "WRITE", engine=engine), *actions]))


def test_files_that_left_the_table(table: Table) -> None:
    def gone() -> set[tuple[str, str]]:
        return {file.file for file in removed_since(table.storage, 0, VERSIONS)}

    from_commits = gone()
    # Two files got a vector, one of them twice, and one file was removed.
    assert len(from_commits) == 4
    write_checkpoint(table.storage)
    table.storage.delete(commit_path(version) for version in range(VERSIONS))
    assert gone() == from_commits
    assert not removed_since(table.storage, 2**60, VERSIONS)
    table.storage.delete([f"{LOG}{VERSIONS:020}.checkpoint.parquet"])
    with pytest.raises(CorruptData, match="version 0 is missing"):
        removed_since(table.storage, 0, VERSIONS)


def test_delta_rs_agrees(table: Table) -> None:
    theirs = DeltaTable(table.storage.url)
    assert theirs.version() == VERSIONS
    assert theirs.transaction_version("app") == 2
    assert sorted(path.rpartition("/")[2] for path in theirs.file_uris()) == sorted(table.snapshot.files)
