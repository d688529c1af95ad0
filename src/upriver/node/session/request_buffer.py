"""The bytes that a session has received and not answered: part of a request, or requests for a later turn.

The memory of all connections together is limited. When it is exceeded, the node refuses the incomplete requests that
have held the most memory for the longest.
"""

from typing import TYPE_CHECKING, Final

from upriver.node.session.refusals import header_refusal
from upriver.wire import MEMCACHED, Buffer, Status

if TYPE_CHECKING:
    from upriver.node.session.session import Session

_HEADER_SIZE: Final = MEMCACHED.header_size


class RequestBuffer:
    """The unanswered bytes of one session."""

    __slots__ = ("data", "is_held", "needed", "since")

    def __init__(self) -> None:
        self.data = bytearray()
        #: When the first byte of the incomplete request came.
        self.since = 0.0
        #: The size of the incomplete request; 0 if it is unknown.
        self.needed = 0
        #: Whether the node's budget counts these bytes.
        self.is_held = False

    def take(self) -> bytes:
        """Take all bytes, to answer them."""
        data, self.data = bytes(self.data), bytearray()
        return data

    def keep(self, session: "Session", data: Buffer) -> None:
        """Keep bytes from now on."""
        self.data += data
        self.since = session.node.ticks()
        self.hold(session)

    def hold(self, session: "Session") -> None:
        """Update the node's budget. If it is exceeded, refuse requests that held the most memory for the longest."""
        partial, limit = session.node.partial, session.node.limits.partial_bytes_max
        self.is_held = bool(self.data)
        partial.hold(session, len(self.data), self.since)
        if partial.total_bytes > limit:
            for each in partial.too_much(limit, session.node.ticks(), _waits_for_its_peer):
                each.refuse_partial(limit)

    def drop(self, session: "Session") -> None:
        """Forget all bytes."""
        self.data, self.is_held = bytearray(), False
        session.node.partial.release(session)

    def refuse(self, session: "Session") -> None:
        """Refuse the incomplete request, if its header has come."""
        if len(self.data) >= _HEADER_SIZE and session.format is None:
            text = "too many requests are incomplete: send it again later"
            session.send(header_refusal(self.data, 0, Status.ENOMEM, text))


def _waits_for_its_peer(session: "Session") -> bool:
    """Whether the received bytes wait for the peer, and not for a turn or for the disk."""
    return session.paused or not session.stalled
