"""Sessions that were opened for streams: the rules of opening, and real sockets end to end."""

import contextlib
import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_memory_node import InMemoryNode, node_with_peer
from tests.support.node_process import wait_until
from tests.support.stream_client import StreamClient
from tests.support.stream_requests import ask, brief
from upriver.errors import OutOfMemory, TemporaryFailure
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.node.auth.users import Role, User
from upriver.node.streams.streaming_session import StreamingSession
from upriver.wire import AnyRequest, AnyResponse, Message, Request, Response, dcp, memcached, tap, upr
from upriver.wire.codes import Status

# Opening, without a socket


def open_request(name: bytes = b"x", flags: int = 1) -> dcp.Open:
    return dcp.Open(name=name, flags=dcp.OpenFlag(flags), opaque=4)


def test_an_open_is_answered() -> None:
    node = InMemoryNode()
    (answer,) = node.connect().send(open_request())
    assert isinstance(answer, AnyResponse)
    assert (answer.opcode, answer.status, answer.opaque, answer.value) == (0x50, Status.SUCCESS, 4, b"")
    assert [connection.name for connection in node.service] == ["x"]


@pytest.mark.parametrize(("flags", "kind"), [(0, "consumer"), (1, "producer"), (2, "notifier"), (3, "notifier")])
def test_what_a_connection_is_for(flags: int, kind: str) -> None:
    node = InMemoryNode()
    node.connect().open(flags=flags)
    assert [connection.type for connection in node.service] == [kind]


def test_an_empty_name_is_refused_and_the_connection_stays() -> None:
    peer = InMemoryNode().connect()
    (answer,) = peer.send(open_request(b""))
    assert isinstance(answer, AnyResponse)
    assert answer.status is Status.EINVAL
    assert answer.text
    assert brief(peer.send(open_request(b"y"))) == ["success"]


def test_extras_of_another_length_are_refused() -> None:
    peer = InMemoryNode().connect()
    assert brief(peer.send(AnyRequest(opcode=0x50, extras=b"\0\0\0\1", key=b"x"))) == ["einval"]
    assert not peer.closed


def test_a_name_that_is_opened_again_closes_the_old_connection() -> None:
    node, old = node_with_peer(b"a", name=b"same")
    ask(old)
    new = node.connect().open(b"same")
    assert old.closed
    assert not new.closed
    assert not node.bucket.vbucket(0).cursors
    assert brief(ask(new)) == ["success", "(0,1]", "a@1"]
    stream = old.session.stream
    assert stream is not None
    stream.lose()  # the old one's end must not take the name from the new one
    assert len(list(node.service)) == 1


@pytest.mark.parametrize(
    "message",
    [
        dcp.StreamRequest(),
        upr.StreamRequest(),
        upr.FailoverLogRequest(),
        upr.CloseStream(),
        upr.AddStream(),
        dcp.Noop(),
        dcp.BufferAck(bytes_processed=1),
        dcp.Control(key=b"enable_noop", value=b"true"),
        dcp.Mutation(by_seqno=1, key=b"k"),
        AnyRequest(opcode=0x53, extras=b"\0"),
    ],
    ids=lambda message: str(message.title()),
)
def test_a_stream_operation_before_an_open_closes_the_connection(message: Message) -> None:
    peer = InMemoryNode().connect()
    assert peer.send(message) == []
    assert peer.closed


@pytest.mark.parametrize(
    "message", [dcp.StreamRequest(), upr.FailoverLogRequest(), dcp.Control(key=b"enable_noop", value=b"true")]
)
def test_a_consumer_is_asked_for_nothing(message: Message) -> None:
    peer = InMemoryNode().connect().open(flags=0)
    assert peer.send(message) == []
    assert peer.closed


