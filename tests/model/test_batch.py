"""Changes in bulk."""

import dataclasses

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.change_strategies import changes
from upriver.model import CHANGES, Change, Event, change_batch, changes_in

TYPES = {
    "vbucket": pa.uint16(),
    "event": pa.uint8(),
    "seqno": pa.uint64(),
    "rev_seqno": pa.uint64(),
    "cas": pa.uint64(),
    "flags": pa.uint32(),
    "expiry": pa.uint32(),
    "lock_time": pa.uint32(),
    "datatype": pa.uint8(),
    "key": pa.binary(),
    "value": pa.binary(),
}


def test_the_columns_are_the_fields_of_a_change_in_their_order() -> None:
    assert CHANGES.names == [field.name for field in dataclasses.fields(Change)]
    assert dict(zip(CHANGES.names, CHANGES.types, strict=True)) == TYPES


def test_no_column_is_ever_null() -> None:
    assert not any(field.nullable for field in CHANGES)


@given(st.lists(changes(), max_size=8))
def test_changes_come_out_of_a_batch_as_they_went_in(rows: list[Change]) -> None:
    batch = change_batch(rows)
    assert batch.schema == CHANGES
    assert batch.num_rows == len(rows)
    batch.validate(full=True)
    again = list(changes_in(batch))
    assert again == rows
    assert all(type(row.event) is Event for row in again)


def test_a_batch_may_be_made_of_any_iterable_and_be_empty() -> None:
    assert change_batch(iter(())).num_rows == 0
    assert list(changes_in(change_batch(()))) == []


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises((OverflowError, pa.ArrowInvalid)):
        change_batch([Change(vbucket=2**16, event=Event.MUTATION, seqno=1, key=b"k")])
