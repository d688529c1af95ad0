"""The progress of each vbucket of a consumer, and what to do when the source is rolled back.

To the protocol a tracked vbucket is a sink. It stores no changes, because the feed decodes them for all vbuckets
together. What happens to a whole vbucket becomes an event, in order with the changes.
"""

from collections.abc import Callable
from typing import Final, Literal, get_args

from upriver.client.consumer.batches import Flush, Reset, Rollback, VbucketEvent
from upriver.client.consumer.progress import Progress
from upriver.errors import KeyNotFound, NotSupported, StreamRolledBack
from upriver.model import NO_END, FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.wire import Buffer, Dialect

Policy = Literal["fail", "rewind", "emit"]
POLICIES: Final[tuple[str, ...]] = get_args(Policy)


class TrackedVbucket:
    """The progress of one vbucket."""

    def __init__(self, number: int, progress: Progress, policy: Policy, tracked: "TrackedVbuckets") -> None:
        self.number = number
        self.progress = progress
        self._policy = policy
        self._tracked = tracked
        #: The seqno that the source rolled us back to, and our branch; reported when the source has accepted.
        self._back: tuple[int, int] | None = None

    @property
    def state(self) -> VbucketState:
        """To the protocol this is a replica: it receives and never writes."""
        return VbucketState.REPLICA

    @property
    def position(self) -> StreamPosition:
        return self.progress.position

    @property
    def failover_log(self) -> FailoverLog:
        return self.progress.failover_log

    def begin_snapshot(self, snapshot: Snapshot, flags: int) -> None:  # noqa: ARG002
        """A marker sets the bounds of the next snapshot."""
        position = self.position
        bounded = snapshot.end != NO_END
        self._move(
            position.announced(snapshot) if bounded else StreamPosition(position.vbucket_uuid, position.seqno, snapshot)
        )

    def complete_snapshot(self) -> None:
        """The position is a consistent point."""
        self._move(StreamPosition.at(self.position.vbucket_uuid, self.position.seqno))
        self._tracked.moved(self)

    def apply(self, frames: Buffer, dialect: Dialect, last_seqno: int, changes: int) -> None:  # noqa: ARG002
        """Move behind these changes; the feed decodes them."""
        position = self.position
        self._move(StreamPosition(position.vbucket_uuid, last_seqno, position.snapshot))

    def advance(self, seqno: int) -> None:
        """The changes up to here did not pass a filter."""
        self._move(self.position.advanced(seqno))
        self._tracked.moved(self)

    def roll_back(self, seqno: int) -> int:
        """The source was rolled back: follow it as the policy says, or fail."""
        if self._policy == "fail":
            raise StreamRolledBack(self.number, seqno, self.position)
        consistent_from = self.progress.consistent_from
        if self._policy == "rewind" or consistent_from is None or seqno < max(1, consistent_from):
            seqno = 0
        uuid = self.position.vbucket_uuid
        self._back = (seqno, uuid) if self._back is None else (min(seqno, self._back[0]), self._back[1])
        if seqno == 0:
            self.progress = Progress.beginning()
        else:
            position = StreamPosition.at(uuid, seqno)
            self.progress = Progress(position, self.progress.failover_log, self.progress.consistent_from)
        return seqno

    def check_failover_log(self, log: FailoverLog) -> None:
        """Accept every log: a client follows its source."""

    def replace_failover_log(self, log: FailoverLog) -> None:
        """The source has accepted the request: take its branch, and report a rollback before it."""
        position, new_uuid = self.position, log.newest.vbucket_uuid
        moved = StreamPosition(new_uuid, position.seqno, position.snapshot)
        self.progress = Progress(moved, log, self.progress.consistent_from)
        if self._back is not None:
            (seqno, old_uuid), self._back = self._back, None
            self._tracked.happened(
                self,
                Rollback(self.number, seqno, old_uuid, new_uuid) if seqno else Reset(self.number, old_uuid, new_uuid),
            )

    def clear(self) -> None:
        """The source was flushed."""
        self.progress = Progress(StreamPosition.at(self.position.vbucket_uuid, 0), self.failover_log)
        self._tracked.happened(self, Flush(self.number))

    def close(self) -> None:
        """The stream ended; another one may feed this vbucket."""

    def _move(self, position: StreamPosition) -> None:
        self.progress = self.progress.moved(position)


class TrackedVbuckets:
    """The vbuckets of a consumer: the sink of its connections."""

    def __init__(
        self,
        progress: dict[int, Progress],
        policy: Policy,
        *,
        on_event: Callable[[VbucketEvent, Progress], object],
        on_move: Callable[[int, Progress], object],
    ) -> None:
        self._policy: Policy = policy
        self._by_number: dict[int, TrackedVbucket] = {}
        self._on_event = on_event
        self._on_move = on_move
        for number, each in progress.items():
            self.put(number, each)

    def __getitem__(self, number: int) -> TrackedVbucket:
        return self._by_number[number]

    def put(self, number: int, progress: Progress) -> None:
        """Track a vbucket from this progress on."""
        self._by_number[number] = TrackedVbucket(number, progress, self._policy, self)

    def happened(self, vbucket: TrackedVbucket, event: VbucketEvent) -> None:
        """Report an event of a whole vbucket."""
        self._on_event(event, vbucket.progress)

    def moved(self, vbucket: TrackedVbucket) -> None:
        """Report progress without a change."""
        self._on_move(vbucket.number, vbucket.progress)

    # The protocol's sink

    def open(self, number: int) -> TrackedVbucket:
        """The vbucket that a stream feeds."""
        if number not in self._by_number:
            raise KeyNotFound("this consumer does not read the vbucket", vbucket=number)
        return self._by_number[number]

    def set_state(self, number: int, state: VbucketState, done: Callable[[], object]) -> None:  # noqa: ARG002
        """A consumer cannot take over a vbucket."""
        raise NotSupported("a consumer cannot take over a vbucket", vbucket=number)