def test_other_requests_stay_with_the_sessions_commands() -> None:
    _, peer = node_with_peer(b"a")
    ask(peer)
    (answer,) = peer.send(memcached.Get(key=b"a"))
    assert isinstance(answer, memcached.GetResponse)
    assert answer.value == b"v"
    assert brief(peer.send(AnyRequest(opcode=0xEE))) == ["unknown_command"]


def test_a_request_that_cannot_be_read_is_answered() -> None:
    _, peer = node_with_peer(b"a")
    assert brief(peer.send(AnyRequest(opcode=0x53, extras=bytes(20)))) == ["einval"]
    assert brief(peer.send(AnyRequest(opcode=0x53, extras=bytes(48), key=b"group"))) == ["einval"]
    assert not peer.closed


@pytest.mark.shows("open_issues:security")
def test_streams_need_their_role() -> None:
    node = InMemoryNode()
    node.state.users = object()  # type: ignore[assignment]
    peer = node.connect()
    assert brief(peer.send(open_request())) == ["auth_error"]
    user: Any = User.__new__(User)
    object.__setattr__(user, "name", "reader")
    object.__setattr__(user, "roles", Role(0))
    peer.session.user = user
    assert brief(peer.send(open_request())) == ["eaccess"]
    assert not peer.closed


def test_a_node_that_stops_ends_its_streams() -> None:
    with start(vbuckets=2) as node, StreamClient(node, b"x") as modern, StreamClient(node, b"y") as old:
        modern.send(*(dcp.StreamRequest(vbucket=vbucket, opaque=7 + vbucket) for vbucket in (0, 1)))
        old.send(upr.StreamRequest(end_seqno=2**64 - 1))
        node.call(node.bucket.vbucket(0).set, b"k", b"v")
        for peer in (modern, old):
            assert list(peer.until(dcp.Mutation, upr.Mutation))
        node.close()
        ends = [message for message in modern.until() if not isinstance(message, Response)]
        assert ends == [
            dcp.StreamEnd(vbucket=vbucket, opaque=7 + vbucket, reason=dcp.EndReason.DISCONNECTED) for vbucket in (0, 1)
        ]
        assert not list(old.until()), "the texts have no word for it: it sees the connection closed"


def visit(node: EmbeddedNode, kind: str, key: bytes) -> "weakref.ref[object]":
    """Ask for both vbuckets, wait for a change of one of them, and leave; what the node had of us."""
    asked: list[Message] = [dcp.StreamRequest(vbucket=vbucket) for vbucket in (0, 1)]
    if kind == "tap":
        asked = [tap.Connect(name=b"same", flags=tap.ConnectFlag.BACKFILL, backfill_date=0)]
    with StreamClient(node, wire=tap.tap) if kind == "tap" else StreamClient(node, b"same") as peer:
        if kind == "persisted":
            peer.send(dcp.Control(key=b"persisted_only", value=b"true"))
        peer.send(*asked)
        node.call(node.bucket.vbucket(0).set, key, b"")
        assert list(peer.until(tap.Mutation, dcp.Mutation))
        return node.call(lambda: weakref.ref(next(s for s in streaming(node) if not s.lost)))


def streaming(node: EmbeddedNode) -> list[StreamingSession]:
    sessions = [connection.session for connection in node.node.state.connections]
    return [
        session.stream for session in sessions if session is not None and isinstance(session.stream, StreamingSession)
    ]


@pytest.mark.parametrize("kind", ["dcp", "persisted", "tap"])
def test_nothing_of_a_connection_stays_without_writes(kind: str) -> None:
    with start(vbuckets=2) as node:
        visits = [visit(node, kind, b"%d" % number) for number in range(3)]

        def gone() -> bool:
            gc.collect()
            return all(each() is None for each in visits)

        wait_until(lambda: node.call(gone), "what streamed is let go")


# Real sockets


@pytest.fixture
def node() -> Iterator[EmbeddedNode]:
    with start(vbuckets=16) as started:
        yield started


