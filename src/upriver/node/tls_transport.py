"""TLS between a socket and a connection: a protocol for the socket, a transport for the connection.

Theory of operation. A connection relies on a plain transport: the transport counts unread bytes, says when there are
too many and when that is over, and sends everything that was written before a close. asyncio's TLS does not: it does
not count encrypted bytes, pauses streams after each piece, and aborts a peer that reads the last bytes slowly. So this
module encrypts data as soon as it is written, piece by piece, and passes it to the socket's transport, which does all
buffering, counting and limiting.

Received data is decrypted into the receive buffer that all connections share. Encrypted bytes have a shared buffer too,
and OpenSSL gets small pieces, because it never frees a buffer that it once needed.
"""

import asyncio
import contextlib
import ssl
from typing import Any, Final, Protocol, cast

from upriver.errors import InvalidArguments

#: The number of bytes that are encrypted or decrypted at once.
PIECE_BYTES: Final = 32 * 1024
#: The size of the receive buffer that all connections share.
ENCRYPTED_BYTES: Final = 256 * 1024


class TlsApplication(Protocol):
    """The protocol behind the encryption: the node's ``Connection``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer has connected; the handshake is still to come."""

    def encryption_failed(self, why: str, *, handshake_done: bool) -> None:
        """The handshake failed or, with ``handshake_done``, a later record; the transport closes."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for received data."""

    def buffer_updated(self, nbytes: int) -> None:
        """This many bytes were received into the buffer."""

    def eof_received(self) -> bool | None:
        """The peer has closed its side; return True to keep the connection open for responses."""

    def pause_writing(self) -> None:
        """The peer has too many unread bytes."""

    def resume_writing(self) -> None:
        """The peer has read enough to go on."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """The server's side of one encrypted connection."""

    __slots__ = (
        "_behind",
        "_buffer",
        "_closing",
        "_deadline",
        "_handshake_done",
        "_handshake_s",
        "_incoming",
        "_left",
        "_outgoing",
        "_over",
        "_socket",
        "_tls",
    )

    def __init__(
        self, behind: TlsApplication, context: ssl.SSLContext, encrypted: memoryview, handshake_s: float = 10.0
    ) -> None:
        super().__init__()
        self._behind = behind
        #: The receive buffer that all connections share.
        self._buffer = encrypted
        self._handshake_s = handshake_s
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._socket: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None
        #: The handshake is done.
        self._handshake_done = False
        self._closing = False
        #: The connection paused reading while there was more to decrypt.
        self._left = False
        #: The peer has closed its side.
        self._over = False

    # Called by the socket's transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        self._behind.connection_made(self)
        if not self.is_closing():
            self._deadline = asyncio.get_running_loop().call_later(self._handshake_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if not self._handshake_done and not self._closing:
            self._behind.encryption_failed("the peer disconnected" if exc is None else str(exc), handshake_done=False)
        self._closing = True
        self._behind.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        into, filled = self._behind.get_buffer(-1), 0
        for start in range(0, nbytes, PIECE_BYTES):
            self._incoming.write(self._buffer[start : min(start + PIECE_BYTES, nbytes)])
            if self._handshake_done or self._shake_hands():
                filled = self._decrypt(into, filled)
        self._hand_over(into, filled)

    def eof_received(self) -> bool:
        return self._handshake_done and self._end_input()

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()

    # Called by the connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt data and send it, or buffer it until it can be sent."""
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            if self.is_closing():
                return
            try:
                self._tls.write(view[start : start + PIECE_BYTES])
            except ssl.SSLError as error:
                self._fail(error)
            self._send()

    def close(self) -> None:
        """Send everything and a close notification, then close."""
        if self.is_closing():
            return
        self._closing = True
        if not self._handshake_done:
            self._socket.abort()
            return
        with contextlib.suppress(ssl.SSLError):  # the peer has not sent its own yet
            self._tls.unwrap()
        self._send()
        self._socket.close()

    def abort(self) -> None:
        """Close at once and drop unsent data."""
        self._closing = True
        self._socket.abort()

    def is_closing(self) -> bool:
        """Whether the transport is closing."""
        return self._closing or self._socket.is_closing()

    def is_reading(self) -> bool:
        """Whether the transport reads."""
        return self._socket.is_reading()

    def pause_reading(self) -> None:
        """Stop reading."""
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Read again, first what was already received."""
        self._socket.resume_reading()
        if self._left or self._over:
            asyncio.get_running_loop().call_soon(self._go_on)

    def get_write_buffer_size(self) -> int:
        """The number of encrypted bytes that the peer has not read."""
        return self._socket.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits for ``pause_writing`` and ``resume_writing``."""
        self._socket.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the socket."""
        return self._socket.get_extra_info(name, default)

    # Internal

    def _shake_hands(self) -> bool:
        """Continue the handshake and return whether it is done."""
        if self.is_closing():
            return False
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            self._fail(error)
            return False
        self._handshake_done = True
        self._stop_waiting()
        return True

    def _decrypt(self, into: memoryview, filled: int) -> int:
        """Decrypt complete records into the buffer and return how many bytes are in it."""
        read = cast(Any, self._tls.read)  # its type hint does not allow a memoryview
        try:
            while filled < len(into) and not self._over and not self.is_closing():
                count = read(len(into) - filled, into[filled:])
                filled += count
                self._over = not count
            self._left = filled == len(into)
        except ssl.SSLWantReadError:
            self._left = False
        except ssl.SSLError as error:
            self._fail(error)
        return filled

    def _hand_over(self, into: memoryview, filled: int) -> None:
        """Pass decrypted data to the connection while it reads."""
        self._send()
        while filled:
            self._behind.buffer_updated(filled)
            filled = self._decrypt(into, 0) if self._left and self.is_reading() else 0
        if self._over and self.is_reading() and self._end_input():
            self._socket.pause_reading()

    def _go_on(self) -> None:
        if self.is_reading() and (self._left or self._over):
            into = self._behind.get_buffer(-1)
            self._hand_over(into, self._decrypt(into, 0) if self._left else 0)

    def _end_input(self) -> bool:
        """The peer has closed its side; return True if the connection still has responses to send."""
        if self.is_closing():
            return False
        if self._behind.eof_received():
            return True
        self.close()
        return False

    def _send(self) -> None:
        if self._outgoing.pending and not self._socket.is_closing():
            self._socket.write(self._outgoing.read())

    def _fail(self, error: ssl.SSLError) -> None:
        """A record was invalid: send the alert that OpenSSL has prepared, and close."""
        if not self.is_closing():
            self._closing = True
            self._stop_waiting()
            self._behind.encryption_failed(error.strerror or str(error), handshake_done=self._handshake_done)
            self._send()
            self._socket.close()

    def _give_up(self) -> None:
        if not self.is_closing():
            self._behind.encryption_failed(f"not finished within {self._handshake_s:g} s", handshake_done=False)
            self.abort()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def server_context(cert: str, key: str | None) -> ssl.SSLContext:
    """Return the TLS context of a certificate; raise ``InvalidArguments`` if the files cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise InvalidArguments(f"cannot use the certificate {cert} with the key {key}: {why}") from None
    return context
