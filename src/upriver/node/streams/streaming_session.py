"""A session that streams, for every kind of streaming connection.

A stream that wakes up only takes note of it. If requests woke it, it sends in the same turn, after these requests were
carried out; otherwise in the event loop's next turn, together with everything that came until then. The connection
decides the order (see ``ServerConnection.buffer_updated``) and writes to the transport (see ``turn_writer``).
"""

import abc
import math
from collections.abc import Iterator

from upriver.node.session import Session
from upriver.node.state import NodeState, Timer
from upriver.wire import Buffer, Message


class StreamingSession(abc.ABC):
    """A session that streams."""

    #: It answers its own requests, without waiting for the peer.
    answers_at_once = True

    def __init__(self, node: NodeState, session: Session) -> None:
        self.node = node
        self.session = session
        #: The transport has not yet sent everything it was given.
        self.blocked = False
        #: There is no room for received changes: the session takes nothing more until there is.
        self.full = False
        #: The connection is closed.
        self.lost = False
        self._woken = False
        self._timer: Timer | None = None
        self._timer_at = math.inf

    # The kinds of connections differ in these

    def receive_run(self, data: Buffer, at: int) -> int:  # noqa: ARG002
        """Take a run of packets without making a message of each; return the offset where the run ends."""
        return at

    @abc.abstractmethod
    def receive(self, message: Message) -> bool:
        """Take a message; return False if it does not belong to a stream."""

    @abc.abstractmethod
    def produce(self) -> Buffer:
        """Return the next piece to send, empty if there is none or no window. A view lies in the node's send buffer."""

    @property
    @abc.abstractmethod
    def has_output(self) -> bool:
        """Whether ``produce`` may return something."""

    @property
    def turn_bytes(self) -> int:
        """About how many bytes a turn may send. It sends at least one piece."""
        return 0

    @abc.abstractmethod
    def on_time(self, now: float) -> None:
        """Handle a deadline that has passed."""

    @property
    def stream_count(self) -> int:
        """The number of streams that it sends."""
        return 0

    def behind(self) -> Iterator[tuple[tuple[str, int], object, int]]:
        """The streams with a backlog whose consumer has room for it: name and vbucket, stream, seqno."""
        return iter(())

    # Sending

    def wake(self) -> None:
        """Send soon: there may be something to send."""
        if not self._woken and not self.lost:
            self._woken = True
            self.node.wake_queue.add(self)

    def flush(self) -> None:
        """Let the connection send. A stream that fails ends its own connection, not the one whose change woke it."""
        self._woken = False
        session = self.session
        if self.lost or session.on_output is None:
            return
        try:
            session.on_output()
        except Exception:
            session.log.exception("closed: a stream's output could not be made")
            session.closing = True
            session.on_output()

    # Time

    def call_at(self, deadline: float | None) -> None:
        """Call ``on_time`` at this tick, unless an earlier call is planned."""
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

    # Closing

    def end(self) -> None:
        """End at once, with the last words of the dialect: the roles under which it began no longer hold."""
        self.session.put(self.last_words())
        self.lose()

    def last_words(self) -> bytes:
        """The messages that tell the peer that nothing more comes; empty where the dialect has none."""
        return b""

    def lose(self) -> None:
        """Forget the connection, which is closed."""
        self.lost = True
        self._stop_timer()
