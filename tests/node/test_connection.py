"""The shell of a session over real sockets: limits, pauses and good-byes."""

import contextlib
import itertools
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.node_connections import connections, logged, name_of, only_connection
from tests.support.node_process import Client, gets, noops, opaques, served_meanwhile, wait_until
from tests.support.stream_client import StreamClient
from upriver.node import connection as connection_module
from upriver.node import server as server_module
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.connection import ServerConnection
from upriver.node.embedded import EmbeddedNode, start
from upriver.node.streams.stream_connection import StreamConnection
from upriver.wire import dcp
from upriver.wire.dialects.memcached import Get, Noop, Quit, QuitQ, SaslAuth, Set

MESSAGES = "upriver.node"


# Counting


def test_connections_are_counted_and_forgotten(upriver_node: EmbeddedNode) -> None:
    clients = [Client(upriver_node.port) for _ in range(5)]
    for client in clients:
        assert client.ask(Noop()).status == 0
    assert connections(upriver_node) == 5
    for client in clients:
        client.close()
    wait_until(lambda: connections(upriver_node) == 0)
    assert not upriver_node.call(lambda: set(upriver_node.node.state.connections))


@pytest.mark.upriver(connections_max=3)
def test_beyond_the_limit_connections_are_refused(upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture) -> None:
    clients = [Client(upriver_node.port) for _ in range(3)]
    for client in clients:
        client.ask(Noop())
    with Client(upriver_node.port) as refused:
        assert refused.is_closed()
        assert logged(caplog, "refused") == [f"{name_of(refused)}: refused: 3 connections are open"]
    clients.pop().close()
    wait_until(lambda: connections(upriver_node) == 2)
    with Client(upriver_node.port) as client:
        assert client.ask(Noop()).status == 0
    for client in clients:
        assert client.ask(Noop()).status == 0
        client.close()


# Pausing: nothing is lost, nothing is out of order, nothing piles up


@pytest.mark.upriver(unread_bytes_max=64 * 1024)
@pytest.mark.parametrize("pipeline", [gets, lambda key, count: noops(count)], ids=["gets", "noops"])
def test_a_reader_that_pauses_gets_every_answer_in_order(
    upriver_node: EmbeddedNode, pipeline: Callable[[bytes, int], bytes]
) -> None:
    count = 30_000
    with Client(upriver_node.port, receive_bytes=4096) as client:
        client.set(b"key", b"v" * 1000)
        sender = threading.Thread(target=client.socket.sendall, args=(pipeline(b"key", count),))
        sender.start()
        state = upriver_node.node.state
        wait_until(
            lambda: (
                upriver_node.call(lambda: any(c.session.paused for c in state.connections if c.session))
                or not sender.is_alive()
            ),
            "the node stops answering",
        )
        assert list(opaques(client, count)) == list(range(count))
        sender.join()
        assert client.ask(Noop(opaque=77)).opaque == 77


@pytest.mark.upriver(unread_bytes_max=64 * 1024)
def test_writes_and_reads_stay_in_order_over_pauses(upriver_node: EmbeddedNode) -> None:
    count = 3000
    pieces = []
    for number in range(count):
        pieces.append(Set(key=b"key", value=b"%06d" % number * 300, opaque=2 * number).encode())
        pieces.append(Get(key=b"key", opaque=2 * number + 1).encode())
    with Client(upriver_node.port, receive_bytes=4096) as client:
        sender = threading.Thread(target=client.socket.sendall, args=(b"".join(pieces),))
        sender.start()
        for number in range(count):
            assert client.reply().opaque == 2 * number
            reply = client.reply()
            assert reply.opaque == 2 * number + 1
            assert reply.body[4:10] == b"%06d" % number
        sender.join()


