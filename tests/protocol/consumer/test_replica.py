"""A connection of the consumer type: what a mover asks of it, and what it answers when."""

import pytest

from tests.support.consumer_messages import QUIET, messages, status_of
from tests.support.recording_sink import RecordingCopy, RecordingSink
from upriver.protocol.consumer.replica import Replica
from upriver.wire import AnyResponse, Message, dcp, memcached, upr
from upriver.wire.codes import Status


def replica() -> Replica:
    return Replica(RecordingSink(RecordingCopy(0)), 0.0, QUIET)


def tell(to: Replica, message: Message) -> list[Message]:
    assert to.receive(message, 0.0)
    return list(messages(to.data_to_send()))


def test_add_stream_is_answered_when_the_producer_has_answered() -> None:
    to = replica()
    (request,) = tell(to, upr.AddStream(opaque=0x13))
    assert isinstance(request, dcp.StreamRequest)
    log = (memcached.FailoverEntry(vbucket_uuid=7, seqno=0),)
    (answer,) = tell(to, upr.StreamRequestResponse(log=log, opaque=request.opaque))
    assert isinstance(answer, upr.AddStreamResponse)
    assert (answer.opaque, answer.stream_opaque) == (0x13, request.opaque)
    assert status_of(tell(to, upr.AddStream(opaque=0x14))) is Status.KEY_EEXISTS
    assert status_of(tell(to, upr.AddStream(opaque=0x15, vbucket=9))) is Status.NOT_MY_VBUCKET
    assert status_of(tell(to, upr.CloseStream(opaque=0x16))) is Status.SUCCESS
    assert status_of(tell(to, upr.CloseStream(opaque=0x17))) is Status.KEY_ENOENT


def test_the_producers_refusal_is_passed_on() -> None:
    to = replica()
    (request,) = tell(to, upr.AddStream(opaque=0x13))
    assert isinstance(request, dcp.StreamRequest)
    refusal = AnyResponse(opcode=request.code, opaque=request.opaque, status=Status.ETMPFAIL, value=b"later")
    (answer,) = tell(to, refusal)
    assert isinstance(answer, AnyResponse)
    assert (answer.opcode, answer.opaque, answer.status, answer.text) == (0x51, 0x13, Status.ETMPFAIL, "later")


def test_takeover_is_passed_on() -> None:
    (request,) = tell(replica(), upr.AddStream(flags=upr.AddStreamFlag.TAKEOVER))
    assert isinstance(request, dcp.StreamRequest)
    assert request.flags == dcp.StreamFlag.TAKEOVER


@pytest.mark.parametrize(
    "message",
    [
        dcp.Open(name=b"again"),
        dcp.StreamRequest(),
        upr.StreamRequest(),
        upr.FailoverLogRequest(),
        dcp.Control(key=b"enable_noop", value=b"true"),
        dcp.BufferAck(bytes_processed=1),
    ],
)
def test_what_only_a_producer_is_asked_ends_the_connection(message: Message) -> None:
    to = replica()
    assert tell(to, message) == []
    assert to.closing
