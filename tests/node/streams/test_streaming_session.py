"""One piece at a time: what a pump writes, and when it looks again."""

import socket

import pytest

from tests.support.in_memory_node import InMemoryNode
from upriver.node.session import Session
from upriver.node.streams.streaming_session import UNSENT_BYTES, StreamingSession
from upriver.protocol.producer.send_buffer import COPIED_BYTES
from upriver.protocol.producer.stream_scheduler import PIECE_BYTES
from upriver.wire import Message, dcp


class Source(StreamingSession):
    """Sends the pieces that it was given."""

    def __init__(self, node: InMemoryNode) -> None:
        self.runs = 0
        super().__init__(node.state, Session(node.state, "peer", self.count))
        self.pieces: list[bytes] = []
        self.times: list[float] = []

    def count(self) -> None:
        self.runs += 1

    def receive(self, message: Message) -> bool:
        raise AssertionError(f"nobody sends {message}")

    def produce(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    @property
    def has_output(self) -> bool:
        return bool(self.pieces)

    def on_time(self, now: float) -> None:
        self.times.append(now)


class Wire:
    """A transport that takes everything, or keeps what it was given."""

    def __init__(self, pump: StreamingSession) -> None:
        self.pump = pump
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
        self.pump.blocked = self.stuck


def test_pieces_until_the_turn_is_over_and_no_more_than_the_transport_takes() -> None:
    class Long(Source):
        turn_bytes = len(b"onetwothree") + PIECE_BYTES // 2 - 1

    node = InMemoryNode()
    pump = Long(node)
    wire = Wire(pump)
    pump.pieces = [b"one", b"two", b"three", b"four"]
    assert pump.pump(wire) == len(b"onetwothree")
    assert wire.written == [b"one", b"two", b"three"]
    node.settle()
    assert pump.runs == 1
    wire.stuck = True
    pump.pieces = [b"four", b"five"]
    assert pump.pump(wire) == len(b"four")
    assert pump.pieces == [b"five"]
    node.settle()
    assert pump.runs == 1  # the transport says when it is empty


def test_one_piece_in_a_turn_and_answers_before_it() -> None:
    node = InMemoryNode()
    pump = Source(node)
    wire = Wire(pump)
    pump.pieces = [b"one", b"two"]
    pump.session.put(b"answer ")
    assert pump.pump(wire) == len(b"answer one")
    assert (wire.written, wire.high) == ([b"answer one"], 0)
    node.settle()
    assert pump.runs == 1  # there was more, so it asked for another turn


def test_the_system_keeps_little_of_what_it_cannot_send() -> None:
    pump = Source(InMemoryNode())
    wire = Wire(pump)
    with socket.socket() as wire.socket:
        pump.pump(wire)
        assert wire.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES
    with socket.socket(socket.AF_UNIX) as other:  # has no such thing
        wire = Wire(Source(InMemoryNode()))
        wire.socket = other
        wire.pump.pump(wire)
        assert wire.high == 0


def test_nothing_is_read_while_the_transport_keeps_something() -> None:
    node = InMemoryNode()
    pump = Source(node)
    wire = Wire(pump)
    wire.stuck = True
    pump.pieces = [b"one", b"two"]
    pump.pump(wire)
    assert pump.pump(wire) == 0
    node.settle()
    assert (pump.pieces, pump.runs) == ([b"two"], 0)
    pump.session.put(bytes(node.state.limits.unread_answer_bytes_max))
    assert pump.choked
    pump.blocked = False
    assert not pump.choked


def test_the_earliest_deadline_counts() -> None:
    node = InMemoryNode()
    pump = Source(node)
    now = node.clock()
    pump.call_at(None)
    pump.call_at(now + 20)
    pump.call_at(now + 10)
    pump.call_at(now + 30)
    node.pass_by(15)
    assert pump.times == [now + 10]


def test_after_the_end_nothing_happens() -> None:
    node = InMemoryNode()
    pump = Source(node)
    pump.call_at(node.clock() + 1)
    pump.wake()
    pump.lose()
    pump.wake()
    node.pass_by(2)
    assert (pump.runs, pump.times) == (0, [])


def test_a_stream_that_fails_ends_its_own_connection_and_nobody_elses(caplog: pytest.LogCaptureFixture) -> None:
    node = InMemoryNode()
    pump = Source(node)
    wire, seen = Wire(pump), []

    def send() -> None:
        seen.append(pump.session.closing)
        if not pump.session.closing:
            pump.pump(wire)

    def fail() -> bytes:
        raise ZeroDivisionError

    pump.produce, pump.session.on_output = fail, send  # type: ignore[method-assign]
    pump.run()
    assert seen == [False, True]
    assert "could not be made" in caplog.text


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
    slow.pump.pump(slow)
    kept = b"".join(slow.written)
    assert b"second" in kept
    assert isinstance(memoryview(slow.written[0]).obj, bytearray), "what is large is not copied"
    quick.pump.pump(quick)
    assert b"second" in b"".join(quick.written)
    assert b"".join(slow.written) == kept
