"""The engine as a consumer's sink: received changes go into copies of vbuckets.

One stream at a time feeds a copy, over any connection, and none while a TAP connection does. No stream feeds an active
vbucket, which writes its own history.
"""

from collections.abc import Callable

from upriver.engine import Vbucket
from upriver.errors import InvalidArguments, NotMyVbucket, OutOfOrder, OutOfRange, WireError
from upriver.model import FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.node.state import NodeState
from upriver.node.streams.engine_source import EngineSource
from upriver.wire import Buffer, Dialect, dcp
from upriver.wire.codec import ChangeBatch, ChangeDecoder


class EngineCopy:
    """A copy that a stream feeds."""

    __slots__ = ("_on_close", "_vbucket")

    def __init__(self, vbucket: Vbucket, on_close: Callable[[], object]) -> None:
        self._vbucket = vbucket
        self._on_close = on_close

    @property
    def number(self) -> int:
        """The number of the vbucket."""
        return self._vbucket.number

    @property
    def state(self) -> VbucketState:
        """The role of this copy."""
        return self._vbucket.state

    @property
    def position(self) -> StreamPosition:
        """The position of this copy."""
        return self._vbucket.position

    @property
    def failover_log(self) -> FailoverLog:
        """The failover log of this copy."""
        return self._vbucket.failover_log

    def begin_snapshot(self, snapshot: Snapshot, flags: int) -> None:  # noqa: ARG002
        """Begin a snapshot, after its marker."""
        try:
            self._vbucket.begin_snapshot(snapshot.start, snapshot.end)
        except OutOfOrder as error:
            raise OutOfRange(str(error), vbucket=self.number) from None

    def complete_snapshot(self) -> None:
        """Mark the copy's seqno as a consistent point."""
        self._vbucket.complete_snapshot()

    def apply(self, frames: Buffer, dialect: Dialect, last_seqno: int, changes: int) -> None:  # noqa: ARG002
        """Apply changes in their order."""
        try:
            if dialect is dcp.dcp:
                self._vbucket.apply_frames(frames)
                return
            decoder = ChangeDecoder(dialect)
            decoder.feed(frames)
            for batch in decoder:
                assert isinstance(batch, ChangeBatch)
                self._vbucket.apply_batch(batch.records)
        except OutOfOrder as error:
            raise OutOfRange(str(error), vbucket=self.number) from None
        except WireError as error:
            raise InvalidArguments(str(error), vbucket=self.number) from None

    def advance(self, seqno: int) -> None:
        """Move to this seqno: no change comes before it."""
        self._vbucket.advance(seqno)

    def roll_back(self, seqno: int) -> int:
        """Roll back to a consistent point at or below the seqno; return that point."""
        return self._vbucket.roll_back(seqno)

    def check_failover_log(self, log: FailoverLog) -> None:
        """Refuse the log of another branch while the copy waits for its takeover."""
        self._vbucket.check_failover_log(log)

    def replace_failover_log(self, log: FailoverLog) -> None:
        """Replace the failover log with the producer's."""
        self._vbucket.replace_failover_log(log)

    def clear(self) -> None:
        """Drop all changes: the producer was flushed."""
        self._vbucket.clear()

    def close(self) -> None:
        """End the stream, so that another one may feed the copy."""
        self._on_close()


class EngineSink:
    """A node's bucket, as the sink of its consumer connections."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._source = EngineSource(node)

    def open(self, number: int) -> EngineCopy:
        """Open a copy for a stream."""
        vbucket = self._node.bucket.existing(number)
        if vbucket is None:
            raise NotMyVbucket(vbucket=number)
        if vbucket.state is VbucketState.ACTIVE:
            raise NotMyVbucket("an active vbucket writes its own history", vbucket=number)
        if vbucket.state is VbucketState.DEAD:  # it may have the only data after an interrupted takeover
            raise NotMyVbucket("a dead vbucket receives nothing: make it a replica first", vbucket=number)
        fed_copies = self._node.fed_copies
        fed_copies.open_stream(number)
        return EngineCopy(vbucket, lambda: fed_copies.close_stream(number))

    def set_state(self, number: int, state: VbucketState, done: Callable[[], object]) -> None:
        """Change the role of a vbucket; call back when that and all earlier changes are on disk."""
        self._source.set_state(number, state)
        self._source.when_durable(done)
