"""One connection to a node: bytes, requests and their replies.

Thousands of requests can be outstanding; the opaque matches each reply to its request. A stream takes over the
connection: from then on its receiver gets all received bytes, in the buffer that they were read into. Every failure is
a typed error that names the node.
"""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from upriver import __version__
from upriver.client.transport.address import Address, Endpoint
from upriver.client.transport.handshake import shake_hands
from upriver.client.transport.replies import Reply, ReplyReader
from upriver.errors import ConnectionLost, TimedOut, Unreachable, UpriverError, WireError
from upriver.model import inflated, plain
from upriver.network import KEEPALIVE_S, do_not_pace, keep_alive
from upriver.wire import Request, Status
from upriver.wire.dialects.memcached import Feature, QuitQ

AGENT: Final = f"upriver/{__version__}"
CONNECT_TIMEOUT_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 1.0
#: After a timeout, a connection that has sent nothing for this long since a request is closed.
SILENCE_S: Final = 5.0
RECEIVE_BYTES: Final = 256 * 1024
#: ``drain`` waits while more than this many bytes are unsent.
UNSENT_BYTES_MAX: Final = 1024 * 1024


class Receiver(Protocol):
    """Receives the bytes of a connection that streams."""

    def receive(self, data: memoryview) -> None:
        """Take bytes; the memory is reused after this call."""

    def lost(self, error: UpriverError) -> None:
        """The connection is lost; no more bytes will come."""


class Collector:
    """Collects the replies to requests with consecutive opaques."""

    __slots__ = ("_missing", "done", "first", "last", "replies")

    def __init__(self, first: int, count: int, missing: int) -> None:
        self.first = first
        self.last = first + count - 1
        self.replies: list[Reply] = []
        self._missing = missing
        self.done: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()

    def take(self, reply: Reply) -> bool:
        """Add a reply and return whether it was the last. The reply to the last request always is."""
        self.replies.append(reply)
        self._missing -= 1 + len(reply.alike)
        if self._missing and (reply.alike or (reply.opaque,))[-1] != self.last:
            return False
        if not self.done.done():
            self.done.set_result(self.replies)
        return True


class Listing:
    """Collects the pieces of a reply; a piece without a key ends it."""

    __slots__ = ("_pieces", "done")

    def __init__(self) -> None:
        self._pieces: list[Reply] = []
        self.done: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()

    def take(self, reply: Reply) -> None:
        """Add a piece; an error ends the reply, too."""
        if self.done.done():
            return
        error = reply.error()
        if error is not None:
            self.done.set_exception(error)
        elif not reply.key:
            self.done.set_result(self._pieces)
        else:
            self._pieces.append(reply)


