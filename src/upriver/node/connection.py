"""The shell of a session: an asyncio connection that moves bytes and nothing else.

Theory of operation. All connections of a node receive into one buffer, because each consumes what it was given before
the next one reads: an idle connection costs no buffer at all. A connection reads only while its session has answered
everything that was read and its peer takes the answers. So nobody can make the node hold more than a bounded number of
bytes for him, and because a session's turn is bounded too, nobody can keep it from the others: a session that has more
to do goes on in the event loop's next turn.

With TLS a connection counts from the moment it is accepted, so that peers who never finish their handshake cannot be
more than the limit allows. It notices nothing else of it: see ``tls``.

Who is told to go is given some time to take his last answers, and is then cut off: see ``sweep``.
"""

import asyncio
import logging
from typing import Final, cast

from upriver.node.options import ListenAddress
from upriver.node.packet_handlers import SessionStream
from upriver.node.session import Session
from upriver.node.state import NodeState
from upriver.node.streams.turn_writer import prepare_for_streams, write_turn

RECEIVE_BYTES: Final = 256 * 1024
#: A peer that was told to go may take so long over its last answers.
LEAVE_S: Final = 30.0
#: Who has read something within this time is reading.
READING_S: Final = 1.0
_COPIED_BYTES: Final = 64 * 1024


