"""The shell of a mover: two sockets, and what the mover wants done with them.

Bytes are read in large pieces and sent on before the next ones are read, so nothing piles up here: a destination that
does not keep up holds back the source, by its window and by the sockets.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

from upriver.protocol.mover import Connect, Disconnect, Link, Mover, Send

RECEIVE_BYTES: Final = 512 * 1024
CONNECT_S: Final = 5.0
SEND_S: Final = 30.0
#: How long to wait before a connection that failed is tried again.
RETRY_S: Final = 0.05
_POLL_S: Final = 0.02


class MoverShell:
    """Runs one mover between two addresses, in the thread that calls ``run``."""

    def __init__(self, mover: Mover, addresses: Mapping[Link, tuple[str, int]]) -> None:
        self.mover = mover
        #: Where the two nodes are; may change while it runs, as when one comes back on another port.
        self.addresses = dict(addresses)
        self._sockets: dict[Link, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._connect_at: dict[Link, float] = {}
        self._buffer = bytearray(RECEIVE_BYTES)

    def run(self, timeout_s: float, until: Callable[[], bool] | None = None) -> bool:
        """Go on until the mover is done, or something else is so; False if that took too long."""
        deadline = time.monotonic() + timeout_s
        if not self._sockets and not self._connect_at:
            self.mover.start()
        self._act()
        while not self.mover.over and not (until is not None and until()):
            if time.monotonic() >= deadline:
                return False
            self._connect_due()
            for key, _ in self._selector.select(_POLL_S):
                self._read(key.data)
            self._act()
        return True

    def close(self) -> None:
        """Close both connections."""
        for link in list(self._sockets):
            self._drop(link)
        self._connect_at.clear()
        self._selector.close()

    def _act(self) -> None:
        while actions := self.mover.actions():
            for action in actions:
                match action:
                    case Connect(link):
                        self._connect_at.setdefault(link, time.monotonic())
                    case Disconnect(link):
                        self._drop(link)
                    case Send(link, data):
                        self._send(link, data)

    def _send(self, link: Link, data: bytes | bytearray | memoryview) -> None:
        connection = self._sockets.get(link)
        if connection is None:
            return
        try:
            connection.sendall(data)
        except OSError as error:
            self._lose(link, str(error))

    def _connect_due(self) -> None:
        now = time.monotonic()
        for link, at in list(self._connect_at.items()):
            if now >= at:
                del self._connect_at[link]
                self._connect(link)

    def _connect(self, link: Link) -> None:
        try:
            connection = socket.create_connection(self.addresses[link], CONNECT_S)
        except OSError as error:
            self.mover.lost(link, str(error))
            self._later(link)
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_S)
        self._sockets[link] = connection
        self._selector.register(connection, selectors.EVENT_READ, link)
        self.mover.connected(link)
        self._act()

    def _later(self, *links: Link) -> None:
        """What the mover wants connected now is connected a little later."""
        kept = []
        for action in self.mover.actions():
            if isinstance(action, Connect):
                self._connect_at[action.link] = time.monotonic() + RETRY_S
            else:
                kept.append(action)
        for link in links:
            self._connect_at.setdefault(link, time.monotonic() + RETRY_S)
        for action in kept:
            if isinstance(action, Disconnect):
                self._drop(action.link)
            elif isinstance(action, Send):
                self._send(action.link, action.data)

    def _read(self, link: Link) -> None:
        connection = self._sockets.get(link)
        if connection is None:
            return
        try:
            count = connection.recv_into(self._buffer)
        except OSError as error:
            self._lose(link, str(error))
            return
        if not count:
            self._lose(link, "it has closed the connection")
            return
        self.mover.received(link, memoryview(self._buffer)[:count])
        self._act()

    def _lose(self, link: Link, why: str) -> None:
        self._drop(link)
        self.mover.lost(link, why)
        self._later()

    def _drop(self, link: Link) -> None:
        connection = self._sockets.pop(link, None)
        if connection is not None:
            self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.close()