def write(node: EmbeddedNode, *keys: bytes, vbucket: int = 0, value: bytes = b"v") -> int:
    """Set keys in the node's thread, as fast as its disk follows; the high seqno after it."""
    left = deque(keys)

    def run() -> int:
        target = node.bucket.vbucket(vbucket)
        with contextlib.suppress(TemporaryFailure):  # the queue to disk is full
            while left:
                target.set(left[0], value)
                left.popleft()
        return target.high_seqno

    deadline = time.monotonic() + 60
    while high := node.call(run):
        if not left:
            break
        assert time.monotonic() < deadline, "the disk does not follow"
    return int(high)


@pytest.mark.parametrize("request_type", [dcp.StreamRequest, upr.StreamRequest])
def test_backfill_and_live_changes(node: EmbeddedNode, request_type: type[Message]) -> None:
    high = write(node, *(b"key-%d" % number for number in range(5000)))
    with StreamClient(node, b"reader") as client:
        client.send(request_type())
        assert brief([m for m in (client.next(), client.next()) if m is not None])[0] == "success"
        assert len(client.changes(high)) == 5000
        write(node, b"live")
        assert client.changes(high + 1) == {b"live": b"v"}


def test_reconnect_and_resume(node: EmbeddedNode) -> None:
    high = write(node, *(b"key-%d" % number for number in range(100)))
    uuid = node.call(lambda: node.bucket.vbucket(0).failover_log.newest.vbucket_uuid)
    with StreamClient(node, b"reader") as client:
        client.send(dcp.StreamRequest())
        first = client.changes(40)
    write(node, b"later")
    with StreamClient(node, b"reader") as client:
        answer = client.ask(
            dcp.StreamRequest(start_seqno=40, vbucket_uuid=uuid, snapshot_start=0, snapshot_end=high, opaque=2)
        )
        assert brief([answer]) == ["success"]
        second = client.changes(high + 1)
    assert len(first) == 40
    assert len(second) == 61
    assert len(first | second) == 101


@pytest.mark.shows("open_issues:restart")
def test_resuming_after_the_node_was_restarted(tmp_path: Path) -> None:
    with start(vbuckets=16, data=str(tmp_path)) as node:
        high = write(node, *(b"key-%d" % number for number in range(100)))
        uuid = node.call(lambda: node.bucket.vbucket(0).failover_log.newest.vbucket_uuid)
    with start(vbuckets=16, data=str(tmp_path)) as node, StreamClient(node, b"reader") as client:
        write(node, b"later")
        request = dcp.StreamRequest(start_seqno=high, vbucket_uuid=uuid, snapshot_start=high, snapshot_end=high)
        assert brief([client.ask(request)]) == ["success"]
        assert client.changes(high + 1) == {b"later": b"v"}


def test_what_memory_does_not_hold_comes_from_disk(tmp_path: Path) -> None:
    with start(vbuckets=16, data=str(tmp_path), memory_quota="24MiB") as node:
        for number in range(40 * 64):
            for _ in range(1000):  # until something was evicted
                try:
                    write(node, b"%d" % number, value=b"v" * 16384)
                    break
                except (OutOfMemory, TemporaryFailure):  # memory, or the queue to disk, is full
                    node.bucket.sync()
                    node.call(node.bucket.maintain, 0.05)
        high = node.call(lambda: node.bucket.vbucket(0).high_seqno)
        with StreamClient(node, b"reader") as client:
            client.send(dcp.StreamRequest())
            client.next()
            marker = client.next()
            assert isinstance(marker, dcp.SnapshotMarker)
            assert marker.flags == dcp.MarkerFlag.DISK
            contents = client.changes(high)
            assert len(contents) == 40 * 64
            assert set(contents.values()) == {b"v" * 16384}


