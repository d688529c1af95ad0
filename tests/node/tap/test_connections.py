"""The two kinds of TAP connections: which messages they take, and when they send."""

import contextlib
import socket
import time
from collections.abc import Callable

import pytest

from tests.support.in_memory_node import InMemoryNode, Peer
from tests.support.node_process import Client
from tests.support.tap_peer import ACK, BACKFILL, LIST, REGISTERED, TapPeer, connect
from upriver.node import start
from upriver.node.tap.connections import TapConnection
from upriver.wire import AnyResponse, tap
from upriver.wire.dialects.memcached import Noop
from upriver.wire.dialects.tap import Control


@pytest.fixture
def node() -> InMemoryNode:
    made = InMemoryNode()
    made.bucket.create_vbucket(1)
    return made


def client(node: InMemoryNode, flags: int = BACKFILL | ACK) -> TapPeer[Peer]:
    return TapPeer(node, connect(b"client", flags | LIST, 0, (1,)))


def test_a_client_has_nothing_to_say_but_answers(node: InMemoryNode) -> None:
    peer = client(node)
    peer.run()
    peer.peer.send(tap.Mutation(vbucket=1, key=b"k", rev_seqno=1, nru=0))
    assert peer.closed


def test_an_answer_on_a_connection_that_only_receives_closes_it(node: InMemoryNode) -> None:
    peer = node.connect()
    peer.send(tap.Opaque(control=Control.ENABLE_AUTO_NACK))
    peer.send(AnyResponse(opcode=0x41, opaque=1))
    assert peer.closed


def test_a_registered_client_gets_nothing_before_its_registration_is_on_disk(node: InMemoryNode) -> None:
    node.write(1, b"k")
    peer = client(node, BACKFILL | ACK | REGISTERED)
    stream = peer.peer.session.stream
    assert isinstance(stream, TapConnection)
    stream.held = True
    assert not stream.has_output
    assert stream.produce() == b""
    stream.release()
    assert stream.has_output
    assert stream.produce()


# Many clients at once


def test_clients_that_connect_and_leave_together_do_not_delay_others() -> None:
    waits: list[float] = []

    def probe(until: Callable[[], bool]) -> None:
        while not until():
            started = time.perf_counter()
            probing.ask(Noop())
            waits.append(time.perf_counter() - started)

    with start(vbuckets=1024) as made, Client(made.port) as probing, contextlib.ExitStack() as stack:
        service = made.call(lambda: made.node.state.tap)
        assert service is not None
        request = connect(b"", BACKFILL).encode()
        peers = [stack.enter_context(socket.create_connection((made.host, made.port))) for _ in range(25)]
        for peer in peers:
            peer.sendall(request)
        # Nothing reads from them: what they get fits into the buffers of their sockets.
        probe(lambda: [connection.producer.beginning for connection in service] == [False] * len(peers))
        for peer in peers:
            peer.close()
        probe(lambda: not list(service) and service.idle)
    waits.sort()
    assert len(waits) > 300  # without turns there are few between the long ones
    assert waits[len(waits) * 95 // 100] < 0.05