@pytest.mark.upriver(unread_bytes_max=64 * 1024)
def test_what_is_held_for_a_peer_that_does_not_read_is_bounded(upriver_node: EmbeddedNode) -> None:
    value = b"v" * 100_000
    with Client(upriver_node.port, receive_bytes=4096) as client:
        client.set(b"key", value)
        # Ten thousand gets, a gigabyte of answers, fit into a few reads of the node.
        client.socket.settimeout(0.2)
        pipeline = gets(b"key", 1_000_000)
        with pytest.raises(TimeoutError):
            client.socket.sendall(pipeline)
        state = upriver_node.node.state

        def held() -> tuple[bool, int]:
            (connection,) = state.connections
            assert connection.session is not None
            return connection.session.paused, connection.held_bytes

        wait_until(lambda: upriver_node.call(held)[0], "it pauses")
        assert upriver_node.call(held)[1] < 64 * 1024 + 2 * len(value) + 2 * connection_module.RECEIVE_BYTES
        assert upriver_node.call(lambda: state.counters.bytes_written) < 50_000_000
    wait_until(lambda: connections(upriver_node) == 0)


def test_a_million_gets_do_not_keep_others_waiting(upriver_node: EmbeddedNode) -> None:
    with Client(upriver_node.port) as client, served_meanwhile(upriver_node.port) as probe:
        client.set(b"key", b"v" * 100)
        pipeline = gets(b"key", 50_000)
        size = 50_000 * (24 + 4 + 100)
        for _ in range(20):
            sender = threading.Thread(target=client.socket.sendall, args=(pipeline,))
            sender.start()
            left = size
            while left:
                left -= len(client.socket.recv(min(left, 1 << 20)))
            sender.join()
        probe.another_round()


def test_requests_that_take_the_long_way_do_not_keep_others_waiting(upriver_node: EmbeddedNode) -> None:
    """A read of the node holds ten thousand noops: they are answered in many turns."""
    turns: list[int] = []
    go_on = ServerConnection._go_on

    def counted(self: ServerConnection) -> None:
        turns.append(1)
        go_on(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerConnection, "_go_on", counted)
        with Client(upriver_node.port) as client, served_meanwhile(upriver_node.port):
            sender = threading.Thread(target=client.socket.sendall, args=(noops(50_000),))
            sender.start()
            assert list(opaques(client, 50_000)) == list(range(50_000))
            sender.join()
    assert len(turns) > 50


def test_answers_that_wait_for_the_disk_are_bounded_too(tmp_path: object) -> None:
    with start(vbuckets=1, ack="disk", data=tmp_path, unread_bytes_max=64 * 1024) as node:
        node.call(node.bucket.flusher.stop)
        with Client(node.port) as client:
            client.send(Set(key=b"key", value=b"v" * 10_000, opaque=1))
            sender = threading.Thread(target=client.socket.sendall, args=(gets(b"key", 20_000),))
            sender.start()
            connection = only_connection(node)
            wait_until(lambda: node.call(lambda: connection.session is not None and connection.session.stalled))
            assert node.call(lambda: connection.held_bytes) < 64 * 1024 + 20_000 + 2 * connection_module.RECEIVE_BYTES
            with Client(node.port) as other:
                assert other.ask(Noop()).status == 0
            node.call(node.bucket.flusher.start)
            assert client.reply().opaque == 1
            assert list(opaques(client, 20_000)) == list(range(20_000))
            sender.join()


