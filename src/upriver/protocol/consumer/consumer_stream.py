"""One stream, as its consumer receives it.

Theory of operation. Messages move the stream through the same table as its producer, and move the position: a marker
sets the bounds of the snapshot, a change lies inside them and above the last one. Anything else is refused. A change
that was received before does no harm, and the stream goes on. After any other refusal something may be missing, so the
stream ends; the position stays, and the next request resumes there.

`upr` markers have no bounds. A marker means that everything before it is consistent, unless the stream was resumed
inside a snapshot, whose rest comes first. So do an end with *ok* and a change of role in a takeover. The drafts, which
are translated to `upr`, also say where a snapshot ends.
"""

from typing import NamedTuple

from upriver.errors import (
    InvalidArguments,
    KeyNotFound,
    OutOfMemory,
    OutOfRange,
    PositionError,
    ProtocolViolation,
    StatusError,
    TemporaryFailure,
)
from upriver.model import NO_END, SEQNO_MAX, FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.protocol.consumer.sink import SinkVbucket
from upriver.protocol.stream_state import StreamEvent, StreamLife, StreamState
from upriver.wire import Buffer, Dialect, dcp, upr
from upriver.wire.codec import change_run

_STATES = (StreamState.SNAPSHOT, StreamState.DRAINING)
#: The states before a takeover changes the role of the copy.
_PLAIN = (StreamState.REQUESTED, StreamState.OPEN, StreamState.SNAPSHOT)


class Run(NamedTuple):
    """Consecutive changes of one vbucket that were taken together."""

    vbucket: int
    #: The number of changes.
    rows: int
    #: The consumer's position behind them: branch, last seqno and the snapshot that they belong to.
    position: StreamPosition


