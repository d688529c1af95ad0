"""TLS: the handshake, and that nothing behind it is different from a plain connection."""

import asyncio
import contextlib
import itertools
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.certificates import CertificateAuthority
from tests.support.depth import examples
from tests.support.node_connections import connections, logged, name_of, only_connection
from tests.support.node_process import PATIENCE_S, Client, gets, noops, opaques, wait_until
from tests.support.stream_client import StreamClient
from upriver.errors import InvalidArguments
from upriver.node.embedded import EmbeddedNode, start
from upriver.node.tls_transport import PIECE_BYTES, TlsTransport, server_context
from upriver.wire import dcp
from upriver.wire.dialects.memcached import Get, Noop, Quit, Set, SetQ


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def tls_node(pki: CertificateAuthority) -> Iterator[EmbeddedNode]:
    with start(vbuckets=4, tls_cert=pki.cert, tls_key=pki.key, tls_handshake_s=1) as node:
        yield node


def test_the_right_certificate(tls_node: EmbeddedNode, pki: CertificateAuthority) -> None:
    with Client(tls_node.port, context=pki.client()) as client:
        client.set(b"key", b"v" * 1_000_000)
        assert client.get(b"key") == b"v" * 1_000_000
        assert connections(tls_node) == 1
    wait_until(lambda: connections(tls_node) == 0)


def test_a_pipeline_over_tls_with_pauses(pki: CertificateAuthority) -> None:
    with (
        start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key, unread_bytes_max=64 * 1024) as node,
        Client(node.port, context=pki.client()) as client,
    ):
        client.set(b"key", b"v" * 10_000)
        # One thread at a time may use a socket with TLS: what is sent must fit into the buffers on the way.
        for pipeline, count in ((gets(b"key", 5000), 5000), (noops(5000), 5000)):
            client.socket.sendall(pipeline)
            assert list(opaques(client, count)) == list(range(count))


