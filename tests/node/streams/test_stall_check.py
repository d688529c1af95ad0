"""Streams that do not move, and what says so."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.in_memory_node import Laboratory, Peer
from tests.support.tap_peer import ACK, BACKFILL, TapPeer, connect
from upriver.model.position import NO_END
from upriver.node.http.metrics import problems
from upriver.node.streams.service import StreamConnection
from upriver.node.streams.statistics import stream_numbers
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.wire import dcp, tap


@pytest.fixture
def laboratory() -> Iterator[Laboratory]:
    opened = Laboratory()
    with opened.bucket:
        opened.bucket.create_vbucket(0)
        opened.bucket.create_vbucket(1)
        yield opened


def streaming(laboratory: Laboratory, *controls: dcp.Control, vbuckets: int = 1) -> Peer:
    peer = laboratory.connect().open()
    uuids = [laboratory.bucket.vbucket(number).failover_log.newest.vbucket_uuid for number in range(vbuckets)]
    peer.send(*controls)
    for number, uuid in enumerate(uuids):
        peer.send(dcp.StreamRequest(vbucket=number, end_seqno=NO_END, vbucket_uuid=uuid, opaque=number))
    return peer


def stopped(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell takes nothing more of the connection's streams."""
    stream: Any = peer.session.stream
    monkeypatch.setattr(stream, "produce", lambda: b"")


def watched(laboratory: Laboratory, seconds: int) -> list[str]:
    for _ in range(seconds):
        laboratory.pass_by(1.0)
        laboratory.node.stream_watch.look(laboratory.node, laboratory.clock())
    return problems(laboratory.node)


def test_streams_that_move_or_have_nothing_to_send_are_healthy(laboratory: Laboratory) -> None:
    streaming(laboratory)
    assert watched(laboratory, 30) == []
    for number in range(30):
        laboratory.write(0, b"%d" % number)
        assert watched(laboratory, 1) == []


def test_a_stream_that_stands_still_is_a_problem(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = streaming(laboratory, vbuckets=2)
    stopped(peer, monkeypatch)
    laboratory.write(0, b"a")
    assert watched(laboratory, 11) == []
    (why,) = watched(laboratory, 1)
    assert why == "1 streams of 'peer' stall, that of vbucket 0 for 11.0 s: they have changes to send"
    laboratory.write(1, b"a")
    (why,) = watched(laboratory, 12)
    assert why.startswith("2 streams of 'peer' stall, that of vbucket 0 for 23.0 s")
    monkeypatch.undo()
    assert peer.session.stream is not None
    peer.session.stream.wake()
    laboratory.settle()
    assert watched(laboratory, 1) == []


def test_who_stopped_reading_is_named(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = streaming(laboratory)
    stopped(peer, monkeypatch)
    assert peer.session.stream is not None
    peer.session.stream.blocked = True
    laboratory.write(0, b"a")
    (why,) = watched(laboratory, 15)
    assert why.endswith("its consumer stopped reading")
    peer.session.stream.lose()
    assert problems(laboratory.node) == []
    assert watched(laboratory, 1) == []


def test_who_waits_for_his_window_is_healthy(laboratory: Laboratory) -> None:
    streaming(laboratory, dcp.Control(key=b"connection_buffer_size", value=b"100"))
    laboratory.write(0, *[b"%d" % number for number in range(1000)], value=b"v" * 1000)
    assert watched(laboratory, 30) == []
    assert stream_numbers(laboratory.node).backlog > 900


def test_the_numbers_of_all_streams(laboratory: Laboratory) -> None:
    peer = streaming(laboratory, vbuckets=2)
    other = laboratory.connect().open(b"other", dcp.OpenFlag.PRODUCER)
    laboratory.write(0, b"a", b"b")
    laboratory.settle()
    numbers = stream_numbers(laboratory.node)
    assert (numbers.connections["producer"], numbers.streams, numbers.changes_sent) == (2, 2, 2)
    assert numbers.backlog == 0
    assert numbers.bytes_sent > 100
    for each in (peer, other):
        assert each.session.stream is not None
        each.session.stream.lose()
    after = stream_numbers(laboratory.node)
    assert (after.connections.total(), after.streams) == (0, 0)
    assert (after.bytes_sent, after.changes_sent) == (numbers.bytes_sent, 2)


# TAP


def test_a_tap_client_that_gets_its_changes_is_healthy(laboratory: Laboratory) -> None:
    client = TapPeer(laboratory, connect(b"client", BACKFILL))
    for number in range(30):
        laboratory.write(0, b"%d" % number)
        client.run()
        assert watched(laboratory, 1) == []


def test_a_tap_stream_that_stands_still_is_a_problem(laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    client = TapPeer(laboratory, connect(b"client", BACKFILL))
    client.run()
    stopped(client.peer, monkeypatch)
    laboratory.write(1, b"a")
    (why,) = watched(laboratory, 12)
    assert why == "1 streams of 'tap:client' stall, that of vbucket 1 for 11.0 s: they have changes to send"
    assert client.peer.session.stream is not None
    client.peer.session.stream.blocked = True
    (why,) = problems(laboratory.node)
    assert why.endswith("its consumer stopped reading")
    client.peer.session.stream.lose()
    assert problems(laboratory.node) == []


def test_a_tap_client_that_does_not_acknowledge_is_healthy() -> None:
    laboratory = Laboratory(tap_settings=TapSettings(window_messages_max=10))
    with laboratory.bucket:
        laboratory.bucket.create_vbucket(0)
        client = TapPeer(laboratory, connect(b"client", BACKFILL | ACK))
        client.judge = lambda _: None
        laboratory.write(0, *[b"%d" % number for number in range(100)])
        client.run()
        assert watched(laboratory, 30) == []
        assert stream_numbers(laboratory.node).backlog > 80


def test_the_numbers_of_tap(laboratory: Laboratory) -> None:
    client = TapPeer(laboratory, connect(b"client", BACKFILL))
    laboratory.write(0, b"a", b"b")
    client.run()
    sender = laboratory.connect()
    sender.send(tap.Mutation(vbucket=1, key=b"k", value=b"v"))
    numbers = stream_numbers(laboratory.node)
    assert (numbers.connections["tap_producer"], numbers.connections["tap_consumer"]) == (1, 1)
    client.run()
    numbers = stream_numbers(laboratory.node)
    assert (numbers.streams, numbers.backlog, numbers.changes_sent) == (2, 0, 3)
    assert numbers.bytes_sent > 100
    for peer in (client.peer, sender):
        assert peer.session.stream is not None
        peer.session.stream.lose()
    after = stream_numbers(laboratory.node)
    assert (after.connections.total(), after.streams) == (0, 0)
    assert (after.bytes_sent, after.changes_sent) == (numbers.bytes_sent, 3)


def test_of_many_streams_some_are_looked_at_each_time_and_none_is_left_out(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.node.streams.stall_check.STREAMS_PER_LOOK", 2)
    for number in range(5):
        peer = laboratory.connect().open(b"peer %d" % number)
        peer.send(*(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket) for vbucket in range(2)))
        stopped(peer, monkeypatch)
    looked: list[str] = []
    behind = StreamConnection.behind

    def recording(self: StreamConnection) -> Any:
        looked.append(self.name)
        return behind(self)

    monkeypatch.setattr(StreamConnection, "behind", recording)
    laboratory.write(0, b"a")
    assert watched(laboratory, 5) == []
    assert looked == [f"peer {number}" for number in range(5)]
    assert len(watched(laboratory, 15)) == 5
