"""Whether rows hold given documents."""

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings

from tests.support.depth import examples
from tests.tables.documents import json_texts
from tests.tables.documents.json_texts import COLUMNS, exact_array
from tests.tables.documents.test_rebuilding import rows_of
from upriver.tables.documents.comparing import matches
from upriver.tables.documents.rebuilding import conform
from upriver.tables.schema import Column, TableSchema

SCHEMA = TableSchema(COLUMNS)


def match(values: Sequence[bytes | None], contents: list[bytes], schema: TableSchema = SCHEMA) -> list[bool]:
    found: list[bool] = matches(pa.array(values, pa.binary()), rows_of(contents, schema), schema).to_pylist()
    return found


@settings(max_examples=examples(200), deadline=None)
@given(json_texts.inputs)
def test_every_value_matches_its_own_row(contents: list[bytes | None]) -> None:
    values = [value for value in contents if value is not None]
    assert match(values, values) == [True] * len(values)


@pytest.mark.parametrize(
    ("value", "row"),
    [
        (b'{"n":1}', b'{"n":2}'),
        (b'{"n":1}', b"{}"),
        (b"{}", b'{"n":1}'),
        (b'{"name":""}', b"{}"),
        (b'{"n":1}', b'{"n":1,"new":1}'),
        (b'{"n":1,"new":1}', b'{"n":1}'),
        (b'{"n":1,"new":1}', b'{"n":1,"new":2}'),
        (b'{"n":1,"new":1}', b'{"n":1,"new":true}'),
        (b'{"n":1,"new":[1]}', b'{"n":1,"new":[1,2]}'),
        (b'{"n":1,"new":1,"new":1}', b'{"n":1,"new":1}'),
        (b'{"n":null}', b"{}"),
        (b"bad", b"worse"),
        (b"bad", b"{}"),
        (b"", b"{}"),
        (b"{}", b""),
        (b'{"tags":[1]}', b'{"tags":[2]}'),
        (b'{"flag":true}', b'{"flag":false}'),
        (b'{"price":1.5}', b'{"price":2}'),
        (b"[" * 100_000, b"{" * 100_000),
    ],
)
def test_another_value_does_not_match(value: bytes, row: bytes) -> None:
    assert match([row, value, row], [row, row, row]) == [True, False, True]


def test_white_space_and_order_do_not_matter() -> None:
    assert match([b' {"n": 1, "price": 2, "tags": [ ]}'], [b'{"tags":[],"price":2.0,"n":1}']) == [True]
    assert match([b'{"n":1,"new":[1,{}]}'], [b'{ "new": [1, {}], "n": 1 }']) == [True]


def test_a_null_is_not_a_document() -> None:
    assert match([None, None], [b"{}", b"bad"]) == [False, False]


def test_rows_from_before_the_table_had_a_column_match() -> None:
    values = [b'{"n":1,"name":"x"}', b'{"n":2}', b'{"n":3,"name":7}']
    rows = rows_of(values, TableSchema([Column("n", "int")]))
    assert matches(pa.array(values), rows, SCHEMA).to_pylist() == [True, True, True]
    changed = [b'{"n":1,"name":"y"}', b'{"n":2,"name":"x"}', b'{"n":3}']
    assert matches(pa.array(changed), rows, SCHEMA).to_pylist() == [False, False, False]


def test_rows_of_a_widened_column_match() -> None:
    old = TableSchema([Column("n", "int"), Column("t", "text")])
    new = old.widened(["n"])
    values = [b'{ "n":1 }', b'{ "t":"x", "n":9007199254740993 }', b'{"n":9007199254740993,"z":1}']
    rows = rows_of(values, old)
    for found in (rows, conform(rows, new)):
        assert matches(pa.array(values), found, new).to_pylist() == [True, True, True]
        others = [value.replace(b"1", b"4") for value in values]
        assert matches(pa.array(others), found, new).to_pylist() == [False, False, False]


def test_rows_in_chunks_and_none_at_all() -> None:
    rows = pa.concat_tables([rows_of([b'{"n":1}'], SCHEMA), rows_of([b'{"n":2}', b"bad"], SCHEMA)])
    assert matches(exact_array([b'{"n":1}', b'{"n":2}', b"bad"]), rows, SCHEMA).to_pylist() == [True, True, True]
    assert matches(pa.array([], pa.binary()), rows.slice(0, 0), SCHEMA).to_pylist() == []
    assert matches(pa.array(["{}"], pa.large_string()), rows_of([b"{}"], SCHEMA), SCHEMA).to_pylist() == [True]