def shake_hands(tls: ssl.SSLObject, plain: socket.socket, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
    """The client's part of it; its last message is left to be sent together with what follows."""
    while True:
        try:
            tls.do_handshake()
            return
        except ssl.SSLWantReadError:
            plain.sendall(outgoing.read())
            incoming.write(plain.recv(65536))


def test_a_request_right_behind_the_handshake(tls_node: EmbeddedNode, pki: CertificateAuthority) -> None:
    """The client's last handshake message and its first request in one segment."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = pki.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", tls_node.port), PATIENCE_S) as plain:
        shake_hands(tls, plain, incoming, outgoing)
        tls.write(Noop(opaque=9).encode())
        plain.sendall(outgoing.read())
        answer = b""
        while len(answer) < 24:
            try:
                answer += tls.read(100)
            except ssl.SSLWantReadError:
                incoming.write(plain.recv(65536))
        assert answer[12:16] == b"\0\0\0\x09"


def test_many_tls_clients_at_once_share_the_buffers(tls_node: EmbeddedNode, pki: CertificateAuthority) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Client(tls_node.port, context=pki.client()) as client:
                for size in (1, 1000, 300_000, 2_000_000):
                    client.set(b"%d" % number, b"%d" % number * size)
                    assert client.get(b"%d" % number) == b"%d" % number * size
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_a_client_that_does_not_trust_the_certificate(tls_node: EmbeddedNode, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        Client(tls_node.port, context=ssl.create_default_context())
    wait_until(lambda: logged(caplog, "handshake failed"))
    wait_until(lambda: connections(tls_node) == 0)


def test_a_certificate_for_another_name(tls_node: EmbeddedNode, pki: CertificateAuthority) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        Client(tls_node.port, context=pki.client(), server_name="elsewhere.test")
    wait_until(lambda: connections(tls_node) == 0)


def test_a_plain_client_on_a_tls_port(
    tls_node: EmbeddedNode, pki: CertificateAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(tls_node.port) as client:
        name = name_of(client)
        client.send(Noop())
        assert client.is_closed()
    wait_until(lambda: connections(tls_node) == 0)
    (line,) = logged(caplog, "handshake failed")
    assert line.startswith(f"{name}: closed: the TLS handshake failed: ")
    with Client(tls_node.port, context=pki.client()) as client:
        assert client.ask(Noop()).status == 0


def test_a_tls_client_on_a_plain_port(
    upriver_node: EmbeddedNode, pki: CertificateAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        Client(upriver_node.port, context=pki.client())
    wait_until(lambda: logged(caplog, "closed: at byte 0"))
    (line,) = logged(caplog, "closed: at byte 0")
    assert line.endswith("found 0x16 (a TLS client on a plain port?)")
    wait_until(lambda: connections(upriver_node) == 0)


def test_a_silent_peer_on_a_tls_port_is_closed_and_blocks_no_other(
    tls_node: EmbeddedNode, pki: CertificateAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    silent = [Client(tls_node.port) for _ in range(20)]
    silent[0].socket.sendall(b"\x16\x03\x01")  # half a greeting
    wait_until(lambda: connections(tls_node) == 20)
    with Client(tls_node.port, context=pki.client()) as client:
        assert client.ask(Noop()).status == 0
        for each in silent:
            assert each.is_closed()
            each.close()
        wait_until(lambda: connections(tls_node) == 1)
        assert client.ask(Noop()).status == 0
    assert len(logged(caplog, "handshake failed")) == 20
    assert tls_node.node.state.counters.handshakes_failed == 20


def test_a_peer_that_leaves_in_the_middle_of_the_handshake(tls_node: EmbeddedNode) -> None:
    for greeting in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"):
        with Client(tls_node.port) as client:
            client.socket.sendall(greeting)
    wait_until(lambda: tls_node.node.state.counters.connections_total == 3)
    wait_until(lambda: connections(tls_node) == 0)


def test_handshakes_count_as_connections(pki: CertificateAuthority, caplog: pytest.LogCaptureFixture) -> None:
    with start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key, connections_max=2) as node:
        silent = [Client(node.port) for _ in range(2)]
        wait_until(lambda: connections(node) == 2)
        with Client(node.port) as third:
            assert third.is_closed()
        for each in silent:
            each.close()
    assert logged(caplog, "refused: 2 connections are open")


def test_closing_in_the_middle_of_handshakes_and_with_idle_tls_clients(pki: CertificateAuthority) -> None:
    node = start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key)
    with Client(node.port) as silent, Client(node.port, context=pki.client()) as idle:
        idle.ask(Noop())
        wait_until(lambda: connections(node) == 2)
        node.close()
        assert silent.is_closed()


@pytest.mark.parametrize("idle", [True, False])
def test_idle_tls_clients_are_closed(idle: bool, pki: CertificateAuthority, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with (
        start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key, idle_s=1, unread_bytes_max=65536) as node,
        Client(node.port, context=pki.client()) as client,
    ):
        client.set(b"key", b"v" * 10_000_000)
        if not idle:
            client.send(Get(key=b"key"))
        wait_until(lambda: connections(node) == 0)
        assert logged(caplog, "idle for 1 s")


# What a plain connection promises


def test_a_stream_needs_no_word_from_its_consumer(tls_node: EmbeddedNode, pki: CertificateAuthority) -> None:
    """A backfill of many pieces, then changes as they come, to somebody who only reads."""
    with Client(tls_node.port, context=pki.client()) as writer:
        writer.send(*(SetQ(key=b"%d" % number, value=bytes(1000)) for number in range(5000)), Noop())
        writer.reply()
        with StreamClient(tls_node, b"consumer", context=pki.client()) as consumer:
            consumer.send(dcp.StreamRequest(vbucket=0, end_seqno=2**64 - 1))
            assert len(consumer.changes(5000)) == 5000
            for number in range(20):
                writer.set(b"live", b"%d" % number)
                assert consumer.changes(5001 + number) == {b"live": b"%d" % number}


def test_what_is_left_unread_is_seen(pki: CertificateAuthority, caplog: pytest.LogCaptureFixture) -> None:
    with start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key, unread_total_bytes_max=2**20) as node:
        with Client(node.port, context=pki.client()) as writer:
            writer.set(b"key", bytes(16 * 10**6))
        wait_until(lambda: connections(node) == 0)
        with Client(node.port, context=pki.client(), receive_bytes=4096) as client:
            client.send(Get(key=b"key"))
            wait_until(lambda: logged(caplog, "cut off: unread answers of all connections take more than"))
        wait_until(lambda: connections(node) == 0)


def test_a_peer_that_does_not_read_is_stuck(pki: CertificateAuthority, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with (
        start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key, stuck_s=0.5) as node,
        Client(node.port, context=pki.client(), receive_bytes=4096) as client,
    ):
        client.set(b"key", bytes(8 * 10**6))
        client.send(Get(key=b"key"))
        wait_until(lambda: connections(node) == 0)
        assert logged(caplog, "it left its answers unread")


def test_a_peer_that_sent_quit_may_read_the_last_answers_slowly(pki: CertificateAuthority) -> None:
    with (
        start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key, unread_bytes_max=2**30) as node,
        Client(node.port, context=pki.client(), receive_bytes=4096) as client,
    ):
        client.set(b"key", bytes(8 * 10**6))
        client.send(Get(key=b"key", opaque=1), Quit(opaque=2))
        wait_until(lambda: is_leaving(node))
        left_at = time.monotonic()
        wait_until(lambda: time.monotonic() - left_at > 1.5, "the peer waits")
        assert list(opaques(client, 2)) == [1, 2]
        assert client.socket.recv(1) == b""


def is_leaving(node: EmbeddedNode) -> bool:
    """The only connection takes no more requests."""
    connection = only_connection(node)
    return node.call(lambda: connection.session is not None and connection.session.closing)


def test_a_peer_that_has_sent_everything_is_answered(pki: CertificateAuthority, tmp_path: Path) -> None:
    """A peer that has sent quit and still waits for the disk gets its answers, as without TLS."""
    with start(vbuckets=1, ack="disk", data=tmp_path / "data", tls_cert=pki.cert, tls_key=pki.key) as node:
        node.call(node.bucket.flusher.stop)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = pki.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
        with socket.create_connection(("127.0.0.1", node.port), PATIENCE_S) as plain:
            shake_hands(tls, plain, incoming, outgoing)
            tls.write(Set(key=b"key", opaque=7).encode())
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.unwrap()
            plain.sendall(outgoing.read())
            wait_until(lambda: is_leaving(node))
            node.call(node.bucket.flusher.start)
            while data := plain.recv(65536):
                incoming.write(data)
            answer = tls.read(100)
        assert answer[12:16] == b"\0\0\0\x07"


def test_nonsense_behind_the_handshake_is_one_line(
    tls_node: EmbeddedNode, pki: CertificateAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(tls_node.port, context=pki.client()) as client:
        assert client.ask(Noop()).status == 0
        name = name_of(client)
        plain = socket.socket(fileno=socket.dup(client.socket.fileno()))
        plain.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        plain.close()
        wait_until(lambda: connections(tls_node) == 0)
    (line,) = logged(caplog, "TLS failed")
    assert line.startswith(f"{name}: closed: TLS failed: ")
    assert tls_node.node.state.counters.handshakes_failed == 0


def test_files_that_cannot_be_used(pki: CertificateAuthority, tmp_path: Path) -> None:
    with pytest.raises(InvalidArguments, match="No such file"):
        server_context(str(tmp_path / "missing.pem"), str(pki.key))
    with pytest.raises(InvalidArguments, match="cannot use the certificate"):
        server_context(str(pki.key), str(pki.cert))


# Without a socket


class Wire(asyncio.Transport):
    """Takes down what is written, and whether somebody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = self.paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_reading(self) -> bool:
        return not (self.paused or self.closed)


class Taker:
    """Records what it is given, and pauses after every few pieces."""

    def __init__(self, buffer_bytes: int, pause_after: int) -> None:
        self._buffer = memoryview(bytearray(buffer_bytes))
        self._pause_after = pause_after
        self._pieces = 0
        self.taken = bytearray()
        self.ended = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def encryption_failed(self, why: str, *, handshake_done: bool) -> None:
        raise AssertionError(why, handshake_done)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        assert self.transport is not None
        assert self.transport.is_reading(), "it was given something in its break"
        self.taken += self._buffer[:nbytes]
        self._pieces += 1
        if self._pieces % self._pause_after == 0:
            self.transport.pause_reading()

    def eof_received(self) -> bool | None:
        self.ended += 1
        return None

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 100, 16_384, 16_385, PIECE_BYTES, 100_000]), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 300_000), max_size=8),
    buffer_bytes=st.sampled_from([1000, 16_384, 256 * 1024]),
    pause_after=st.sampled_from([1, 2, 1000]),
)
def test_everything_arrives_however_it_is_cut(
    pki: CertificateAuthority, sizes: list[int], cuts: list[int], buffer_bytes: int, pause_after: int
) -> None:
    asyncio.run(_exchange(pki, sizes, cuts, buffer_bytes, pause_after))


async def _exchange(
    pki: CertificateAuthority, sizes: list[int], cuts: list[int], buffer_bytes: int, pause_after: int
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = pki.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    taker, wire = Taker(buffer_bytes, pause_after), Wire()
    server = TlsTransport(taker, pki.server, memoryview(bytearray(256 * 1024)))
    server.connection_made(wire)

    async def give(data: bytes) -> None:
        while wire.paused:  # as a transport does, which calls no paused protocol
            server.resume_reading()
            await asyncio.sleep(0)
        server.get_buffer(-1)[: len(data)] = data
        server.buffer_updated(len(data))
        incoming.write(bytes(wire.written))
        wire.written.clear()

    for _ in range(3):
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        await give(outgoing.read())
    sent = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    for each in sent:
        client.write(each)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.unwrap()
    encrypted = outgoing.read()
    places = sorted({0, len(encrypted), *(cut % len(encrypted) for cut in cuts), *range(0, len(encrypted), 200_000)})
    for begin, end in itertools.pairwise(places):
        await give(encrypted[begin:end])
    while wire.paused:
        server.resume_reading()
        await asyncio.sleep(0)
    assert (bytes(taker.taken), taker.ended, wire.closed) == (b"".join(sent), 1, True)