def test_a_rollback_after_a_promotion(node: EmbeddedNode) -> None:
    write(node, b"a", b"b", b"c")
    uuid = node.call(lambda: node.bucket.vbucket(0).failover_log.newest.vbucket_uuid)

    def demote_and_promote() -> None:
        vbucket = node.bucket.vbucket(0)
        vbucket.set_state(VbucketState.REPLICA)
        vbucket.roll_back(2)
        vbucket.set_state(VbucketState.ACTIVE)

    node.call(demote_and_promote)
    with StreamClient(node, b"reader") as client:
        request = dcp.StreamRequest(start_seqno=3, vbucket_uuid=uuid, snapshot_start=3, snapshot_end=3)
        answer = client.ask(request)
        assert isinstance(answer, dcp.RollbackRequired)
        assert answer.seqno == 2


def test_a_state_change_under_load(node: EmbeddedNode) -> None:
    stop = threading.Event()

    def load() -> None:
        number = 0
        while not stop.is_set():
            write(node, *(b"%d" % key for key in range(number, number + 50)))
            number += 50

    writer = threading.Thread(target=load)
    with StreamClient(node, b"reader") as client:
        client.send(dcp.StreamRequest())
        writer.start()
        try:
            client.changes(500)
        finally:
            stop.set()
            writer.join()
        node.call(lambda: node.bucket.vbucket(0).set_state(VbucketState.REPLICA))
        *messages, end = client.until(dcp.StreamEnd)
        assert brief([end]) == ["end 2"]
        seqnos = [message.by_seqno for message in messages if isinstance(message, dcp.Mutation)]
        assert seqnos == sorted(set(seqnos))


def test_every_key_arrives_while_it_is_written(node: EmbeddedNode) -> None:
    keys = [b"key-%d" % number for number in range(20_000)]
    writer = threading.Thread(target=lambda: [write(node, *keys[at : at + 100]) for at in range(0, len(keys), 100)])
    with StreamClient(node, b"reader") as client:
        client.send(dcp.Control(key=b"connection_buffer_size", value=b"100000"), dcp.StreamRequest())
        writer.start()
        seen: set[bytes] = set()
        unacked = 0
        while len(seen) < len(keys):
            message = client.next()
            assert message is not None
            if isinstance(message, dcp.Mutation):
                seen.add(message.key)
            if isinstance(message, dcp.Mutation | dcp.SnapshotMarker):
                unacked += len(message.encode())
            if unacked > 20_000:
                client.send(dcp.BufferAck(bytes_processed=unacked))
                unacked = 0
        writer.join()
        numbers = client.statistics(b"dcp")
        assert int(numbers["eq_dcpq:reader:unacked_bytes"]) == unacked
        assert int(numbers["eq_dcpq:reader:items_sent"]) == len(keys)


def test_a_consumer_that_does_not_read_costs_bounded_memory(node: EmbeddedNode) -> None:
    for part in range(16):
        write(node, *(b"%d-%d" % (part, number) for number in range(256)), value=b"v" * 16384)
    with StreamClient(node, b"slow", receive_buffer_bytes=65536) as client:
        client.send(dcp.StreamRequest())

        def sent() -> tuple[bool, int]:
            service = node.node.state.streams
            assert service is not None
            (connection,) = service
            assert connection.producer is not None
            return connection.blocked, connection.producer.bytes_sent_total

        while not node.call(sent)[0]:
            pass
        assert node.call(sent)[1] < 24 * 2**20, "what kernel buffers take, and one piece"
        write(node, *(b"more-%d" % number for number in range(1000)), value=b"v" * 16384)
        assert node.call(sent)[1] < 24 * 2**20
        high = node.call(lambda: node.bucket.vbucket(0).high_seqno)
        assert len(client.changes(high)) == 16 * 256 + 1000, "and nothing is missing when it reads at last"


