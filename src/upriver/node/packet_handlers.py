"""Between a session and the parts of the node that answer its packets.

Theory of operation. A session cuts received bytes into packets and offers each to the node's handlers, in their order,
until one takes it. It knows neither their opcodes nor their dialects. A handler answers through the session; it may
attach a ``SessionStream``, which then sends on its own, or claim a connection whose packets have a header of their own.
"""

import abc
from typing import TYPE_CHECKING, Protocol

from upriver.errors import WireError
from upriver.wire import Buffer, Framing, Message

if TYPE_CHECKING:
    from upriver.node.session import Session


class ConnectionFormat(Protocol):
    """Packets with another header than memcached's; it takes every packet of its connection."""

    @property
    def framing(self) -> Framing:
        """The header."""

    def handle(self, session: "Session", packet: bytes) -> None:
        """Answer a packet."""

    def close_on_wire_error(self, session: "Session", error: WireError) -> None:
        """Close the connection: its bytes cannot be cut into packets any more."""


class PacketHandler(abc.ABC):
    """Answers one kind of packet."""

    def claim(self, session: "Session", first_byte: int) -> ConnectionFormat | None:  # noqa: ARG002
        """Claim a new connection by its first byte; None if its packets have memcached's header."""
        return None

    @abc.abstractmethod
    def handle(self, session: "Session", packet: bytes) -> bool:
        """Answer a packet; return False to leave it to the next handler."""

    def may_overtake(self, session: "Session", opcode: int) -> bool:  # noqa: ARG002
        """Whether answers to this request bypass answers that wait. The session then holds the request back."""
        return False


class SessionStream(Protocol):
    """The streams of a connection, as its session and its connection see them."""

    #: The transport has not yet sent everything it was given.
    blocked: bool
    #: There is no room for received changes: the session takes nothing more until there is.
    full: bool
    #: The connection is closed.
    lost: bool

    @property
    def has_output(self) -> bool:
        """Whether ``produce`` may return something."""

    @property
    def turn_bytes(self) -> int:
        """About how many bytes a turn may send. It sends at least one piece."""

    @property
    def answers_at_once(self) -> bool:
        """Whether it answers its own requests without waiting for the peer."""

    def receive_run(self, data: Buffer, at: int) -> int:
        """Take a run of packets without making a message of each; return the offset where the run ends."""

    def receive(self, message: Message) -> bool:
        """Take a message; return False if it does not belong to a stream."""

    def produce(self) -> Buffer:
        """Return the next piece to send, empty if there is none or no window. A view lies in the node's send buffer."""

    def wake(self) -> None:
        """Send soon: there may be something to send."""

    def flush(self) -> None:
        """Let the connection send."""

    def end(self) -> None:
        """End at once, with the last words of the dialect: the roles under which it began no longer hold."""

    def lose(self) -> None:
        """Forget the connection, which is closed."""
