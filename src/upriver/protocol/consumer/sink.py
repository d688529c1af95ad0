"""What a consumer needs of its store. The node implements this with the engine, a client with its batches."""

from collections.abc import Callable
from typing import Protocol

from upriver.model import FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.wire import Buffer, Dialect


class SinkVbucket(Protocol):
    """A copy of a vbucket that receives a stream. No other stream may feed it until it is closed."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def state(self) -> VbucketState:
        """The role of this copy. An active copy writes its own history and receives nothing."""

    @property
    def position(self) -> StreamPosition:
        """The position of this copy; read before a request, and after a rollback."""

    @property
    def failover_log(self) -> FailoverLog:
        """The branches of this copy, newest first."""

    def begin_snapshot(self, snapshot: Snapshot, flags: int) -> None:
        """A marker came, with the flags of `dcp`. On `upr` the end is unknown and is ``NO_END``."""

    def complete_snapshot(self) -> None:
        """The copy is at a consistent point; called on `upr` only, where markers have no bounds."""

    def apply(self, frames: Buffer, dialect: Dialect, last_seqno: int, changes: int) -> None:
        """Apply the next changes: whole packets of this vbucket. The buffer is reused after the call.

        A TemporaryFailure or OutOfMemory means that there is no room now; ``position`` says how far it got.
        """

    def advance(self, seqno: int) -> None:
        """Nothing more comes up to this seqno: a filter left it out."""

    def roll_back(self, seqno: int) -> int:
        """Roll back to a consistent point at or below the seqno; return that seqno."""

    def check_failover_log(self, log: FailoverLog) -> None:
        """Raise a StatusError if the copy must not continue under this log; called before it is rolled back."""

    def replace_failover_log(self, log: FailoverLog) -> None:
        """Take the producer's log after it has accepted the request."""

    def clear(self) -> None:
        """Drop everything: the producer was flushed."""

    def close(self) -> None:
        """The stream is over; another one may feed the copy."""


class Sink(Protocol):
    """The store that streams go to."""

    def open(self, number: int) -> SinkVbucket:
        """The copy that a stream feeds; raises a StatusError if that is impossible."""

    def set_state(self, number: int, state: VbucketState, done: Callable[[], object]) -> None:
        """Change the role of a vbucket; call back when that, and everything received before, is on disk."""