# Bad frames


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        bytes(1000),
        b"\xff" * 1000,
        Noop().encode() + b"get key\r\n",
        struct.pack(">BBHBBHIIQ", 0x80, 0x01, 3, 8, 0, 0, 0xFFFFFFFF, 0, 0),
        struct.pack(">BBHBBHIIQ", 0x80, 0x01, 300, 8, 0, 0, 20, 0, 0),
        struct.pack(">BBHBBHIIQ", 0x81, 0x00, 0, 0, 0, 0, 0, 0, 0),
    ],
    ids=["http", "tls", "zeros", "ones", "text behind a request", "4 GiB", "key beyond the body", "a response"],
)
def test_garbage_closes_the_connection_with_one_line(
    garbage: bytes, upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(upriver_node.port) as client:
        name = name_of(client)
        client.socket.sendall(garbage)
        assert client.is_closed()
    wait_until(lambda: logged(caplog, "closed: "))
    (line,) = logged(caplog, "closed: ")
    assert line.startswith(f"{name}: closed: at byte ")
    with Client(upriver_node.port) as client:
        assert client.ask(Noop()).status == 0


@pytest.mark.upriver(body_bytes_max=1000)
def test_the_limit_of_a_body(upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture) -> None:
    with Client(upriver_node.port) as client:
        assert client.ask(Set(key=b"key", value=b"v" * (1000 - 8 - 3))).status == 0
        client.send(Set(key=b"key", value=b"v" * (1000 - 8 - 2)))
        assert client.is_closed()
    assert "a body of at most 1000 bytes, found a length of 1001" in logged(caplog, "closed: ")[0]


def test_before_the_login_requests_are_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "users.json"
    with Users.edit(path, create=True) as users:
        users.add(User.create("alice", "secret", Role.WRITE))
    large = Set(key=b"key", value=b"v" * 100_000)
    with start(vbuckets=1, users=path) as node, Client(node.port) as friend, Client(node.port) as stranger:
        assert stranger.ask(Set(key=b"key", value=b"v" * 1000)).status == 0x20
        assert stranger.ask(large).status == 0x03
        assert stranger.is_closed()
        assert friend.ask(SaslAuth(mechanism=b"PLAIN", value=b"\0alice\0secret")).status == 0
        assert friend.ask(large).status == 0
    assert "a body of at most 65536 bytes" in logged(caplog, "closed: ")[0]


def test_a_request_byte_by_byte(upriver_node: EmbeddedNode) -> None:
    packet = Set(key=b"key", value=b"value", opaque=5).encode() + Noop(opaque=6).encode()
    with Client(upriver_node.port) as client, served_meanwhile(upriver_node.port) as probe:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before = upriver_node.node.state.counters.bytes_read
        for byte in packet:
            client.socket.sendall(bytes([byte]))
            probe.another_round()
        assert list(opaques(client, 2)) == [5, 6]
        assert upriver_node.node.state.counters.bytes_read > before
        assert client.get(b"key") == b"value"


# Going


@pytest.mark.upriver(idle_s=1.0)
def test_idle_connections_are_closed(upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, MESSAGES)
    with Client(upriver_node.port) as idle, Client(upriver_node.port) as half, served_meanwhile(upriver_node.port):
        half.socket.sendall(Set(key=b"key", value=b"value").encode()[:30])
        assert idle.is_closed()
        assert half.is_closed()
        assert f"{name_of(idle)}: closed: idle for 1 s" in logged(caplog, "idle")
        assert f"{name_of(half)}: closed: idle for 1 s, half a request came" in logged(caplog, "idle")


@pytest.mark.upriver(idle_s=1.0, unread_bytes_max=64 * 1024)
def test_a_peer_that_never_reads_is_disconnected_when_idle(
    upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, MESSAGES)
    with Client(upriver_node.port, receive_bytes=4096) as client:
        client.set(b"key", b"v" * 1_000_000)
        client.socket.sendall(gets(b"key", 100))
        wait_until(lambda: connections(upriver_node) == 0, "it is cut off")
        assert logged(caplog, "idle") == [f"{name_of(client)}: closed: idle for 1 s, it left its answers unread"]


@pytest.fixture
def still_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedNode]:
    """A node that sweeps its connections only when the test asks for it, at the time that the test gives."""
    monkeypatch.setattr(server_module, "SWEEP_INTERVAL_S", 1e6)
    with start(vbuckets=1, idle_s=1e6, login_s=1e9, stuck_s=0, unread_bytes_max=2**30) as node:
        yield node


def unread(node: EmbeddedNode, connection: ServerConnection) -> int:
    return node.call(lambda: connection.held_bytes)


