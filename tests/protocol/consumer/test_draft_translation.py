"""The drafts in the words of `upr`, and back."""

from copy import deepcopy

import pytest

from upriver.errors import WireError
from upriver.protocol.consumer.draft_translation import HELD_BYTES_MAX, DraftTranslator
from upriver.wire import AnyResponse, Message, dcp, memcached, upr, upr_draft1, upr_draft2, upr_draft3
from upriver.wire.codes import Status

LOG = (memcached.FailoverEntry(vbucket_uuid=7, seqno=3),)
#: The opaque of the request for the log that follows each stream request.
AGAIN = 0x80000000


def test_what_a_consumer_asks() -> None:
    log, stream = upr.FailoverLogRequest(vbucket=5, opaque=9), upr.StreamRequest(vbucket=5, opaque=9, start_seqno=4)
    short, long = DraftTranslator("upr_draft2"), DraftTranslator("upr_draft3")
    assert short.outgoing(log) == upr_draft1.FailoverLogRequest(request_id=9, vbucket=5).encode()
    assert long.outgoing(log) == upr_draft3.FailoverLogRequest(opaque=9, vbucket=5).encode()
    assert short.outgoing(stream) == (
        upr_draft1.StreamRequest(request_id=9, vbucket=5, start_seqno=4).encode()
        + upr_draft1.FailoverLogRequest(request_id=9 | AGAIN, vbucket=5).encode()
    )
    assert long.outgoing(stream) == (
        upr_draft3.StreamRequest(opaque=9, vbucket=5, start_seqno=4).encode()
        + upr_draft3.FailoverLogRequest(opaque=9 | AGAIN, vbucket=5).encode()
    )
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
        (upr_draft1.RollbackRequired(request_id=9, seqno=6), upr.RollbackRequired(opaque=9, seqno=6)),
        (upr_draft1.NotMyVbucket(request_id=9),
         AnyResponse(opcode=0x53, opaque=9, status=Status.NOT_MY_VBUCKET, value=b"Not my vbucket")),
        (upr_draft1.RequestError(request_id=9, status=Status.ERANGE, text=b"no"),
         AnyResponse(opcode=0x53, opaque=9, status=Status.ERANGE, value=b"no")),
    ],
)  # fmt: skip
def test_what_a_producer_of_the_short_drafts_says(said: Message, meant: Message | None) -> None:
    translator = _asked("upr_draft2", upr_draft1.Ok(request_id=9, log=LOG))
    assert translator.incoming(said) == ([] if meant is None else [meant])


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
        (AnyResponse(opcode=0x50, opaque=9, status=Status.ETMPFAIL, value=b"wait"),
         AnyResponse(opcode=0x53, opaque=9, status=Status.ETMPFAIL, value=b"wait")),
        (upr_draft3.RollbackRequired(opaque=9, seqno=6), upr.RollbackRequired(opaque=9, seqno=6)),
    ],
)  # fmt: skip
def test_what_a_producer_of_the_third_draft_says(said: Message, meant: Message | None) -> None:
    translator = _asked("upr_draft3", upr_draft3.FailoverLogResponse(opaque=9, log=LOG))
    assert translator.incoming(said) == ([] if meant is None else [meant])


def test_what_upr_has_no_room_for_is_kept_beside_the_deletion() -> None:
    translator = _asked("upr_draft2", upr_draft1.Ok(request_id=9, log=LOG))
    translator.incoming(upr_draft2.Deletion(request_id=9, by_seqno=1, key=b"k"))
    translator.incoming(upr_draft2.Deletion(request_id=9, by_seqno=2, key=b"l", flags=7, expiration=8, lock_time=9))
    assert translator.take_left_over() == {(5, 2): (7, 8, 9)}
    assert translator.take_left_over() == {}


ACCEPTED: dict[str, tuple[Message, Message]] = {
    "upr_draft1": (upr_draft1.Ok(request_id=9), upr_draft1.Ok(request_id=9 | AGAIN, log=LOG)),
    "upr_draft2": (upr_draft1.Ok(request_id=9), upr_draft1.Ok(request_id=9 | AGAIN, log=LOG)),
    "upr_draft3": (
        AnyResponse(opcode=0x50, opaque=9),
        upr_draft3.FailoverLogResponse(opaque=9 | AGAIN, log=LOG),
    ),
}


def accepted(dialect: str) -> tuple[DraftTranslator, Message, Message]:
    """A stream that was asked for; what accepts it, and the log that was asked for together with it."""
    short = dialect != "upr_draft3"
    first: Message = (
        upr_draft1.Ok(request_id=9, log=LOG) if short else upr_draft3.FailoverLogResponse(opaque=9, log=LOG)
    )
    return _asked(dialect, first), *deepcopy(ACCEPTED[dialect])


@pytest.mark.parametrize("dialect", ACCEPTED)
def test_a_stream_is_there_when_its_log_is_confirmed(dialect: str) -> None:
    translator, ok, log = accepted(dialect)
    short = dialect != "upr_draft3"
    start: Message = upr_draft1.StreamStart(request_id=9) if short else upr_draft3.StreamStart(vbucket=5, opaque=9)
    assert translator.incoming(ok) == []
    assert translator.incoming(start) == []
    assert translator.incoming(log) == [
        upr.StreamRequestResponse(opaque=9, log=LOG),
        upr_draft3.StreamStart(vbucket=5, opaque=9),
    ]
    assert translator.incoming(start) == [upr_draft3.StreamStart(vbucket=5, opaque=9)], "and then as it comes"


@pytest.mark.parametrize("dialect", ACCEPTED)
def test_a_log_that_has_changed_before_the_request_arrived_is_the_end(dialect: str) -> None:
    """A position is compared with the first log; under another one it is unknown whether it may resume."""
    translator, ok, log = accepted(dialect)
    log.log = (memcached.FailoverEntry(vbucket_uuid=8, seqno=2), *LOG)  # type: ignore[attr-defined]
    translator.incoming(ok)
    with pytest.raises(WireError, match="another one"):
        translator.incoming(log)


def test_the_log_behind_a_refused_request_is_not_told() -> None:
    translator, _, log = accepted("upr_draft2")
    assert translator.incoming(upr_draft1.RollbackRequired(request_id=9, seqno=1))
    assert translator.incoming(log) == []


def test_what_comes_before_the_log_is_bounded() -> None:
    translator, ok, _ = accepted("upr_draft2")
    translator.incoming(ok, 13)
    change = upr_draft1.Mutation(request_id=9, by_seqno=1, key=b"k")
    translator.incoming(change, HELD_BYTES_MAX - 13)
    with pytest.raises(WireError, match="bytes without it"):
        translator.incoming(change, 1)


def test_a_node_that_did_not_understand_is_told_as_such() -> None:
    translator = _asked("upr_draft2", upr_draft1.Ok(request_id=9, log=LOG))
    with pytest.raises(WireError, match="found what was that"):
        translator.incoming(upr_draft1.DecodeError(request_id=9, offset=3, text=b"what was that"))


def _asked(dialect: str, log: Message) -> DraftTranslator:
    translator = DraftTranslator(dialect)
    translator.outgoing(upr.FailoverLogRequest(vbucket=5, opaque=9))
    assert translator.incoming(log) == [upr.FailoverLogResponse(opaque=9, log=LOG)]
    translator.outgoing(upr.StreamRequest(vbucket=5, opaque=9))
    return translator
