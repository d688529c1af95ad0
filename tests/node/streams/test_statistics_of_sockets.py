"""Statistics of streams over raw sockets: they add up with what the peer has received and acknowledged."""

from collections.abc import Iterator

import pytest

from tests.support.mover_socket import MoverSocket
from tests.support.stream_client import StreamClient
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.wire import Message, Response, dcp, upr


@pytest.fixture
def node() -> Iterator[EmbeddedNode]:
    with start(vbuckets=2, initial_vbuckets="0") as node:
        node.call(node.bucket.create_vbucket, 1, VbucketState.REPLICA)
        for number in range(20):
            node.call(node.bucket.vbucket(0).set, b"k%d" % number, b"v" * 100)
        yield node


def test_sent_bytes_are_acknowledged_or_not_yet(node: EmbeddedNode) -> None:
    with StreamClient(node, b"seen") as client, StreamClient(node) as observer:

        def told() -> tuple[int, ...]:
            pairs = observer.statistics(b"dcp")
            names = ("total_bytes_sent", "unacked_bytes", "total_acked_bytes", "num_streams")
            return tuple(int(pairs[f"eq_dcpq:seen:{name}"]) for name in names)

        for name, value in ((b"connection_buffer_size", b"500"), (b"send_stream_end_on_client_close_stream", b"true")):
            assert isinstance(client.ask(dcp.Control(key=name, value=value)), Response)
        client.send(dcp.StreamRequest(vbucket=0))
        received = 0
        while received < 500:
            message = client.next()
            assert message is not None
            received += counted(message)
        assert told() == (received, received, 0, 1)
        client.send(dcp.BufferAck(bytes_processed=300), dcp.Noop())
        later: list[Message] = list(client.until(Response))
        received += sum(map(counted, later))
        sent, unacked, acked, _ = told()
        assert (acked, unacked) == (300, sent - 300)
        client.send(upr.CloseStream(vbucket=0), dcp.Noop(opaque=1))
        rest = [*client.until(dcp.StreamEnd)]
        received += sum(map(counted, rest))
        assert told() == (received, received - 300, 300, 0)


def counted(message: Message) -> int:
    """The bytes of a message that count for flow control."""
    return 0 if isinstance(message, Response) else len(message.encode())


@pytest.mark.parametrize("dialect", ["dcp", "upr"])
def test_an_ended_stream_is_no_longer_shown(node: EmbeddedNode, dialect: str) -> None:
    with MoverSocket(node) as mover, StreamClient(node) as observer:
        mover.add_stream(1, speaks=dialect)
        prefix = f"eq_{dialect}q:move:"

        def told() -> set[str]:
            pairs = observer.statistics(dialect.encode())
            return {name.removeprefix(prefix) for name in pairs if name.startswith(f"{prefix}stream_")}

        assert "stream_1_state" in told()
        mover.tell(upr.StreamEnd(), vbucket=1)
        assert isinstance(mover.ask(dcp.Noop()), Response)
        assert told() == set()
        assert observer.statistics(dialect.encode())[f"{prefix}num_streams"] == "0"
