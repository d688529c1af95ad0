"""Choosing files, merging them, and vectors that change meanwhile."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from tests.support.table_parts import SEED, Change, PartTable, after, contents, number, rows_of
from upriver.errors import StorageError
from upriver.tables import Add, Column, DeletionVector, Edit, TableSchema, read
from upriver.tables import compaction as module
from upriver.tables.compaction import (
    DEAD_BYTES,
    FULL_BYTES,
    MERGED_BYTES,
    PATIENCE,
    Merged,
    MergedInput,
    carried,
    choose,
    rewrite,
)
from upriver.tables.data_files.data_file import NewFile
from upriver.tables.key_index import KeyIndex, sidecar_path

A, B, C = (1, b"a"), (1, b"b"), (2, b"c")
KIB, MIB = 1 << 10, 1 << 20
_names = itertools.count()


def file_of(size: int, rows: int = 1000, dead: int = 0) -> Add:
    vector = DeletionVector("u", "x", 1, dead, 1) if dead else None
    return Add(f"{next(_names):06}.parquet", size, 0, stats=json.dumps({"numRecords": rows}), deletion_vector=vector)


# Which files


def test_eight_files_of_a_class_are_merged() -> None:
    files = [file_of(40 * KIB) for _ in range(8)]
    assert choose(files[:7]) == []
    assert choose(files) == [tuple(files)]
    assert choose(files, patience=PATIENCE) == []
    crowd = [file_of(100 * KIB) for _ in range(8 * PATIENCE)]
    assert choose(crowd, patience=PATIENCE) == [tuple(crowd)]
    larger = [file_of(300 * KIB) for _ in range(7)]
    assert choose([*larger, *files]) == [tuple(files)]
    assert choose([*larger, file_of(2000 * KIB), *files[:7]]) != []


def test_smaller_files_come_along() -> None:
    small, medium, large = [file_of(3 * KIB)], [file_of(MIB) for _ in range(8)], [file_of(3 * MIB)]
    assert choose([*large, *medium, *small]) == [(*small, *medium)]


def test_full_files_stay_and_merged_files_have_a_limit() -> None:
    assert choose([file_of(FULL_BYTES) for _ in range(50)]) == []
    groups = choose([file_of(FULL_BYTES - 1) for _ in range(20)])
    assert [len(group) for group in groups] == [8, 8, 4]
    assert all(sum(file.size for file in group) <= MERGED_BYTES for group in groups)


def test_files_with_many_dead_rows_are_written_again() -> None:
    sparse, dense = file_of(40 * MIB, dead=301), file_of(40 * MIB, dead=300)
    assert choose([sparse, dense]) == [(sparse,)]
    few = file_of(2 * MIB, dead=400)
    assert few.size * 0.4 < DEAD_BYTES
    assert choose([few]) == []
    assert choose([few, *(more := [file_of(2 * MIB, dead=400) for _ in range(2)])]) == [(few, *more)]


def test_a_file_without_live_rows_is_always_chosen() -> None:
    empty, full = file_of(KIB, dead=1000), file_of(KIB)
    assert choose([full, empty]) == [(empty,)]


def test_the_size_class_counts_live_rows() -> None:
    files = [file_of(40 * MIB, dead=990), *(file_of(100 * KIB) for _ in range(8))]
    groups = choose(files)
    assert (files[0],) in groups
    assert tuple(files[1:]) in groups


def test_a_file_without_statistics_counts_as_full_of_live_rows() -> None:
    unknown = Add("x.parquet", MIB, 0)
    assert choose([unknown]) == []
    assert choose([unknown, *(file_of(MIB) for _ in range(7))]) != []


def test_everything_purges_vectors_and_merges_small_files() -> None:
    whole, purged, small, other = file_of(FULL_BYTES), file_of(FULL_BYTES * 9, dead=1), file_of(KIB), file_of(KIB)
    assert choose([whole], everything=True) == []
    assert choose([whole, small], everything=True) == []
    groups = choose([whole, purged, small, other], everything=True)
    assert groups == [(small, other), (purged,)]


@given(
    st.lists(st.tuples(st.integers(0, 200 * MIB), st.integers(0, 100), st.integers(0, 100)), max_size=60), st.booleans()
)
def test_groups_are_disjoint_and_compaction_comes_to_an_end(
    found: list[tuple[int, int, int]], everything: bool
) -> None:
    files = [file_of(size, rows, min(rows, dead)) for size, rows, dead in found]
    for _ in range(20):
        groups = choose(files, everything=everything)
        chosen = [file.path for group in groups for file in group]
        assert len(set(chosen)) == len(chosen)
        if not groups:
            return
        files = [file for file in files if file.path not in chosen]
        for group in groups:
            rows = sum((file.rows or 0) - file.dead for file in group)
            if rows:
                files.append(file_of(sum(int(file.size * (1 - file.dead / (file.rows or 1))) for file in group), rows))
    raise AssertionError("compaction never ends")


def test_each_row_is_written_once_per_class() -> None:
    """A thousand small batches: how often bytes are written again."""
    files: list[Add] = []
    written = 0
    for _ in range(1000):
        files.append(file_of(12 * KIB))
        for group in choose(files):
            size = sum(file.size for file in group)
            written += size
            files = [file for file in files if file not in group] + [file_of(size)]
    assert written / (1000 * 12 * KIB) < 4
    assert len(files) < 24


# Merging


@pytest.fixture
def table(tmp_path: Path) -> PartTable:
    return PartTable(tmp_path)


def test_live_rows_are_copied_in_order(table: PartTable, tmp_path: Path) -> None:
    table.add([(*A, number(1)), (*B, number(2)), (*C, number(3))])
    table.add([(*A, number(4)), (3, b"d", b"not JSON")])
    expected = {A: number(4), B: number(2), C: number(3), (3, b"d"): b"not JSON"}
    merged = table.merge()
    assert merged.file is not None
    assert merged.file.rows == 4
    assert merged.file.stats["minValues"] == {"_vbucket": 1, "_seqno": 1}
    assert merged.file.stats["tightBounds"] is True
    table.commit_merged(merged)
    assert table.contents() == expected
    keys = read(table.storage.url)["_key"].to_pylist()
    assert [key for key in keys if key in "bc"] == ["b", "c"]
    assert [key for key in keys if key in "ad"] == ["a", "d"]
    (file,) = table.table.snapshot.files.values()
    assert file.deletion_vector is None
    stored = KeyIndex.open(table.storage, file.path, SEED, tmp_path / "c").entries.copy()
    table.storage.delete([sidecar_path(file.path)])
    assert (stored == KeyIndex.open(table.storage, file.path, SEED, tmp_path / "c").entries).all()


def test_keys_are_not_hashed_again(table: PartTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table.add([(*A, number(1)), (*B, number(2))])
    table.add([(*A, number(4))])
    monkeypatch.setattr("upriver.tables.key_index._hashed", None)
    table.commit_merged(table.merge())
    table.add([(*B, None)])
    assert table.contents() == {A: number(4)}


def test_inputs_without_sidecars(table: PartTable) -> None:
    table.add([(*A, number(1)), (*B, number(2))])
    table.add([(*A, number(4))])
    table.storage.delete([sidecar_path(path) for path in table.table.snapshot.files])
    table.commit_merged(table.merge())
    table.add([(*B, None)])
    assert table.contents() == {A: number(4)}


def test_vectors_that_change_during_a_merge_are_carried_over(table: PartTable) -> None:
    table.add([(*A, number(1)), (*B, number(2)), (*C, number(3)), (5, b"e", number(5))])
    table.add([(*A, number(4)), (6, b"f", number(6))])
    merged = table.merge()
    table.add([(*C, None), (6, b"f", number(7)), (7, b"g", number(8))])
    table.commit_merged(merged)
    assert table.contents() == {
        A: number(4),
        B: number(2),
        (5, b"e"): number(5),
        (6, b"f"): number(7),
        (7, b"g"): number(8),
    }
    assert merged.file is not None
    assert table.table.snapshot.files[merged.file.path].dead == 2
    table.add([(*B, None)])
    assert B not in table.contents()


def test_a_merge_of_dead_rows_only_leaves_no_file(table: PartTable) -> None:
    table.add([(*A, number(1))])
    files = list(table.table.snapshot.files.values())
    merged = Merged(None, (MergedInput(files[0].path, 1, b""),))
    table.table.commit(Edit("EMPTY", removed=[files[0].path]))
    assert merged.file is None
    assert (
        rewrite(
            table.storage, files[0].path, BitMap([0]), table.table.schema, SEED, path="x.parquet", cache=table.cache
        )
        is None
    )
    assert "x.parquet" not in table.files()


def test_a_failed_merge_leaves_nothing(table: PartTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table.add([(*A, number(1))])
    table.add([(*B, number(1))])
    before = table.files()

    def failing(*_: object) -> None:
        raise StorageError("table", "the disk is full")

    for place in ("write_index", "live_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(module, place, failing)
            with pytest.raises(StorageError):
                table.merge()
        assert table.files() == before


@given(st.lists(st.tuples(st.integers(1, 12), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11))), max_size=5))
def test_carried_positions_are_those_of_the_rows(found: list[tuple[int, set[int], set[int]]]) -> None:
    inputs = [(rows, {n for n in old if n < rows}, {n for n in new if n < rows}) for rows, old, new in found]
    output = [(number, row) for number, (rows, old, _) in enumerate(inputs) for row in range(rows) if row not in old]
    merged = Merged(
        None,
        tuple(MergedInput(str(number), rows, BitMap(old).serialize()) for number, (rows, old, _) in enumerate(inputs)),
    )
    now = {str(number): BitMap(old | new) for number, (_, old, new) in enumerate(inputs)}
    expected = [place for place, (number, row) in enumerate(output) if row in inputs[number][2]]
    assert list(carried(merged, now)) == expected
    assert list(carried(merged, {})) == []


def test_results_travel_as_bytes() -> None:
    file = NewFile("x.parquet", 7, 2, {"numRecords": 2})
    for merged in (Merged(None, ()), Merged(file, (MergedInput("a", 3, b"12"), MergedInput("b", 1, b"")))):
        assert Merged.of_bytes(merged.to_bytes()) == merged


# Columns


def rewritten(table: PartTable, path: str, schema: TableSchema, dead: BitMap | None = None) -> pa.Table:
    file = rewrite(table.storage, path, dead or BitMap(), schema, SEED, path=table.new_path(), cache=table.cache)
    assert file is not None
    with table.storage.open(file.path) as source:
        return pq.read_table(source)


def test_files_get_new_columns(table: PartTable) -> None:
    table.add([(*A, number(1))])
    wider = TableSchema([*table.table.schema.columns, Column("late", "text")])
    rows = rewritten(table, next(iter(table.table.snapshot.files)), wider)
    assert rows.schema.equals(wider.arrow)
    assert rows["late"].to_pylist() == [None]


def test_an_integer_column_becomes_decimal_and_loses_nothing(table: PartTable) -> None:
    big = 2**53 + 1
    table.add([(*A, number(1)), (*B, number(big)), (*C, b'{"n":%d,"other":true}' % -big), (4, b"x", number(2**53))])
    wide = table.table.schema.widened(["n"])
    rows = rewritten(table, next(iter(table.table.snapshot.files)), wide, BitMap([3]))
    assert rows.schema.field("n").type == pa.float64()
    assert rows["n"].to_pylist() == [1.0, None, None]
    found = {name: json.loads(value) for name, value in contents(rows, wide).items()}
    assert found == {A: {"n": 1}, B: {"n": big}, C: {"n": -big, "other": True}}
    assert rows["_raw"].to_pylist()[0] is None


def test_columns_of_other_programs_are_kept(table: PartTable) -> None:
    table.add([(*A, number(1)), (*B, number(2))])
    (path,) = table.table.snapshot.files
    with table.storage.open(path) as source:
        rows = pq.read_table(source)
    rows = rows.append_column("score", pa.array([0.5, None], pa.float32()))
    with table.storage.new_file("foreign.parquet") as file:
        pq.write_table(rows, file)
    stats = json.dumps({"numRecords": 2})
    table.table.commit(Edit("WRITE", [Add("foreign.parquet", 1, 0, stats=stats)], removed=[path]))
    table.add([(*C, number(3))])
    merged = table.merge()
    assert merged.file is not None
    with table.storage.open(merged.file.path) as source:
        found = pq.read_table(source)
    assert sorted(zip(found["_key"].to_pylist(), found["score"].to_pylist(), strict=True)) == [
        ("a", 0.5), ("b", None), ("c", None)
    ]  # fmt: skip
    assert found.schema.field("score").type == pa.float32()


def test_rows_of_other_programs_without_keys_are_kept(table: PartTable) -> None:
    with table.storage.new_file("foreign.parquet") as file:
        pq.write_table(pa.table({"n": [7, 8], "_vbucket": pa.array([None, 3], pa.int32())}), file)
    table.table.commit(Edit("WRITE", [Add("foreign.parquet", 1, 0)]))
    table.add([(*A, number(1))])
    merged = table.merge()
    assert merged.file is not None
    assert merged.file.stats["minValues"] == {"_vbucket": 1, "_seqno": 1}
    assert merged.file.stats["nullCount"] == {"_vbucket": 1, "_seqno": 2}
    table.commit_merged(merged)
    assert sorted(read(table.storage.url)["n"].to_pylist()) == [1, 7, 8]


@pytest.mark.slow
def test_row_groups_with_more_than_2_gib_of_text(tmp_path: Path) -> None:
    table = PartTable(tmp_path, schema=TableSchema([Column("text", "text")]))
    table.add([(1, b"a", b'{"text":"x"}')])
    (path,) = table.table.snapshot.files
    with table.storage.open(path) as source:
        rows = pq.read_table(source).drop_columns(["text"])
    rows = rows.append_column("text", pa.array(["y" * (20 << 20)]))
    with table.storage.new_file("large.parquet") as file:
        pq.write_table(pa.concat_tables([rows] * 110), file, row_group_size=1000, use_dictionary=False)
    table.table.commit(Edit("WRITE", [Add("large.parquet", 1, 0)], removed=[path]))
    with table.storage.open("large.parquet") as source:
        assert pq.ParquetFile(source).num_row_groups == 1
    merged = table.merge()
    assert merged.file is not None
    assert merged.file.rows == 110


# The whole, against a dict


@pytest.fixture
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small commits would wait for the disk most of the time."""
    monkeypatch.setattr("os.fsync", lambda _: None)


