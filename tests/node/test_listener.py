"""Listening: addresses, ports, and what happens when descriptors run out."""

import asyncio
import errno
import logging
import os
import socket

import pytest

from upriver.errors import CannotListen
from upriver.node import listener as listener_module
from upriver.node.listener import Listener, bind

LOG = logging.getLogger("upriver.node")


class Greeter(asyncio.Protocol):
    """Says hello and goes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


async def greeting(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()
        await writer.wait_closed()


def test_every_address_of_a_host_has_the_same_port() -> None:
    sockets = asyncio.run(bind("localhost", 0))
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
    finally:
        for each in sockets:
            each.close()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", None), ("host.invalid", 1)])
def test_an_address_on_which_the_node_cannot_listen(host: str, port: int | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = taken.getsockname()[1] if port is None else port
        with pytest.raises(CannotListen) as caught:
            asyncio.run(bind(host, wanted))
        assert str(caught.value).startswith(f"cannot listen on {host}:{wanted}: ")
        assert "while attempting" not in str(caught.value)


def test_it_accepts_until_it_is_closed() -> None:
    async def run() -> None:
        (listening,) = await bind("127.0.0.1", 0)
        listener = Listener(listening, Greeter, LOG)
        assert await asyncio.gather(*(greeting(listener.port) for _ in range(100))) == [b"hello"] * 100
        await listener.close()
        await listener.close()
        with pytest.raises(ConnectionRefusedError):
            await greeting(listener.port)

    asyncio.run(run())


def test_without_descriptors_it_waits_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "RETRY_S", 0.01)

    class Exhausted(socket.socket):
        refusals = 3

        def accept(self) -> tuple[socket.socket, object]:
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    async def run() -> None:
        (listening,) = await bind("127.0.0.1", 0)
        exhausted = Exhausted(fileno=listening.detach())
        listener = Listener(exhausted, Greeter, LOG)
        assert await greeting(listener.port) == b"hello"
        exhausted.refusals = 1
        with socket.create_connection(("127.0.0.1", listener.port)):
            while exhausted.refusals:
                await asyncio.sleep(0)
            await listener.close()  # while it waits

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept connections for 0.01 s: Too many open files"
    ] * 4


def test_a_connection_that_cannot_be_set_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> asyncio.Protocol:
        raise RuntimeError("broken")

    async def run() -> None:
        (listening,) = await bind("127.0.0.1", 0)
        listener = Listener(listening, broken, LOG)
        assert await greeting(listener.port) == b""
        await listener.close()

    asyncio.run(run())
    assert "could not be set up" in caplog.text
    assert "RuntimeError: broken" in caplog.text
