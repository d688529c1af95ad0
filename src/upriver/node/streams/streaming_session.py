"""How changes flow from the history to a peer, the same for every kind of streaming connection.

Two things flow. Answers go out at once, before everything else. Changes are read from the history only when the
transport's buffer is empty, one piece at a time, and after a few pieces the next one waits for the event loop's next
turn: so a consumer that stops reading costs one piece of memory, and one that reads as fast as it can leaves room for
the others. A stream
that wakes up only takes note. If what some connection has received woke it, it sends in the same turn, when the
requests are carried out: a live change is on its way before anything else is looked at. The first stream that was woken
even goes before the answer, which is ready and as good as sent; the others come behind it, so that a writer does not
wait for all who listen. Otherwise a stream sends in the next turn, together with all that has come until then.
"""

import abc
import contextlib
import math
import socket
from collections.abc import Iterator
from typing import Any, Final, Protocol

from upriver.node.session import Session
from upriver.node.state import NodeState, Timer
from upriver.protocol.producer import PIECE_BYTES, TURN_BYTES
from upriver.wire import Buffer, Message

#: What the system keeps of a connection before it has been put on its way: room for a turn, or it would be cut.
UNSENT_BYTES: Final = TURN_BYTES


class Transport(Protocol):
    """As much of asyncio's as is needed here."""

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        """Say so when more than that is kept."""

    def write(self, data: bytes | memoryview) -> None:
        """Send, or keep until it can be sent."""

    def get_extra_info(self, name: str) -> Any:
        """What is known of the connection: its ``socket``."""


def _keep_queue_short(transport: Transport) -> None:
    """Let the system keep little of what cannot be sent yet: a live change waits behind all of it."""
    peer = transport.get_extra_info("socket")
    if peer is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):  # no TCP, or gone already
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class StreamingSession(abc.ABC):
    """A session that streams: moves pieces to the transport, and knows when to look at the time."""

    #: What it is asked it answers by itself, not when its peer has answered.
    answers_at_once = True

    def __init__(self, node: NodeState, session: Session) -> None:
        self.node = node
        self.session = session
        #: The transport has not sent yet what it was given.
        self.blocked = False
        #: There is no room for what comes: nothing more is taken until there is.
        self.full = False
        #: The connection is gone.
        self.lost = False
        self._pumped = False
        self._woken = False
        self._timer: Timer | None = None
        self._timer_at = math.inf

    # What the kinds of connections differ in

    def receive_run(self, data: Buffer, at: int) -> int:  # noqa: ARG002
        """Take at once what needs no message for each packet; where that ends."""
        return at

    @abc.abstractmethod
    def receive(self, message: Message) -> bool:
        """Take a message; False if it is none of a stream's."""

    @abc.abstractmethod
    def produce(self) -> Buffer:
        """The next piece to send; empty if there is nothing, or no room for it. A view stands in the node's outbox."""

    @property
    @abc.abstractmethod
    def has_output(self) -> bool:
        """Would ``produce`` hand out something, as far as one can know before trying?"""

    @property
    def turn_bytes(self) -> int:
        """After about so many bytes it is the others' turn; one piece it sends in any case."""
        return 0

    @abc.abstractmethod
    def on_time(self, now: float) -> None:
        """A deadline has come."""

    @property
    def stream_count(self) -> int:
        """How many streams it sends."""
        return 0

    def behind(self) -> Iterator[tuple[tuple[str, int], object, int]]:
        """The streams that have something to send, and whose consumer would take it: which, and where they stand."""
        return iter(())

    # Going out

    def wake(self) -> None:
        """There may be something to send: look when this turn's requests are answered, or in the next turn."""
        if not self._woken and not self.lost:
            self._woken = True
            if self.node.woken is not None:
                self.node.woken.append(self)
            else:
                self.node.scheduler.later(0.0, self.run)

    def run(self) -> None:
        """Send what there is. A stream that fails ends its own connection, not that of the writer who woke it."""
        self._woken = False
        session = self.session
        if self.lost or session.on_output is None:
            return
        try:
            session.on_output()
        except Exception:
            session.log.exception("what a stream sends could not be made")
            session.closing = True
            session.on_output()

    def pump(self, transport: Transport) -> int:
        """Write a turn's pieces as long as the transport keeps nothing of them; how many bytes."""
        if not self._pumped:
            # Every byte that the transport keeps blocks us, until it has sent them all.
            self._pumped = True
            transport.set_write_buffer_limits(high=0)
            _keep_queue_short(transport)
        if self.blocked:
            return 0
        answers = self.session.data_to_send()
        data = self.produce()
        if answers:
            data = answers + data
        written = 0
        while data:
            transport.write(memoryview(data))  # asyncio cuts off what it could send, which shall not be a copy
            written += len(data)
            if self.blocked:
                if isinstance(data, memoryview):
                    self.node.outbox.let_go()  # what the transport keeps must stay as it is
                break
            if not self.has_output:
                break
            if self.turn_bytes - written < PIECE_BYTES // 2:  # pieces are never quite full
                self.wake()
                break
            data = self.produce()
        return written

    @property
    def choked(self) -> bool:
        """The peer asks and asks and does not read the answers."""
        return self.blocked and self.session.unsent >= self.node.limits.unread_answer_bytes_max

    # Time

    def call_at(self, deadline: float | None) -> None:
        """Call ``on_time`` then, unless that is planned earlier already. It counts in ticks, which nobody sets."""
        if deadline is not None and deadline < self._timer_at and not self.lost:
            self._stop_timer()
            self._timer_at = deadline
            self._timer = self.node.scheduler.later(max(0.0, deadline - self.node.ticks()), self._on_time)

    def _on_time(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.on_time(self.node.ticks())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # The end

    def lose(self) -> None:
        """The connection is gone, and nothing shall hold on to it."""
        self.lost = True
        self._stop_timer()
