"""What a consumer needs of whoever keeps the data. The node fits the engine to this; a client its batches."""

from collections.abc import Callable
from typing import Protocol

from upriver.model import FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.wire import Buffer, Dialect


class SinkVbucket(Protocol):
    """A copy of a vbucket that receives history. Nobody else feeds it until it is closed."""

    @property
    def number(self) -> int:
        """Which one it is."""

    @property
    def state(self) -> VbucketState:
        """The role of this copy. Who becomes active writes a history of its own and receives no more."""

    @property
    def position(self) -> StreamPosition:
        """Where this copy stands; asked for before a request, and after a rollback."""

    @property
    def failover_log(self) -> FailoverLog:
        """The branches that the history of this copy has lived on."""

    def begin_snapshot(self, snapshot: Snapshot, flags: int) -> None:
        """A marker came, with the flags of `dcp`. On `upr` nobody knows the end: it is ``NO_END`` then."""

    def complete_snapshot(self) -> None:
        """The copy is whole where it stands; told on `upr` only, where the bounds of a snapshot do not show it."""

    def apply(self, frames: Buffer, dialect: Dialect, last_seqno: int, changes: int) -> None:
        """Changes that follow, in their order: whole packets of this vbucket. They are only lent.

        A TemporaryFailure or OutOfMemory says that there is no room now; ``position`` tells how far it came.
        """

    def advance(self, seqno: int) -> None:
        """Nothing more comes up to here: what stood there did not pass a filter."""

    def roll_back(self, seqno: int) -> int:
        """Go back to a whole state at or below the seqno; where that is."""

    def replace_failover_log(self, log: FailoverLog) -> None:
        """Take over the producer's log, which has accepted the request."""

    def clear(self) -> None:
        """Drop everything: the producer was flushed."""

    def close(self) -> None:
        """The stream is over; somebody else may feed it."""


class Sink(Protocol):
    """The store that streams go into."""

    def open(self, number: int) -> SinkVbucket:
        """The copy that a stream shall feed; raises a StatusError if that cannot be."""

    def set_state(self, number: int, state: VbucketState, done: Callable[[], object]) -> None:
        """Give a vbucket another role; call back when that, and all received before, is on disk."""
