"""The second draft: the first one with a lock time in deletions, and a flush."""

import pytest

from upriver.wire import Message, upr_draft1
from upriver.wire import upr_draft2 as d
from upriver.wire.dialects.upr_draft2 import upr_draft2

SHARED = (
    "DecodeError",
    "FailoverLogRequest",
    "Mutation",
    "NotMyVbucket",
    "Ok",
    "RequestError",
    "RollbackRequired",
    "SnapshotEnd",
    "SnapshotStart",
    "StreamEnd",
    "StreamRequest",
    "StreamStart",
)


def test_what_the_text_changes_is_declared() -> None:
    declared = {(cls.declaration.opcode, cls.declaration.type_code): cls for cls in upr_draft2.messages}
    assert declared == {(4, 4): d.Deletion, (4, 5): d.Expiration, (4, 6): d.Flush}


def test_everything_else_is_that_of_the_first_draft() -> None:
    for name in SHARED:
        assert getattr(d, name) is getattr(upr_draft1, name)


@pytest.mark.parametrize("cls", [d.Deletion, d.Expiration])
def test_a_deletion_has_a_lock_time(cls: type[d.Deletion]) -> None:
    message = cls(request_id=45, cas=1, by_seqno=2, rev_seqno=3, flags=4, expiration=5, lock_time=6, key=b"k")
    assert message.encode()[13:] == bytes.fromhex(
        "0000000000000001 0000000000000002 0000000000000003 00000004 00000005 00000006 6b"
    )
    assert cls.layout.lengths == (36,)
    assert upr_draft2.decode(message.encode()) == message


@pytest.mark.parametrize("message", [d.Flush(request_id=1), upr_draft1.StreamStart(), upr_draft1.NotMyVbucket()])
def test_a_message_without_fields_is_its_header_and_its_type(message: Message) -> None:
    size = 12 if message.declaration.type_code is None else 13
    assert len(message.encode()) == size
    assert upr_draft2.decode(message.encode()) == message


def test_the_two_drafts_read_a_deletion_differently() -> None:
    packet = d.Deletion(by_seqno=1, key=b"k", lock_time=0x61626364).encode()
    first = upr_draft1.upr_draft1.decode(packet)
    assert first == upr_draft1.Deletion(by_seqno=1, key=b"abcdk")