@pytest.mark.parametrize("farewell", [False, True])
def test_a_peer_that_reads_slowly_but_steadily_stays_connected(
    farewell: bool, still_node: EmbeddedNode, caplog: pytest.LogCaptureFixture
) -> None:
    """No event tells that the peer has read some of a large answer, but less of it is left."""
    caplog.set_level(logging.INFO, MESSAGES)
    limit_s = connection_module.LEAVE_S if farewell else 1e6
    with Client(still_node.port, receive_bytes=65536) as client:
        client.set(b"key", bytes(15_000_000))
        client.send(Get(key=b"key"), *[QuitQ()] * farewell)
        connection = only_connection(still_node)
        wait_until(lambda: unread(still_node, connection) > 2_000_000)
        now = time.monotonic()
        for _ in range(4):
            before = unread(still_node, connection)
            while unread(still_node, connection) == before:
                client.socket.recv(65536)
            now += limit_s
            still_node.call(connection.sweep, now)
            assert not logged(caplog, "idle") + logged(caplog, "cut off")
        assert unread(still_node, connection) > 0
        later = itertools.count(now, limit_s)  # as soon as the system takes no more for it either

        def gone() -> bool:
            still_node.call(connection.sweep, next(later))
            return connections(still_node) == 0

        wait_until(gone, "it is cut off")
        (line,) = logged(caplog, "did not read its last answers" if farewell else "it left its answers unread")
        assert line.startswith(name_of(client))


def test_quit_is_answered_and_the_connection_closed(upriver_node: EmbeddedNode) -> None:
    with Client(upriver_node.port) as client:
        client.send(Noop(opaque=1), Quit(opaque=2), Noop(opaque=3))
        assert list(opaques(client, 2)) == [1, 2]
        assert client.socket.recv(1) == b""
    with Client(upriver_node.port) as client:
        client.send(Noop(opaque=1), QuitQ(), Noop(opaque=3))
        assert client.reply().opaque == 1
        assert client.socket.recv(1) == b""


@pytest.mark.parametrize("farewell", ["quit", "half-close"])
def test_a_peer_that_waits_for_the_disk_is_answered_before_the_connection_closes(
    farewell: str, tmp_path: object
) -> None:
    with start(vbuckets=1, ack="disk", data=tmp_path) as node:
        node.call(node.bucket.flusher.stop)
        with Client(node.port) as client:
            client.send(Set(key=b"key", value=b"value", opaque=1), Noop(opaque=2))
            if farewell == "quit":
                client.send(QuitQ(), Noop(opaque=3))
            else:
                client.socket.shutdown(socket.SHUT_WR)
            connection = only_connection(node)
            wait_until(lambda: node.call(lambda: connection.session is not None and connection.session.closing))
            node.call(node.bucket.flusher.start)
            assert list(opaques(client, 2)) == [1, 2]
            assert client.socket.recv(1) == b""


def test_a_peer_that_half_closes_is_answered(upriver_node: EmbeddedNode) -> None:
    with Client(upriver_node.port) as client:
        client.socket.sendall(noops(3000))
        client.socket.shutdown(socket.SHUT_WR)
        assert list(opaques(client, 3000)) == list(range(3000))
        assert client.socket.recv(1) == b""


