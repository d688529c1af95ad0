"""One connection to a node: bytes, requests and their answers.

Requests are numbered by their opaque and may be on their way by the thousand; answers find whoever asked. A stream
takes the received bytes over for itself: from then on they go to its receiver, in the buffer that they were read into.
Every way to fail is a typed error that names the node.
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
from upriver.client.transport.handshake import greet
from upriver.client.transport.replies import Reply, ReplyReader
from upriver.errors import ConnectionLost, TimedOut, Unreachable, UpriverError, WireError
from upriver.model import inflated, plain
from upriver.network import do_not_pace
from upriver.wire import Request, Status
from upriver.wire.dialects.memcached import Feature, QuitQ

AGENT: Final = f"upriver/{__version__}"
CONNECT_TIMEOUT_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 1.0
#: A connection that was asked something and has said nothing for so long is given up when somebody stops waiting.
SILENCE_S: Final = 5.0
RECEIVE_BYTES: Final = 256 * 1024
#: ``drain`` waits while more than this is unsent.
UNSENT_BYTES_MAX: Final = 1024 * 1024


class Receiver(Protocol):
    """Who gets the received bytes of a connection that streams."""

    def receive(self, data: memoryview) -> None:
        """Take bytes; the memory is used again after this call."""

    def lost(self, error: UpriverError) -> None:
        """Nothing more comes."""


class Collector:
    """The answers to a run of requests whose opaques follow each other."""

    __slots__ = ("_missing", "done", "first", "last", "replies")

    def __init__(self, first: int, count: int, missing: int) -> None:
        self.first = first
        self.last = first + count - 1
        self.replies: list[Reply] = []
        self._missing = missing
        self.done: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()

    def take(self, reply: Reply) -> bool:
        """Keep an answer; True if it was the last. The answer to the last request always ends it."""
        self.replies.append(reply)
        self._missing -= 1 + len(reply.alike)
        if self._missing and (reply.alike or (reply.opaque,))[-1] != self.last:
            return False
        if not self.done.done():
            self.done.set_result(self.replies)
        return True


class Listing:
    """The pieces of an answer that ends with one that has no key."""

    __slots__ = ("_pieces", "done")

    def __init__(self) -> None:
        self._pieces: list[Reply] = []
        self.done: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()

    def take(self, reply: Reply) -> None:
        """Keep a piece; a refusal ends it, too."""
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
    """An open, greeted connection."""

    def __init__(self, endpoint: Endpoint, receive_bytes: int = RECEIVE_BYTES) -> None:
        self.endpoint = endpoint
        self.features: frozenset[Feature] = frozenset()
        self.error: UpriverError | None = None
        #: Whom to tell of a cluster map that comes along with a refusal.
        self.on_map: Callable[[bytes, Endpoint], object] | None = None
        self._buffer = memoryview(bytearray(receive_bytes))
        self._transport: asyncio.Transport
        self._replies = ReplyReader()
        self._receiver: Receiver | None = None
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._collectors: list[Collector] = []
        self._listings: dict[int, Listing] = {}
        self._next_opaque = 1
        #: When it was asked something for the first time since it said anything.
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
        greeting: bool = True,
        tokens: bool = False,
    ) -> "Connection":
        """Connect and, unless the dialect knows no such thing, say hello, log in and select the bucket."""
        loop = asyncio.get_running_loop()
        context = tls_context(address) if address.tls else None
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: cls(endpoint, receive_bytes),
                    endpoint.host,
                    endpoint.port,
                    ssl=context,
                    server_hostname=endpoint.host if context else None,
                )
        except TimeoutError:
            raise Unreachable(str(endpoint), f"no connection within {timeout_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise Unreachable(str(endpoint), f"its certificate is not trusted: {error.verify_message}") from None
        except ssl.SSLError as error:
            why = f"no TLS connection: {error.reason or error}; does it speak TLS on this port?"
            raise Unreachable(str(endpoint), why) from None
        except OSError as error:
            hint = "; does it speak TLS on this port?" if context and isinstance(error, ConnectionResetError) else ""
            raise Unreachable(str(endpoint), f"cannot connect: {reason(error)}{hint}") from None
        except (ValueError, OverflowError) as error:  # a cluster map may name what is no host or port
            raise Unreachable(str(endpoint), f"cannot connect: {error}") from None
        if greeting:
            try:
                ask = partial(connection.ask, timeout_s=timeout_s)
                connection.features = await greet(ask, endpoint, address, agent, tokens=tokens)
            except BaseException:
                await connection.close()
                raise
        return connection

    @property
    def is_upriver_node(self) -> bool:
        """Whether the node understands our own settings."""
        return Feature.UPRIVER in self.features

    @property
    def inflate(self) -> Callable[[bytes], bytes]:
        """What makes a compressed value plain.

        Who has agreed on compression makes no mistake in it. Others send what came from elsewhere as it came.
        """
        return inflated if Feature.SNAPPY in self.features else plain

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return self.error is None

    @property
    def backed_up(self) -> bool:
        """Whether the other side is slow to take what was sent; ``drain`` waits for it."""
        return not self._writable.is_set()

    # Asking

    def post(self, request: Request) -> "asyncio.Future[Reply]":
        """Send a request; its answer, or what kept it away, comes through the future."""
        if self.error is not None:
            raise self.error
        request.opaque = opaque = self.reserve(1)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[opaque] = answer
        self._say(request.encode())
        return answer

    async def ask(self, request: Request, *, timeout_s: float = REQUEST_TIMEOUT_S) -> Reply:
        """Send a request and wait for its answer; a refusal is raised."""
        answer = self.post(request)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await answer
        except TimeoutError:
            self.give_up_if_silent()
            raise TimedOut(str(self.endpoint), f"no answer to {request.title()} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(request.opaque, None)
        error = reply.error(request.vbucket)
        if error is not None:
            raise error
        return reply

    async def ask_list(self, request: Request, *, timeout_s: float = REQUEST_TIMEOUT_S) -> list[Reply]:
        """Send a request that is answered piece by piece, as statistics are, until a piece without a key."""
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
            raise TimedOut(str(self.endpoint), f"no answer to {request.title()} within {timeout_s:g} s") from None
        finally:
            self._listings.pop(opaque, None)

    async def collect(
        self, data: "bytes | bytearray | memoryview", first: int, count: int, missing: int, timeout_s: float
    ) -> list[Reply]:
        """Send a run of encoded requests numbered from ``first`` and wait for their answers.

        ``missing`` is how many answers come at most; the answer to the last request ends the run even if the quiet
        ones before it stayed silent.
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
            raise TimedOut(str(self.endpoint), f"{count} requests not answered within {timeout_s:g} s") from None
        finally:
            if collector in self._collectors:
                self._collectors.remove(collector)

    def _say(self, data: "bytes | bytearray | memoryview") -> None:
        """Send something that wants an answer."""
        if self._asked_at is None:
            self._asked_at = asyncio.get_running_loop().time()
        self._transport.write(data)

    def give_up_if_silent(self) -> None:
        """Somebody waits no longer. If nothing at all comes the connection is dead, although nobody has said so.

        A firewall that has forgotten it, or a machine that is gone, tells nobody; the system would try for a quarter of
        an hour, in which every further question would be in vain.
        """
        silent_s = 0.0 if self._asked_at is None else asyncio.get_running_loop().time() - self._asked_at
        if silent_s >= SILENCE_S and self.error is None:
            self._fail(ConnectionLost(str(self.endpoint), f"it has said nothing for {silent_s:.0f} s"))
            self._transport.abort()

    def reserve(self, count: int) -> int:
        """The first of so many opaques in a row."""
        first = self._next_opaque
        if first + count > 0xFFFFFFFF:
            first = 1
        self._next_opaque = first + count
        return first

    def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        if self.error is None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the other side has taken most of what was sent."""
        await self._writable.wait()
        if self.error is not None:
            raise self.error

    def refused(self, status: int, value: bytes) -> None:
        """A node that does not have a vbucket says who has: the map stands in its refusal."""
        if status == Status.NOT_MY_VBUCKET and value[:1] == b"{" and self.on_map is not None:
            self.on_map(value, self.endpoint)

    # Streaming

    def stream_to(self, receiver: Receiver) -> None:
        """Give everything that is received from now on to a stream."""
        self._receiver = receiver
        if self.error is not None:  # it was lost before anybody listened
            asyncio.get_running_loop().call_soon(receiver.lost, self.error)

    def pause(self) -> None:
        """Read nothing for now, so that the other side has to wait."""
        if self.error is None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self.error is None:
            self._transport.resume_reading()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(UNSENT_BYTES_MAX)
        do_not_pace(transport.get_extra_info("socket"))

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
            self._fail(ConnectionLost(str(self.endpoint), f"what it sends is not the protocol: {error}"))
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
        """Whether all these refusals belong to one run of requests."""
        lowest, highest = min(reply.opaque, *reply.alike), max(reply.opaque, *reply.alike)
        return any(collector.first <= lowest and highest <= collector.last for collector in self._collectors)

    def _hand_over(self, reply: Reply) -> None:
        """Give an answer to whoever has asked."""
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
        # Whoever asked has given up waiting.

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        why = "it closed the connection" if error is None else f"the connection broke: {error}"
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
                each.exception()  # whoever gave up waiting does not look at it any more
        if self._receiver is not None:
            self._receiver.lost(error)

    async def close(self) -> None:
        """Say good-bye and close; what is on its way is lost."""
        if self.error is None:
            if self._receiver is None:  # in the middle of streams nobody waits for a good-bye
                self._transport.write(QuitQ().encode())
            self._fail(ConnectionLost(str(self.endpoint), "we closed the connection"))
        self._transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._gone.wait()
        except TimeoutError:  # it does not read what we have sent
            self._transport.abort()
            await self._gone.wait()

    def abort(self) -> None:
        """Close without a word."""
        self._fail(ConnectionLost(str(self.endpoint), "we closed the connection"))
        self._transport.abort()


def reason(error: OSError) -> str:
    """Why a connection failed, in the system's words: asyncio puts the address in their place, or joins several."""
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    number = error.errno or next((int(each) for each in re.findall(r"\[Errno (\d+)\]", str(error))), 0)
    return os.strerror(number) if number else str(error) or type(error).__name__


def tls_context(address: Address) -> ssl.SSLContext:
    """What we trust."""
    try:
        return ssl.create_default_context(cafile=address.ca)
    except OSError as error:
        raise Unreachable(str(address), f"the certificates in {address.ca} cannot be read: {error}") from None
