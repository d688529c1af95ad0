"""The node as a whole: TLS, addresses, limits that follow from the process."""

import asyncio
import logging
import resource
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.node.probes import PATIENCE_S, Client, gets, noops, opaques, served_meanwhile, wait_until
from tests.node.test_connection import connections, name_of, told
from upriver.engine.backend import COMPILED
from upriver.node import server as server_module
from upriver.node.embedded import EmbeddedNode, start
from upriver.node.options import NodeOptions
from upriver.node.server import DESCRIPTORS_KEPT, LoopScheduler, Node
from upriver.node.session import Session
from upriver.wire.memcached import Flush, Get, Noop, Set


class Pki:
    """An authority, the certificate that it gave the node, and what its friends trust."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def tls_node(pki: Pki) -> Iterator[EmbeddedNode]:
    with start(vbuckets=4, tls_cert=pki.cert, tls_key=pki.key, tls_handshake_s=1) as node:
        yield node


@pytest.mark.skipif(not COMPILED, reason="the compiled parts are not built")
@pytest.mark.parametrize("ack", ["memory", "disk"])
def test_the_compiled_loop_reads_also_where_writes_wait_for_the_disk(ack: str) -> None:
    with start(vbuckets=4, ack=ack) as node, Client(node.port) as client:
        client.set(b"key", b"value")

        def unlearn() -> None:
            node.node.state.commands = {}

        node.call(unlearn)
        assert client.get(b"key") == b"value"


# TLS


def test_the_right_certificate(tls_node: EmbeddedNode, pki: Pki) -> None:
    with Client(tls_node.port, context=pki.client()) as client:
        client.set(b"key", b"v" * 1_000_000)
        assert client.get(b"key") == b"v" * 1_000_000
        assert connections(tls_node) == 1
    wait_until(lambda: connections(tls_node) == 0)


def test_a_pipeline_over_tls_with_pauses(pki: Pki) -> None:
    with (
        start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key, unread_bytes_max=64 * 1024) as node,
        Client(node.port, context=pki.client()) as client,
    ):
        client.set(b"key", b"v" * 10_000)
        # One thread at a time may use a socket with TLS: what is sent must fit into the buffers on the way.
        for pipeline, count in ((gets(b"key", 5000), 5000), (noops(5000), 5000)):
            client.socket.sendall(pipeline)
            assert list(opaques(client, count)) == list(range(count))


def test_a_request_right_behind_the_handshake(tls_node: EmbeddedNode, pki: Pki) -> None:
    """The client's last handshake message and its first request in one segment."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = pki.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", tls_node.port), 30) as plain:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(65536))
        tls.write(Noop(opaque=9).encode())
        plain.sendall(outgoing.read())
        answer = b""
        while len(answer) < 24:
            try:
                answer += tls.read(100)
            except ssl.SSLWantReadError:
                incoming.write(plain.recv(65536))
        assert answer[12:16] == b"\0\0\0\x09"


def test_many_tls_clients_at_once_share_the_buffers(tls_node: EmbeddedNode, pki: Pki) -> None:
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


def test_a_tls_connection_has_no_buffer_of_its_own(tls_node: EmbeddedNode, pki: Pki) -> None:
    """If this fails asyncio has changed, and each TLS connection costs 256 KiB more."""
    with Client(tls_node.port, context=pki.client()) as client:
        client.ask(Noop())
        (connection,) = tls_node.call(lambda: set(tls_node.node.state.connections))
        protocol = getattr(connection._transport, "_ssl_protocol", None)
        assert getattr(protocol, "_ssl_buffer_view", None) is connection._buffer