@pytest.mark.upriver(unread_bytes_max=2**30)
def test_a_peer_that_quits_and_does_not_read_is_disconnected(
    upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LEAVE_S", 0.2)
    with Client(upriver_node.port, receive_bytes=4096) as client:
        client.set(b"key", b"v" * 10_000_000)
        client.send(Get(key=b"key"), QuitQ())
        wait_until(lambda: connections(upriver_node) == 0, "it is cut off")
        assert "did not read its last answers" in logged(caplog, "cut off")[0]


def test_a_peer_that_resets_is_forgotten(upriver_node: EmbeddedNode) -> None:
    client = Client(upriver_node.port)
    client.set(b"key", b"v" * 1_000_000)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.sendall(gets(b"key", 50))
    client.close()
    wait_until(lambda: connections(upriver_node) == 0)


def test_an_answer_that_comes_after_the_peer_has_left_is_dropped(tmp_path: object) -> None:
    with start(vbuckets=1, ack="disk", data=tmp_path) as node:
        node.call(node.bucket.flusher.stop)
        client = Client(node.port)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.send(Set(key=b"key", value=b"value"))
        wait_until(lambda: node.call(lambda: node.bucket.vbucket(0).high_seqno) == 1)
        client.close()
        wait_until(lambda: connections(node) == 0)
        node.call(node.bucket.flusher.start)
        with Client(node.port) as other:
            other.set(b"other", b"value")


def test_answers_for_a_peer_that_is_gone_do_not_flood_the_log(
    upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would complain of the fifth write to a closed transport, and of each behind it."""

    def answer_on() -> None:
        connection.abort()
        for _ in range(20):
            assert connection.session is not None
            connection.session.put(b"an answer")
            connection.flush()
        assert connection.held_bytes == 0

    with Client(upriver_node.port) as client:
        client.ask(Noop())
        connection = only_connection(upriver_node)
        upriver_node.call(answer_on)
    wait_until(lambda: connections(upriver_node) == 0)
    assert not logged(caplog, "socket.send()")


@pytest.mark.upriver(stuck_s=0.4)
def test_a_stuck_peer_is_closed_and_an_idle_one_is_not(
    upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, MESSAGES)
    port = upriver_node.port
    with Client(port) as idle, Client(port) as half, Client(port, receive_bytes=4096) as unread:
        idle.set(b"key", bytes(5_000_000))
        half.socket.sendall(Set(key=b"key", value=b"value").encode()[:30])
        unread.send(Get(key=b"key"))
        wait_until(lambda: connections(upriver_node) == 1, "they are closed")
        assert sorted(logged(caplog, "idle")) == sorted((
            f"{name_of(half)}: closed: idle for 0.4 s, half a request came",
            f"{name_of(unread)}: closed: idle for 0.4 s, it left its answers unread",
        ))  # fmt: skip
        assert idle.ask(Noop()).status == 0
        assert not upriver_node.call(lambda: upriver_node.node.state.watched)


@pytest.mark.upriver(login_s=0.4)
def test_idle_connections_are_not_looked_at(upriver_node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ten thousand of them that would take milliseconds each time."""
    looked_at: list[ServerConnection] = []
    monkeypatch.setattr(ServerConnection, "sweep", lambda self, _: looked_at.append(self))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(upriver_node.port)) for _ in range(20)]
        for client in clients:
            client.set(b"key", b"value")
        clients[3].socket.sendall(Noop().encode()[:10])
        wait_until(lambda: len(looked_at) >= 3)
        assert len(set(looked_at)) == 1


@pytest.mark.upriver(unread_total_bytes_max=8 * 2**20)
def test_the_peer_that_has_left_most_unread_for_longest_makes_room(
    upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture
) -> None:
    port, state = upriver_node.port, upriver_node.node.state

    def total() -> int:
        return upriver_node.call(lambda: state.unread.total_bytes)

    def is_cut_off(client: Client) -> bool:
        lines = logged(caplog, "cut off: unread answers of all connections take more than 8388608 bytes")
        return any(line.startswith(f"{name_of(client)}: ") for line in lines)

    with Client(port, receive_bytes=4096) as large, Client(port, receive_bytes=4096) as small:
        for size in (6, 14, 20):
            large.set(b"%d" % size, bytes(size * 10**6))
        small.send(Get(key=b"6"))
        wait_until(lambda: total() > 0)
        large.send(Get(key=b"20"))  # the system holds some of it, and still it is more than twice what is allowed
        wait_until(lambda: is_cut_off(large))
        assert not is_cut_off(small)
        with Client(port) as reader:
            assert reader.get(b"6") == bytes(6_000_000)
            assert not is_cut_off(reader)
    with Client(port, receive_bytes=4096) as large, Client(port) as reader:
        large.send(Get(key=b"14"))  # more than is allowed, but it may be about to read it
        wait_until(lambda: total() > 8 * 2**20)
        assert reader.get(b"6") == bytes(6_000_000)
        wait_until(lambda: is_cut_off(large), "after a moment it goes too")
        assert reader.ask(Noop()).status == 0
    wait_until(lambda: connections(upriver_node) == 0)
    assert total() == 0


