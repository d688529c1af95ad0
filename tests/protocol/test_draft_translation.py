"""The drafts in the words of `upr`, and back."""

import pytest

from upriver.errors import WireError
from upriver.protocol.draft_translation import DraftTranslator
from upriver.wire import AnyResponse, Message, dcp, memcached, upr, upr_draft1, upr_draft2, upr_draft3
from upriver.wire.codes import Status

LOG = (memcached.FailoverEntry(vbucket_uuid=7, seqno=3),)


def test_what_a_consumer_asks() -> None:
    log, stream = upr.FailoverLogRequest(vbucket=5, opaque=9), upr.StreamRequest(vbucket=5, opaque=9, start_seqno=4)
    short, long = DraftTranslator("upr_draft2"), DraftTranslator("upr_draft3")
    assert short.outgoing(log) == upr_draft1.FailoverLogRequest(request_id=9, vbucket=5).encode()
    assert long.outgoing(log) == upr_draft3.FailoverLogRequest(opaque=9, vbucket=5).encode()
    assert short.outgoing(stream) == upr_draft1.StreamRequest(request_id=9, vbucket=5, start_seqno=4).encode()
    assert long.outgoing(stream) == upr_draft3.StreamRequest(opaque=9, vbucket=5, start_seqno=4).encode()
    assert short.outgoing(dcp.Control(key=b"k", value=b"v")) == b""
    assert long.outgoing(dcp.BufferAck(bytes_processed=1)) == b""


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (upr_draft1.Mutation(request_id=9, cas=1, by_seqno=2, flags=3, key=b"k", value=b"v"),
         upr.Mutation(vbucket=5, opaque=9, cas=1, by_seqno=2, flags=3, key=b"k", value=b"v")),
        (upr_draft2.Deletion(request_id=9, cas=1, by_seqno=2, key=b"k"),
         upr.Deletion(vbucket=5, opaque=9, cas=1, by_seqno=2, key=b"k")),
        (upr_draft2.Expiration(request_id=9, by_seqno=2, key=b"k"),
         upr.Expiration(vbucket=5, opaque=9, by_seqno=2, key=b"k")),
        (upr_draft1.Expiration(request_id=9, by_seqno=2, key=b"k"),
         upr.Expiration(vbucket=5, opaque=9, by_seqno=2, key=b"k")),
        (upr_draft1.SnapshotStart(request_id=9), upr.SnapshotMarker(vbucket=5, opaque=9)),
        (upr_draft1.SnapshotEnd(request_id=9), upr_draft3.SnapshotEnd(vbucket=5, opaque=9)),
        (upr_draft1.StreamStart(request_id=9), upr_draft3.StreamStart(vbucket=5, opaque=9)),
        (upr_draft1.StreamEnd(request_id=9), upr.StreamEnd(vbucket=5, opaque=9)),
        (upr_draft2.Flush(request_id=9), upr.Flush(vbucket=5, opaque=9)),
        (upr_draft1.SnapshotStart(request_id=8), None),
        (upr_draft1.Ok(request_id=9), upr.StreamRequestResponse(opaque=9, log=LOG)),
        (upr_draft1.RollbackRequired(request_id=9, seqno=6), upr.RollbackRequired(opaque=9, seqno=6)),
        (upr_draft1.NotMyVbucket(request_id=9),
         AnyResponse(opcode=0x53, opaque=9, status=Status.NOT_MY_VBUCKET, value=b"Not my vbucket")),
        (upr_draft1.RequestError(request_id=9, status=Status.ERANGE, text=b"no"),
         AnyResponse(opcode=0x53, opaque=9, status=Status.ERANGE, value=b"no")),
    ],
)  # fmt: skip
def test_what_a_producer_of_the_short_drafts_says(said: Message, meant: Message | None) -> None:
    translator = _asked("upr_draft2", upr_draft1.Ok(request_id=9, log=LOG))
    assert translator.incoming(said) == meant


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (upr_draft3.Mutation(vbucket=5, opaque=9, by_seqno=2, key=b"k", datatype=1),
         upr.Mutation(vbucket=5, opaque=9, by_seqno=2, key=b"k", datatype=1)),
        (upr_draft3.Deletion(vbucket=5, opaque=9, by_seqno=2, key=b"k"),
         upr.Deletion(vbucket=5, opaque=9, by_seqno=2, key=b"k")),
        (upr_draft3.StreamStart(vbucket=5, opaque=9), upr_draft3.StreamStart(vbucket=5, opaque=9)),
        (upr_draft3.SnapshotStart(vbucket=5, opaque=9), upr.SnapshotMarker(vbucket=5, opaque=9)),
        (upr_draft3.SnapshotEnd(vbucket=5, opaque=9), upr_draft3.SnapshotEnd(vbucket=5, opaque=9)),
        (upr_draft3.StreamEnd(vbucket=5, opaque=9, reason=upr.EndReason.STATE_CHANGED),
         upr.StreamEnd(vbucket=5, opaque=9, reason=upr.EndReason.STATE_CHANGED)),
        (AnyResponse(opcode=0x50, opaque=9), upr.StreamRequestResponse(opaque=9, log=LOG)),
        (AnyResponse(opcode=0x50, opaque=9, status=Status.ETMPFAIL, value=b"wait"),
         AnyResponse(opcode=0x53, opaque=9, status=Status.ETMPFAIL, value=b"wait")),
        (upr_draft3.RollbackRequired(opaque=9, seqno=6), upr.RollbackRequired(opaque=9, seqno=6)),
    ],
)  # fmt: skip
def test_what_a_producer_of_the_third_draft_says(said: Message, meant: Message | None) -> None:
    translator = _asked("upr_draft3", upr_draft3.FailoverLogResponse(opaque=9, log=LOG))
    assert translator.incoming(said) == meant


def test_what_upr_has_no_room_for_is_kept_beside_the_deletion() -> None:
    translator = _asked("upr_draft2", upr_draft1.Ok(request_id=9, log=LOG))
    translator.incoming(upr_draft2.Deletion(request_id=9, by_seqno=1, key=b"k"))
    translator.incoming(upr_draft2.Deletion(request_id=9, by_seqno=2, key=b"l", flags=7, expiration=8, lock_time=9))
    assert translator.take_left_over() == {(5, 2): (7, 8, 9)}
    assert translator.take_left_over() == {}


def test_a_node_that_did_not_understand_is_told_as_such() -> None:
    translator = _asked("upr_draft2", upr_draft1.Ok(request_id=9, log=LOG))
    with pytest.raises(WireError, match="found what was that"):
        translator.incoming(upr_draft1.DecodeError(request_id=9, offset=3, text=b"what was that"))


def _asked(dialect: str, log: Message) -> DraftTranslator:
    translator = DraftTranslator(dialect)
    translator.outgoing(upr.FailoverLogRequest(vbucket=5, opaque=9))
    assert translator.incoming(log) == upr.FailoverLogResponse(opaque=9, log=LOG)
    translator.outgoing(upr.StreamRequest(vbucket=5, opaque=9))
    return translator
