"""The source's part of a takeover, the same in every dialect: when it stops writing, and what it must know before the
other side may be told to be active.

At every moment at most one of the two copies is active, whatever fails. So the source is *dead* first, and that is on
its disk before the destination hears *active*: a source that crashes in between comes back dead. A destination that is
lost half-way leaves the source dead, because it may be active already; whoever moves vbuckets must ask it.

Several copies may be pending, left by takeovers that broke off before the source died. Only one of them was told more
than the others, so the source remembers with its death for whom it died: the name of the connection, which is the same
for every mover between the same two nodes and no others. Nobody else may go on with the takeover, or undo it. A copy
that an operator made dead has no successor: the first takeover that gets this far becomes it. When the
destination has answered that it is active the source remembers that too, before the stream ends: a takeover that is
over is not repeated, and not undone, whatever becomes of the destination's copy later.

Writers may be faster than the stream, and then the backlog is never small. So the source counts in rounds: one sends
what was there when it began, and leaves what was written meanwhile. While each leaves less than half of the last one
it pays to wait; when they shrink no more, writes stop, and the pause is as long as the last round was.
"""

import math
from collections.abc import Callable
from typing import Final

from upriver.model import VbucketState
from upriver.protocol.producer.source import Source, SourceVbucket

#: A takeover stops writes when no more than so many changes are still to be sent.
BACKLOG_SMALL: Final = 1000


class SourceTakeover:
    """One vbucket that is being handed over."""

    __slots__ = (
        "_backlog",
        "_on_durable",
        "_round_end",
        "_source",
        "_successor",
        "_vbucket",
        "dead",
        "durable",
        "over",
    )

    def __init__(
        self, source: Source, vbucket: SourceVbucket, successor: str, on_durable: Callable[[], object]
    ) -> None:
        self._source = source
        self._vbucket = vbucket
        self._successor = successor
        self._on_durable = on_durable
        #: Nobody writes any more.
        self.dead = False
        #: And that is on disk, together with everything that was written: the destination may be active.
        self.durable = False
        #: The destination is active, and that is on our disk too.
        self.over = False
        #: Where the round ends, and how much there was to send when it began.
        self._round_end = vbucket.high_seqno
        self._backlog: float = math.inf

    def is_near(self, seqno: int) -> bool:
        """A round is sent, and of what was written meanwhile little is left, or it gets no less by waiting."""
        if seqno < self._round_end:
            return False
        high_seqno = self._vbucket.high_seqno
        backlog = high_seqno - seqno
        if backlog <= BACKLOG_SMALL:
            return True
        shrinks = backlog * 2 < self._backlog
        self._round_end, self._backlog = high_seqno, backlog
        return not shrinks

    def make_dead(self) -> None:
        """Stop writes. What had come in between is still to be read, from a place of its own."""
        self._source.set_state(self._vbucket.number, VbucketState.DEAD, successor=self._successor)
        self.dead = True
        self._source.when_durable(self._dead_on_disk)

    def _dead_on_disk(self) -> None:
        self.durable = True
        self._on_durable()

    def confirm_takeover(self) -> None:
        """The destination has answered that it is active."""
        self._source.confirm_takeover(self._vbucket.number, self._successor)
        self._source.when_durable(self._confirmed_on_disk)

    def _confirmed_on_disk(self) -> None:
        self.over = True
        self._on_durable()