@pytest.mark.upriver(unread_total_bytes_max=4 * 2**20)
def test_a_peer_that_does_not_read_answers_makes_room_also_if_it_streams(
    upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture
) -> None:
    """A consumer that only stops reading its stream stays."""
    with Client(upriver_node.port) as writer, contextlib.ExitStack() as stack:
        writer.set(b"key", bytes(10**6))
        consumers = [stack.enter_context(Client(upriver_node.port, receive_bytes=4096)) for _ in range(12)]
        for number, consumer in enumerate(consumers):
            consumer.ask(dcp.Open(name=b"%d" % number, flags=dcp.OpenFlag.PRODUCER))
            if number == 0:
                consumer.send(dcp.StreamRequest(vbucket=0, end_seqno=2**64 - 1))
            else:
                consumer.send(*[Get(key=b"key")] * 8)
        wait_until(lambda: logged(caplog, "cut off: unread answers of all connections take more than 4194304 bytes"))
        state = upriver_node.node.state
        wait_until(lambda: upriver_node.call(lambda: state.unread.total_bytes) <= 2 * 4 * 2**20)
        assert not [line for line in logged(caplog, "cut off") if line.startswith(f"{name_of(consumers[0])}: ")]
        assert writer.ask(Noop()).status == 0


def test_sweeping_a_connection_that_is_gone(upriver_node: EmbeddedNode) -> None:
    with Client(upriver_node.port) as client:
        client.ask(Noop())
        connection = only_connection(upriver_node)
    wait_until(lambda: connections(upriver_node) == 0)
    upriver_node.call(connection.sweep, time.monotonic())
    upriver_node.call(connection.leave)
    upriver_node.call(connection.abort)


def test_a_connection_that_is_done_is_not_closed_while_asyncio_says_that_all_is_sent(
    upriver_node: EmbeddedNode,
) -> None:
    """Otherwise asyncio would report twice that the connection is lost, the second time without a receiver."""
    client = Client(upriver_node.port)
    assert client.ask(Noop()).status == 0
    connection = only_connection(upriver_node)

    def finish() -> bool:
        assert connection.session is not None
        assert connection._transport is not None
        connection.session.closing = True
        connection.resume_writing()
        return connection._transport.is_closing()

    assert upriver_node.call(finish) is False
    wait_until(lambda: connections(upriver_node) == 0)
    client.close()


def test_a_live_change_goes_to_one_stream_before_the_answer_and_to_the_others_behind_it(
    upriver_node: EmbeddedNode,
) -> None:
    """A writer waits for one of those who listen, not for all of them."""
    writes: list[str] = []

    def record(connection: ServerConnection, name: str) -> None:
        transport = connection._transport
        assert transport is not None
        write = transport.write

        def recording(data: bytes | bytearray | memoryview) -> None:
            writes.append(name)
            write(data)

        transport.write = recording  # type: ignore[method-assign]

    with contextlib.ExitStack() as stack:
        for number in range(3):
            client = stack.enter_context(Client(upriver_node.port))
            assert client.ask(dcp.Open(name=b"%d" % number, flags=dcp.OpenFlag.PRODUCER)).status == 0
            client.ask(dcp.StreamRequest(opaque=1))
        wait_until(lambda: upriver_node.call(lambda: len(upriver_node.bucket.vbucket(0).cursors)) == 3)
        for connection in upriver_node.call(lambda: set(upriver_node.node.state.connections)):
            upriver_node.call(record, connection, "stream")
        writer = stack.enter_context(Client(upriver_node.port))
        writer.ask(Noop())
        (connection,) = (c for c in upriver_node.node.state.connections if c.session and c.session.stream is None)
        upriver_node.call(record, connection, "answer")
        writer.set(b"key", b"value")
        wait_until(lambda: len(writes) == 4)
    assert writes == ["stream", "answer", "stream", "stream"]


def test_a_stream_that_fails_when_its_peer_reads_again_closes_the_connection(
    upriver_node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    vbucket = upriver_node.bucket.vbucket(0)
    for number in range(1500):
        upriver_node.call(vbucket.set, b"%d" % number, bytes(10_000))
    with StreamClient(upriver_node, b"slow", receive_buffer_bytes=4096) as peer:
        peer.send(dcp.StreamRequest(vbucket=0, opaque=7))
        connection = only_connection(upriver_node)
        wait_until(lambda: connection.session and connection.session.stream and connection.session.stream.blocked)
        monkeypatch.setattr(StreamConnection, "produce", lambda self: b"" if self.session.closing else 1 // 0)
        while peer.socket.recv(1 << 20):
            pass
    wait_until(lambda: connections(upriver_node) == 0)
