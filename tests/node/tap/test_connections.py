"""The two kinds of TAP connections: which messages they take, and when they send."""

import pytest

from tests.support.in_memory_node import InMemoryNode, Peer
from tests.support.tap_peer import ACK, BACKFILL, LIST, REGISTERED, TapPeer, connect
from upriver.node.tap.connections import TapConnection
from upriver.wire import AnyResponse, tap
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
