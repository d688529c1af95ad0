"""What one task writes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from tests.support.broken_writer import refuse_keys
from tests.support.table_parts import CHANGES, SCHEMA, SEED, Change, PartTable, after, contents, number, rows_of
from upriver.errors import StorageError
from upriver.tables import Column, TableSchema, TableStorage
from upriver.tables.data_files.data_file import DataFileWriter, NewFile
from upriver.tables.data_files.part_result import PartResult
from upriver.tables.data_files.unwritable_rows import UnwritableRows
from upriver.tables.documents import FieldReport
from upriver.tables.key_index import KeyIndex, hash_keys, sidecar_path
from upriver.tables.keys.entries import Entries, positions_of
from upriver.tables.keys.key_list import KeyList
from upriver.tables.part_writer import PartWriter

A, B, C = (1, b"a"), (1, b"b"), (2, b"c")


@pytest.fixture
def storage(tmp_path: Path) -> TableStorage:
    return TableStorage.of(tmp_path / "table")


def part_of(
    storage: TableStorage, *batches: Sequence[Change], replaced: Sequence[int] = (), **options: Any
) -> PartResult:
    """A part whose every batch is a chunk."""
    with PartWriter(storage, SCHEMA, SEED, attempt="a", **options) as writer:
        for changes in batches:
            writer.add(rows_of(changes))
            writer._write_chunk()
        return writer.finish(replaced)


def live_rows(storage: TableStorage, file: NewFile) -> dict[tuple[int, bytes], bytes]:
    with storage.open(file.path) as source:
        rows = pq.read_table(source)
    mask = [position not in file.dead_rows for position in range(rows.num_rows)]
    return contents(rows.filter(pa.array(mask)))


def found_in(storage: TableStorage, result: PartResult) -> dict[tuple[int, bytes], bytes]:
    """The live rows of all files."""
    found: dict[tuple[int, bytes], bytes] = {}
    for file in result.files:
        rows = live_rows(storage, file)
        assert not found.keys() & rows.keys()
        found |= rows
    return found


def test_rows_become_a_file_with_statistics(storage: TableStorage, tmp_path: Path) -> None:
    result = part_of(storage, [(*A, number(1)), (*C, number(2)), (5, b"\xff", b"not JSON")])
    (file,) = result.files
    assert file.rows == result.live_rows == 3
    assert file.size == storage.size(file.path)
    assert not file.dead
    assert file.stats == {
        "numRecords": 3,
        "minValues": {"_vbucket": 1, "_seqno": 1},
        "maxValues": {"_vbucket": 5, "_seqno": 3},
        "nullCount": {"_vbucket": 0, "_seqno": 0},
        "tightBounds": True,
    }
    with storage.open(file.path) as source:
        rows = pq.read_table(source)
    assert rows.schema.equals(SCHEMA.arrow)
    assert rows["_key"].to_pylist() == ["a", "c", None]
    assert rows["_raw_key"].to_pylist() == [None, None, b"\xff"]
    assert rows["_raw"].to_pylist() == [None, None, b"not JSON"]
    assert rows["n"].to_pylist() == [1, 2, None]
    assert rows["_seqno"].to_pylist() == [1, 2, 3]
    assert rows["_cas"].to_pylist() == [10**15, 10**15 + 1, 10**15 + 2]
    add = file.add(77)
    assert (add.path, add.size, add.modified_ms, add.rows, add.dead) == (file.path, file.size, 77, 3, 0)
    assert len(KeyIndex.open(storage, file.path, SEED, tmp_path)) == 3


def test_the_last_change_of_a_chunk_wins_and_earlier_ones_are_not_written(storage: TableStorage) -> None:
    result = part_of(
        storage,
        [(*A, number(1)), (*B, number(2)), (*A, number(3)), (*C, number(4)), (*C, None), (*B, None), (*B, number(5))],
    )
    (file,) = result.files
    assert file.rows == 2
    assert found_in(storage, result) == {A: number(3), B: number(5)}
    assert result.deleted_keys == 1


def test_rows_of_earlier_chunks_and_files_become_dead(storage: TableStorage, tmp_path: Path) -> None:
    result = part_of(
        storage,
        [(*A, number(1)), (*B, number(2)), (*C, number(3))],
        [(*A, number(4))],
        [(*B, None), (*A, number(5))],
        rows_per_file=4,
    )
    first, second = result.files
    assert first.dead_rows == BitMap([0, 1, 3])
    assert first.stats["tightBounds"] is False
    assert first.stats["numRecords"] == 4
    assert not second.dead
    assert found_in(storage, result) == {A: number(5), C: number(3)}
    assert positions_of(KeyIndex.open(storage, first.path, SEED, tmp_path).entries).tolist() == [2]
    assert result.live_rows == 2
    assert result.deleted_keys == 1


def test_a_file_without_live_rows_is_dropped(storage: TableStorage) -> None:
    result = part_of(storage, [(*A, number(1))], [(*A, number(2))], [(*A, None)], rows_per_file=1)
    assert result.files == ()
    assert [file.path for file in storage.list()] == [result.keys]
    assert result.deleted_keys == 1


def test_the_key_list_has_all_keys_and_the_replaced_vbuckets(storage: TableStorage, tmp_path: Path) -> None:
    result = part_of(storage, [(*A, number(1)), (*C, None)], [(*A, number(2))], replaced=[7, 3])
    found = KeyList.open(storage, result.keys, tmp_path)
    expected = hash_keys(SEED, np.array([1, 2], np.uint16), pa.array([b"a", b"c"]))
    hashes = np.concatenate(list(found.hashes(storage, tmp_path)))
    assert sorted(hashes[:, 0].tolist()) == sorted(expected[:, 0].tolist())
    assert found.replaced == result.replaced == (3, 7)
    assert result.vbuckets == (1, 2, 3, 7)


def test_a_part_without_changes(storage: TableStorage, tmp_path: Path) -> None:
    assert part_of(storage) == PartResult((), "", (), (), FieldReport(), 0, 0)
    assert list(storage.list()) == []
    replaced = part_of(storage, replaced=[4])
    assert KeyList.open(storage, replaced.keys, tmp_path).replaced == (4,)


def test_deletions_only(storage: TableStorage) -> None:
    result = part_of(storage, [(*A, None)], [(*B, None)])
    assert (result.files, result.deleted_keys, result.live_rows) == ((), 2, 0)


def test_what_is_discarded_never_happened(storage: TableStorage, tmp_path: Path) -> None:
    with PartWriter(storage, SCHEMA, SEED, attempt="a") as writer:
        writer.add(rows_of([(*A, number(1)), (*C, number(1))]))
        writer._write_chunk()
        writer.add(rows_of([(*B, number(2)), (2, b"d", number(2)), (*A, None)]))
        writer.discard(1)
        writer.add(rows_of([(*B, number(3))]))
        result = writer.finish()
    assert found_in(storage, result) == {B: number(3), C: number(1), (2, b"d"): number(2)}
    assert sum(map(len, KeyList.open(storage, result.keys, tmp_path).hashes(storage, tmp_path))) == 3
    assert result.files[0].dead_rows == BitMap([0])


def test_everything_discarded(storage: TableStorage) -> None:
    with PartWriter(storage, SCHEMA, SEED, attempt="a", chunk_bytes=1) as writer:
        writer.add(rows_of([(*A, number(1)), (*B, number(1))]))
        writer.discard(1)
        result = writer.finish()
    assert (result.files, result.live_rows, result.vbuckets) == ((), 0, ())


def test_a_result_travels_as_bytes(storage: TableStorage) -> None:
    result = part_of(storage, [(*A, b'{"other":1.5}'), (*B, number(1))], [(*A, number(2))], replaced=[9])
    assert result.report.unknown == {"other": {"float": 1}}
    assert PartResult.of_bytes(result.to_bytes()) == result


def test_an_abandoned_part_leaves_nothing(storage: TableStorage) -> None:
    writer = PartWriter(storage, SCHEMA, SEED, attempt="a", rows_per_file=1, chunk_bytes=1)
    writer.add(rows_of([(*A, number(1)), (*B, number(2))]))
    assert len(list(storage.list())) == 2
    writer.abandon()
    assert list(storage.list()) == []
    finished = PartWriter(storage, SCHEMA, SEED, attempt="b")
    finished.add(rows_of([(*A, number(1))]))
    finished.finish()
    assert len(list(storage.list())) == 3
    finished.abandon()
    assert list(storage.list()) == []


class Failing:
    """A storage that fails at the nth operation that changes files."""

    def __init__(self, inner: TableStorage, operations: int) -> None:
        self._inner, self.left = inner, operations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def new_file(self, path: str, **options: Any) -> Any:
        return _FailingFile(self, self._inner.new_file(path, **options))

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageError("table", "the disk is full")


class _FailingFile:
    def __init__(self, storage: Failing, inner: Any) -> None:
        self._storage, self._inner = storage, inner

    def __enter__(self) -> Path:
        self._storage.step()
        path: Path = self._inner.__enter__()
        return path

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        if kind is None:
            try:
                self._storage.step()
            except StorageError as failure:
                self._inner.__exit__(StorageError, failure, None)
                raise
        return self._inner.__exit__(kind, error, trace)


@pytest.mark.parametrize("vectors", [True, False])
def test_a_failure_of_any_file_operation_leaves_nothing(tmp_path: Path, vectors: bool) -> None:
    for operations in range(100):
        storage = TableStorage.of(tmp_path / str(operations))
        failing: Any = Failing(storage, operations)
        try:
            result = part_of(
                failing, [(*A, number(1)), (*B, number(2))], [(*A, number(3))], rows_per_file=2, vectors=vectors
            )
        except StorageError:
            assert list(storage.list()) == []
            continue
        assert found_in(storage, result) == {A: number(3), B: number(2)}
        break
    assert operations == (10 if vectors else 14)


def test_without_vectors_no_file_has_dead_rows(storage: TableStorage, tmp_path: Path) -> None:
    result = part_of(storage, [(*A, number(1)), (*B, number(2))], [(*A, number(3))], rows_per_file=2, vectors=False)
    assert [file.rows for file in result.files] == [1, 1]
    assert not any(file.dead for file in result.files)
    assert found_in(storage, result) == {A: number(3), B: number(2)}
    listed = {file.path for file in storage.list()}
    assert listed == {result.keys, *(name for file in result.files for name in (file.path, sidecar_path(file.path)))}
    for file in result.files:
        assert positions_of(KeyIndex.open(storage, file.path, SEED, tmp_path).entries).tolist() == [0]


def test_different_keys_of_one_hash_in_a_batch_are_told_apart(storage: TableStorage) -> None:
    def hashing(seed: bytes, vbuckets: np.ndarray, keys: pa.Array, first: int) -> Entries:
        return hash_keys(seed, vbuckets, keys, first) & np.array([0xFFFF << 48, 2**32 - 1], np.uint64)

    changes = [(*A, number(1)), (*B, number(2)), (*A, number(3)), (1, b"d", None), (*C, number(4))]
    result = part_of(storage, changes, [(2, b"e", number(5))], hashing=hashing)
    # In the second chunk, a key of vbucket 2 has the hash of an earlier one, which then counts as its old version.
    assert found_in(storage, result) == {A: number(3), B: number(2), (2, b"e"): number(5)}


@pytest.mark.parametrize(
    ("column", "values", "why"),
    [
        ("value", [None], "a mutation has no value"),
        ("key", [None], "without a key"),
        ("event", ["rollback"], "not mutation, deletion or expiration"),
        ("event", [None], "must hold texts"),
        (None, [], "no column flags"),
    ],
)
def test_rows_that_are_not_changes_are_refused(
    storage: TableStorage, column: str | None, values: list[Any], why: str
) -> None:
    rows = rows_of([(*A, number(1))])
    if column is None:
        rows = rows.drop_columns(["flags"])
    else:
        place = CHANGES.names.index(column)
        rows = rows.set_column(place, CHANGES.field(column), pa.array(values, CHANGES.field(column).type))
    with PartWriter(storage, SCHEMA, SEED, attempt="a") as writer, pytest.raises(ValueError, match=why):
        writer.add(rows)


def test_expirations_delete_and_other_columns_and_types_do_not_matter(storage: TableStorage) -> None:
    rows = rows_of([(*A, number(1)), (*B, number(2)), (*B, None)])
    rows = rows.set_column(4, "event", pa.array(["mutation", "mutation", "expiration"], pa.large_string()))
    rows = rows.set_column(0, "vbucket", pa.array([1, 1, 1], pa.uint16()))
    rows = rows.append_column("lock_time", pa.array([0, 0, 0]))
    with PartWriter(storage, SCHEMA, SEED, attempt="a") as writer:
        writer.add(rows)
        result = writer.finish()
    assert found_in(storage, result) == {A: number(1)}
    assert result.deleted_keys == 1


changes_of_few_keys = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([b"a", b"b", b"\xff", "ü".encode()]),
        st.none() | st.integers(0, 99).map(number) | st.just(b"[1]"),
    ),
    max_size=12,
)


@given(
    st.lists(st.tuples(changes_of_few_keys, st.none() | st.integers(0, 2)), max_size=6),
    st.integers(1, 6),
    st.booleans(),
)
def test_a_part_holds_what_a_dict_would(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[list[Change], int | None]],
    rows_per_file: int,
    one_chunk: bool,
) -> None:
    storage = TableStorage.of(tmp_path_factory.mktemp("part"))
    model: dict[tuple[int, bytes], bytes] = {}
    seen: set[tuple[int, bytes]] = set()
    options: dict[str, Any] = {} if one_chunk else {"chunk_bytes": 200}
    with PartWriter(storage, SCHEMA, SEED, attempt="a", rows_per_file=rows_per_file, **options) as writer:
        for changes, discarded in steps:
            writer.add(rows_of(changes))
            model = after(model, changes)
            seen |= {(vbucket, key) for vbucket, key, _ in changes}
            if discarded is not None:
                writer.discard(discarded)
                model = {name: value for name, value in model.items() if name[0] != discarded}
                seen = {name for name in seen if name[0] != discarded}
        result = writer.finish()
    assert found_in(storage, result) == model
    assert result.live_rows == len(model)
    assert result.deleted_keys == len(seen) - len(model)
    assert set(result.vbuckets) == {vbucket for vbucket, _ in seen}
    for file in result.files:
        entries = KeyIndex.open(storage, file.path, SEED, Path("unused")).entries
        assert sorted(positions_of(entries).tolist()) == sorted(BitMap(range(file.rows)) - file.dead_rows)


def test_large_documents_and_texts_of_more_than_2_gib(tmp_path: Path) -> None:
    """A small version of the slow test below."""
    table = PartTable(tmp_path, schema=TableSchema([Column("text", "text")]), chunk_bytes=1 << 20)
    document = json.dumps({"text": "x" * (1 << 20)}).encode()
    table.add([(number, b"k%d" % number, document) for number in range(5)])
    assert table.contents() == {(number, b"k%d" % number): document.replace(b": ", b":") for number in range(5)}


BOUNDED = """
import sys
import numpy as np, pyarrow as pa
from pathlib import Path
from tests.support.table_parts import SEED, number, rows_of
from upriver.errors import StorageError
from upriver.tables import Column, TableSchema, TableStorage
from upriver.tables.part_writer import PartWriter

