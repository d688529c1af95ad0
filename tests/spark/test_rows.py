"""Rows of Spark: the right types, null where there is no value, and only what was asked for."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.model import Change, Event, change_batch
from upriver.spark.rows import (
    DOCUMENTS,
    FIELDS,
    Bounds,
    RowMaker,
    document_metadata,
    rollback_value,
    signed,
    unsigned,
)

BOUNDS = Bounds(2**47 + 1, 3, 4, 9)
RUNS = [(4, BOUNDS)]
CHANGES = [
    Change(
        vbucket=7, event=Event.MUTATION, seqno=5, key=b"a", value=b"x", cas=2**64 - 1, flags=2**32 - 1, expiry=2**32 - 1
    ),
    Change(vbucket=7, event=Event.MUTATION, seqno=6, key=b"b", value=b"", rev_seqno=2, datatype=1, lock_time=5),
    Change(vbucket=7, event=Event.DELETION, seqno=7, key=b"c", value=b""),
    Change(vbucket=7, event=Event.EXPIRATION, seqno=8, key=b"d"),
]


def test_all_columns() -> None:
    rows = RowMaker(tuple(FIELDS)).rows(change_batch(CHANGES), RUNS)
    assert rows.schema == pa.schema([pa.field(name, kind) for name, kind in FIELDS.items()])
    assert rows.column("event").to_pylist() == ["mutation", "mutation", "deletion", "expiration"]
    assert rows.column("value").to_pylist() == [b"x", b"", None, None]
    assert rows.to_pylist()[0] == {
        "vbucket": 7, "seqno": 5, "rev_seqno": 0, "cas": -1, "event": "mutation", "key": b"a", "value": b"x",
        "flags": 2**32 - 1, "expiry": 2**32 - 1, "lock_time": 0, "datatype": 0, "vbucket_uuid": 2**47 + 1, "branch": 3,
        "snapshot_start": 4, "snapshot_end": 9,
    }  # fmt: skip
    rows.validate(full=True)


def test_runs_have_their_own_bounds() -> None:
    other = Bounds(2**64 - 1, 0, 9, 12)
    rows = RowMaker(["vbucket_uuid", "branch"]).rows(change_batch(CHANGES), [(3, BOUNDS), (1, other)])
    assert rows.column("vbucket_uuid").to_pylist() == [2**47 + 1] * 3 + [-1]
    assert rows.column("branch").to_pylist() == [3, 3, 3, 0]


def test_a_slice_is_no_different() -> None:
    maker = RowMaker(tuple(FIELDS))
    whole = maker.rows(change_batch(CHANGES), RUNS)
    assert maker.rows(change_batch(CHANGES).slice(1), [(3, BOUNDS)]).to_pylist() == whole.to_pylist()[1:]


@pytest.mark.parametrize("name", FIELDS)
def test_each_column_alone(name: str) -> None:
    maker = RowMaker([name])
    batch = change_batch(CHANGES).select(maker.to_decode)
    assert (
        maker.rows(batch, RUNS)
        .column(name)
        .equals(RowMaker(tuple(FIELDS)).rows(change_batch(CHANGES), RUNS).column(name))
    )


def test_keys_only_needs_no_values() -> None:
    maker = RowMaker(["key", "value"], keys_only=True)
    assert "value" not in maker.to_decode
    assert maker.rows(change_batch(CHANGES).select(maker.to_decode), RUNS).column("value").null_count == 4


def test_values_as_text() -> None:
    maker = RowMaker(["value"], value_as_text=True)
    assert maker.rows(change_batch(CHANGES), RUNS).column("value").to_pylist() == ["x", "", None, None]


def test_what_is_no_text_ends_nothing() -> None:
    picture = Change(vbucket=7, event=Event.MUTATION, seqno=9, key=b"e", value=b"\x89PNG\xff")
    maker = RowMaker(["value"], value_as_text=True)
    rows = maker.rows(change_batch([*CHANGES, picture]), [(5, BOUNDS)])
    assert rows.column("value").to_pylist() == ["x", "", None, None, "\ufffdPNG\ufffd"]


def test_only_documents_say_what_they_are() -> None:
    assert document_metadata("json", "name string") == {DOCUMENTS: "name string"}
    assert document_metadata("json", None) == {DOCUMENTS: ""}
    assert document_metadata("string", None) is None


def test_a_row_of_a_vbucket() -> None:
    row = RowMaker(tuple(FIELDS)).row(Event.ROLLBACK, 7, 5, BOUNDS, rollback_value(1, 2)).to_pylist()[0]
    assert (row["event"], row["vbucket"], row["seqno"], row["key"], row["branch"]) == ("rollback", 7, 5, None, 3)
    assert json.loads(row["value"]) == {"old_uuid": "0x1", "new_uuid": "0x2"}


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown column colour; choose from vbucket, seqno"):
        RowMaker(["key", "colour"])


@given(st.integers(0, 2**64 - 1))
def test_signs(number: int) -> None:
    assert -(2**63) <= signed(number) < 2**63
    assert unsigned(signed(number)) == number
