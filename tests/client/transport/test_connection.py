"""One connection: each answer reaches its request, and every failure says what it is."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from upriver.client.transport.address import Address, Endpoint
from upriver.client.transport.connection import Connection, reason
from upriver.errors import ConnectionLost, KeyNotFound, TimedOut, Unreachable, UpriverError
from upriver.node import EmbeddedNode, start
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import Get, Noop, Set, Stat

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(talk: Talk) -> AsyncIterator[Endpoint]:
    """A server that runs the given conversation."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield Endpoint(*server.sockets[0].getsockname())
    finally:
        server.close()


class Ear:
    """Somebody who streams."""

    def __init__(self) -> None:
        self.told: asyncio.Future[UpriverError] = asyncio.get_running_loop().create_future()

    def receive(self, data: memoryview) -> None:
        raise AssertionError(bytes(data))

    def lost(self, error: UpriverError) -> None:
        self.told.set_result(error)


def opened(
    endpoint: Endpoint, *, handshake: bool = True, timeout_s: float = 30.0
) -> "Coroutine[None, None, Connection]":
    return Connection.open(endpoint, Address((endpoint,)), handshake=handshake, timeout_s=timeout_s)


async def ask_much(node: EmbeddedNode) -> None:
    connection = await opened(Endpoint(node.host, node.port))
    assert connection.is_upriver_node
    answers = [connection.post(Set(key=b"%d" % n, value=b"v%d" % n)) for n in range(500)]
    answers += [connection.post(Get(key=b"%d" % n)) for n in range(500)]
    replies = await asyncio.gather(*answers)
    assert [reply.value for reply in replies[500:]] == [b"v%d" % n for n in range(500)]
    with pytest.raises(KeyNotFound):
        await connection.ask(Get(key=b"nothing"))
    first = connection.reserve(0)
    refusals = await asyncio.gather(*(connection.post(Get(key=b"nothing")) for _ in range(500)))  # all alike
    assert [(reply.opaque, reply.status) for reply in refusals] == [(first + n, Status.KEY_ENOENT) for n in range(500)]
    await connection.close()
    with pytest.raises(ConnectionLost, match="the client closed"):
        await connection.ask(Noop())


def test_a_thousand_requests_on_their_way() -> None:
    with start(vbuckets=1) as node:
        asyncio.run(ask_much(node))


def test_nothing_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match=rf"^127\.0\.0\.1:{port}: cannot connect: Connection refused; check"):
        asyncio.run(opened(Endpoint("127.0.0.1", port)))
    with pytest.raises(Unreachable, match=r"^host\.invalid:1: cannot connect: "):
        asyncio.run(opened(Endpoint("host.invalid", 1)))


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 99999), ("a" * 300, 1), ("x..y", 1), ("x\0y", 1)])
def test_what_is_no_host_or_port_cannot_be_reached(host: str, port: int) -> None:
    """Users do not type that, but a cluster map may have it."""
    with pytest.raises(Unreachable, match="cannot connect: "):
        asyncio.run(Connection.open(Endpoint(host, port), Address.parse("127.0.0.1:1")))


def test_a_server_that_says_nothing_is_given_up() -> None:
    async def run() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with served(silent) as endpoint:
            with pytest.raises(TimedOut, match=r"no reply to hello within 0\.05 s"):
                await opened(endpoint, timeout_s=0.05)

    asyncio.run(run())


def test_a_connection_that_has_fallen_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.client.transport.connection.SILENCE_S", 0.2)

    async def run() -> None:
        async def falls_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readexactly(24)
            writer.write(b"\x81" + asked[1:])
            await reader.read()

        async with served(falls_silent) as endpoint:
            connection = await opened(endpoint, handshake=False)
            await connection.ask(Noop())
            await asyncio.sleep(0.3)  # there was no request, so there was nothing to report
            waiting = connection.post(Noop())
            with pytest.raises(TimedOut):
                await connection.ask(Noop(), timeout_s=0.05)
            assert connection.is_open
            with pytest.raises(TimedOut):
                await connection.ask_list(Stat(), timeout_s=0.2)
            assert not connection.is_open
            with pytest.raises(ConnectionLost, match="the node has sent nothing for"):
                await waiting
            await connection.close()

    asyncio.run(run())


def test_a_server_that_is_something_else() -> None:
    async def run() -> None:
        async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            await reader.read()

        async with served(web) as endpoint:
            with pytest.raises(ConnectionLost, match="protocol error: at byte 0"):
                await opened(endpoint)

    asyncio.run(run())


def test_listeners_of_a_connection_that_is_already_lost_are_told() -> None:
    async def run() -> None:
        async def curt(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Say nothing, and go."""

        async with served(curt) as endpoint:
            connection = await opened(endpoint, handshake=False)
            with pytest.raises(ConnectionLost):
                await connection.ask(Noop())
            ear = Ear()
            connection.stream_to(ear)
            await asyncio.wait_for(ear.told, 30)
            await connection.close()

    asyncio.run(run())


def test_everybody_who_waits_learns_of_the_end() -> None:
    async def run() -> None:
        async def curt(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(24)

        async with served(curt) as endpoint:
            connection = await opened(endpoint, handshake=False)
            answers = [connection.post(Noop()) for _ in range(3)]
            results = await asyncio.gather(*answers, return_exceptions=True)
            assert all(isinstance(result, ConnectionLost) for result in results)
            with pytest.raises(ConnectionLost):
                connection.post(Noop())
            with pytest.raises(ConnectionLost):
                await connection.drain()
            await connection.close()

    asyncio.run(run())


def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    cert, key, ca = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    key.write_bytes(issued.private_key_pem.bytes())
    cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    ca.write_bytes(authority.cert_pem.bytes())

    async def ask(text: str) -> None:
        address = Address.parse(text)
        connection = await Connection.open(address.endpoints[0], address)
        await connection.ask(Noop())
        await connection.close()

    with start(vbuckets=1, tls_cert=str(cert), tls_key=str(key)) as node:
        asyncio.run(ask(f"upriver://{node.address}?ca={ca}"))
        with pytest.raises(Unreachable, match="the certificate is not trusted"):
            asyncio.run(ask(f"upriver://{node.address}?tls=on"))
        with pytest.raises(Unreachable, match="cannot read the certificates"):
            asyncio.run(ask(f"upriver://{node.address}?ca={tmp_path}/nothing"))
    with start(vbuckets=1) as plain, pytest.raises(Unreachable, match="check that this port speaks TLS"):
        asyncio.run(ask(f"upriver://{plain.address}?ca={ca}"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 111] …"),
            "Connection refused",
        ),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_a_failure_is_told_in_the_systems_words(error: OSError, words: str) -> None:
    assert reason(error) == words
