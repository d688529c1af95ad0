"""The source's part of a takeover, the same in every dialect.

At every moment at most one of the two copies is active, whatever fails. So the source becomes *dead* first, and that is
on its disk before the destination is told to become *active*: a source that crashes in between comes back dead. If the
destination is lost after that, the source stays dead, because the destination may be active already; a mover must ask
it.

Takeovers that broke off while the source was active may have left several pending copies. Only one takeover may go
further. So the source stores its *successor* with the state *dead*: the name of the connection, which is the same for
every mover between the same two nodes and for no others. No other connection may continue the takeover or undo it. A
copy that an operator made dead has no successor; the first takeover that gets this far becomes it. When the destination
has answered that it is active, the source stores that too, before the stream ends: a completed takeover is neither
repeated nor undone, whatever happens to the destination's copy later.

Writers may be faster than the stream, and then the backlog never becomes small. So the source counts in rounds: a round
sends what existed when it began, and leaves what was written meanwhile. While each round leaves less than half of the
one before, it waits. When the rounds stop shrinking, writes stop, and the pause is as long as the last round.
"""

import math
from collections.abc import Callable
from typing import Final

from upriver.model import VbucketState
from upriver.protocol.producer.source import Source, SourceVbucket

#: A takeover stops writes when at most this many changes are left to send.
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
        #: The copy is dead: no client writes any more.
        self.dead = False
        #: That is on disk, with everything that was written: the destination may become active.
        self.durable = False
        #: The destination is active, and that is on our disk too.
        self.over = False
        #: Where the round ends, and the backlog when it began.
        self._round_end = vbucket.high_seqno
        self._backlog: float = math.inf

    def is_near(self, seqno: int) -> bool:
        """Whether a round is sent and its backlog is small, or waiting no longer makes it smaller."""
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
        """Stop writes. The rest is read from a new position in the history."""
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
