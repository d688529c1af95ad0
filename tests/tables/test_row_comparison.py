"""Rows of a table beside the changes of a node."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from tests.support.table_parts import SCHEMA, Change, PartTable, after, number, rows_of
from upriver.model import Difference
from upriver.tables import Edit, row_comparison
from upriver.tables.key_index import hash_keys
from upriver.tables.row_comparison import RowComparison, rows_of_vbuckets

VBUCKETS = 4
NOW_S = 1_700_000_000
EVERYTHING = np.ones(2**16, np.bool_)


def compared(table: PartTable, *batches: pa.RecordBatch, wanted: Any = EVERYTHING) -> list[Difference]:
    files = list(table.table.snapshot.files.values())
    comparison = RowComparison(rows_of_vbuckets(table.storage, files, table.table.schema, wanted), SCHEMA, NOW_S)
    for batch in batches:
        comparison.add(batch)
    return list(comparison.differences())


def with_column(rows: pa.RecordBatch, name: str, values: Sequence[Any]) -> pa.RecordBatch:
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.field(at).type))


CHANGES: list[Change] = [(n % VBUCKETS, b"k%d" % n, number(n)) for n in range(40)]


def test_equal_rows_have_no_differences(tmp_path: Path) -> None:
    table = PartTable(tmp_path)
    table.add(CHANGES)
    assert compared(table, rows_of(CHANGES)) == []
    assert compared(table) == [Difference(vbucket, "extra", key) for vbucket, key, _ in sorted(CHANGES)]


def test_an_empty_table_misses_everything(tmp_path: Path) -> None:
    table = PartTable(tmp_path)
    assert compared(table, rows_of(CHANGES)) == [Difference(v, "missing", key) for v, key, _ in sorted(CHANGES)]
    assert compared(table) == []


def test_each_kind_of_difference(tmp_path: Path) -> None:
    table = PartTable(tmp_path)
    table.add(CHANGES)
    rows = with_column(rows_of(CHANGES), "flags", [7 if n == 2 else 0 for n in range(len(CHANGES))])
    changed = [
        (CHANGES[1][0], CHANGES[1][1], number(99)),
        (CHANGES[3][0], CHANGES[3][1], None),
        (0, b"\xff new", b"{}"),
    ]
    assert compared(table, rows, with_column(rows_of(changed), "cas", [10**15 + 1, 0, 0])) == [
        Difference(0, "missing", b"\xff new"),
        Difference(1, "different", b"k1", ("value",)),
        Difference(2, "different", b"k2", ("_flags",)),
        Difference(3, "extra", b"k3"),
    ]


def test_the_latest_change_decides(tmp_path: Path) -> None:
    table = PartTable(tmp_path)
    table.add([(0, b"a", number(1))])
    wrong, right, gone = ([(0, b"a", value)] for value in (number(2), number(1), None))
    assert compared(table, rows_of(wrong + gone + right)) == [Difference(0, "different", b"a", ("_cas",))]
    assert compared(table, rows_of(wrong), rows_of(gone), rows_of(right)) == []
    assert compared(table, rows_of(right), rows_of(gone)) == [Difference(0, "extra", b"a")]
    other: list[Change] = [(0, b"b", number(1)), (0, b"b", None)]
    assert compared(table, rows_of(right), *(rows_of([each]) for each in other)) == []


def test_expired_documents_are_ignored_on_both_sides(tmp_path: Path) -> None:
    table = PartTable(tmp_path)
    expired = with_column(rows_of([(0, b"a", number(1)), (0, b"b", number(1))]), "expiry", [NOW_S, NOW_S + 1])
    with table.writer() as writer:
        writer.add(expired)
        table.commit(writer.finish())
    assert compared(table) == [Difference(0, "extra", b"b")]
    assert compared(table, expired) == []
    assert compared(PartTable(tmp_path / "empty"), expired) == [Difference(0, "missing", b"b")]


def test_only_the_wanted_vbuckets_and_live_rows_are_read(tmp_path: Path) -> None:
    table = PartTable(tmp_path)
    table.add(CHANGES[:20])
    table.add(CHANGES[:8])
    table.add(CHANGES[20:])
    some = np.zeros(2**16, np.bool_)
    some[[1, 3]] = True
    files = list(table.table.snapshot.files.values())
    rows = rows_of_vbuckets(table.storage, files, SCHEMA, some)
    assert sorted(rows.column("_key").to_pylist()) == sorted(key.decode() for v, key, _ in CHANGES if v in (1, 3))
    assert rows.schema.equals(SCHEMA.arrow)


def test_a_key_with_two_rows_has_one_extra(tmp_path: Path) -> None:
    table = PartTable(tmp_path)
    table.add(CHANGES)
    with table.writer() as writer:
        writer.add(rows_of(CHANGES[:1]))
        (file,) = writer.finish().files
    table.table.commit(Edit("BATCH", [file.add(1)], {file.path: BitMap()}))
    assert compared(table, rows_of(CHANGES)) == [Difference(0, "extra", b"k0")]


def test_rows_of_another_program_without_key_and_vbucket_are_extra(tmp_path: Path) -> None:
    table = PartTable(tmp_path)
    table.add(CHANGES[:1])
    with table.writer() as writer:
        writer.add(rows_of([(7, b"x", number(1)), (8, b"y", number(2))]))
        (file,) = writer.finish().files
    path = table.storage.local(file.path)
    rows = pq.read_table(path)
    given = {"_key": pa.array([None, "y"]), "_vbucket": pa.array([7, None], pa.int32())}
    pq.write_table(pa.table({name: given.get(name, rows.column(name)) for name in rows.column_names}), path)
    table.table.commit(Edit("BATCH", [dataclasses.replace(file.add(1), size=table.storage.size(file.path))]))
    assert compared(table, rows_of(CHANGES[:1])) == [Difference(7, "extra"), Difference(0xFFFF, "extra", b"y")]


def test_equal_hashes_of_different_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def same(seed: bytes, vbuckets: Any, keys: pa.Array) -> Any:
        found = hash_keys(seed, vbuckets, keys)
        found[:, 0] = 0
        found[:, 1] &= np.uint64(0xFFFFFFFF)
        return found

    table = PartTable(tmp_path)
    table.add(CHANGES)
    monkeypatch.setattr(row_comparison, "hash_keys", same)
    assert compared(table, rows_of(CHANGES)) == []
    found = compared(table, rows_of(CHANGES[:-1]), rows_of([(0, b"new", b"{}")]))
    assert found == [Difference(0, "missing", b"new"), Difference(3, "extra", b"k39")]


keys = st.sampled_from([b"a", b"b", b"c", b"\xff"])
values = st.none() | st.integers(0, 2).map(number) | st.just(b"not JSON")
changes = st.lists(st.tuples(st.integers(0, 1), keys, values), max_size=8)


@settings(deadline=None, max_examples=25)
@given(held=st.lists(changes, max_size=3), sent=st.lists(changes, max_size=3))
def test_like_two_dicts(tmp_path_factory: pytest.TempPathFactory, held: list[list[Change]], sent: list[Any]) -> None:
    table = PartTable(tmp_path_factory.mktemp("table"))
    ours: dict[tuple[int, bytes], bytes] = {}
    for batch in held:
        table.add(batch)
        ours = after(ours, batch)
    theirs: dict[tuple[int, bytes], bytes] = {}
    for batch in sent:
        theirs = after(theirs, batch)
    found = compared(table, *(with_column(rows_of(batch), "cas", [0] * len(batch)) for batch in sent))
    by_name = {(each.vbucket, each.key): each.kind for each in found}
    assert len(by_name) == len(found)
    assert {name for name, kind in by_name.items() if kind == "missing"} == theirs.keys() - ours.keys()
    assert {name for name, kind in by_name.items() if kind == "extra"} == ours.keys() - theirs.keys()
    differing = {(each.vbucket, each.key) for each in found if "value" in each.columns}
    assert differing == {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
