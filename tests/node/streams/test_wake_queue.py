"""Streams that requests wake are returned to the connection; all others send in the next turn."""

import pytest

from tests.support.in_memory_node import InMemoryNode
from tests.support.piece_stream import PieceStream
from upriver.wire import Buffer
from upriver.wire.dialects.memcached import Noop, Set


def streaming(node: InMemoryNode) -> PieceStream:
    """A stream that the next change of vbucket 0 wakes."""
    stream = PieceStream(node)
    node.bucket.vbucket(0).when_changed(stream.wake, owner=stream)
    return stream


def test_a_session_returns_its_answers_and_the_streams_that_its_requests_woke() -> None:
    node = InMemoryNode(vbuckets=1)
    node.bucket.create_vbuckets()
    first, second = streaming(node), streaming(node)
    session = node.connect().session
    request = Set(key=b"k", value=b"v").encode()
    _, woken = session.serve(request, len(request))
    assert woken == [first, second]
    assert session.data_to_send()
    node.settle()
    assert (first.runs, second.runs) == (0, 0), "the caller decides when they send"
    for stream in woken:
        stream.flush()
    assert (first.runs, second.runs) == (1, 1)
    noop = Noop().encode()
    assert session.serve(noop, len(noop))[1] == []


def test_a_stream_woken_between_turns_sends_in_the_next_turn() -> None:
    node = InMemoryNode(vbuckets=1)
    node.bucket.create_vbuckets()
    stream = streaming(node)
    node.write(0, b"k")
    assert stream.runs == 0
    node.settle()
    assert stream.runs == 1


def test_streams_woken_by_a_turn_that_fails_send_in_the_next_turn() -> None:
    node = InMemoryNode()
    stream = PieceStream(node)

    def fail(data: Buffer, size: int) -> None:
        stream.wake()
        raise ZeroDivisionError

    queue = node.state.wake_queue
    with pytest.raises(ZeroDivisionError):
        queue.collect(fail, b"", 0)
    assert stream.runs == 0
    node.settle()
    assert stream.runs == 1
    stream.wake()
    node.settle()
    assert stream.runs == 2, "the queue no longer collects"
