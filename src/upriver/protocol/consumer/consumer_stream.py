"""One stream, as its consumer receives it.

Theory of operation. What comes moves the stream through the same table that its producer moved through by sending it,
and moves the position on: a marker sets the bounds of the snapshot, a change lies inside them and above the last one.
Whatever does not fit is refused. A change that is there already harms nobody and the stream goes on; after anything
else that does not fit something may be missing, so the stream is over: the position stands, and whoever asks again goes
on from there.

`upr` tells no bounds. A marker says that everything before it is whole, unless the stream was resumed inside a
snapshot, whose rest comes first; so do an end with *ok* and a change of state in a takeover. The drafts, which are
heard in `upr`, say that a snapshot ends.
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
#: Before a takeover gives the copy roles of its own.
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
        #: It speaks `dcp`, not `upr`.
        self.speaks_dcp = True
        #: Where it was asked to end.
        self.end_seqno = NO_END
        self.changes_received = 0
        self.markers_received = 0
        #: The last run was not taken whole, because there was no room for it.
        self.full = False
        #: Why it is over, in words; empty before.
        self.end_reason = ""
        #: A marker that wants an answer when everything up to here has come.
        self.marker_answer_at: int | None = None
        self._starts_inclusive = starts_inclusive
        self._resumed_inside = False

    @property
    def dialect(self) -> Dialect:
        """What its messages speak."""
        return dcp.dcp if self.speaks_dcp else upr.upr

    # Beginning

    def accept(self, log: FailoverLog, *, speaks_dcp: bool, end_seqno: int = NO_END) -> None:
        """The producer has accepted the request, up to this end: its log is ours from now on."""
        self.copy.replace_failover_log(log)  # refused if somebody has made the copy active meanwhile
        self.life.move(StreamEvent.ACCEPT)
        self.speaks_dcp = speaks_dcp
        self.end_seqno = end_seqno
        position = self.copy.position
        self.start_seqno = position.seqno
        self._resumed_inside = not speaks_dcp and position.consistent_seqno != position.seqno
        self.position = StreamPosition(log.newest.vbucket_uuid, position.seqno, position.snapshot)

    # Going on

    @property
    def _is_ours(self) -> bool:
        """Nobody has made the copy active since: what it wrote then lies in the way, and no seqno need show it. Nor is
        it dead, as is one that somebody has deleted."""
        copy = self.copy
        on_our_branch = copy.failover_log.newest.vbucket_uuid == self.position.vbucket_uuid
        return on_our_branch and copy.state not in (VbucketState.ACTIVE, VbucketState.DEAD)

    def _check_ours(self) -> None:
        if not self._is_ours:
            raise KeyNotFound("this copy is or was active, or dead, and receives no more here", vbucket=self.vbucket)

    def check_role(self) -> None:
        """Somebody gave the copy another role; in a takeover each message asks for itself who the copy is."""
        if self.life.state in _PLAIN:
            self._check_ours()

    def marker(self, start: int, end: int, flags: int) -> None:
        """A `dcp` marker."""
        self._check_ours()
        if end > SEQNO_MAX:
            raise OutOfRange(f"no snapshot ends at {end}", vbucket=self.vbucket)
        if start > end + 1:  # one beyond it is how an empty one is printed by those whose starts are inclusive
            raise OutOfRange(f"no snapshot reaches from {start} to {end}", vbucket=self.vbucket)
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
        self._check_ours()
        self.life.move(StreamEvent.MARKER)
        self.markers_received += 1
        if self._resumed_inside:
            self._resumed_inside = False  # what was missing of the old snapshot follows
            snapshot = Snapshot(self.position.snapshot.start, NO_END)
        else:
            self._complete()
            snapshot = Snapshot(self.position.seqno, NO_END)
        self.copy.begin_snapshot(snapshot, 0)
        self.position = StreamPosition(self.position.vbucket_uuid, self.position.seqno, snapshot)

    def snapshot_end(self) -> None:
        """The drafts say that a snapshot is sent: whatever was missing before has come with it.

        Where it ends they do not say. It is the last change, unless the stream was cut at its end seqno, whose change
        may be a deletion that was purged: there only the end of the stream is a proof.
        """
        self._check_ours()
        self.life.move(StreamEvent.SNAPSHOT_END)
        if self.end_seqno == NO_END:
            self._resumed_inside = False
            self._complete()

    def run(self, data: Buffer, at: int) -> int:
        """Take the changes that stand next, as many as fit in here; where they end, ``at`` if the first does not."""
        if self.life.state not in _STATES or not self._is_ours:
            return at
        position = self.position
        end, last, count = change_run(data, at, position.seqno, min(position.snapshot.end, SEQNO_MAX), self.speaks_dcp)
        if not count:
            return at
        try:
            self.copy.apply(memoryview(data)[at:end], self.dialect, last, count)
        except (TemporaryFailure, OutOfMemory):
            # No room, which is nobody's fault: what is left comes again, once there is.
            self.full = True
            end, last, count = change_run(data, at, position.seqno, self.copy.position.seqno, self.speaks_dcp)
        self.position = StreamPosition(position.vbucket_uuid, last, position.snapshot)
        self.changes_received += count
        return end

    def refuse(self, seqno: int) -> StatusError:
        """Why the change with this seqno was not taken. Unless it was old, the stream is over."""
        try:
            self._check_ours()
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
        return self.abandon(InvalidArguments("the change has no key or a layout of another dialect"))

    def advance(self, seqno: int) -> None:
        """What stood up to here did not pass a filter."""
        self._check_ours()
        if not self.speaks_dcp:
            raise InvalidArguments("no stream of this dialect says how far it is", vbucket=self.vbucket)
        if seqno > SEQNO_MAX:
            raise OutOfRange(f"no history reaches {seqno}", vbucket=self.vbucket)
        try:
            position = self.position.advanced(seqno)
        except PositionError as error:
            raise OutOfRange(str(error), vbucket=self.vbucket) from None
        self.life.move(StreamEvent.ADVANCE)
        self.copy.advance(seqno)
        self.position = position

    def flush(self) -> None:
        """The producer was flushed, and so are we; whoever asks again starts at 0."""
        self._check_ours()
        self.life.move(StreamEvent.FLUSH)
        self.copy.clear()
        self.position = StreamPosition.at(self.position.vbucket_uuid, 0)
        self.marker_answer_at = None
        self._resumed_inside = False

    def take_marker_answer(self) -> bool:
        """Is the answer to a marker due? Once."""
        due = self.marker_answer_at is not None and self.position.seqno >= self.marker_answer_at
        if due:
            self.marker_answer_at = None
        return due

    def handed_over(self, state: VbucketState) -> None:
        """The producer hands its vbucket over: everything that it had announced has come."""
        now = self.copy.state
        if now is not VbucketState.ACTIVE:
            self._check_ours()
        if state is VbucketState.PENDING and now is not VbucketState.ACTIVE:
            self.life.move(StreamEvent.SET_PENDING)
        elif state is VbucketState.ACTIVE and now is VbucketState.PENDING:
            self._check_consistent()
            self.life.move(StreamEvent.SET_ACTIVE)
        elif state in (VbucketState.PENDING, VbucketState.ACTIVE):
            # Somebody has decided otherwise meanwhile, and the source may be active again because of that.
            raise InvalidArguments(f"this copy is {now.value}: it cannot become {state.value}", vbucket=self.vbucket)
        else:
            raise InvalidArguments(f"no takeover makes a vbucket {state.value}", vbucket=self.vbucket)
        if not self.speaks_dcp:
            self._resumed_inside = False
            self._complete()

    def _check_consistent(self) -> None:
        """Whose snapshots have bounds must have kept them: an active copy that is a mixture would be everybody's."""
        position = self.position
        if self.speaks_dcp and position.consistent_seqno != position.seqno:
            raise OutOfRange(
                f"the vbucket is handed over at {position.seqno}, in the middle of a snapshot that ends at"
                f" {position.snapshot.end}",
                vbucket=self.vbucket,
            )

    def pending_answered(self) -> None:
        """The producer knows that we are pending."""
        if self.life.state is StreamState.PENDING:
            self.life.move(StreamEvent.PENDING_ANSWERED)

    # The end

    def end(self, reason: "dcp.EndReason | upr.EndReason") -> None:
        """The producer has ended it."""
        self.life.move(StreamEvent.END)
        if not self.speaks_dcp and not int(reason) and self._is_ours:
            self._reach_end()
            self._complete()
        self._leave(reason.label)

    def close(self) -> None:
        """It was closed by whoever asked for it."""
        if not self.life.ended:
            self.life.move(StreamEvent.CLOSE)
            self._leave("closed")

    def refused(self, error: StatusError) -> None:
        """The producer does not give it."""
        self.life.move(StreamEvent.REFUSE)
        self._leave(str(error))

    def lose(self) -> None:
        """The connection is gone."""
        if not self.life.ended:
            self.life.move(StreamEvent.LOSE)
            self._leave("disconnected")

    def abandon(self, error: StatusError) -> StatusError:
        """Something is wrong with it, and something may be missing: it is over."""
        self.close()
        self.end_reason = str(error)
        return error

    def _leave(self, reason: str) -> None:
        self.end_reason = reason
        self.copy.close()

    def _reach_end(self) -> None:
        """It was cut where we asked for it: that is where we stand, though the last change may lie before it."""
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
