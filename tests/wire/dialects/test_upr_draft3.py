"""The third draft: its own opcodes on the memcached header, and its slips."""

import pytest

from upriver.errors import WireError
from upriver.wire import AnyResponse, Request
from upriver.wire import upr_draft3 as d
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import FailoverEntry
from upriver.wire.dialects.upr import VbucketState
from upriver.wire.dialects.upr_draft3 import upr_draft3

OPCODES = {
    0x50: (d.StreamRequest, (40,)),
    0x51: (d.FailoverLogRequest, (0,)),
    0x52: (d.StreamStart, (0,)),
    0x53: (d.StreamEnd, (4,)),
    0x54: (d.SnapshotStart, (0,)),
    0x55: (d.SnapshotEnd, (0,)),
    0x56: (d.Mutation, (28,)),
    0x57: (d.Deletion, (28,)),
    0x58: (d.Expiration, (28,)),
    0x59: (d.Flush, (0,)),
    0x5A: (d.SetVbucketState, (1,)),
}


def test_every_opcode_of_the_text_is_declared_with_its_size() -> None:
    requests = [cls for cls in upr_draft3.messages if issubclass(cls, Request)]
    assert {cls.declaration.opcode: (cls, cls.layout.lengths) for cls in requests} == OPCODES


def test_the_group_id_is_the_key_of_a_stream_request() -> None:
    message = d.StreamRequest(vbucket=12, group_id=b"replication_12")
    packet = message.encode()
    assert packet[2:5] == b"\x00\x0e\x28"
    assert packet.endswith(b"replication_12")
    assert upr_draft3.decode(packet) == message


def test_extras_of_36_bytes_are_refused() -> None:
    packet = bytearray(d.Mutation(by_seqno=1, key=b"k", value=bytes(8)).encode())
    packet[4] = 36
    with pytest.raises(WireError) as caught:
        upr_draft3.decode(packet)
    assert str(caught.value) == "at byte 4: expected 28 bytes of extras in mutation, found 36"


@pytest.mark.shows("upr_draft3:log-count")
def test_a_log_may_have_1024_pairs() -> None:
    pairs = tuple(FailoverEntry(vbucket_uuid=number + 1, seqno=1024 - number) for number in range(1024))
    packet = d.FailoverLogResponse(log=pairs, opaque=45).encode()
    assert (len(packet) - 24) // 16 == 1024
    message = upr_draft3.decode(packet)
    assert isinstance(message, d.FailoverLogResponse)
    assert message.log == pairs


@pytest.mark.shows("upr_draft3:state-codes")
def test_the_states_have_the_numbers_of_the_text() -> None:
    codes = {state: d.SetVbucketState(state=state).encode()[24] for state in VbucketState}
    assert {state.name: code for state, code in codes.items()} == {"ACTIVE": 1, "PENDING": 2, "REPLICA": 3, "DEAD": 4}


@pytest.mark.shows("upr_draft3:state-printed")
def test_set_vbucket_state_is_sent_as_a_request_and_taken_with_either_magic() -> None:
    message = d.SetVbucketState(vbucket=12, opaque=45, state=VbucketState.DEAD)
    packet = bytearray(message.encode())
    assert packet[0] == 0x80
    assert upr_draft3.decode(packet) == message
    packet[0] = 0x81
    assert upr_draft3.decode(packet) == message


@pytest.mark.parametrize("status", [Status.SUCCESS, Status.NOT_MY_VBUCKET, Status.UNKNOWN_COMMAND])
def test_an_answer_to_set_vbucket_state_is_still_an_answer(status: Status) -> None:
    answer = AnyResponse(opcode=0x5A, status=status, opaque=45, value=b"" if status is Status.SUCCESS else b"why")
    assert upr_draft3.decode(answer.encode()) == answer


def test_no_other_request_is_taken_with_the_magic_of_a_response() -> None:
    packet = bytearray(d.StreamEnd(vbucket=12).encode())
    packet[0] = 0x81
    assert isinstance(upr_draft3.decode(packet), AnyResponse)


def test_not_my_vbucket_is_sent_as_7_and_taken_as_1_too() -> None:
    assert d.NotMyVbucket().encode()[6:8] == b"\x00\x07"
    for status in (Status.NOT_MY_VBUCKET, Status.KEY_ENOENT):
        message = d.NotMyVbucket(status=status, opaque=1)
        assert upr_draft3.decode(message.encode()) == message


def test_a_rollback_is_sent_in_the_value_and_taken_from_the_extras_too() -> None:
    message = d.RollbackRequired(opaque=7, seqno=0x45A8)
    packet = bytearray(message.encode())
    assert packet[:8] == bytes.fromhex("8150 0000 00 00 0023")
    assert upr_draft3.decode(packet) == message
    packet[4] = 8
    assert upr_draft3.decode(packet) == message


def test_a_mutation_has_no_metadata() -> None:
    message = d.Mutation(by_seqno=1, rev_seqno=2, flags=3, expiration=4, lock_time=5, key=b"k", value=b"v")
    assert message.encode()[24:] == bytes.fromhex("0000000000000001 0000000000000002 00000003 00000004 00000005 6b 76")