rows, size, batches = map(int, sys.argv[2:])
document = b'{"text":"' + b"x" * size + b'"}'
with PartWriter(TableStorage.of(sys.argv[1]), TableSchema([Column("text", "text")]), SEED, attempt="a") as writer:
    for batch in range(batches):
        writer.add(rows_of([(n % 7, b"%d-%d" % (batch, n), document) for n in range(rows)]))
    result = writer.finish()
assert result.live_rows == rows * batches
# The kernel's other figure, ru_maxrss, includes the process that started this one.
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "size", "batches"),
    [(1, 20 << 20, 130), (1000, 6000, 400), (20_000, 10, 200)],
    ids=["20 MiB", "6 kB", "10 B"],
)
def test_memory_is_bounded(tmp_path: Path, rows: int, size: int, batches: int) -> None:
    command = [sys.executable, "-c", BOUNDED, str(tmp_path), str(rows), str(size), str(batches)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.getcwd()).stdout
    assert int(printed) < 500


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_rows_that_cannot_be_written_are_named_and_then_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    table = PartTable(tmp_path, chunk_bytes=1)
    changes: list[Change] = [(0, b"k%d" % n, number(n)) for n in range(6)]
    table.add([(0, b"k3", number(-1)), (0, b"other", number(1))])
    refuse_keys(monkeypatch, "k3", "k5")
    with table.writer() as writer, pytest.raises(UnwritableRows) as caught:
        writer.add(rows_of(changes))
    assert caught.value.reasons == {(0, b"k3", 4): "ValueError: no room for k3"}
    files = table.files()
    diverted: list[tuple[bytes, str]] = []
    with PartWriter(
        table.storage, table.table.schema, SEED, attempt="again", chunk_bytes=chunk_bytes,
        on_refused=lambda rows, reasons: diverted.extend(zip(rows.column("key").to_pylist(), reasons, strict=True)),
    ) as writer:  # fmt: skip
        writer.add(rows_of(changes))
        result = writer.finish()
        table.commit(result)
    assert diverted == [(b"k3", "ValueError: no room for k3"), (b"k5", "ValueError: no room for k5")]
    assert result.report.documents == 4, "rows that were tried in memory are not counted twice"
    kept = {(0, key): value for _, key, value in changes if key not in (b"k3", b"k5")}
    assert table.contents() == {**kept, (0, b"other"): number(1)}, "the old version of k3 is hidden"
    assert files <= table.files()


@pytest.mark.parametrize("error", [OSError("the disk is full"), ValueError("a bug")])
def test_a_failure_that_no_row_causes_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def write(*_: Any) -> None:
        raise error

    table = PartTable(tmp_path, chunk_bytes=1)
    monkeypatch.setattr(DataFileWriter, "write", write)
    with table.writer() as writer, pytest.raises(type(error), match=str(error)):
        writer.add(rows_of([(0, b"a", number(1))]))
