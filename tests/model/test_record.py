"""The record: its layout as numbers, and nothing lost between memory and bytes.

That the part behind the prefix is the frame of a `dcp` message is checked beside those messages.
"""

import dataclasses
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.change_strategies import U8, U32, U64, key_changes
from upriver.model import Change, Event, record
from upriver.model.record import Record, pack, size_at, unpack


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Records as the engine makes them: a deletion's own second is the record's."""
    change, time = draw(key_changes()), draw(U32)
    if change.event is Event.DELETION:
        change = dataclasses.replace(change, expiry=time)
    return Record(change=change, superseded_by=draw(U64), time=time, ttl=draw(U8))


MUTATION = Record(
    change=Change(
        vbucket=0x0102,
        event=Event.MUTATION,
        seqno=0x11,
        rev_seqno=0x12,
        cas=0x13,
        flags=0x14,
        expiry=0x15,
        lock_time=0x16,
        datatype=0x17,
        key=b"key",
        value=b"value",
    ),
    superseded_by=0x21,
    time=0x22,
    ttl=0x23,
)


@given(records())
def test_a_record_comes_back_from_its_bytes(made: Record) -> None:
    assert unpack(pack(made)) == made


@given(st.lists(records(), max_size=5))
def test_records_follow_each_other_without_gaps(made: list[Record]) -> None:
    data, at, again = b"".join(map(pack, made)), 0, []
    while at < len(data):
        again.append(unpack(memoryview(data), at))
        at += size_at(data, at)
    assert again == made
    assert at == len(data)


def test_the_prefix_has_16_bytes_in_the_order_of_the_machine() -> None:
    prefix = pack(MUTATION)[:16]
    assert record.PREFIX.size == 16
    assert int.from_bytes(prefix[record.SUPERSEDED_BY_OFFSET :][:8], sys.byteorder) == 0x21
    assert int.from_bytes(prefix[record.TIME_OFFSET :][:4], sys.byteorder) == 0x22
    assert prefix[record.TTL_OFFSET] == 0x23
    assert prefix[13:] == bytes(3)


def test_the_frame_of_a_mutation_is_spelled_out() -> None:
    assert pack(MUTATION)[16:].hex(" ", -4) == (
        "80570003 1f170102 00000027 00000000 00000000 00000013 "
        "00000000 00000011 00000000 00000012 00000014 00000015 00000016 0000006b 65797661 6c7565"
    )


@pytest.mark.parametrize(("event", "size"), [(Event.MUTATION, 31), (Event.DELETION, 18), (Event.EXPIRATION, 20)])
def test_the_fixed_part_has_the_size_of_its_kind(event: Event, size: int) -> None:
    packed = pack(Record(change=Change(vbucket=0, event=event, seqno=1, key=b"key")))
    assert packed[16 + 4] == size
    assert len(packed) == size_at(packed, 0) == 16 + 24 + size + 3


@given(records())
def test_what_every_change_shares_stands_at_one_place(made: Record) -> None:
    frame = pack(made)[record.PREFIX.size :]
    assert struct.unpack_from(">I", frame, record.BODY_LENGTH_OFFSET) == (len(frame) - 24,)
    assert struct.unpack_from(">I", frame, record.OPAQUE_OFFSET) == (0,)
    assert struct.unpack_from(">Q", frame, record.CAS_OFFSET) == (made.change.cas,)
    assert struct.unpack_from(">Q", frame, record.SEQNO_OFFSET) == (made.change.seqno,)
    assert struct.unpack_from(">Q", frame, record.REV_SEQNO_OFFSET) == (made.change.rev_seqno,)


def test_a_deletion_happened_when_its_record_says() -> None:
    made = Record(change=Change(vbucket=0, event=Event.DELETION, seqno=1, key=b"k"), time=99)
    assert unpack(pack(made)).change.expiry == 99


@pytest.mark.parametrize("event", [Event.FLUSH, Event.ROLLBACK, Event.RESET])
def test_what_concerns_a_whole_vbucket_has_no_record(event: Event) -> None:
    with pytest.raises(ValueError, match=f"a {event.name.lower()} is not a change of a key"):
        pack(Record(change=Change(vbucket=0, event=event, seqno=1, key=b"")))


def test_a_new_record_is_current_and_has_all_its_hops_to_live() -> None:
    made = Record(change=MUTATION.change)
    assert (made.superseded_by, made.ttl) == (0, 255)
