"""Listeners that are pinned to one dialect, over raw sockets: nothing of another dialect is said or taken there."""

from collections.abc import Iterator

import pytest

from tests.support.mover_socket import MoverSocket
from tests.support.stream_client import StreamClient
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.wire import AnyResponse, Request, Response, Status, dcp, upr

PINNED = ("upr", "dcp")


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    listen = " ".join(f"127.0.0.1:0,dialect={name}" for name in PINNED)
    with start(vbuckets=4, initial_vbuckets="1", listen=listen) as node:
        node.call(node.bucket.create_vbucket, 0, VbucketState.REPLICA)
        yield node


def port_of(node: EmbeddedNode, dialect: str) -> int:
    return next(each.port for each in node.node.listen_addresses if each.dialect == dialect)


def high_seqno(node: EmbeddedNode) -> int:
    return node.call(lambda: node.bucket.vbucket(0).high_seqno)


def test_the_node_consumes_in_upr_alone(node: EmbeddedNode) -> None:
    with MoverSocket(node, port=port_of(node, "upr")) as mover:
        sent = mover.add_stream()
        assert [type(message) for message in sent] == [
            upr.FailoverLogRequest,
            upr.StreamRequest,
            upr.AddStreamResponse,
        ]
        mover.tell(upr.SnapshotMarker(), upr.Mutation(by_seqno=1, key=b"a", value=b"1"), upr.StreamEnd())
        assert answer_to(mover, upr.CloseStream()).status is Status.SUCCESS
        assert high_seqno(node) == 1
        # No acknowledgement and no noop came in between.


@pytest.mark.parametrize(
    "message",
    [
        dcp.SnapshotMarker(start_seqno=0, end_seqno=9),
        dcp.SeqnoAdvanced(by_seqno=9),
        dcp.Noop(),
        dcp.Control(key=b"enable_noop", value=b"true"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_of_dcp_are_refused_where_upr_is_spoken(node: EmbeddedNode, message: Request) -> None:
    with MoverSocket(node, port=port_of(node, "upr")) as mover:
        mover.add_stream()
        before = high_seqno(node)
        assert answer_to(mover, message).status in (Status.EINVAL, Status.UNKNOWN_COMMAND)
        mover.tell(dcp.Mutation(by_seqno=before + 1, key=b"b", value=b"2"))
        assert answer_to(mover, upr.CloseStream()).status is Status.SUCCESS
        assert high_seqno(node) == before


def answer_to(mover: MoverSocket, message: Request) -> Response:
    """The answer to a message of the stream, behind answers to earlier ones."""
    mover.tell(message)
    for answer in iter(mover.next, None):
        assert isinstance(answer, Response), answer
        if answer.code == message.code:
            return answer
    raise AssertionError("the node closed the connection")


def test_the_node_consumes_in_dcp_alone(node: EmbeddedNode) -> None:
    """A producer that refuses its request is not asked in `upr`."""
    with MoverSocket(node, port=port_of(node, "dcp")) as mover:
        mover.send(upr.AddStream(opaque=1))
        (request,) = [each for each in mover.until(dcp.StreamRequest) if isinstance(each, dcp.StreamRequest)]
        mover.send(AnyResponse(opcode=request.code, opaque=request.opaque, status=Status.EINVAL))
        answer = mover.next()
        assert isinstance(answer, Response)
        assert (answer.code, answer.status) == (upr.AddStream.declaration.opcode, Status.EINVAL)


@pytest.mark.parametrize("dialect", ["", *PINNED])
@pytest.mark.parametrize("flags", [0, 1], ids=["consumer", "producer"])
def test_a_connection_is_in_the_statistics_of_its_listener(node: EmbeddedNode, dialect: str, flags: int) -> None:
    with StreamClient(node, b"seen", flags, port=port_of(node, dialect)) as client:
        groups = {group for group in PINNED if f"eq_{group}q:seen:type" in client.statistics(group.encode())}
        assert groups == {dialect or "dcp"}
