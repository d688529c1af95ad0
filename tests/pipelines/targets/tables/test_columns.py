"""JSON values as columns: nothing is lost, whatever the values are."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pipeline_model import row, table
from upriver.pipelines.targets.tables.columns import COLUMNS_MAX, OWN, Columns, keys_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
DOCUMENTS = st.dictionaries(st.sampled_from(["a", "b", "A", "_key", "x y", "name"]), VALUES, max_size=4)


def rows_of(columns: Columns, *values: bytes) -> list[dict[str, Any]]:
    rows = table(row(0, n, "mutation", b"k%d" % n, value) for n, value in enumerate(values))
    found: list[dict[str, Any]] = columns.table(rows).to_pylist()
    return found


def restored(found: dict[str, Any], columns: Columns) -> Any:
    """The value that a row of the table tells."""
    if found["_raw"] is not None:
        return json.loads(found["_raw"])
    told = {name: value for name, value in found.items() if name not in OWN.names and value is not None}
    return {name: json.loads(value) if columns.schema.field(name).metadata else value for name, value in told.items()}


@given(st.lists(DOCUMENTS, max_size=6), st.lists(DOCUMENTS, max_size=6))
def test_every_document_can_be_restored(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    columns = Columns()
    for documents in (first, second):
        again = Columns(columns.schema)
        found = rows_of(columns, *(json.dumps(document).encode() for document in documents))
        for document, each in zip(documents, found, strict=True):
            assert restored(each, columns) == document
        # What is known is enough to make the same of the same.
        assert set(again.schema.names) <= set(columns.schema.names)


@pytest.mark.parametrize(
    "value",
    [b"", b"plain", b"\xff\xfe", b"[1]", b"12", b"null", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": 1, "a": 2}',
     b'{"a": "\\ud800"}', b"{" * 5000, b'{"a": 1} x'],
)  # fmt: skip
def test_what_is_no_document_stays_as_it_came(value: bytes) -> None:
    (found,) = rows_of(Columns(), value)
    assert found["_raw"] == value


def test_the_kind_of_a_column_is_that_of_most_values_and_stays() -> None:
    columns = Columns()
    found = rows_of(columns, b'{"a": 1}', b'{"a": "x"}', b'{"a": 2}', b'{"f": 1}', b'{"f": 1.5}')
    assert [each["a"] for each in found] == [1, None, 2, None, None]
    assert [each["_raw"] for each in found] == [None, b'{"a": "x"}', None, None, None]
    assert [each["f"] for each in found] == [None, None, None, 1.0, 1.5]
    (last,) = rows_of(columns, b'{"a": "text", "f": 9007199254740993}')
    assert (last["a"], last["f"], last["_raw"]) == (None, None, b'{"a": "text", "f": 9007199254740993}')


def test_objects_and_arrays_are_json_as_text() -> None:
    columns = Columns()
    (found,) = rows_of(columns, '{"o": {"x": [1, "ü"]}}'.encode())
    assert (found["o"], found["_raw"]) == ('{"x":[1,"ü"]}', None)
    (found,) = rows_of(Columns(columns.schema), b'{"o": "[1]"}')
    assert found["_raw"] == b'{"o": "[1]"}'


def test_names_that_cannot_be_columns_stay_raw() -> None:
    columns = Columns()
    (found,) = rows_of(columns, b'{"_key": 1, "x y": 1, "": 1, "UPRIVER_PART": 1, "ok": 1, "OK": 2}')
    assert found["_raw"] is not None
    assert len(columns.schema.names) == len(OWN.names) + 1


def test_columns_are_bounded() -> None:
    columns = Columns()
    rows_of(columns, json.dumps({f"f{n}": n for n in range(COLUMNS_MAX + 10)}).encode())
    assert len(columns.schema.names) == len(OWN.names) + COLUMNS_MAX


def test_keys_that_are_no_text_are_kept() -> None:
    rows = table([row(0, 1, "mutation", b"\xff\x00", b"{}"), row(0, 2, "mutation", "ü".encode(), b"{}")])
    made = Columns().table(rows)
    assert keys_of(made).to_pylist() == [b"\xff\x00", "ü".encode()]
    assert made.column("_key").to_pylist() == [None, "ü"]


def test_numbers_of_a_change_are_columns() -> None:
    rows = table([row(3, 7, "mutation", b"k", b"{}", cas=-5, flags=2**32 - 1, expiry=9, rev_seqno=4, datatype=1)])
    (found,) = Columns().table(rows).to_pylist()
    assert {name: found[name] for name in OWN.names if name[1:] in ("vbucket", "seqno", "cas", "flags", "expiry")} == {
        "_vbucket": 3, "_seqno": 7, "_cas": -5, "_flags": 2**32 - 1, "_expiry": 9,
    }  # fmt: skip
    assert not math.isnan(found["_rev_seqno"])