documents = st.integers(0, 99).map(number) | st.sampled_from([b"[1]", b'{"other":"x"}', b'{"n":9007199254740993}'])
changes = st.tuples(st.integers(0, 2), st.sampled_from([b"a", b"b", b"\xff"]), documents | st.none())
parts = st.tuples(
    st.just("part"),
    st.lists(st.lists(changes, min_size=1, max_size=8), min_size=1, max_size=3),
    st.just(frozenset()) | st.frozensets(st.integers(0, 2), max_size=1),
)
masks = st.just(2**16 - 1) | st.integers(1, 2**16 - 1)
between = st.one_of(
    st.tuples(st.just("compact"), masks),
    st.tuples(st.just("merge"), masks),
    st.tuples(st.just("commit merge")),
    st.tuples(st.just("lose sidecars")),
    st.tuples(st.just("abandon"), parts),
)


class Play:
    """Applies steps to a table and to a dict."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.table = PartTable(path, **options)
        self.model: dict[tuple[int, bytes], bytes] = {}
        self.merged: Merged | None = None

    def part(self, batches: list[list[Change]], replaced: frozenset[int]) -> None:
        self.table.add(*batches, replaced=replaced)
        self.model = {name: value for name, value in self.model.items() if name[0] not in replaced}
        for changes in batches:
            self.model = after(self.model, changes)

    def compact(self, mask: int) -> None:
        self.merge(mask)
        self.commit_merge()

    def merge(self, mask: int) -> None:
        paths = [path for place, path in enumerate(self.table.table.snapshot.files) if mask >> place & 1]
        if self.merged is None and paths:
            self.merged = self.table.merge(paths)

    def commit_merge(self) -> None:
        if self.merged is not None and self.table.table.vectors:
            self.table.commit_merged(self.merged)
        self.merged = None

    def lose_sidecars(self) -> None:
        self.table.storage.delete([path for path in self.table.files() if path.endswith(".idx")])

    def abandon(self, part: tuple[str, list[list[Change]], frozenset[int]]) -> None:
        with self.table.writer() as writer:
            for changes in part[1]:
                writer.add(rows_of(changes))

    def step(self, name: str, *rest: Any) -> None:
        action: Callable[..., None] = getattr(self, name.replace(" ", "_"))
        action(*rest)
        assert self.table.contents() == self.model


@pytest.mark.usefixtures("_fast_disk")
@given(st.lists(st.tuples(parts, between), min_size=2, max_size=6), st.integers(1, 6), st.sampled_from([300, 2000]))
def test_any_sequence_of_parts_and_merges_gives_what_a_dict_holds(
    tmp_path_factory: pytest.TempPathFactory,
    todo: list[tuple[tuple[Any, ...], tuple[Any, ...]]],
    rows_per_file: int,
    chunk_bytes: int,
) -> None:
    play = Play(tmp_path_factory.mktemp("play"), rows_per_file=rows_per_file, chunk_bytes=chunk_bytes)
    for name, *rest in itertools.chain.from_iterable(todo):
        play.step(name, *rest)


@pytest.mark.usefixtures("_fast_disk")
@given(st.lists(parts, max_size=6), st.integers(1, 6))
def test_without_vectors_too(
    tmp_path_factory: pytest.TempPathFactory, todo: list[tuple[Any, ...]], rows_per_file: int
) -> None:
    play = Play(tmp_path_factory.mktemp("play"), rows_per_file=rows_per_file, chunk_bytes=300, vectors=False)
    for name, *rest in todo:
        play.step(name, *rest)
        assert all(file.deletion_vector is None for file in play.table.table.snapshot.files.values())
