"""A connection of the producer type: when it sends, how much, and when it stops to listen."""

from collections.abc import Callable

from tests.support.in_memory_node import Peer, node_with_peer
from tests.support.stream_requests import ask
from upriver.node.streams.turn_writer import write_turn
from upriver.protocol.producer.stream_scheduler import PIECE_BYTES
from upriver.wire import dcp, upr


def test_a_stream_wakes_its_session_once_for_many_changes() -> None:
    node, peer = node_with_peer(b"a")
    ask(peer)
    woken: list[int] = []
    peer.session.on_output = lambda: woken.append(1)
    node.write(0, b"b", b"c", b"d")
    while node.scheduler.step():
        pass
    assert len(woken) == 1


class Sink:
    """A transport that takes some bytes and then blocks."""

    def __init__(self, on_block: Callable[[], None]) -> None:
        self.written = 0
        self.on_block = on_block

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        assert high == 0

    def write(self, data: bytes | memoryview) -> None:
        self.written += len(data)
        self.on_block()


def turn(sink: Sink, peer: Peer) -> int:
    """Write one turn of a peer's streams."""
    session = peer.session
    assert session.stream is not None
    return write_turn(sink, session.data_to_send(), session.stream, session.node.send_buffer)


def test_a_transport_that_is_full_gets_one_piece_and_no_more() -> None:
    node, peer = node_with_peer()
    node.write(0, *(b"%d" % number for number in range(3000)), value=b"v" * 1000)
    peer.put(dcp.StreamRequest())
    stream = peer.session.stream
    assert stream is not None

    def block() -> None:
        stream.blocked = True

    sink = Sink(block)
    turn(sink, peer)
    first = sink.written
    assert 0 < first < 1.2 * PIECE_BYTES
    stream.blocked = False
    turn(sink, peer)
    assert 0 < sink.written - first < 1.2 * PIECE_BYTES


def test_a_higher_priority_has_a_larger_share() -> None:
    turns = {}
    for priority in (b"low", b"medium", b"high"):
        node, peer = node_with_peer()
        peer.send(dcp.Control(key=b"set_priority", value=priority))
        node.write(0, *(b"%d" % number for number in range(2000)), value=b"v" * 2000)
        peer.put(dcp.StreamRequest())
        turns[priority] = turn(Sink(lambda: None), peer)
    assert turns[b"low"] * 3 < turns[b"medium"] < turns[b"high"] / 1.5


def test_a_piece_that_filters_have_looked_at_is_a_turn() -> None:
    """They take far longer over it than it takes to be sent, and others wait for the end of the turn."""
    node, peer = node_with_peer()
    peer.send(dcp.Control(key=b"key_filter", value=b"."))
    node.write(0, *(b"%d" % number for number in range(20)), value=b"v" * PIECE_BYTES)
    peer.put(dcp.StreamRequest())
    assert PIECE_BYTES < turn(Sink(lambda: None), peer) < 1.2 * PIECE_BYTES


def test_requests_of_a_peer_that_does_not_read_answers_wait() -> None:
    node, peer = node_with_peer(b"a")
    stream = peer.session.stream
    assert stream is not None
    stream.blocked = True
    limit = node.state.limits.unread_answer_bytes_max
    peer.put(*[upr.FailoverLogRequest()] * (limit // 40 + 1000))
    while peer.session.unsent < limit:
        assert peer.session.stalled
        peer.session.resume()
    peer.session.resume()
    assert limit <= peer.session.unsent < limit + 100
