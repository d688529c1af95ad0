"""The asyncio side of a session: it moves bytes, and decides their order.

Theory of operation. All connections of a node receive into one buffer, because each consumes its bytes before the next
one reads: an idle connection costs no buffer. A connection reads only while its session has answered everything and its
peer takes the answers, so the memory that a peer can make the node hold is bounded. A session's turn is bounded too: if
it has more to do, it continues in the event loop's next turn, after the others.

A session returns its answers and the streams that the requests woke. The first of these streams sends before the
answers, which are ready anyway, so that a live change is on its way at once. The others send after them: a writer does
not wait for all its listeners.

With TLS a connection counts from the moment it is accepted, so that peers that never finish their handshake count
against the limit. Nothing else is different: see ``tls_transport``.

A peer being disconnected gets ``LEAVE_S`` seconds to read its last answers; then the connection is aborted: see
``sweep``.
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
#: The time that a peer being disconnected gets to read its last answers.
LEAVE_S: Final = 30.0
#: A peer that has read anything within this time counts as reading.
READING_S: Final = 1.0
_COPIED_BYTES: Final = 64 * 1024


class ServerConnection(asyncio.BufferedProtocol):
    """One accepted connection."""

    __slots__ = (
        "_buffer",
        "_last_active",
        "_listen_address",
        "_logged_out_since",
        "_moved",
        "_node",
        "_passed",
        "_prepared",
        "_resuming",
        "_scheduled",
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
        self._listen_address = listen_address
        self._buffer = buffer
        #: When bytes were last seen to have moved.
        self._last_active = 0.0
        #: The bytes received and written, and how many of them had moved at the last look.
        self._passed = 0
        self._moved = 0
        #: When it connected, or was last seen logged in.
        self._logged_out_since = 0.0
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
        session = Session(node, peer, self.flush, self._listen_address)
        if node.counters.connections >= node.limits.connections_max or node.stopping:
            node.counters.connections_refused += 1
            why = "the node stops" if node.stopping else f"{node.counters.connections} connections are open"
            session.log.log(logging.DEBUG if node.stopping else logging.WARNING, "refused: %s", why)
            cast(asyncio.Transport, transport).abort()
            return
        session.log.debug("connected")
        self.session = session
        self._last_active = self._logged_out_since = loop.time()
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
        # Its unread answers are freed now, and not kept for the next peer.
        node.malloc_tuning.used(node.unread.release(self))
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
        """Answer what is left: a peer that half-closed its side may still be waiting for responses.

        It looks the same as a peer that is gone. So answers that the disk will complete soon are waited for, and
        requests that may wait for long are refused at once.
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

    # Sending

    @property
    def held_bytes(self) -> int:
        """The number of bytes held for the peer: requests that wait, answers that wait or are not read."""
        held = 0 if self.session is None else self.session.held_bytes
        return held + (0 if self._transport is None else self._transport.get_write_buffer_size())

    def flush(self) -> None:
        """Send what the session and its streams have, and close if the session is finished."""
        session, transport = self.session, self._transport
        if session is None or transport is None:
            return
        if transport.is_closing():
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
            # asyncio calls this after it sent the last bytes; closing now would make it call connection_lost twice.
            asyncio.get_running_loop().call_soon(self.flush)
        elif session.finished:
            self._leave(session)
            # A consumer that does not read does not want the rest of its streams.
            (transport.abort if stream is not None and stream.blocked else transport.close)()
        elif session.stalled or not transport.is_reading():
            self._regulate()

    def _write_turn(self, transport: asyncio.Transport, session: Session, stream: SessionStream) -> None:
        if not self._prepared:
            self._prepared = True
            prepare_for_streams(transport)
        if not stream.blocked:
            sent = write_turn(transport, session.data_to_send(), stream, self._node.send_buffer)
            self._node.counters.bytes_written += sent
            self._passed += sent
        session.paused = stream.blocked and session.unsent >= self._node.limits.unread_answer_bytes_max

    def _write(self, transport: asyncio.Transport, data: bytes) -> None:
        self._node.counters.bytes_written += len(data)
        self._passed += len(data)
        # asyncio slices off what it has sent; a view makes that free of copies.
        transport.write(memoryview(data) if len(data) > _COPIED_BYTES else data)

    def _hold_unread(self, session: Session, transport: asyncio.Transport) -> None:
        """Update the node's budget for answers that are not read, or wait."""
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
        """Note whether a byte has moved in either direction since the last look."""
        moved = self._passed - transport.get_write_buffer_size()
        if moved != self._moved:
            self._moved, self._last_active = moved, now

    def encryption_failed(self, why: str, *, handshake_done: bool) -> None:
        """Log that TLS failed: in the handshake or, if that was complete, after it."""
        if self.session is not None:
            self._node.counters.handshakes_failed += not handshake_done
            what = "TLS failed" if handshake_done else "the TLS handshake failed"
            self.session.log.warning("closed: %s: %s", what, why)

    def leave(self) -> None:
        """Take no more requests, and close when everything is answered."""
        if self.session is not None:
            self._leave(self.session)
            self.session.give_up()
            self.flush()

    def dismiss(self, why: str) -> None:
        """Close the connection for a reason that goes into the log."""
        if self.session is not None:
            self.session.log.info("closed: %s", why)
            self.leave()

    def abort(self) -> None:
        """Close now, and drop what was not sent."""
        if self._transport is not None:
            self._transport.abort()

    def sweep(self, now: float) -> None:
        """Close the connection if nothing has moved for too long."""
        session, transport, limits = self.session, self._transport, self._node.limits
        if session is None or transport is None:
            return
        if self._node.users is None or session.user is not None or session.listen_address.anonymous:
            self._logged_out_since = now
        elif now - self._logged_out_since >= limits.login_s and not session.closing:
            self.dismiss(f"no login within {limits.login_s:g} s")
            return
        self._look(now, transport)
        still_s = now - self._last_active
        if session.closing:
            if still_s >= LEAVE_S:
                session.log.warning("cut off: it did not read its last answers within %.0f s", LEAVE_S)
                transport.abort()
        elif session.stream is not None:  # it may be idle for long; noops detect a lost peer
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
        """Read only while everything is answered and the peer reads; continue with the rest in a later turn."""
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
    """Cut off peers until the unread answers fit the limit: those with the most for the longest first.

    Up to twice the limit, only peers that have not read for a moment are cut off: fresh answers take time to read.
    """
    unread, limit = node.unread, node.limits.unread_total_bytes_max
    before = unread.total_bytes
    for connection in unread:  # asyncio does not report how much peers have read
        connection._update_unread(now)
    for connection in unread.too_much(limit, now, lambda each: now - each._last_active >= READING_S):
        connection._cut_off(limit)
    for connection in unread.too_much(2 * limit, now):
        connection._cut_off(limit)
    node.malloc_tuning.used(before - unread.total_bytes)  # or malloc would keep it


def _unread_bytes(session: Session, transport: asyncio.Transport) -> int:
    """The number of bytes of answers that are not read, or wait.

    A consumer may leave its streams unread for as long as it wants, which costs one piece, unless it sends requests.
    """
    unsent = transport.get_write_buffer_size()
    if session.stream is None:
        return unsent + session.answers.waiting_bytes
    asked = session.unsent + session.answers.waiting_bytes
    return asked and asked + unsent


def _address(peer: tuple[str, int] | None) -> str:
    host, port = (peer or ("?", 0))[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
