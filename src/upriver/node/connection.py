"""The shell of a session: an asyncio connection that moves bytes and nothing else.

All connections of a node receive into one buffer, because each consumes what it was given before the next one reads:
an idle connection costs no buffer at all. When a peer does not read its answers, its session pauses and so does reading
from it, so nobody can make the node hold more than a bounded number of bytes for him.
"""

import asyncio
from typing import Final, cast

from upriver.node.session import Session
from upriver.node.state import NodeState

RECEIVE_BYTES: Final = 256 * 1024


class Connection(asyncio.BufferedProtocol):
    """One accepted connection."""

    __slots__ = ("_buffer", "_last_active", "_node", "_transport", "session")

    def __init__(self, node: NodeState, buffer: memoryview) -> None:
        self._node = node
        self._buffer = buffer
        self._last_active = 0.0
        self._transport: asyncio.Transport | None = None
        self.session: Session | None = None

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        node = self._node
        self._transport = cast(asyncio.Transport, transport)
        host, port = (transport.get_extra_info("peername") or ("?", 0))[:2]
        if node.counters.connections >= node.limits.connections_max:
            node.counters.connections_refused += 1
            node.log.warning("%s:%s: refused: %d connections are open", host, port, node.counters.connections)
            transport.close()
            return
        self._transport.set_write_buffer_limits(high=node.limits.unread_answer_bytes_max)
        self.session = Session(node, f"{host}:{port}", self.flush)
        node.sessions.add(self.session)
        node.counters.connections += 1
        node.counters.connections_total += 1
        if node.limits.idle_s:
            self._last_active = node.clock()
            node.scheduler.later(node.limits.idle_s, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self.session is not None:
            self.session.closing = True
            if self.session.stream is not None:
                self.session.stream.lose()
            self._node.sessions.discard(self.session)
            self._node.counters.connections -= 1
        self.session = self._transport = None

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        session = self.session
        if session is None:
            return
        self._node.counters.bytes_read += nbytes
        if self._node.limits.idle_s:
            self._last_active = self._node.clock()
        session.receive(self._buffer[:nbytes])
        self.flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self.session is not None and self.session.stream is not None:
            self.session.stream.blocked = True
        elif self.session is not None:
            self.session.paused = True

    def resume_writing(self) -> None:
        if self.session is not None and self._transport is not None and not self._transport.is_closing():
            if self.session.stream is not None:
                self.session.stream.blocked = False
            self.session.resume()
            self.flush()

    # Its own

    def flush(self) -> None:
        """Send what the session has to say, and close if it is done."""
        session, transport = self.session, self._transport
        if session is None or transport is None:
            return
        stream = session.stream
        if stream is not None:
            self._node.counters.bytes_written += stream.pump(transport)
            session.paused = stream.choked
        elif data := session.data_to_send():
            self._node.counters.bytes_written += len(data)
            transport.write(data)
        if session.closing:
            # Who does not read does not want what is left of a stream.
            (transport.abort if stream is not None and stream.blocked else transport.close)()
        elif session.saturated is transport.is_reading():
            (transport.pause_reading if session.saturated else transport.resume_reading)()

    def _close_if_idle(self) -> None:
        node, transport = self._node, self._transport
        if self.session is None or transport is None:
            return
        remaining = self._last_active + node.limits.idle_s - node.clock()
        if self.session.stream is not None:  # it may be quiet for long; whether the peer is there, noops tell
            remaining = node.limits.idle_s
        if remaining > 0:
            node.scheduler.later(remaining, self._close_if_idle)
            return
        node.log.info("%s: closed: idle for %.0f s", self.session.peer, node.limits.idle_s)
        transport.close()