def test_many_streams_on_one_connection() -> None:
    with start(vbuckets=1024) as node, StreamClient(node, b"all") as client:
        for vbucket in range(1024):
            write(node, b"key", vbucket=vbucket)
        client.send(*(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket) for vbucket in range(1024)))
        seen: set[int] = set()
        while len(seen) < 1024:
            message = client.next()
            if isinstance(message, dcp.Mutation):
                assert message.opaque == message.vbucket
                seen.add(message.vbucket)


@pytest.mark.shows("open_issues:dead-connections")
def test_a_dead_consumer_is_noticed(node: EmbeddedNode) -> None:
    with StreamClient(node, b"dead") as client:
        client.send(dcp.Control(key=b"set_noop_interval", value=b"0.1"), dcp.Control(key=b"enable_noop", value=b"true"))
        assert [message.title() for message in iter(client.next, None)] == ["any response", "any response", "noop"]


def test_a_connection_that_is_taken_over_by_name_is_closed(node: EmbeddedNode) -> None:
    with StreamClient(node, b"same") as old, StreamClient(node, b"same"):
        assert old.next() is None


def test_a_takeover_over_a_socket(node: EmbeddedNode) -> None:
    write(node, b"a", b"b")
    with StreamClient(node, b"taker") as client:
        client.send(dcp.StreamRequest(flags=dcp.StreamFlag.TAKEOVER, opaque=5))
        seen: list[str] = []
        for message in iter(client.next, None):
            seen += brief([message])
            if isinstance(message, dcp.SnapshotMarker | upr.SetVbucketState):
                client.send(AnyResponse(opcode=message.code, opaque=5))
            if isinstance(message, dcp.StreamEnd):
                break
    assert seen == ["success", "(0,2]", "a@1", "b@2", "state pending", "state active", "end 0"]
    assert node.call(lambda: node.bucket.vbucket(0).state) is VbucketState.DEAD


# In the order of the requests


@pytest.mark.parametrize("pieces", [1, 7, 1 << 20])
def test_what_streams_answer_stays_behind_what_waits_for_the_disk(pieces: int) -> None:
    requests: list[Request] = [memcached.Set(key=b"a", opaque=1), open_request()]
    requests += [memcached.Set(key=b"b", opaque=5), dcp.Control(key=b"set_noop_interval", value=b"20", opaque=6)]
    requests += [memcached.Set(key=b"c", opaque=7), dcp.StreamRequest(opaque=8, flags=dcp.StreamFlag.TO_LATEST)]
    requests += [memcached.Set(key=b"d", opaque=9), upr.FailoverLogRequest(opaque=10), open_request(b"")]
    data = b"".join(request.encode() for request in requests)
    with start(vbuckets=1, ack="disk") as node, StreamClient(node) as client:
        for at in range(0, len(data), pieces):
            client.socket.sendall(data[at : at + pieces])
        answered = []
        while (message := client.next()) is not None:
            if isinstance(message, Response):
                answered.append(message.opaque)
    # The second open closes the connection, once everything before it is answered.
    assert answered == [1, 4, 5, 6, 7, 8, 9, 10]


def test_a_tap_client_that_is_refused_behind_a_write_that_waits_for_the_disk() -> None:
    connect = tap.Connect(name=b"t", flags=tap.ConnectFlag.LIST_VBUCKETS, vbuckets=(99,), opaque=2)
    with start(vbuckets=1, ack="disk") as node, StreamClient(node, wire=tap.tap) as client:
        client.send(memcached.Set(key=b"a", opaque=1), connect)
        answers = [client.next() for _ in range(2)]
    assert [message.opaque for message in answers if isinstance(message, Response)] == [1, 2]


def test_what_cannot_be_read_is_refused_in_its_turn() -> None:
    with start(vbuckets=1, ack="disk") as node, StreamClient(node, b"x") as client:
        client.send(memcached.Set(key=b"a", opaque=1), AnyRequest(opcode=0x5D, extras=b"\0", opaque=2))
        answers = [client.next() for _ in range(2)]
    assert [message.opaque for message in answers if isinstance(message, Response)] == [1, 2]
