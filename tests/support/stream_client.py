"""A minimal client on a real socket: blocking, message by message."""

import socket
import ssl
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

from upriver.wire import Dialect, Framer, Message, Response, dcp, memcached

TIMEOUT_S = 30.0


class Served(Protocol):
    """A node that can be reached."""

    @property
    def host(self) -> str:
        """Its address."""

    @property
    def port(self) -> int:
        """Its port."""


class StreamClient:
    """One connection to a node."""

    def __init__(
        self,
        node: Served,
        name: bytes = b"",
        flags: int = 1,
        receive_buffer_bytes: int = 0,
        *,
        wire: Dialect = dcp.dcp,
        port: int = 0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect((node.host, port or node.port))
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        self.wire = wire
        self._framer = Framer(wire.framing)
        if name:
            self.send(dcp.Open(name=name, flags=dcp.OpenFlag(flags)))
            answer = self.next()
            assert isinstance(answer, Response)
            assert not answer.status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    def send(self, *messages: Message) -> None:
        self.socket.sendall(b"".join(message.encode() for message in messages))

    def next(self) -> Message | None:
        """The next message; None if the node has closed the connection."""
        while (packet := self._framer.next_packet()) is None:
            data = self.socket.recv(256 * 1024)
            if not data:
                return None
            self._framer.feed(data)
        return self.wire.decode(packet)

    def until(self, *kinds: type[Message]) -> Iterator[Message]:
        """All messages up to the first of these kinds, that one included."""
        while (message := self.next()) is not None:
            yield message
            if isinstance(message, kinds):
                return

    def changes(self, upto: int) -> dict[bytes, bytes | None]:
        """The newest value of each key in the changes up to a seqno; None for a deleted one."""
        out: dict[bytes, bytes | None] = {}
        for message in iter(self.next, None):
            if isinstance(message, dcp.Mutation | dcp.Deletion) or hasattr(message, "by_seqno"):
                out[message.key] = None if isinstance(message, dcp.Deletion) else message.value  # type: ignore[attr-defined]
                if message.by_seqno >= upto:
                    return out
        raise AssertionError(f"the connection was closed before change {upto}")

    def ask(self, message: Message) -> Message:
        """Send a request and return the next message."""
        self.send(message)
        answer = self.next()
        assert answer is not None
        return answer

    def statistics(self, group: bytes) -> dict[str, str]:
        """A group of statistics."""
        self.send(memcached.Stat(key=group))
        out: dict[str, str] = {}
        for answer in iter(self.next, None):
            assert isinstance(answer, memcached.StatResponse), answer
            if not answer.key:
                return out
            out[answer.key.decode()] = answer.value.decode()
        raise AssertionError("the connection was closed")
