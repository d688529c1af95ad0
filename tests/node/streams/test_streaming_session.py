"""When a streaming session sends, and its deadlines."""

import pytest

from tests.support.in_memory_node import InMemoryNode
from tests.support.piece_stream import PieceStream


def test_the_earliest_deadline_counts() -> None:
    node = InMemoryNode()
    stream = PieceStream(node)
    now = node.clock()
    stream.call_at(None)
    stream.call_at(now + 20)
    stream.call_at(now + 10)
    stream.call_at(now + 30)
    node.pass_by(15)
    assert stream.times == [now + 10]


def test_after_the_end_nothing_happens() -> None:
    node = InMemoryNode()
    stream = PieceStream(node)
    stream.call_at(node.clock() + 1)
    stream.wake()
    stream.lose()
    stream.wake()
    node.pass_by(2)
    assert (stream.runs, stream.times) == (0, [])


def test_a_stream_that_fails_ends_its_own_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    node = InMemoryNode()
    stream = PieceStream(node)
    seen = []

    def send() -> None:
        seen.append(stream.session.closing)
        if not stream.session.closing:
            stream.produce()

    def fail() -> bytes:
        raise ZeroDivisionError

    stream.produce, stream.session.on_output = fail, send  # type: ignore[method-assign]
    stream.flush()
    assert seen == [False, True]
    assert "could not be made" in caplog.text
