"""What a streaming connection writes in a turn, and when it asks for another turn."""

import socket

from tests.support.in_memory_node import InMemoryNode
from tests.support.piece_stream import PieceStream
from upriver.node.streams.streaming_session import StreamingSession
from upriver.node.streams.turn_writer import UNSENT_BYTES, prepare_for_streams, write_turn
from upriver.protocol.producer.send_buffer import COPIED_BYTES
from upriver.protocol.producer.stream_scheduler import PIECE_BYTES
from upriver.wire import dcp


class Wire:
    """A transport that takes everything, or keeps what it was given."""

    def __init__(self, stream: StreamingSession) -> None:
        self.stream = stream
        self.written: list[bytes | memoryview] = []
        self.high: int | None = None
        self.stuck = False
        self.socket: socket.socket | None = None

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        self.high = high

    def get_extra_info(self, name: str) -> object:
        return self.socket if name == "socket" else None

    def write(self, data: bytes | memoryview) -> None:
        self.written.append(data)
        self.stream.blocked = self.stuck


def turn(wire: Wire) -> int:
    """Write one turn, as a connection does whose transport is not blocked."""
    stream = wire.stream
    return write_turn(wire, stream.session.data_to_send(), stream, stream.node.send_buffer)


def test_pieces_until_the_turn_is_over_and_no_more_than_the_transport_takes() -> None:
    class Long(PieceStream):
        turn_bytes = len(b"onetwothree") + PIECE_BYTES // 2 - 1

    node = InMemoryNode()
    stream = Long(node)
    wire = Wire(stream)
    stream.pieces = [b"one", b"two", b"three", b"four"]
    assert turn(wire) == len(b"onetwothree")
    assert wire.written == [b"one", b"two", b"three"]
    node.settle()
    assert stream.runs == 1
    wire.stuck = True
    stream.pieces = [b"four", b"five"]
    assert turn(wire) == len(b"four")
    assert stream.pieces == [b"five"]
    node.settle()
    assert stream.runs == 1  # the transport says when it is empty


def test_one_piece_in_a_turn_and_answers_before_it() -> None:
    node = InMemoryNode()
    stream = PieceStream(node)
    wire = Wire(stream)
    stream.pieces = [b"one", b"two"]
    stream.session.put(b"answer ")
    assert turn(wire) == len(b"answer one")
    assert wire.written == [b"answer one"]
    node.settle()
    assert stream.runs == 1  # there was more, so it asked for another turn


def test_the_system_keeps_little_of_what_it_cannot_send() -> None:
    wire = Wire(PieceStream(InMemoryNode()))
    with socket.socket() as wire.socket:
        prepare_for_streams(wire)
        assert wire.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES
    with socket.socket(socket.AF_UNIX) as other:  # has no such option
        wire = Wire(PieceStream(InMemoryNode()))
        wire.socket = other
        prepare_for_streams(wire)
        assert wire.high == 0


def test_a_blocked_transport_gets_no_second_piece() -> None:
    node = InMemoryNode()
    stream = PieceStream(node)
    wire = Wire(stream)
    wire.stuck = True
    stream.pieces = [b"one", b"two"]
    turn(wire)
    node.settle()
    assert (stream.pieces, stream.runs) == ([b"two"], 0)


def test_what_a_transport_keeps_is_not_overwritten_by_what_others_send() -> None:
    node = InMemoryNode(vbuckets=1)
    node.bucket.create_vbuckets()
    node.write(0, b"first", b"second", value=bytes(COPIED_BYTES))
    wires: list[Wire] = []
    for peer in [node.connect().open(name) for name in (b"slow", b"quick")]:
        peer.put(dcp.StreamRequest(vbucket=0, opaque=len(wires) + 1))
        peer.session.data_to_send()  # the answer would go out in one piece with the changes, which is a copy
        assert isinstance(peer.session.stream, StreamingSession)
        wires.append(Wire(peer.session.stream))
    slow, quick = wires
    slow.stuck = True
    turn(slow)
    kept = b"".join(slow.written)
    assert b"second" in kept
    assert isinstance(memoryview(slow.written[0]).obj, bytearray), "what is large is not copied"
    turn(quick)
    assert b"second" in b"".join(quick.written)
    assert b"".join(slow.written) == kept
