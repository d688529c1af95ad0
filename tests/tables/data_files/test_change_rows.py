"""Rows of changes on the way to rows of a table."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.table_parts import number, rows_of
from upriver.tables.data_files.change_rows import (
    CHANGE_COLUMNS,
    chosen,
    is_mutation,
    own_columns,
    split,
    vbuckets_in,
    without_foreign_columns,
)
from upriver.tables.schema import OWN

CHANGES = [(1, b"a", number(1)), (2, b"\xff", b"x"), (1, b"b", None), (700, "ü".encode(), b"")]


def test_columns_that_a_table_does_not_need_are_dropped() -> None:
    rows = rows_of(CHANGES).append_column("branch", pa.array([0] * 4))
    assert tuple(without_foreign_columns(rows).schema.names) == CHANGE_COLUMNS


@pytest.mark.parametrize("bytes_max", [1, 100, 10_000])
def test_split(bytes_max: int) -> None:
    rows = rows_of([(1, b"%d" % key, b"x" * key) for key in range(40)])
    pieces = split(rows, bytes_max)
    assert pa.Table.from_batches(pieces).equals(pa.Table.from_batches([rows]))
    assert all(piece.nbytes <= bytes_max or piece.num_rows == 1 for piece in pieces)
    assert split(rows.slice(0, 0), 1) == []


@pytest.mark.parametrize("start", [0, 1, 3])
def test_masks_and_numbers_of_slices(start: int) -> None:
    rows = rows_of(CHANGES).slice(start)
    assert is_mutation(rows).tolist() == [True, True, False, True][start:]
    assert vbuckets_in(rows).tolist() == [1, 2, 1, 700][start:]


def test_chosen_rows() -> None:
    rows = rows_of(CHANGES)
    assert chosen(rows, np.ones(4, np.bool_)) is rows
    assert chosen(rows, np.array([True, False, False, True])).column("key").to_pylist() == [b"a", "ü".encode()]


@given(
    st.lists(st.binary(max_size=5) | st.text(max_size=3).map(str.encode), min_size=1, max_size=20), st.integers(0, 5)
)
def test_keys_are_text_or_raw(keys: list[bytes], start: int) -> None:
    rows = rows_of([(1, key, b"x") for key in keys]).slice(start)
    columns = own_columns(rows, rows.column("value"))
    table = pa.table(columns, schema=OWN)
    table.validate(full=True)
    for key, text, raw in zip(keys[start:], table["_key"].to_pylist(), table["_raw_key"].to_pylist(), strict=True):
        assert (text.encode() if raw is None else raw) == key
        assert (text is None) != (raw is None)


def test_other_integer_and_key_types_are_converted() -> None:
    rows = rows_of([(1, b"a", b"x")])
    rows = rows.set_column(0, "vbucket", pa.array([1], pa.uint16())).set_column(5, "key", pa.array(["a"]))
    table = pa.table(own_columns(rows, rows.column("value")), schema=OWN)
    assert table["_key"].to_pylist() == ["a"]
    assert table["_vbucket"].to_pylist() == [1]
