"""Listening sockets, and how connections are accepted on them.

When asyncio's own server closes, it drops connections that it has accepted and not yet set up, and it accepts a whole
backlog in one turn. This listener accepts a few at a time, and closing it waits until every accepted connection has its
protocol, which can then close it properly.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from upriver.errors import CannotListen
from upriver.network import KEEPALIVE_S, do_not_pace, keep_alive

#: The most connections that may wait to be accepted, and that are accepted in one turn of the event loop.
BACKLOG: Final = 4096
ACCEPTS_PER_TURN: Final = 64
#: The pause when no file descriptor is left: another connection must close first.
RETRY_S: Final = 0.5


class Listener:
    """Accepts connections on one socket and gives each a protocol."""

    def __init__(
        self,
        listening: socket.socket,
        factory: Callable[[], asyncio.BaseProtocol],
        log: logging.Logger,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = listening
        self._factory = factory
        self._log = log
        self._keepalive_s = keepalive_s
        self._setting_up: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self.port = int(listening.getsockname()[1])
        self._watch()

    async def close(self) -> None:
        """Accept no more. Every accepted connection has its protocol when this returns."""
        if self._retry is not None:
            self._retry.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        await asyncio.gather(*self._setting_up, return_exceptions=True)

    def _watch(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._log.error("cannot accept connections for %g s: %s", RETRY_S, error.strerror)
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(RETRY_S, self._watch)
                return
            task = self._loop.create_task(self._set_up(accepted))
            self._setting_up.add(task)
            task.add_done_callback(self._setting_up.discard)

    async def _set_up(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            do_not_pace(accepted)
            keep_alive(accepted, self._keepalive_s)
            await self._loop.connect_accepted_socket(self._factory, accepted)
        except Exception:
            self._log.exception("closed: an accepted connection could not be set up")
            accepted.close()


async def bind(host: str, port: int) -> list[socket.socket]:
    """Open listening sockets on every address of the host, all with the same port."""
    listeners: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            picked = listeners[0].getsockname()[1] if listeners else port
            listeners.append(socket.create_server((*address[:1], picked), family=family, backlog=BACKLOG))
    except OSError as error:
        for listener in listeners:
            listener.close()
        # CPython adds the address in brackets, which CannotListen already names.
        raise CannotListen(host, port, (error.strerror or str(error)).partition(" (while")[0]) from None
    for listener in listeners:
        listener.setblocking(False)
    return listeners
