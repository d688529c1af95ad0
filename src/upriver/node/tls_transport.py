"""TLS between a socket and a connection: a protocol for the one, a transport for the other.

Theory of operation. A connection relies on what a plain transport promises: it knows how many bytes the peer has left
unread, it is told when that is too much and when it is over, and what was written before a close is sent. asyncio's own
TLS promises none of it: it does not count what it has encrypted, tells streams to stop after each piece that was
sent, and cuts off whoever takes longer than a moment over the last bytes. So the encryption is done here, in the
straightest way: what is written is encrypted at once, some at a time, and given to the socket's transport, which keeps
what the peer does not take. All limits, counts and calls about writing are that transport's own.

What comes in is decrypted into the buffer that all connections receive into. All encrypted bytes have a buffer
in common too, and OpenSSL is fed a little at a time, because it keeps for ever what it has once needed.
"""

import asyncio
import contextlib
import ssl
from typing import Any, Final, Protocol, cast

from upriver.errors import InvalidArguments

#: So many bytes are encrypted, or handed over to be decrypted, at once.
PIECE_BYTES: Final = 32 * 1024
#: What is received at once, of all connections.
ENCRYPTED_BYTES: Final = 256 * 1024


class TlsApplication(Protocol):
    """What is behind the encryption, and notices nothing of it; the node's ``Connection``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody has come, who has yet to shake hands."""

    def encryption_failed(self, why: str, *, greeted: bool) -> None:
        """The handshake came to nothing or, if they had greeted, what came behind it; the transport closes."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to put what came."""

    def buffer_updated(self, nbytes: int) -> None:
        """So much was put there."""

    def eof_received(self) -> bool | None:
        """The peer has said everything; True if it is still to be answered."""

    def pause_writing(self) -> None:
        """The peer leaves too much unread."""

    def resume_writing(self) -> None:
        """The peer has read."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Everything is over."""


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """One encrypted connection, from the server's end."""

    __slots__ = (
        "_behind",
        "_buffer",
        "_closing",
        "_deadline",
        "_greeted",
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
        #: Where all connections receive what is encrypted.
        self._buffer = encrypted
        self._handshake_s = handshake_s
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._socket: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None
        #: The handshake is done.
        self._greeted = False
        self._closing = False
        #: The connection took a break while there was more to decrypt.
        self._left = False
        #: The peer has said that nothing follows.
        self._over = False

    # The socket's transport calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        self._behind.connection_made(self)
        if not self.is_closing():
            self._deadline = asyncio.get_running_loop().call_later(self._handshake_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if not self._greeted and not self._closing:
            self._behind.encryption_failed("the peer left" if exc is None else str(exc), greeted=False)
        self._closing = True
        self._behind.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        into, filled = self._behind.get_buffer(-1), 0
        for start in range(0, nbytes, PIECE_BYTES):
            self._incoming.write(self._buffer[start : min(start + PIECE_BYTES, nbytes)])
            if self._greeted or self._greet():
                filled = self._decrypt(into, filled)
        self._hand_over(into, filled)

    def eof_received(self) -> bool:
        return self._greeted and self._end_input()

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()

    # The connection calls these

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send, or keep until it can be sent."""
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
        """Say good-bye, send everything, and close."""
        if self.is_closing():
            return
        self._closing = True
        if not self._greeted:
            self._socket.abort()
            return
        with contextlib.suppress(ssl.SSLError):  # that the other one has not said it yet
            self._tls.unwrap()
        self._send()
        self._socket.close()

    def abort(self) -> None:
        """Close now, whatever was not sent."""
        self._closing = True
        self._socket.abort()

    def is_closing(self) -> bool:
        """Nothing more will be sent."""
        return self._closing or self._socket.is_closing()

    def is_reading(self) -> bool:
        """Whether requests are taken."""
        return self._socket.is_reading()

    def pause_reading(self) -> None:
        """Take nothing more for a while."""
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Go on, first with what has come already."""
        self._socket.resume_reading()
        if self._left or self._over:
            asyncio.get_running_loop().call_soon(self._go_on)

    def get_write_buffer_size(self) -> int:
        """How many bytes, encrypted, the peer has left unread."""
        return self._socket.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Say so when more than that is left unread."""
        self._socket.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the socket."""
        return self._socket.get_extra_info(name, default)

    # Its own

    def _greet(self) -> bool:
        """Go on with the handshake; True if it is done."""
        if self.is_closing():
            return False
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            self._fail(error)
            return False
        self._greeted = True
        self._stop_waiting()
        return True

    def _decrypt(self, into: memoryview, filled: int) -> int:
        """Fill the buffer further with what has come whole; how much is in it."""
        read = cast(Any, self._tls.read)  # which is said to take no memoryview
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
        """Let the connection have what was decrypted, as long as it takes it."""
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
        """Nothing more will come; True if the connection has something to say yet."""
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
        """What came cannot be understood; OpenSSL has left a word about it for the peer."""
        if not self.is_closing():
            self._closing = True
            self._stop_waiting()
            self._behind.encryption_failed(error.strerror or str(error), greeted=self._greeted)
            self._send()
            self._socket.close()

    def _give_up(self) -> None:
        if not self.is_closing():
            self._behind.encryption_failed(f"it is not done within {self._handshake_s:g} s", greeted=False)
            self.abort()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def server_context(cert: str, key: str | None) -> ssl.SSLContext:
    """What a server with this certificate does; ``InvalidArguments`` if the files cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise InvalidArguments(f"the certificate {cert} with the key {key} cannot be used: {why}") from None
    return context
