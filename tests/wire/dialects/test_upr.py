"""UPR against the transport specification: its opcodes, its sizes and what early builds did otherwise."""

import pytest

from upriver.errors import WireError
from upriver.wire import AnyResponse, Request
from upriver.wire import upr as u
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import FailoverEntry
from upriver.wire.dialects.upr import upr

OPCODES = {
    0x50: u.Open,
    0x51: u.AddStream,
    0x52: u.CloseStream,
    0x53: u.StreamRequest,
    0x54: u.FailoverLogRequest,
    0x55: u.StreamEnd,
    0x56: u.SnapshotMarker,
    0x57: u.Mutation,
    0x58: u.Deletion,
    0x59: u.Expiration,
    0x5A: u.Flush,
    0x5B: u.SetVbucketState,
}
EXTRAS = {
    u.Open: (8,),
    u.AddStream: (4,),
    u.AddStreamResponse: (4,),
    u.CloseStream: (0,),
    u.StreamRequest: (40,),
    u.StreamRequestResponse: (0,),
    u.RollbackRequired: (8,),
    u.FailoverLogRequest: (0,),
    u.FailoverLogResponse: (0,),
    u.StreamEnd: (4,),
    u.SnapshotMarker: (0,),
    u.Mutation: (30, 31),
    u.Deletion: (18,),
    u.Expiration: (18,),
    u.Flush: (0,),
    u.SetVbucketState: (1,),
}


def test_every_opcode_of_the_text_is_declared() -> None:
    requests = {cls.declaration.opcode: cls for cls in upr.messages if issubclass(cls, Request)}
    assert requests == OPCODES


def test_the_extras_have_the_sizes_of_the_text() -> None:
    assert {cls: cls.layout.lengths for cls in upr.messages} == EXTRAS


def test_a_rollback_is_sent_in_the_extras_and_taken_from_either_place() -> None:
    message = u.RollbackRequired(opaque=7, seqno=0x45A8)
    in_extras = bytes.fromhex("81530000080000230000000800000007000000000000000000000000000045a8")
    in_value = bytes.fromhex("81530000000000230000000800000007000000000000000000000000000045a8")
    assert message.encode() == in_extras
    assert upr.decode(in_extras) == upr.decode(in_value) == message


def test_a_rollback_that_is_partly_extras_is_refused() -> None:
    with pytest.raises(WireError) as caught:
        upr.decode(bytes.fromhex("81530000040000230000000800000007000000000000000000000000000045a8"))
    assert (caught.value.offset, caught.value.found) == (4, "4 bytes of extras")


def test_an_answer_is_chosen_by_its_status() -> None:
    accepted = u.StreamRequestResponse(log=(FailoverEntry(vbucket_uuid=5, seqno=3),))
    assert type(upr.decode(accepted.encode())) is u.StreamRequestResponse
    refused = AnyResponse(opcode=0x53, status=Status.KEY_ENOENT, value=b"Not found")
    assert upr.decode(refused.encode()) == refused
    assert refused.text == "Not found"


def test_states_and_reasons_have_the_numbers_of_the_text() -> None:
    assert {state.name: int(state) for state in u.VbucketState} == {"ACTIVE": 1, "PENDING": 2, "REPLICA": 3, "DEAD": 4}
    assert (u.EndReason.OK, u.EndReason.STATE_CHANGED) == (0, 1)


def test_the_reason_that_early_builds_sent_is_understood() -> None:
    message = upr.decode(u.StreamEnd(reason=u.EndReason(2)).encode())
    assert isinstance(message, u.StreamEnd)
    assert message.reason.label == "state changed early"


def test_a_mutation_of_early_builds_has_one_byte_more() -> None:
    message = u.Mutation(by_seqno=1, key=b"k", value=b"v", nru=2)
    assert message.encode()[4] == 31
    assert upr.decode(message.encode()) == message
    assert u.Mutation(by_seqno=1, key=b"k", value=b"v").encode()[4] == 30


def test_metadata_is_split_off_the_value() -> None:
    message = u.Mutation(by_seqno=1, key=b"k", value=b"value", meta=b"meta")
    packet = message.encode()
    assert message.nmeta == 4
    assert packet[52:54] == b"\x00\x04"
    assert packet.endswith(b"kvaluemeta")
    assert upr.decode(packet) == message


def test_metadata_longer_than_the_body_is_refused() -> None:
    packet = bytearray(u.Mutation(by_seqno=1, key=b"k", value=b"value").encode())
    packet[52:54] = b"\x00\x64"
    with pytest.raises(WireError) as caught:
        upr.decode(packet)
    assert str(caught.value) == "at byte 55: expected 100 bytes after value, found 5"


def test_an_expiration_is_told_from_a_deletion() -> None:
    deletion, expiration = u.Deletion(by_seqno=1, key=b"k"), u.Expiration(by_seqno=1, key=b"k")
    assert deletion != expiration
    assert [type(upr.decode(m.encode())) for m in (deletion, expiration)] == [u.Deletion, u.Expiration]
