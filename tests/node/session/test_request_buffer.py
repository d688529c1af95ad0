"""Bytes that wait to be answered count towards the budget of the node until they are answered or dropped."""

from tests.support.command_peers import ManualNode, open_manual_node
from upriver.node.session import Session
from upriver.node.session.request_buffer import RequestBuffer
from upriver.node.state import Limits
from upriver.wire import Status
from upriver.wire.dialects.memcached import Set


def test_bytes_are_taken_once(manual: ManualNode) -> None:
    session, buffer = Session(manual.node, "peer"), RequestBuffer()
    buffer.keep(session, b"abc")
    assert (bytes(buffer.data), buffer.since) == (b"abc", manual.node.ticks())
    assert buffer.take() == b"abc"
    assert buffer.take() == b""


def test_the_budget_counts_what_is_kept(manual: ManualNode) -> None:
    session, buffer = Session(manual.node, "peer"), RequestBuffer()
    buffer.keep(session, b"abc")
    buffer.keep(session, b"de")
    assert (manual.node.partial.total_bytes, buffer.is_held) == (5, True)
    buffer.take()
    buffer.hold(session)
    assert (manual.node.partial.total_bytes, buffer.is_held) == (0, False)
    buffer.keep(session, b"f")
    buffer.drop(session)
    assert (manual.node.partial.total_bytes, buffer.is_held, bytes(buffer.data)) == (0, False, b"")


def test_only_a_request_with_a_header_is_refused(manual: ManualNode) -> None:
    packet = Set(key=b"k", value=b"v" * 100, opaque=3).encode()
    for received, refusals in ((packet[:23], 0), (packet[:24], 1)):
        peer, buffer = manual.peer(), RequestBuffer()
        buffer.data += received
        buffer.refuse(peer.session)
        assert [(answer.status, answer.opaque) for answer in peer.receive()] == [(Status.ENOMEM, 3)] * refusals


def test_a_peer_is_refused_when_all_together_hold_too_much() -> None:
    manual = open_manual_node(limits=Limits(partial_bytes_max=1000))
    with manual.bucket:
        half = Set(key=b"k", value=b"v" * 2000).encode()[:600]
        first, second = manual.peer(), manual.peer()
        assert first.send(half) == []
        manual.time.pass_by(1)
        second.send(half)
        assert (first.session.closing, second.session.closing) == (True, False)
        assert manual.node.partial.total_bytes == 600
