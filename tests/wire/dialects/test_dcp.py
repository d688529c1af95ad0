"""DCP: what differs from the transport specification, byte by byte, and the record that shares its frames."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.change_strategies import key_changes
from upriver.errors import WireError
from upriver.model import Change, Event
from upriver.model import record as r
from upriver.wire import Message, Request, dcp, memcached, upr
from upriver.wire.codes import Status
from upriver.wire.fields import UInt
from upriver.wire.framing import MEMCACHED

OPCODES = {
    0x50: dcp.Open,
    0x53: dcp.StreamRequest,
    0x55: dcp.StreamEnd,
    0x56: dcp.SnapshotMarker,
    0x57: dcp.Mutation,
    0x58: dcp.Deletion,
    0x59: dcp.Expiration,
    0x5C: dcp.Noop,
    0x5D: dcp.BufferAck,
    0x5E: dcp.Control,
    0x64: dcp.SeqnoAdvanced,
}
#: Sizes that deployed servers use.
FIXED_SIZES = {
    dcp.Open: (8,),
    dcp.StreamRequest: (48,),
    dcp.StreamEnd: (4,),
    dcp.SnapshotMarker: (20,),
    dcp.Mutation: (31,),
    dcp.Deletion: (18, 21),
    dcp.Expiration: (20, 18),
    dcp.Noop: (0,),
    dcp.BufferAck: (4,),
    dcp.Control: (0,),
    dcp.SeqnoAdvanced: (8,),
    dcp.RollbackRequired: (0,),
}


def test_every_opcode_of_deployed_servers_is_declared() -> None:
    own = {cls.declaration.opcode: cls for cls in dcp.dcp.messages if issubclass(cls, Request)}
    assert own == OPCODES
    inherited = {0x51: "add stream", 0x52: "close stream", 0x54: "failover log request", 0x5A: "flush"}
    assert {opcode: dcp.dcp.request_title(opcode) for opcode in inherited} == inherited
    assert dcp.dcp.request_title(0x5B) == "set vbucket state"


def test_fixed_parts_have_the_sizes_of_deployed_servers() -> None:
    assert {cls: cls.layout.lengths for cls in dcp.dcp.messages} == FIXED_SIZES


@pytest.mark.parametrize(
    ("message", "body"),
    [
        (
            dcp.StreamRequest(
                flags=dcp.StreamFlag.TO_LATEST,
                start_seqno=1,
                end_seqno=2,
                vbucket_uuid=3,
                snapshot_start=4,
                snapshot_end=5,
            ),
            "00000004 00000000 0000000000000001 0000000000000002 0000000000000003 0000000000000004 0000000000000005",
        ),
        (
            dcp.SnapshotMarker(start_seqno=1, end_seqno=2, flags=dcp.MarkerFlag.DISK),
            "0000000000000001 0000000000000002 00000002",
        ),
        (
            dcp.Mutation(by_seqno=1, rev_seqno=2, flags=3, expiration=4, lock_time=5, nru=6, key=b"", meta=b"\xaa"),
            "0000000000000001 0000000000000002 00000003 00000004 00000005 0001 06 aa",
        ),
        (dcp.Deletion(by_seqno=1, rev_seqno=2, key=b"k"), "0000000000000001 0000000000000002 0000 6b"),
        (
            dcp.Deletion(by_seqno=1, rev_seqno=2, delete_time=3, unused=4, key=b"k"),
            "0000000000000001 0000000000000002 00000003 04 6b",
        ),
        (
            dcp.Expiration(by_seqno=1, rev_seqno=2, delete_time=3, key=b"k"),
            "0000000000000001 0000000000000002 00000003 6b",
        ),
        (dcp.Expiration(by_seqno=1, rev_seqno=2, key=b"k"), "0000000000000001 0000000000000002 0000 6b"),
        (dcp.BufferAck(bytes_processed=1), "00000001"),
        (dcp.Control(key=b"\x01", value=b"\x02"), "01 02"),
        (dcp.SeqnoAdvanced(by_seqno=1), "0000000000000001"),
        (dcp.RollbackRequired(seqno=1), "0000000000000001"),
        (dcp.StreamEnd(reason=dcp.EndReason.TOO_SLOW), "00000004"),
        (dcp.Noop(), ""),
        (
            memcached.GetAllVbucketSeqnosResponse(seqnos=(memcached.VbucketSeqno(vbucket=1, seqno=2),) * 2),
            "0001 0000000000000002 0001 0000000000000002",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_fields_stand_where_deployed_servers_put_them(message: Message, body: str) -> None:
    assert message.encode()[24:] == bytes.fromhex(body)
    assert dcp.dcp.decode(message.encode()) == message


def test_a_rollback_is_sent_in_the_value_and_taken_from_the_extras_too() -> None:
    message = dcp.RollbackRequired(opaque=7, seqno=0x45A8)
    in_value = bytes.fromhex("81530000000000230000000800000007000000000000000000000000000045a8")
    in_extras = bytes.fromhex("81530000080000230000000800000007000000000000000000000000000045a8")
    assert message.encode() == in_value
    assert dcp.dcp.decode(in_value) == dcp.dcp.decode(in_extras) == message
    assert message.status is Status.ROLLBACK


def test_acknowledged_bytes_are_sent_in_the_extras_and_taken_from_the_value_too() -> None:
    message = dcp.BufferAck(bytes_processed=500)
    in_value = bytearray(message.encode())
    assert in_value[4] == 4
    in_value[4] = 0
    assert dcp.dcp.decode(in_value) == message


def test_what_the_text_sends_is_understood_on_the_same_connection() -> None:
    for message in (
        upr.StreamRequest(start_seqno=5, high_seqno=3),
        upr.SnapshotMarker(),
        upr.Mutation(by_seqno=1, key=b"k", value=b"v"),
    ):
        assert dcp.dcp.decode(message.encode()) == message


def test_a_deletion_with_a_time_has_no_room_for_metadata() -> None:
    with pytest.raises(ValueError, match="no fixed part"):
        dcp.Deletion(by_seqno=1, key=b"k", delete_time=5, meta=b"m").encode()
    assert dcp.Deletion(by_seqno=1, key=b"k", meta=b"m").encode().endswith(b"km")


@pytest.mark.parametrize("extras", [17, 19, 20, 22])
def test_a_deletion_of_another_size_is_refused(extras: int) -> None:
    packet = MEMCACHED.header.pack(0x80, 0x58, 1, extras, 0, 0, extras + 1, 0, 0) + bytes(extras) + b"k"
    with pytest.raises(WireError) as caught:
        dcp.dcp.decode(packet)
    assert str(caught.value) == f"at byte 4: expected 18 or 21 bytes of extras in deletion, found {extras}"


def test_codes_have_the_numbers_of_deployed_servers() -> None:
    assert [reason.label for reason in dcp.EndReason] == [
        "ok",
        "closed",
        "state changed",
        "disconnected",
        "too slow",
        "backfill failed",
        "rollback",
    ]
    assert [int(reason) for reason in dcp.EndReason] == list(range(7))
    assert {flag.name: int(flag) for flag in dcp.OpenFlag} == {
        "PRODUCER": 1,
        "NOTIFIER": 2,
        "XATTRS": 4,
        "NO_VALUE": 8,
        "DELETE_TIMES": 0x20,
    }
    assert {flag.name: int(flag) for flag in dcp.StreamFlag} == {
        "TAKEOVER": 1,
        "DISK_ONLY": 2,
        "TO_LATEST": 4,
        "ACTIVE_ONLY": 0x10,
        "STRICT_UUID": 0x20,
    }
    assert {flag.name: int(flag) for flag in dcp.MarkerFlag} == {
        "MEMORY": 1,
        "DISK": 2,
        "CHECKPOINT": 4,
        "ACK": 8,
        "HISTORY": 0x10,
        "MAY_DUPLICATE_KEYS": 0x20,
    }
    assert (dcp.VbucketState.PENDING, dcp.VbucketState.REPLICA) == (2, 3)


# The record of `model` is a prefix and then the frame of a change: it may not know this module, so it is compared here.


def frame_of(change: Change) -> Message:
    common: dict[str, Any] = {
        "vbucket": change.vbucket,
        "datatype": change.datatype,
        "cas": change.cas,
        "by_seqno": change.seqno,
        "rev_seqno": change.rev_seqno,
        "key": change.key,
        "value": change.value,
    }
    if change.event is Event.MUTATION:
        numbers = {"flags": change.flags, "expiration": change.expiry, "lock_time": change.lock_time}
        return dcp.Mutation(**{**common, **numbers})
    if change.event is Event.DELETION:
        return dcp.Deletion(**common)
    return dcp.Expiration(**common, delete_time=change.expiry)


@given(key_changes(), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 255))
def test_a_record_is_a_prefix_and_the_frame_of_its_change(
    change: Change, superseded_by: int, time: int, ttl: int
) -> None:
    packed = r.pack(r.Record(change=change, superseded_by=superseded_by, time=time, ttl=ttl))
    assert packed[r.PREFIX.size :] == frame_of(change).encode()


def test_a_record_and_the_messages_agree_on_opcodes_and_sizes() -> None:
    assert r.HEADER.format == MEMCACHED.header.format
    structs: dict[type[Message], struct.Struct] = {
        dcp.Mutation: r.MUTATION_EXTRAS,
        dcp.Deletion: r.DELETION_EXTRAS,
        dcp.Expiration: r.EXPIRATION_EXTRAS,
    }
    for cls, structure in structs.items():
        event = cls.declaration.change
        assert event is not None
        assert r.OPCODES[event] == cls.declaration.opcode
        assert cls.layout.parts[structure.size].struct.format == structure.format


@pytest.mark.parametrize("cls", [dcp.Mutation, dcp.Deletion, dcp.Expiration])
def test_a_record_finds_the_shared_numbers_of_every_change_at_one_place(cls: type[Message]) -> None:
    for length in cls.layout.lengths:
        offsets = {field.name: 24 + at for field, at, _ in cls.layout.parts[length].offsets()}
        assert (offsets["by_seqno"], offsets["rev_seqno"]) == (r.SEQNO_OFFSET, r.REV_SEQNO_OFFSET)
        assert all(isinstance(field.kind, UInt) for field in cls.layout.parts[length].fields)
    places = {field.name: field.first for field in MEMCACHED.request_fields}
    assert places["total body"] == r.BODY_LENGTH_OFFSET
    assert places["opaque"] == r.OPAQUE_OFFSET
    assert places["cas"] == r.CAS_OFFSET
