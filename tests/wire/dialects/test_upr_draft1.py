"""The first draft: what its text lists, and the bodies that it left open."""

import pytest

from upriver.errors import WireError
from upriver.wire import Message
from upriver.wire import upr_draft1 as d
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import FailoverEntry
from upriver.wire.dialects.upr import EndReason
from upriver.wire.dialects.upr_draft1 import upr_draft1

#: Opcode and type of every message, and the sizes of the fields between the type and the bytes.
DECLARED = {
    (1, 1): (d.StreamRequest, (35,)),
    (1, 2): (d.FailoverLogRequest, (0, 3)),
    (1, 3): (d.DialectRequest, (1,)),
    (2, 1): (d.Ok, (0,)),
    (2, 2): (d.NotMyVbucket, (0,)),
    (2, 3): (d.RollbackRequired, (8,)),
    (3, None): (d.StreamStart, (0,)),
    (4, 1): (d.SnapshotStart, (0,)),
    (4, 2): (d.SnapshotEnd, (0,)),
    (4, 3): (d.Mutation, (36,)),
    (4, 4): (d.Deletion, (32,)),
    (4, 5): (d.Expiration, (32,)),
    (5, None): (d.StreamEnd, (4,)),
    (6, None): (d.RequestError, (2,)),
    (7, None): (d.DecodeError, (4,)),
}


def test_every_message_of_the_text_is_declared() -> None:
    declared = {
        (cls.declaration.opcode, cls.declaration.type_code): (cls, cls.layout.lengths) for cls in upr_draft1.messages
    }
    assert declared == DECLARED


@pytest.mark.parametrize(
    ("message", "packet"),
    [
        (
            d.StreamRequest(
                request_id=45, vbucket=12, start_seqno=1, end_seqno=2, vbucket_uuid=3, high_seqno=4, group_id=b"g"
            ),
            "01000000 0000002d 00000025 01 00 000c"
            "0000000000000001 0000000000000002 0000000000000003 0000000000000004 67",
        ),
        (d.FailoverLogRequest(request_id=45), "01000000 0000002d 00000001 02"),
        (d.FailoverLogRequest(request_id=45, vbucket=12), "01000000 0000002d 00000004 02 00 000c"),
        (d.DialectRequest(request_id=45, draft=1), "01000000 0000002d 00000002 03 01"),
        (
            d.Ok(request_id=45, log=(FailoverEntry(vbucket_uuid=1, seqno=2),)),
            "02000000 0000002d 00000011 01 0000000000000001 0000000000000002",
        ),
        (d.StreamEnd(request_id=45, reason=EndReason.STATE_CHANGED), "05000000 0000002d 00000004 00000001"),
        (d.RequestError(request_id=45, status=Status.ERANGE, text=b"no"), "06000000 0000002d 00000004 0022 6e6f"),
        (d.DecodeError(request_id=45, offset=9, text=b"no"), "07000000 0000002d 00000006 00000009 6e6f"),
        (
            d.Mutation(
                request_id=45, cas=1, by_seqno=2, rev_seqno=3, flags=4, expiration=5, lock_time=6, key=b"k", value=b"v"
            ),
            "04000001 0000002d 00000027 03"
            "0000000000000001 0000000000000002 0000000000000003 00000004 00000005 00000006 6b76",
        ),
        (
            d.Deletion(request_id=45, cas=1, by_seqno=2, rev_seqno=3, flags=4, expiration=5, key=b"k"),
            "04000000 0000002d 00000022 04 0000000000000001 0000000000000002 0000000000000003 00000004 00000005 6b",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_fields_stand_in_the_order_of_the_text(message: Message, packet: str) -> None:
    assert message.encode() == bytes.fromhex(packet)
    assert upr_draft1.decode(bytes.fromhex(packet)) == message


def test_a_failover_log_request_with_half_a_vbucket_is_refused() -> None:
    with pytest.raises(WireError) as caught:
        upr_draft1.decode(bytes.fromhex("01000000 0000002d 00000003 02 00 0c"))
    assert str(caught.value) == "at byte 13: expected 0 or 3 bytes of failover log request, found 2"


def test_a_log_that_ends_inside_an_entry_is_refused() -> None:
    packet = bytearray(d.Ok(log=(FailoverEntry(vbucket_uuid=1, seqno=2),)).encode() + bytes(7))
    packet[11] += 7
    with pytest.raises(WireError) as caught:
        upr_draft1.decode(packet)
    assert str(caught.value) == "at byte 29: expected 16 bytes of FailoverEntry, found 7"


def test_there_is_no_flush() -> None:
    with pytest.raises(WireError) as caught:
        upr_draft1.decode(bytes.fromhex("04000000 0000002d 00000001 06"))
    assert str(caught.value) == "at byte 12: expected type 1 or 2 or 3 or 4 or 5, found 6"


def test_a_deletion_has_no_lock_time() -> None:
    assert "lock_time" not in {field.name for field in d.Deletion.layout.fields}
    assert "lock_time" in {field.name for field in d.Mutation.layout.fields}
