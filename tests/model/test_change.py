"""What happened to a key."""

import dataclasses

import pytest

from upriver.model import Change, Event


def test_events_have_numbers_that_are_stored_and_must_not_change() -> None:
    assert {event.name: int(event) for event in Event} == {
        "MUTATION": 1,
        "DELETION": 2,
        "EXPIRATION": 3,
        "FLUSH": 4,
        "ROLLBACK": 5,
        "RESET": 6,
    }


def test_a_change_needs_a_place_and_a_key_and_nothing_more() -> None:
    change = Change(vbucket=1, event=Event.DELETION, seqno=2, key=b"k")
    assert (change.rev_seqno, change.cas, change.flags, change.expiry) == (0, 0, 0, 0)
    assert (change.lock_time, change.datatype, change.value) == (0, 0, b"")


def test_a_change_cannot_be_changed() -> None:
    change = Change(vbucket=1, event=Event.MUTATION, seqno=2, key=b"k")
    with pytest.raises(dataclasses.FrozenInstanceError):
        change.seqno = 3  # type: ignore[misc]
    assert {change} == {Change(vbucket=1, event=Event.MUTATION, seqno=2, key=b"k")}