class Connection(asyncio.BufferedProtocol):
    """An open connection after its handshake."""

    def __init__(
        self, endpoint: Endpoint, receive_bytes: int = RECEIVE_BYTES, keepalive_s: float = KEEPALIVE_S
    ) -> None:
        self.endpoint = endpoint
        self.features: frozenset[Feature] = frozenset()
        self.error: UpriverError | None = None
        #: Called with a cluster map that a refusal carries.
        self.on_map: Callable[[bytes, Endpoint], object] | None = None
        self._keepalive_s = keepalive_s
        self._buffer = memoryview(bytearray(receive_bytes))
        self._transport: asyncio.Transport
        self._replies = ReplyReader()
        self._receiver: Receiver | None = None
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._collectors: list[Collector] = []
        self._listings: dict[int, Listing] = {}
        self._next_opaque = 1
        #: When the oldest request since the last received byte was sent.
        self._asked_at: float | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()

    @classmethod
    async def open(
        cls,
        endpoint: Endpoint,
        address: Address,
        *,
        agent: str = AGENT,
        receive_bytes: int = RECEIVE_BYTES,
        timeout_s: float = CONNECT_TIMEOUT_S,
        handshake: bool = True,
        tokens: bool = False,
    ) -> "Connection":
        """Connect and, with ``handshake``, send hello, log in and select the bucket."""
        loop = asyncio.get_running_loop()
        context = tls_context(address) if address.tls else None
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: cls(endpoint, receive_bytes, address.keepalive_s),
                    endpoint.host,
                    endpoint.port,
                    ssl=context,
                    server_hostname=endpoint.host if context else None,
                )
        except TimeoutError:
            why = f"no connection within {timeout_s:g} s; check the address and the network"
            raise Unreachable(str(endpoint), why) from None
        except ssl.SSLCertVerificationError as error:
            raise Unreachable(str(endpoint), f"the certificate is not trusted: {error.verify_message}") from None
        except ssl.SSLError as error:
            why = f"the TLS handshake failed: {error.reason or error}; check that this port speaks TLS"
            raise Unreachable(str(endpoint), why) from None
        except OSError as error:
            is_plain = context is not None and isinstance(error, ConnectionResetError)
            hint = "check that this port speaks TLS" if is_plain else "check the address, and that a node runs there"
            raise Unreachable(str(endpoint), f"cannot connect: {reason(error)}; {hint}") from None
        except (ValueError, OverflowError) as error:  # a cluster map may contain an invalid host or port
            raise Unreachable(str(endpoint), f"cannot connect: {error}; check the address") from None
        if handshake:
            try:
                ask = partial(connection.ask, timeout_s=timeout_s)
                connection.features = await shake_hands(ask, endpoint, address, agent, tokens=tokens)
            except BaseException:
                await connection.close()
                raise
        return connection

    @property
    def is_upriver_node(self) -> bool:
        """Whether the peer is an Upriver node and understands our own settings."""
        return Feature.UPRIVER in self.features

    @property
    def inflate(self) -> Callable[[bytes], bytes]:
        """The function that decompresses a value.

        A peer that has agreed on compression sends only valid compressed values. Other peers pass on what they got.
        """
        return inflated if Feature.SNAPPY in self.features else plain

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used."""
        return self.error is None

    @property
    def backed_up(self) -> bool:
        """Whether the peer reads too slowly; ``drain`` waits until it has caught up."""
        return not self._writable.is_set()

    # Requests

    def post(self, request: Request) -> "asyncio.Future[Reply]":
        """Send a request and return a future of its reply."""
        if self.error is not None:
            raise self.error
        request.opaque = opaque = self.reserve(1)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[opaque] = reply
        self._say(request.encode())
        return reply

    async def ask(self, request: Request, *, timeout_s: float = REQUEST_TIMEOUT_S) -> Reply:
        """Send a request and return its reply; raise the error that the node returns."""
        posted = self.post(request)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await posted
        except TimeoutError:
            self.give_up_if_silent()
            raise TimedOut(str(self.endpoint), f"no reply to {request.title()} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(request.opaque, None)
        error = reply.error(request.vbucket)
        if error is not None:
            raise error
        return reply

    async def ask_list(self, request: Request, *, timeout_s: float = REQUEST_TIMEOUT_S) -> list[Reply]:
        """Send a request whose reply comes in pieces, as statistics do, until a piece without a key."""
        if self.error is not None:
            raise self.error
        request.opaque = opaque = self.reserve(1)
        listing = self._listings[opaque] = Listing()
        try:
            self._say(request.encode())
            async with asyncio.timeout(timeout_s):
                return await listing.done
        except TimeoutError:
            self.give_up_if_silent()
            raise TimedOut(str(self.endpoint), f"no reply to {request.title()} within {timeout_s:g} s") from None
        finally:
            self._listings.pop(opaque, None)

    async def collect(
        self, data: "bytes | bytearray | memoryview", first: int, count: int, missing: int, timeout_s: float
    ) -> list[Reply]:
        """Send encoded requests with opaques from ``first`` on and return their replies.

        At most ``missing`` replies come. The reply to the last request ends the run even if quiet requests before it
        got none.
        """
        if self.error is not None:
            raise self.error
        collector = Collector(first, count, missing)
        self._collectors.append(collector)
        try:
            async with asyncio.timeout(timeout_s):
                self._say(data)
                await self._writable.wait()
                return await collector.done
        except TimeoutError:
            self.give_up_if_silent()
            raise TimedOut(str(self.endpoint), f"no reply to {count} requests within {timeout_s:g} s") from None
        finally:
            if collector in self._collectors:
                self._collectors.remove(collector)

    def _say(self, data: "bytes | bytearray | memoryview") -> None:
        """Send data that expects a reply."""
        if self._asked_at is None:
            self._asked_at = asyncio.get_running_loop().time()
        self._transport.write(data)

    def give_up_if_silent(self) -> None:
        """After a timeout: close the connection if the node has sent nothing at all.

        A firewall that dropped the connection, or a machine that is gone, reports nothing. The system would retry for
        a quarter of an hour, and every further request would time out as well.
        """
        silent_s = 0.0 if self._asked_at is None else asyncio.get_running_loop().time() - self._asked_at
        if silent_s >= SILENCE_S and self.error is None:
            self._fail(ConnectionLost(str(self.endpoint), f"the node has sent nothing for {silent_s:.0f} s"))
            self._transport.abort()

    def reserve(self, count: int) -> int:
        """Reserve ``count`` consecutive opaques and return the first."""
        first = self._next_opaque
        if first + count > 0xFFFFFFFF:
            first = 1
        self._next_opaque = first + count
        return first

    def write(self, data: bytes) -> None:
        """Send raw bytes."""
        if self.error is None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the peer has read most of what was sent."""
        await self._writable.wait()
        if self.error is not None:
            raise self.error

    def refused(self, status: int, value: bytes) -> None:
        """Pass on the cluster map in a refusal: a node that does not have a vbucket says who has it."""
        if status == Status.NOT_MY_VBUCKET and value[:1] == b"{" and self.on_map is not None:
            self.on_map(value, self.endpoint)

    # Streaming

    def stream_to(self, receiver: Receiver) -> None:
        """Give all bytes from now on to a receiver."""
        self._receiver = receiver
        if self.error is not None:  # lost before the receiver was set
            asyncio.get_running_loop().call_soon(receiver.lost, self.error)

    def pause(self) -> None:
        """Stop reading, so that the peer has to wait."""
        if self.error is None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self.error is None:
            self._transport.resume_reading()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(UNSENT_BYTES_MAX)
        connected = transport.get_extra_info("socket")
        do_not_pace(connected)
        keep_alive(connected, self._keepalive_s)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        received = self._buffer[:nbytes]
        self._asked_at = None
        try:
            if self._receiver is not None:
                self._receiver.receive(received)
            else:
                for reply in self._replies.feed(received):
                    self._dispatch(reply)
        except WireError as error:
            self._fail(ConnectionLost(str(self.endpoint), f"protocol error: {error}"))
            self._transport.abort()

    def _dispatch(self, reply: Reply) -> None:
        if reply.status:
            self.refused(reply.status, reply.value)
        if reply.alike and not self._is_collected(reply):
            for opaque in (reply.opaque, *reply.alike):
                self._hand_over(reply._replace(opaque=opaque, alike=()))
            return
        self._hand_over(reply)

    def _is_collected(self, reply: Reply) -> bool:
        """Whether all these errors belong to one run of requests."""
        lowest, highest = min(reply.opaque, *reply.alike), max(reply.opaque, *reply.alike)
        return any(collector.first <= lowest and highest <= collector.last for collector in self._collectors)

    def _hand_over(self, reply: Reply) -> None:
        """Pass a reply to the caller that waits for it."""
        waiting = self._waiting.pop(reply.opaque, None)
        if waiting is not None:
            if not waiting.done():
                waiting.set_result(reply)
            return
        listing = self._listings.get(reply.opaque)
        if listing is not None:
            listing.take(reply)
            return
        for collector in self._collectors:
            if collector.first <= reply.opaque <= collector.last:
                if collector.take(reply):
                    self._collectors.remove(collector)
                return
        # Otherwise the caller has stopped waiting.

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        why = "the node closed the connection" if error is None else f"the connection was lost: {error}"
        self._fail(ConnectionLost(str(self.endpoint), why))
        self._gone.set()

    def _fail(self, error: UpriverError) -> None:
        if self.error is not None:
            return
        self.error = error
        self._writable.set()
        waiting, self._waiting = self._waiting, {}
        several: tuple[Collector | Listing, ...] = (*self._collectors, *self._listings.values())
        futures: list[asyncio.Future[Any]] = [*waiting.values(), *(each.done for each in several)]
        for each in futures:
            if not each.done():
                each.set_exception(error)
                each.exception()  # marks it as seen: a caller that timed out will not
        if self._receiver is not None:
            self._receiver.lost(error)

    async def close(self) -> None:
        """Send a quit and close; outstanding requests fail."""
        if self.error is None:
            if self._receiver is None:  # a stream needs no quit
                self._transport.write(QuitQ().encode())
            self._fail(ConnectionLost(str(self.endpoint), "the client closed the connection"))
        self._transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._gone.wait()
        except TimeoutError:  # the node does not read
            self._transport.abort()
            await self._gone.wait()

    def abort(self) -> None:
        """Close at once, without a quit."""
        self._fail(ConnectionLost(str(self.endpoint), "the client closed the connection"))
        self._transport.abort()


def reason(error: OSError) -> str:
    """The system's reason for a failed connection: asyncio replaces it with the address, or joins several."""
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    number = error.errno or next((int(each) for each in re.findall(r"\[Errno (\d+)\]", str(error))), 0)
    return os.strerror(number) if number else str(error) or type(error).__name__


def tls_context(address: Address) -> ssl.SSLContext:
    """The TLS context with the certificates that we trust."""
    try:
        return ssl.create_default_context(cafile=address.ca)
    except OSError as error:
        raise Unreachable(str(address), f"cannot read the certificates in {address.ca}: {error}") from None