class ServerConnection(asyncio.BufferedProtocol):
    """One accepted connection."""

    __slots__ = (
        "_buffer",
        "_entrance",
        "_last_active",
        "_moved",
        "_node",
        "_passed",
        "_prepared",
        "_resuming",
        "_scheduled",
        "_stranger_since",
        "_transport",
        "session",
    )

    def __init__(
        self,
        node: NodeState,
        buffer: memoryview,
        listen_address: ListenAddress = ListenAddress(),  # noqa: B008 (it never changes)
    ) -> None:
        self._node = node
        self._entrance = listen_address
        self._buffer = buffer
        #: When somebody last saw that something had moved.
        self._last_active = 0.0
        #: How many bytes were received and written, and how many of them had moved when somebody last looked.
        self._passed = 0
        self._moved = 0
        #: When it had last logged in, or came.
        self._stranger_since = 0.0
        self._scheduled = False
        self._resuming = False
        #: The transport is set up for streams.
        self._prepared = False
        self._transport: asyncio.Transport | None = None
        self.session: Session | None = None

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        node, loop = self._node, asyncio.get_running_loop()
        peer = _address(transport.get_extra_info("peername"))
        session = Session(node, peer, self.flush, self._entrance)
        if node.counters.connections >= node.limits.connections_max or node.stopping:
            node.counters.connections_refused += 1
            why = "the node stops" if node.stopping else f"{node.counters.connections} connections are open"
            session.log.log(logging.DEBUG if node.stopping else logging.WARNING, "refused: %s", why)
            cast(asyncio.Transport, transport).abort()
            return
        session.log.debug("connected")
        self.session = session
        self._last_active = self._stranger_since = loop.time()
        node.connections.add(self)
        node.counters.connections += 1
        node.counters.connections_total += 1
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=node.limits.unread_answer_bytes_max)

    def connection_lost(self, exc: Exception | None) -> None:
        session, node = self.session, self._node
        self.session = self._transport = None
        if session is None:
            return
        session.end()
        if session.stream is not None:
            session.stream.lose()
        session.log.debug("disconnected%s", "" if exc is None else f": {exc}")
        node.connections.discard(self)
        node.watched.discard(self)
        # What it left unread is free now; whoever wants as much next time is not waited for.
        node.heap.used(node.unread.release(self))
        node.counters.connections -= 1

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        session, node = self.session, self._node
        if session is None or session.closing:
            return
        node.counters.bytes_read += nbytes
        self._passed += nbytes
        answers, woken = session.serve(self._buffer, nbytes)
        try:
            if answers is None:
                self.flush()
            elif answers and self._transport is not None:
                if woken:  # the answer is ready, so one stream may go first; more of them would delay the writer
                    woken.pop(0).flush()
                self._write(self._transport, answers)
                if self._transport.get_write_buffer_size():
                    self._hold_unread(session, self._transport)
        finally:
            for stream in woken:
                stream.flush()

    def eof_received(self) -> bool:
        """Whoever has said everything may still wait for answers.

        One cannot tell a peer that waits from one that is gone. So what the disk is about to end is waited for; what
        may last is refused at once, and if nobody is there to hear it, the transport finds out.
        """
        session = self.session
        if session is None or not session.waiting:
            return False
        self._leave(session)
        session.give_up()
        return True

    def pause_writing(self) -> None:
        if self.session is not None and self.session.stream is not None:
            self.session.stream.blocked = True
        elif self.session is not None:
            self.session.paused = True
            self._regulate()

    def resume_writing(self) -> None:
        if self.session is not None:
            if self.session.stream is not None:
                self.session.stream.blocked = False
            self.session.resume()
            self._resuming = True
            try:
                (self.flush if self.session.stream is None else self.session.stream.flush)()
            finally:
                self._resuming = False

    # Its own

    @property
    def held_bytes(self) -> int:
        """How many bytes are held for the peer: requests that wait, answers that wait or are not read."""
        held = 0 if self.session is None else self.session.held_bytes
        return held + (0 if self._transport is None else self._transport.get_write_buffer_size())

    def flush(self) -> None:
        """Send what the session has to say, and close if it is done."""
        session, transport = self.session, self._transport
        if session is None or transport is None:
            return
        if transport.is_closing():  # nothing reaches the peer any more
            session.data_to_send()
            return
        stream = session.stream
        if stream is not None:
            self._write_turn(transport, session, stream)
        elif data := session.data_to_send():
            self._write(transport, data)
        self._hold_unread(session, transport)
        if session.unread or session.closing:
            self._node.watched.add(self)
        if session.finished and self._resuming:
            # asyncio, which has just sent the last of it, would tell twice that the connection is lost.
            asyncio.get_running_loop().call_soon(self.flush)
        elif session.finished:
            self._leave(session)
            # Who does not read does not want what is left of a stream.
            (transport.abort if stream is not None and stream.blocked else transport.close)()
        elif session.stalled or not transport.is_reading():
            self._regulate()

    def _write_turn(self, transport: asyncio.Transport, session: Session, stream: SessionStream) -> None:
        if not self._prepared:
            self._prepared = True
            prepare_for_streams(transport)
        if not stream.blocked:
            sent = write_turn(transport, session.data_to_send(), stream, self._node.outbox)
            self._node.counters.bytes_written += sent
            self._passed += sent
        session.paused = stream.blocked and session.unsent >= self._node.limits.unread_answer_bytes_max

    def _write(self, transport: asyncio.Transport, data: bytes) -> None:
        self._node.counters.bytes_written += len(data)
        self._passed += len(data)
        # asyncio cuts off what it could send at once, and megabytes are not to be copied for that.
        transport.write(memoryview(data) if len(data) > _COPIED_BYTES else data)

    def _hold_unread(self, session: Session, transport: asyncio.Transport) -> None:
        """Keep the node's sum of answers that are not read, or wait."""
        unread = self._node.unread
        size = _unread_bytes(session, transport)
        if not size and self not in unread:
            return
        now = asyncio.get_running_loop().time()
        self._look(now, transport)
        unread.hold(self, size, self._last_active)
        self._node.watched.add(self)
        if unread.total_bytes > self._node.limits.unread_total_bytes_max:
            _make_room(self._node, now)

    def _update_unread(self, now: float) -> None:
        if self.session is not None and self._transport is not None:
            self._look(now, self._transport)
            self._node.unread.hold(self, _unread_bytes(self.session, self._transport), self._last_active)

    def _cut_off(self, limit: int) -> None:
        if self.session is not None and self._transport is not None:
            self.session.log.warning("cut off: unread answers of all connections take more than %d bytes", limit)
            self._transport.abort()
        self._node.unread.release(self)

    def _look(self, now: float, transport: asyncio.Transport) -> None:
        """See whether a byte has moved, in either direction, since somebody last looked."""
        moved = self._passed - transport.get_write_buffer_size()
        if moved != self._moved:
            self._moved, self._last_active = moved, now

    def encryption_failed(self, why: str, *, greeted: bool) -> None:
        """TLS has come to an end that is none: in the handshake or, if they had greeted, behind it."""
        if self.session is not None:
            self._node.counters.handshakes_failed += not greeted
            self.session.log.warning("closed: %s: %s", "TLS failed" if greeted else "the TLS handshake failed", why)

    def leave(self) -> None:
        """Take no more requests; close when everything is answered."""
        if self.session is not None:
            self._leave(self.session)
            self.session.give_up()
            self.flush()

    def dismiss(self, why: str) -> None:
        """Close it, because somebody decided so."""
        if self.session is not None:
            self.session.log.info("closed: %s", why)
            self.leave()

    def abort(self) -> None:
        """Close now, whatever was not sent."""
        if self._transport is not None:
            self._transport.abort()

    def sweep(self, now: float) -> None:
        """Close it if nothing has moved for too long."""
        session, transport, limits = self.session, self._transport, self._node.limits
        if session is None or transport is None:
            return
        if self._node.users is None or session.user is not None or session.listen_address.anonymous:
            self._stranger_since = now
        elif now - self._stranger_since >= limits.login_s and not session.closing:
            self.dismiss(f"no login within {limits.login_s:g} s")
            return
        self._look(now, transport)
        still_s = now - self._last_active
        if session.closing:
            if still_s >= LEAVE_S:
                session.log.warning("cut off: it did not take its last answers within %.0f s", LEAVE_S)
                transport.abort()
        elif session.stream is not None:  # it may be quiet for long; whether the peer is there, noops tell
            self._node.watched.discard(self)
        else:
            self._sweep_requests(session, transport, still_s)

    def _sweep_requests(self, session: Session, transport: asyncio.Transport, still_s: float) -> None:
        limits, unread = self._node.limits, transport.get_write_buffer_size()
        self._hold_unread(session, transport)
        if not (unread or session.unread or session.waiting):
            self._node.watched.discard(self)
        left = "it left its answers unread" if unread else "half a request came" if session.unread else ""
        limit_s = min(filter(None, (limits.idle_s, limits.stuck_s if left else 0)), default=0)
        if limit_s and still_s >= limit_s and not session.waiting and (session.paused or not session.stalled):
            session.log.info("closed: idle for %g s%s", limit_s, left and f", {left}")
            transport.abort() if unread else transport.close()

    def _leave(self, session: Session) -> None:
        if not session.closing or session.finished:
            self._last_active = asyncio.get_running_loop().time()
        session.closing = True
        self._node.watched.add(self)

    def _regulate(self) -> None:
        """Read only while everything is answered and the peer reads; go on with what was left, in a later turn."""
        session, transport = self.session, self._transport
        if session is None or transport is None or transport.is_closing():
            return
        if session.stalled or session.paused:
            transport.pause_reading()
        else:
            transport.resume_reading()
        if session.stalled and not session.blocked and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._scheduled = False
        if self.session is not None and self.session.stalled and not self.session.blocked:
            self.session.resume()
            self.flush()


def _make_room(node: NodeState, now: float) -> None:
    """All together have too much unread: who has left most for longest is cut off. What was just answered nobody can
    have read, so up to twice the limit only those go who have not moved for a moment."""
    unread, limit = node.unread, node.limits.unread_total_bytes_max
    before = unread.total_bytes
    for connection in unread:  # some have read meanwhile, which nobody tells
        connection._update_unread(now)
    for connection in unread.too_much(limit, now, lambda each: now - each._last_active >= READING_S):
        connection._cut_off(limit)
    for connection in unread.too_much(2 * limit, now):
        connection._cut_off(limit)
    node.heap.used(before - unread.total_bytes)  # what was theirs would be kept for the next who want as much


def _unread_bytes(session: Session, transport: asyncio.Transport) -> int:
    """How many bytes of answers are not read, or wait. A consumer may leave its stream unread for as long as it wants,
    which costs a piece; but not if it goes on asking."""
    unsent = transport.get_write_buffer_size()
    if session.stream is None:
        return unsent + session.waiting_bytes
    asked = session.unsent + session.waiting_bytes
    return asked and asked + unsent


def _address(peer: tuple[str, int] | None) -> str:
    host, port = (peer or ("?", 0))[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
