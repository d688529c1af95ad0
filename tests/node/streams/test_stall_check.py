"""Streams that do not move, and what says so."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.in_memory_node import InMemoryNode, Peer
from tests.support.tap_peer import ACK, BACKFILL, TapPeer, connect
from upriver.model.position import NO_END
from upriver.node.http.metrics import problems
from upriver.node.streams.statistics import stream_numbers
from upriver.node.streams.stream_connection import StreamConnection
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.wire import dcp, tap


@pytest.fixture
def node() -> Iterator[InMemoryNode]:
    opened = InMemoryNode()
    with opened.bucket:
        opened.bucket.create_vbucket(0)
        opened.bucket.create_vbucket(1)
        yield opened


def streaming(node: InMemoryNode, *controls: dcp.Control, vbuckets: int = 1) -> Peer:
    peer = node.connect().open()
    uuids = [node.bucket.vbucket(number).failover_log.newest.vbucket_uuid for number in range(vbuckets)]
    peer.send(*controls)
    for number, uuid in enumerate(uuids):
        peer.send(dcp.StreamRequest(vbucket=number, end_seqno=NO_END, vbucket_uuid=uuid, opaque=number))
    return peer


def stopped(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell takes nothing more of the connection's streams."""
    stream: Any = peer.session.stream
    monkeypatch.setattr(stream, "produce", lambda: b"")


def watched(node: InMemoryNode, seconds: int) -> list[str]:
    for _ in range(seconds):
        node.pass_by(1.0)
        node.state.stall_check.look(node.state, node.clock())
    return problems(node.state)


def test_streams_that_move_or_have_nothing_to_send_are_healthy(node: InMemoryNode) -> None:
    streaming(node)
    assert watched(node, 30) == []
    for number in range(30):
        node.write(0, b"%d" % number)
        assert watched(node, 1) == []


def test_a_stream_that_stands_still_is_a_problem(node: InMemoryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = streaming(node, vbuckets=2)
    stopped(peer, monkeypatch)
    node.write(0, b"a")
    assert watched(node, 11) == []
    (why,) = watched(node, 1)
    assert why == "1 streams of 'peer' stall, that of vbucket 0 for 11.0 s: they have changes to send"
    node.write(1, b"a")
    (why,) = watched(node, 12)
    assert why.startswith("2 streams of 'peer' stall, that of vbucket 0 for 23.0 s")
    monkeypatch.undo()
    assert peer.session.stream is not None
    peer.session.stream.wake()
    node.settle()
    assert watched(node, 1) == []


def test_a_peer_that_stopped_reading_is_named(node: InMemoryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = streaming(node)
    stopped(peer, monkeypatch)
    assert peer.session.stream is not None
    peer.session.stream.blocked = True
    node.write(0, b"a")
    (why,) = watched(node, 15)
    assert why.endswith("its consumer stopped reading")
    peer.session.stream.lose()
    assert problems(node.state) == []
    assert watched(node, 1) == []


def test_a_stream_that_waits_for_its_window_is_healthy(node: InMemoryNode) -> None:
    streaming(node, dcp.Control(key=b"connection_buffer_size", value=b"100"))
    node.write(0, *[b"%d" % number for number in range(1000)], value=b"v" * 1000)
    assert watched(node, 30) == []
    assert stream_numbers(node.state).backlog > 900


def test_the_numbers_of_all_streams(node: InMemoryNode) -> None:
    peer = streaming(node, vbuckets=2)
    other = node.connect().open(b"other", dcp.OpenFlag.PRODUCER)
    node.write(0, b"a", b"b")
    node.settle()
    numbers = stream_numbers(node.state)
    assert (numbers.connections["producer"], numbers.streams, numbers.changes_sent) == (2, 2, 2)
    assert numbers.backlog == 0
    assert numbers.bytes_sent > 100
    for each in (peer, other):
        assert each.session.stream is not None
        each.session.stream.lose()
    after = stream_numbers(node.state)
    assert (after.connections.total(), after.streams) == (0, 0)
    assert (after.bytes_sent, after.changes_sent) == (numbers.bytes_sent, 2)


# TAP


def test_a_tap_client_that_gets_its_changes_is_healthy(node: InMemoryNode) -> None:
    client = TapPeer(node, connect(b"client", BACKFILL))
    for number in range(30):
        node.write(0, b"%d" % number)
        client.run()
        assert watched(node, 1) == []


def test_a_tap_stream_that_stands_still_is_a_problem(node: InMemoryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    client = TapPeer(node, connect(b"client", BACKFILL))
    client.run()
    stopped(client.peer, monkeypatch)
    node.write(1, b"a")
    (why,) = watched(node, 12)
    assert why == "1 streams of 'tap:client' stall, that of vbucket 1 for 11.0 s: they have changes to send"
    assert client.peer.session.stream is not None
    client.peer.session.stream.blocked = True
    (why,) = problems(node.state)
    assert why.endswith("its consumer stopped reading")
    client.peer.session.stream.lose()
    assert problems(node.state) == []


def test_a_tap_client_that_does_not_acknowledge_is_healthy() -> None:
    node = InMemoryNode(tap_settings=TapSettings(window_messages_max=10))
    with node.bucket:
        node.bucket.create_vbucket(0)
        client = TapPeer(node, connect(b"client", BACKFILL | ACK))
        client.judge = lambda _: None
        node.write(0, *[b"%d" % number for number in range(100)])
        client.run()
        assert watched(node, 30) == []
        assert stream_numbers(node.state).backlog > 80


def test_the_numbers_of_tap(node: InMemoryNode) -> None:
    client = TapPeer(node, connect(b"client", BACKFILL))
    node.write(0, b"a", b"b")
    client.run()
    sender = node.connect()
    sender.send(tap.Mutation(vbucket=1, key=b"k", value=b"v"))
    numbers = stream_numbers(node.state)
    assert (numbers.connections["tap_producer"], numbers.connections["tap_consumer"]) == (1, 1)
    client.run()
    numbers = stream_numbers(node.state)
    assert (numbers.streams, numbers.backlog, numbers.changes_sent) == (2, 0, 3)
    assert numbers.bytes_sent > 100
    for peer in (client.peer, sender):
        assert peer.session.stream is not None
        peer.session.stream.lose()
    after = stream_numbers(node.state)
    assert (after.connections.total(), after.streams) == (0, 0)
    assert (after.bytes_sent, after.changes_sent) == (numbers.bytes_sent, 3)


def test_of_many_streams_some_are_looked_at_each_time_and_none_is_left_out(
    node: InMemoryNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.node.streams.stall_check.STREAMS_PER_LOOK", 2)
    for number in range(5):
        peer = node.connect().open(b"peer %d" % number)
        peer.send(*(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket) for vbucket in range(2)))
        stopped(peer, monkeypatch)
    looked: list[str] = []
    behind = StreamConnection.behind

    def recording(self: StreamConnection) -> Any:
        looked.append(self.name)
        return behind(self)

    monkeypatch.setattr(StreamConnection, "behind", recording)
    node.write(0, b"a")
    assert watched(node, 5) == []
    assert looked == [f"peer {number}" for number in range(5)]
    assert len(watched(node, 15)) == 5
