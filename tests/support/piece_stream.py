"""A stream whose output a test gives it."""

from tests.support.in_memory_node import InMemoryNode
from upriver.node.session import Session
from upriver.node.streams.streaming_session import StreamingSession
from upriver.wire import Message


class PieceStream(StreamingSession):
    """Sends the pieces that it was given."""

    def __init__(self, node: InMemoryNode) -> None:
        self.runs = 0
        super().__init__(node.state, Session(node.state, "peer", self.count))
        self.pieces: list[bytes] = []
        self.times: list[float] = []

    def count(self) -> None:
        self.runs += 1

    def receive(self, message: Message) -> bool:
        raise AssertionError(f"unexpected message {message}")

    def produce(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    @property
    def has_output(self) -> bool:
        return bool(self.pieces)

    def on_time(self, now: float) -> None:
        self.times.append(now)
