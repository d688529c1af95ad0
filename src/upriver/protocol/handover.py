"""The source's part of a takeover, the same in every dialect: when it stops writing, and what it must know before the
other side may be told to be active.

At every moment at most one of the two copies is active, whatever fails. So the source is *dead* first, and that is on
its disk before the destination hears *active*: a source that crashes in between comes back dead. A destination that is
lost half-way leaves the source dead, because it may be active already; whoever moves vbuckets must ask it.

Several copies may be pending, left by takeovers that broke off before the source died. Only one of them was told more
than the others, so the source remembers with its death for whom it died: the name of the connection, which is the same
for every mover between the same two nodes and no others. Nobody else may go on with the takeover, or undo it.
"""

from collections.abc import Callable
from typing import Final

from upriver.model import VbucketState
from upriver.protocol.source import Source

#: A takeover stops writes when no more than so many changes are still to be sent.
BACKLOG_SMALL: Final = 1000


class Handover:
    """One vbucket that is being handed over."""

    __slots__ = ("_heir", "_on_durable", "_source", "_vbucket", "dead", "durable")

    def __init__(self, source: Source, vbucket: int, heir: str, on_durable: Callable[[], object]) -> None:
        self._source = source
        self._vbucket = vbucket
        self._heir = heir
        self._on_durable = on_durable
        #: Nobody writes any more.
        self.dead = False
        #: And that is on disk, together with everything that was written: the destination may be active.
        self.durable = False

    def die(self) -> None:
        """Stop writes. What had come in between is still to be read, from a place of its own."""
        self._source.set_state(self._vbucket, VbucketState.DEAD, heir=self._heir)
        self.dead = True
        self._source.when_durable(self._died)

    def _died(self) -> None:
        self.durable = True
        self._on_durable()
