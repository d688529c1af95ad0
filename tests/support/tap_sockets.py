"""Clients of a TAP stream on real sockets: one that only listens, and one that passes everything on to another node."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from tests.support.node_process import PATIENCE_S
from upriver.wire import AnyResponse, Framer, Message, Request, tap
from upriver.wire.dialects.tap import TapFlag
from upriver.wire.framing import MEMCACHED


class Listener:
    """Asks for a TAP stream and reads it, message by message."""

    def __init__(self, port: int, request: tap.Connect) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(request.encode())
        self._framer = Framer(MEMCACHED)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def next(self) -> Message | None:
        """The next message, answered if it asks for that; None if the node has closed the connection."""
        while (packet := self._framer.next_packet()) is None:
            data = self.socket.recv(256 * 1024)
            if not data:
                return None
            self._framer.feed(data)
        message = tap.tap.decode(packet)
        if isinstance(message, Request) and TapFlag.ACK in getattr(message, "tap_flags", TapFlag(0)):
            self.socket.sendall(AnyResponse(opcode=message.code, opaque=message.opaque).encode())
        return message

    def until(self, wanted: Callable[[Message], bool]) -> Iterator[Message]:
        """All messages up to the first that is wanted, that one included."""
        while (message := self.next()) is not None:
            yield message
            if wanted(message):
                return
        raise AssertionError("the connection was closed before it came")


class Relay:
    """Passes the messages of one node on to another, and the answers back, until either hangs up."""

    def __init__(
        self,
        source: int,
        destination: int,
        request: tap.Connect,
        on_message: Callable[[Message], object] = lambda _: None,
    ) -> None:
        """``on_message`` sees everything before it is passed on, in both directions."""
        self._on_message = on_message
        self._source = socket.create_connection(("127.0.0.1", source))
        self._destination = socket.create_connection(("127.0.0.1", destination))
        self._source.sendall(request.encode())
        ways = ((self._source, self._destination), (self._destination, self._source))
        self._threads = [threading.Thread(target=self._pass_on, args=way, daemon=True) for way in ways]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self.join()

    @property
    def ended(self) -> bool:
        """One of the two has hung up."""
        return not all(thread.is_alive() for thread in self._threads)

    def cut(self) -> None:
        """Cut both connections."""
        for peer in (self._source, self._destination):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the end."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self._source.close()
        self._destination.close()

    def _pass_on(self, come: socket.socket, go: socket.socket) -> None:
        framer = Framer(MEMCACHED)
        try:
            while data := come.recv(256 * 1024):
                framer.feed(data)
                out = []
                while packet := framer.next_packet():
                    self._on_message(tap.tap.decode(packet))
                    out.append(packet)
                go.sendall(b"".join(out))
        except OSError:
            pass
        finally:
            self.cut()
