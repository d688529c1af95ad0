"""The consumer's copies of vbuckets: nothing but how far each is, and what to do when the source goes back.

To the protocol a copy is a sink like any other. Changes that it is given are only noted, because they are decoded for
all vbuckets together; what happens to the vbucket as a whole becomes an event, at its place in the order.
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
    """One vbucket, as far as this consumer has it."""

    def __init__(self, number: int, progress: Progress, policy: Policy, copies: "TrackedVbuckets") -> None:
        self.number = number
        self.progress = progress
        self._policy = policy
        self._copies = copies
        #: Where the source sent us back to, and on which branch we were; told when it has accepted.
        self._back: tuple[int, int] | None = None

    @property
    def state(self) -> VbucketState:
        """To the protocol it is a replica: it receives and never writes."""
        return VbucketState.REPLICA

    @property
    def position(self) -> StreamPosition:
        return self.progress.position

    @property
    def failover_log(self) -> FailoverLog:
        return self.progress.failover_log

    def begin_snapshot(self, snapshot: Snapshot, flags: int) -> None:  # noqa: ARG002
        """A marker came: new bounds."""
        position = self.position
        bounded = snapshot.end != NO_END
        self._move(
            position.announced(snapshot) if bounded else StreamPosition(position.vbucket_uuid, position.seqno, snapshot)
        )

    def complete_snapshot(self) -> None:
        """Whole where it stands."""
        self._move(StreamPosition.at(self.position.vbucket_uuid, self.position.seqno))
        self._copies.moved(self)

    def apply(self, frames: Buffer, dialect: Dialect, last_seqno: int, changes: int) -> None:  # noqa: ARG002
        """Move behind these changes; the feed decodes them."""
        position = self.position
        self._move(StreamPosition(position.vbucket_uuid, last_seqno, position.snapshot))

    def advance(self, seqno: int) -> None:
        """What stood up to here did not pass a filter."""
        self._move(self.position.advanced(seqno))
        self._copies.moved(self)

    def roll_back(self, seqno: int) -> int:
        """The source went back: follow by the policy, or fail."""
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

    def replace_failover_log(self, log: FailoverLog) -> None:
        """The source has accepted: we are on its branch now, and can tell what happened before."""
        position, new_uuid = self.position, log.newest.vbucket_uuid
        moved = StreamPosition(new_uuid, position.seqno, position.snapshot)
        self.progress = Progress(moved, log, self.progress.consistent_from)
        if self._back is not None:
            (seqno, old_uuid), self._back = self._back, None
            self._copies.happened(
                self,
                Rollback(self.number, seqno, old_uuid, new_uuid) if seqno else Reset(self.number, old_uuid, new_uuid),
            )

    def clear(self) -> None:
        """The source was flushed."""
        self.progress = Progress(StreamPosition.at(self.position.vbucket_uuid, 0), self.failover_log)
        self._copies.happened(self, Flush(self.number))

    def close(self) -> None:
        """The stream is over; another one may feed it."""

    def _move(self, position: StreamPosition) -> None:
        self.progress = self.progress.moved(position)


class TrackedVbuckets:
    """All copies of a consumer: the sink of its connections."""

    def __init__(
        self,
        progress: dict[int, Progress],
        policy: Policy,
        *,
        on_event: Callable[[VbucketEvent, Progress], object],
        on_move: Callable[[int, Progress], object],
    ) -> None:
        self._policy: Policy = policy
        self._copies: dict[int, TrackedVbucket] = {}
        self._on_event = on_event
        self._on_move = on_move
        for number, each in progress.items():
            self.put(number, each)

    def __getitem__(self, number: int) -> TrackedVbucket:
        return self._copies[number]

    def put(self, number: int, progress: Progress) -> None:
        """Have a copy that stands here, instead of one that stood elsewhere."""
        self._copies[number] = TrackedVbucket(number, progress, self._policy, self)

    def happened(self, copy: TrackedVbucket, event: VbucketEvent) -> None:
        """Something happened to a whole vbucket."""
        self._on_event(event, copy.progress)

    def moved(self, copy: TrackedVbucket) -> None:
        """A copy moved on without a change."""
        self._on_move(copy.number, copy.progress)

    # The protocol's sink

    def open(self, number: int) -> TrackedVbucket:
        """The copy that a stream shall feed."""
        if number not in self._copies:
            raise KeyNotFound("this consumer has no such vbucket", vbucket=number)
        return self._copies[number]

    def set_state(self, number: int, state: VbucketState, done: Callable[[], object]) -> None:  # noqa: ARG002
        """A consumer takes nothing over."""
        raise NotSupported("a consumer takes no vbucket over", vbucket=number)
