"""Documents from rows, and rows of older files in the current schema."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings

from tests.support.depth import examples
from tests.tables.documents import json_texts
from tests.tables.documents.json_texts import COLUMNS, exact_array
from upriver.tables.documents.parsing import parse
from upriver.tables.documents.rebuilding import completed, conform, documents_of
from upriver.tables.schema import OWN, Column, TableSchema

SCHEMA = TableSchema(COLUMNS)


def rows_of(contents: list[bytes], schema: TableSchema) -> pa.Table:
    """The rows of a table with these documents."""
    values = exact_array(contents)
    found = parse(values, schema.columns)
    own = [found.raw if field.name == "_raw" else pa.nulls(len(values), field.type) for field in OWN]
    return pa.table([*own, *found.columns], schema=schema.arrow)


def raw_of(rows: pa.Table) -> list[bytes | None]:
    found: list[bytes | None] = rows.column("_raw").to_pylist()
    return found


@settings(max_examples=examples(200), deadline=None)
@given(json_texts.inputs)
def test_a_rebuilt_document_gives_the_same_row(contents: list[bytes | None]) -> None:
    rows = rows_of([value for value in contents if value is not None], SCHEMA)
    again = rows_of(documents_of(rows, SCHEMA).to_pylist(), SCHEMA)
    assert again.equals(rows)


def test_documents_are_rebuilt_from_their_cells() -> None:
    contents = [
        b'{ "name": "\\u00e9\\n\\"", "price": 5, "n": -3, "tags": [ 1 ], "flag": false }', b"{}", b"bad", b'{"n":null}',
        b'{"price":1e22,"quo\\"te":1}',
    ]  # fmt: skip
    assert documents_of(rows_of(contents, SCHEMA), SCHEMA).to_pylist() == [
        '{"flag":false,"n":-3,"price":5.0,"name":"é\\n\\"","tags":[1]}'.encode(), b"{}", b"bad", b'{"n":null}',
        b'{"price":1e+22,"quo\\"te":1}',
    ]  # fmt: skip


def test_numbers_that_json_lacks_become_null() -> None:
    rows = rows_of([b'{"price":1}'], SCHEMA).set_column(12, "price", pa.array([float("nan")]))
    assert documents_of(rows, SCHEMA).to_pylist() == [b'{"price":null}']


def test_columns_that_a_file_lacks_are_null() -> None:
    old = TableSchema([Column("n", "int")])
    rows = rows_of([b'{"n":1}', b'{"n":2,"name":"x"}'], old)
    now = conform(rows, SCHEMA)
    assert now.schema == SCHEMA.arrow
    assert now.column("n").to_pylist() == [1, 2]
    assert now.column("name").to_pylist() == [None, None]
    assert raw_of(now) == [None, b'{"n":2,"name":"x"}']
    assert documents_of(rows, SCHEMA).to_pylist() == [b'{"n":1}', b'{"n":2,"name":"x"}']
    assert conform(now, SCHEMA).equals(now)


def test_columns_of_other_programs_stay() -> None:
    rows = rows_of([b'{"n":1}'], SCHEMA).append_column("added", pa.array([7], pa.int16()))
    now = conform(rows, SCHEMA)
    assert now.column_names == [*SCHEMA.arrow.names, "added"]
    assert now.column("added").to_pylist() == [7]


def test_an_integer_column_becomes_one_of_decimals() -> None:
    old = TableSchema([Column("n", "int"), Column("m", "int"), Column("t", "text")])
    new = old.widened(["n"])
    rows = rows_of([b'{"n":1,"t":"x"}', b'{"n":null}', b'{"t":"y"}'], old)
    now = conform(rows, new)
    assert now.schema == new.arrow
    assert now.column("n").to_pylist() == [1.0, None, None]
    assert raw_of(now) == [None, b'{"n":null}', None]


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)])
def test_an_integer_that_a_double_cannot_represent_keeps_its_document(number: int) -> None:
    old = TableSchema([Column("n", "int"), Column("m", "int"), Column("t", "text")])
    new = old.widened(["n", "m"])
    contents = [json.dumps(document).encode() for document in _documents(number)]
    now = conform(rows_of(contents, old), new)
    assert now.column("n").to_pylist() == [2.0**53, None, None, None, 1.0]
    assert now.column("m").to_pylist() == [None, None, 5.0, None, None]
    assert now.column("t").to_pylist() == ["exact", "beyond", None, None, None]
    raw = raw_of(now)
    assert [raw[0], raw[4]] == [None, None]
    assert raw[3] == contents[3]  # the original stays
    assert json.loads(raw[1] or b"") == json.loads(contents[1])
    assert json.loads(raw[2] or b"") == json.loads(contents[2])
    again = rows_of(contents, new)
    assert now.select(["n", "m", "t"]).equals(again.select(["n", "m", "t"]))


def _documents(number: int) -> list[dict[str, Any]]:
    return [
        {"n": 2**53, "t": "exact"},
        {"n": number, "t": "beyond"},
        {"m": 5, "n": number},
        {"n": number, "m": number, "new": 1},
        {"n": 1},
    ]


def test_rows_are_completed_as_if_they_were_written_now() -> None:
    """Those that keep their document: of others the columns have everything."""
    old = TableSchema([Column("n", "int")])
    new = old.with_columns([Column("late", "text"), Column("deep", "json")])
    contents = [
        b'{"n": 1}',
        b'{"n": 2, "late": "a"}',
        b'{"late": "b", "deep": [1]}',
        b'{"n": 3, "late": 4}',
        b'{"n": 5, "late": "c", "rare": true}',
        b"no document",
        b'{"n": 12345678901234567890}',
    ]
    now = completed(conform(rows_of(contents, old), new), new)
    assert now.equals(rows_of(contents, new))
    assert now.column("late").to_pylist() == [None, "a", "b", None, "c", None, None]
    assert raw_of(now)[:3] == [None, None, None]
    assert completed(now.slice(0, 0), new).num_rows == 0


def test_rows_in_several_chunks_and_none_at_all() -> None:
    old = TableSchema([Column("n", "int")])
    new = old.widened(["n"])
    parts = [rows_of([b'{"n":%d}' % n], old) for n in (1, 2**60, 3)]
    now = conform(pa.concat_tables(parts), new)
    assert now.column("n").to_pylist() == [1.0, None, 3.0]
    assert raw_of(now) == [None, b'{"n":%d}' % 2**60, None]
    assert conform(parts[0].slice(0, 0), new).num_rows == 0
    assert documents_of(parts[0].slice(0, 0), old).to_pylist() == []