def test_a_client_that_does_not_trust_the_certificate(tls_node: EmbeddedNode, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        Client(tls_node.port, context=ssl.create_default_context())
    wait_until(lambda: told(caplog, "handshake failed"))
    wait_until(lambda: connections(tls_node) == 0)


def test_a_certificate_for_another_name(tls_node: EmbeddedNode, pki: Pki) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        Client(tls_node.port, context=pki.client(), server_name="elsewhere.test")
    wait_until(lambda: connections(tls_node) == 0)


def test_a_plain_client_on_a_tls_port(tls_node: EmbeddedNode, pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    with Client(tls_node.port) as client:
        name = name_of(client)
        client.send(Noop())
        assert client.is_closed()
    wait_until(lambda: connections(tls_node) == 0)
    (line,) = told(caplog, "handshake failed")
    assert line.startswith(f"{name}: closed: the TLS handshake failed: ")
    with Client(tls_node.port, context=pki.client()) as client:
        assert client.ask(Noop()).status == 0


def test_a_tls_client_on_a_plain_port(upriver_node: EmbeddedNode, pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        Client(upriver_node.port, context=pki.client())
    wait_until(lambda: told(caplog, "closed: at byte 0"))
    wait_until(lambda: connections(upriver_node) == 0)


def test_who_says_nothing_on_a_tls_port_is_closed_and_blocks_nobody(
    tls_node: EmbeddedNode, pki: Pki, caplog: pytest.LogCaptureFixture
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
    assert len(told(caplog, "handshake failed")) == 20
    assert tls_node.node.state.counters.handshakes_failed == 20


def test_who_leaves_in_the_middle_of_the_handshake(tls_node: EmbeddedNode) -> None:
    for greeting in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"):
        with Client(tls_node.port) as client:
            client.socket.sendall(greeting)
    wait_until(lambda: tls_node.node.state.counters.connections_total == 3)
    wait_until(lambda: connections(tls_node) == 0)


def test_handshakes_count_as_connections(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    with start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key, connections_max=2) as node:
        silent = [Client(node.port) for _ in range(2)]
        wait_until(lambda: connections(node) == 2)
        with Client(node.port) as third:
            assert third.is_closed()
        for each in silent:
            each.close()
    assert told(caplog, "refused: 2 connections are open")


def test_closing_in_the_middle_of_handshakes_and_with_idle_tls_clients(pki: Pki) -> None:
    node = start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key)
    with Client(node.port) as silent, Client(node.port, context=pki.client()) as idle:
        idle.ask(Noop())
        wait_until(lambda: connections(node) == 2)
        node.close()
        assert silent.is_closed()


@pytest.mark.parametrize("idle", [True, False])
def test_idle_tls_clients_are_closed(idle: bool, pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with (
        start(vbuckets=1, tls_cert=pki.cert, tls_key=pki.key, idle_s=1, unread_bytes_max=65536) as node,
        Client(node.port, context=pki.client()) as client,
    ):
        client.set(b"key", b"v" * 10_000_000)
        if not idle:
            client.send(Get(key=b"key"))
        wait_until(lambda: connections(node) == 0)
        assert told(caplog, "idle for 1 s")


# Addresses


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6(caplog: pytest.LogCaptureFixture) -> None:
    with start(vbuckets=1, host="::1") as node, Client(node.port, host="::1") as client:
        assert node.address == f"[::1]:{node.port}"
        client.set(b"key", b"value")
        client.socket.sendall(b"garbage")
        assert client.is_closed()
    assert told(caplog, "closed: ")[0].startswith("[::1]:")


def test_localhost() -> None:
    with start(vbuckets=1, host="localhost") as node:
        assert node.address == f"localhost:{node.port}"
        with socket.create_connection(("localhost", node.port), 30) as plain:
            plain.sendall(Noop().encode())
            assert len(plain.recv(24)) == 24


# The process around it


def test_connections_leave_descriptors_to_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 200))
    with start(vbuckets=1) as node:
        assert node.node.state.limits.connections_max == 200 - DESCRIPTORS_KEPT
    assert "the process has descriptors for 136 connections" in caplog.text


def test_maintenance_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "MAINTENANCE_INTERVAL_S", 0.01)
    calls: list[float] = []

    def fail(budget_s: float) -> None:
        calls.append(budget_s)
        raise OSError("broken")

    with start(vbuckets=1) as node, Client(node.port) as client:
        node.call(monkeypatch.setattr, node.bucket, "maintain", fail)
        wait_until(lambda: len(calls) > 2)
        assert client.ask(Noop()).status == 0
    assert "maintenance failed" in caplog.text


def test_a_scheduler_whose_loop_is_gone() -> None:
    async def make() -> LoopScheduler:
        return LoopScheduler(asyncio.get_running_loop(), logging.getLogger())

    scheduler = asyncio.run(make())
    scheduler.from_thread(lambda: None)
    scheduler.close()


def test_what_comes_from_threads_wakes_the_loop_once_and_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A commit answers thousands; one of them that fails takes no other with it."""
    count = 2 * server_module.CALLBACKS_PER_TURN + 10
    called: list[int] = []

    async def run() -> int:
        loop, turns = asyncio.get_running_loop(), 0
        scheduler = LoopScheduler(loop, logging.getLogger("upriver.node"))

        def send() -> None:
            for number in range(count):
                scheduler.from_thread(lambda number=number: called.append(1 // (number != 5) * number))  # type: ignore[misc]

        await asyncio.to_thread(send)
        deadline = loop.time() + PATIENCE_S
        while len(called) < count - 1:
            assert loop.time() < deadline
            await asyncio.sleep(0)
            turns += 1
        scheduler.close()
        return turns

    assert asyncio.run(run()) < 100
    assert called == [number for number in range(count) if number != 5]
    assert "a callback failed" in caplog.text


def test_a_node_in_a_loop_of_ones_own() -> None:
    async def run() -> None:
        node = await Node.open(NodeOptions(port=0, vbuckets=1))
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(Set(key=b"key", value=b"value").encode())
        assert (await reader.readexactly(24))[:2] == b"\x81\x01"
        await asyncio.gather(node.close(), node.close())
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()

    asyncio.run(run())


@pytest.mark.parametrize("compiled", [True, False])
def test_with_and_without_the_compiled_loop(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(server_module, "COMPILED", False)
    with start(vbuckets=1, unread_bytes_max=65536) as node, Client(node.port) as client:
        assert (node.node.state.fast_path is not None) is (compiled and COMPILED)
        client.set(b"key", b"v" * 1000)
        with served_meanwhile(node.port):
            sender = threading.Thread(target=client.socket.sendall, args=(gets(b"key", 10_000),))
            sender.start()
            assert list(opaques(client, 10_000)) == list(range(10_000))
            sender.join()


def test_a_flush_that_was_put_off_does_not_run_while_the_node_stops() -> None:
    async def stopped() -> asyncio.TimerHandle:
        node = await Node.open(NodeOptions(port=0, vbuckets=1))
        Session(node.state, "peer").receive(Flush(expiration=3600).encode())
        timer = node.state.flush_timer
        assert isinstance(timer, asyncio.TimerHandle)
        assert not timer.cancelled()
        await node.close()
        return timer

    assert asyncio.run(stopped()).cancelled()


# The past


def test_history_is_kept_as_long_as_told() -> None:
    """With no time and no bytes for it, superseded versions go; with the defaults they stay."""
    with start(vbuckets=1, history_s=0, history_bytes=0) as brief, start(vbuckets=1) as long:
        for node in (brief, long):
            with Client(node.port) as client:
                for number in range(100):
                    client.set(b"key", b"%d" % number)
        wait_until(lambda: brief.call(lambda: brief.bucket.statistics().history_bytes) == 0, "history is dropped")
        assert long.call(lambda: long.bucket.statistics().history_bytes) > 99 * 60
        for node in (brief, long):
            with Client(node.port) as client:
                assert client.get(b"key") == b"99"
