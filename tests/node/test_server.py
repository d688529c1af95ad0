"""The node as a whole: addresses, limits that follow from the process."""

import asyncio
import logging
import resource
import socket
import threading
from pathlib import Path

import pytest

from tests.support.node_connections import logged
from tests.support.node_process import PATIENCE_S, Client, gets, has_ipv6, opaques, served_meanwhile, wait_until
from upriver.errors import CannotListen, StorageError
from upriver.node import server as server_module
from upriver.node.embedded import start
from upriver.node.listener import bind
from upriver.node.options import NodeOptions
from upriver.node.server import DESCRIPTORS_KEPT, LoopScheduler, Node
from upriver.node.session import Session
from upriver.wire.dialects.memcached import Flush, Noop, Set


@pytest.mark.parametrize("ack", ["memory", "disk"])
def test_the_compiled_loop_reads_also_where_writes_wait_for_the_disk(ack: str) -> None:
    with start(vbuckets=4, ack=ack) as node, Client(node.port) as client:
        client.set(b"key", b"value")

        def unlearn() -> None:
            node.node.state.commands = {}

        node.call(unlearn)
        assert client.get(b"key") == b"value"


# Addresses


def test_no_client_is_served_before_the_node_knows_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that connects while further addresses are looked up waits, and is closed if the start fails."""
    with start(vbuckets=1, data=tmp_path, bucket="ours") as node:
        port = node.port
    waiting: list[Client] = []

    async def bind_slowly(host: str, wanted: int) -> list[socket.socket]:
        for client in waiting:
            client.send(Set(key=b"key"))
        for _ in range(100):
            await asyncio.sleep(0)
        found = await bind(host, wanted)
        waiting.append(Client(found[0].getsockname()[1]))
        return found

    monkeypatch.setattr(server_module, "bind", bind_slowly)
    with pytest.raises(StorageError, match="holds bucket 'ours'"):
        start(vbuckets=1, data=tmp_path, bucket="theirs", port=port, metrics_port=0)
    for client in waiting:
        assert client.is_closed()
        client.close()
    monkeypatch.undo()
    with start(vbuckets=1, data=tmp_path, bucket="ours") as node:
        assert node.call(lambda: node.bucket.vbucket(0).high_seqno) == 0


def test_an_address_that_is_taken_leaves_no_other_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[socket.socket] = []

    async def bind_noted(host: str, port: int) -> list[socket.socket]:
        found = await bind(host, port)
        bound.extend(found)
        return found

    monkeypatch.setattr(server_module, "bind", bind_noted)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CannotListen):
        start(vbuckets=1, metrics_port=taken.getsockname()[1])
    assert [each.fileno() for each in bound] == [-1]


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6(caplog: pytest.LogCaptureFixture) -> None:
    with start(vbuckets=1, host="::1") as node, Client(node.port, host="::1") as client:
        assert node.address == f"[::1]:{node.port}"
        client.set(b"key", b"value")
        client.socket.sendall(b"garbage")
        assert client.is_closed()
    assert logged(caplog, "closed: ")[0].startswith("[::1]:")


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
        monkeypatch.setattr(server_module, "FastPath", lambda *_: None)
    with start(vbuckets=1, unread_bytes_max=65536) as node, Client(node.port) as client:
        assert (node.node.state.fast_path is not None) is compiled
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