class ConsumerStream:
    """The stream of one vbucket into one copy of it."""

    def __init__(self, copy: SinkVbucket, opaque: int, *, flags: int = 0, starts_inclusive: bool = False) -> None:
        self.copy = copy
        self.vbucket = copy.number
        self.opaque = opaque
        self.flags = flags
        self.life = StreamLife(copy.number)
        self.position = copy.position
        self.start_seqno = self.position.seqno
        #: Whether it speaks `dcp`, not `upr`.
        self.speaks_dcp = True
        #: The end seqno of the request.
        self.end_seqno = NO_END
        self.changes_received = 0
        self.markers_received = 0
        #: The last run was not applied completely, because there was no room.
        self.full = False
        #: Why it ended; empty before.
        self.end_reason = ""
        #: A marker is answered when everything up to this seqno has come.
        self.marker_answer_at: int | None = None
        self._starts_inclusive = starts_inclusive
        self._resumed_inside = False
        #: The role that the copy had at the start, or that the producer has given it since.
        self._role = copy.state
        #: The producer has made the copy active, so it has a branch of its own.
        self._was_activated = False

    @property
    def dialect(self) -> Dialect:
        """The dialect of its messages."""
        return dcp.dcp if self.speaks_dcp else upr.upr

    # Beginning

    def accept(self, log: FailoverLog, *, speaks_dcp: bool, end_seqno: int = NO_END) -> None:
        """The producer has accepted the request, up to this end: take its failover log."""
        self.copy.replace_failover_log(log)  # refused if the copy became active meanwhile
        self.life.move(StreamEvent.ACCEPT)
        self.speaks_dcp = speaks_dcp
        self.end_seqno = end_seqno
        self._role = self.copy.state
        position = self.copy.position
        self.start_seqno = position.seqno
        self._resumed_inside = not speaks_dcp and position.consistent_seqno != position.seqno
        self.position = StreamPosition(log.newest.vbucket_uuid, position.seqno, position.snapshot)

    # Going on

    @property
    def _may_receive(self) -> bool:
        """Whether the copy may still receive. A copy that was active since has a branch of its own, even if no seqno
        shows it. A deleted copy counts as dead."""
        return self._is_on_branch and self.copy.state not in (VbucketState.ACTIVE, VbucketState.DEAD)

    @property
    def _is_on_branch(self) -> bool:
        return self.copy.failover_log.newest.vbucket_uuid == self.position.vbucket_uuid

    def _check_may_receive(self) -> None:
        if not self._may_receive:
            raise KeyNotFound("the copy changed role and no longer accepts this stream", vbucket=self.vbucket)

    def check_role(self) -> None:
        """The copy changed role. In a takeover each message checks the role itself."""
        if self.life.state in _PLAIN:
            self._check_may_receive()

    def marker(self, start: int, end: int, flags: int) -> None:
        """A `dcp` marker."""
        self._check_may_receive()
        if end > SEQNO_MAX:
            raise OutOfRange(f"the snapshot end {end} is too large", vbucket=self.vbucket)
        if start > end + 1:  # servers with inclusive starts send end + 1 for an empty snapshot
            raise OutOfRange(f"the snapshot start {start} is greater than its end {end}", vbucket=self.vbucket)
        if self._starts_inclusive and start:
            start -= 1
        try:
            snapshot = Snapshot(min(start, end), end)
            position = self.position.announced(snapshot)
        except PositionError as error:
            raise OutOfRange(str(error), vbucket=self.vbucket) from None
        self.life.move(StreamEvent.MARKER)
        self.copy.begin_snapshot(snapshot, flags)
        self.position = position
        self.markers_received += 1
        self.marker_answer_at = end if flags & dcp.MarkerFlag.ACK else None

    def unbounded_marker(self) -> None:
        """An `upr` marker."""
        self._check_may_receive()
        self.life.move(StreamEvent.MARKER)
        self.markers_received += 1
        if self._resumed_inside:
            self._resumed_inside = False  # the rest of the old snapshot follows
            snapshot = Snapshot(self.position.snapshot.start, NO_END)
        else:
            self._complete()
            snapshot = Snapshot(self.position.seqno, NO_END)
        self.copy.begin_snapshot(snapshot, 0)
        self.position = StreamPosition(self.position.vbucket_uuid, self.position.seqno, snapshot)

    def snapshot_end(self) -> None:
        """The drafts say that a snapshot is complete; a snapshot that was resumed is complete too.

        They do not say where it ends. It is the last change, unless the stream ends at its end seqno, whose change may
        be a purged deletion: then only the end of the stream proves it.
        """
        self._check_may_receive()
        self.life.move(StreamEvent.SNAPSHOT_END)
        if self.end_seqno == NO_END:
            self._resumed_inside = False
            self._complete()

    def run(self, data: Buffer, at: int) -> int:
        """Apply the changes at ``at``, as many as fit; return where they end, ``at`` if the first does not fit."""
        if self.life.state not in _STATES or not self._may_receive:
            return at
        position = self.position
        end, last, count = change_run(data, at, position.seqno, min(position.snapshot.end, SEQNO_MAX), self.speaks_dcp)
        if not count:
            return at
        try:
            self.copy.apply(memoryview(data)[at:end], self.dialect, last, count)
        except (TemporaryFailure, OutOfMemory):
            # No room: the rest is applied again once there is.
            self.full = True
            end, last, count = change_run(data, at, position.seqno, self.copy.position.seqno, self.speaks_dcp)
        self.position = StreamPosition(position.vbucket_uuid, last, position.snapshot)
        self.changes_received += count
        return end

    def refuse(self, seqno: int) -> StatusError:
        """The reason why the change with this seqno was not applied. Unless it was received before, the stream ends."""
        try:
            self._check_may_receive()
            self.life.move(StreamEvent.CHANGE)
        except KeyNotFound as error:
            return self.abandon(error)
        except ProtocolViolation as error:
            return self.abandon(InvalidArguments(str(error), vbucket=self.vbucket))
        if seqno <= self.position.seqno:
            return OutOfRange(f"change {seqno} does not follow {self.position.seqno}", vbucket=self.vbucket)
        if seqno > min(self.position.snapshot.end, SEQNO_MAX):
            text = f"change {seqno} lies beyond its snapshot, which ends at {self.position.snapshot.end}"
            return self.abandon(OutOfRange(text, vbucket=self.vbucket))
        return self.abandon(InvalidArguments("the change has no key, or is in another dialect"))

    def advance(self, seqno: int) -> None:
        """A filter left out everything up to here."""
        self._check_may_receive()
        if not self.speaks_dcp:
            raise InvalidArguments("seqno-advanced does not exist in this stream's dialect", vbucket=self.vbucket)
        if seqno > SEQNO_MAX:
            raise OutOfRange(f"the seqno {seqno} is too large", vbucket=self.vbucket)
        try:
            position = self.position.advanced(seqno)
        except PositionError as error:
            raise OutOfRange(str(error), vbucket=self.vbucket) from None
        self.life.move(StreamEvent.ADVANCE)
        self.copy.advance(seqno)
        self.position = position

    def flush(self) -> None:
        """The producer was flushed: clear the copy. The next request starts at 0."""
        self._check_may_receive()
        self.life.move(StreamEvent.FLUSH)
        self.copy.clear()
        self.position = StreamPosition.at(self.position.vbucket_uuid, 0)
        self.marker_answer_at = None
        self._resumed_inside = False

    def take_marker_answer(self) -> bool:
        """Whether the answer to a marker is due; True once."""
        due = self.marker_answer_at is not None and self.position.seqno >= self.marker_answer_at
        if due:
            self.marker_answer_at = None
        return due

    @property
    def is_takeover(self) -> bool:
        """Whether it was requested as a takeover: only then may the producer change the role of the copy."""
        return bool(self.flags & dcp.StreamFlag.TAKEOVER)

    @property
    def has_given_role(self) -> bool:
        """Whether the copy has the role that the producer has given it, and no other client has changed it."""
        return self.copy.state is self._role

    def handed_over(self, state: VbucketState) -> None:
        """The producer changes the role of the copy; everything that it announced has come.

        The producer may give every role, whatever role the copy has from it. If another client has changed the role
        meanwhile, the source may be active again, so the copy does not become active; and a copy that another client
        has made active or dead keeps that role.
        """
        now = self.copy.state
        if now is not VbucketState.ACTIVE and not self._was_activated and not self._is_on_branch:
            raise KeyNotFound("the copy was active meanwhile and left this stream", vbucket=self.vbucket)
        passes_on = now in (VbucketState.REPLICA, VbucketState.PENDING) and state is not VbucketState.ACTIVE
        if not self.has_given_role and not passes_on:
            raise InvalidArguments(f"the copy is {now.value} and cannot become {state.value}", vbucket=self.vbucket)
        if state is VbucketState.ACTIVE and now is not VbucketState.ACTIVE:
            self._check_consistent()
        self.life.move(self._event_of(state))
        if not self.speaks_dcp and self._may_receive:
            self._resumed_inside = False
            self._complete()
        self._role = state
        self._was_activated = self._was_activated or state is VbucketState.ACTIVE

    def _event_of(self, state: VbucketState) -> StreamEvent:
        """A takeover makes the copy pending and then active; anything else is out of order."""
        if state is VbucketState.PENDING and self.life.state in _PLAIN:
            return StreamEvent.SET_PENDING
        if state is VbucketState.ACTIVE and self.life.state is StreamState.DRAINING:
            return StreamEvent.SET_ACTIVE
        return StreamEvent.SET_OUT_OF_ORDER

    def _check_consistent(self) -> None:
        """On `dcp` an active copy must be at a consistent point."""
        position = self.position
        if self.speaks_dcp and position.consistent_seqno != position.seqno:
            raise OutOfRange(
                f"the takeover ends at {position.seqno}, inside a snapshot that ends at {position.snapshot.end}",
                vbucket=self.vbucket,
            )

    def pending_answered(self) -> None:
        """The producer was told that the copy is pending."""
        if self.life.state is StreamState.PENDING:
            self.life.move(StreamEvent.PENDING_ANSWERED)

    # The end

    def end(self, reason: "dcp.EndReason | upr.EndReason") -> None:
        """The producer has ended the stream."""
        self.life.move(StreamEvent.END)
        if not self.speaks_dcp and not int(reason) and self._may_receive:
            self._reach_end()
            self._complete()
        self._leave(reason.label)

    def close(self) -> None:
        """The consumer closes the stream."""
        if not self.life.ended:
            self.life.move(StreamEvent.CLOSE)
            self._leave("closed")

    def refused(self, error: StatusError) -> None:
        """The producer refuses the stream."""
        self.life.move(StreamEvent.REFUSE)
        self._leave(str(error))

    def lose(self) -> None:
        """The connection is lost."""
        if not self.life.ended:
            self.life.move(StreamEvent.LOSE)
            self._leave("disconnected")

    def abandon(self, error: StatusError) -> StatusError:
        """End the stream after an error: something may be missing."""
        self.close()
        self.end_reason = str(error)
        return error

    def _leave(self, reason: str) -> None:
        self.end_reason = reason
        self.copy.close()

    def _reach_end(self) -> None:
        """The stream ended at the requested seqno, so the position is there, even if the last change lies before it."""
        position, end = self.position, self.end_seqno
        if self._resumed_inside or end == NO_END or position.seqno >= end:
            return
        snapshot = Snapshot(position.consistent_seqno, NO_END)
        self.copy.begin_snapshot(snapshot, 0)
        self.copy.advance(end)
        self.position = StreamPosition(position.vbucket_uuid, end, snapshot)

    def _complete(self) -> None:
        """Everything that was announced has come."""
        position = self.position
        if not self._resumed_inside and position.consistent_seqno != position.seqno:
            self.copy.complete_snapshot()
            self.position = StreamPosition.at(position.vbucket_uuid, position.seqno)
