"""One vbucket of a TAP connection, as its producer sends it.

Theory of operation. A stream reads the history of its vbucket from one position, and every change comes once: first the
*backfill*, which control messages announce and close, even if it has a date, then live changes. It sends when the
connection gives it a turn, and subscribes to its cursor when there is nothing to send.

TAP has neither uuids nor an end of a single stream. When the history breaks, by a rollback or a new branch, or when a
client reconnects at a position that no longer exists, the stream starts over and says so with *initial vbucket stream*,
whatever was requested: anything less might leave out a change that the consumer must see.

A *takeover* first makes the consumer's copy pending, sends everything, and then follows the rules of every takeover
(see ``producer.takeover``): its own copy is dead, on disk, before the consumer's is told to become active.
"""

import dataclasses
import enum
from typing import TYPE_CHECKING, Final

from upriver.errors import StatusError, StorageError
from upriver.model import NO_END, Snapshot, StreamPosition, VbucketState, rollback_by_snapshot
from upriver.protocol.producer.source import SourceCursor, SourceVbucket
from upriver.protocol.producer.takeover import SourceTakeover
from upriver.protocol.tap.acknowledgements import Piece
from upriver.protocol.tap.position import LOST, TapPosition
from upriver.wire import Request, memcached, tap
from upriver.wire.codec import Laid, inflated_records, lay_out
from upriver.wire.dialects.tap import Control

if TYPE_CHECKING:
    from upriver.protocol.tap.producer import TapProducer

#: The number of a message that is not sent yet.
_NEVER: Final = 2**63


class TapPhase(enum.Enum):
    """The phase of a stream."""

    BACKFILL = "backfill"  #: the changes that existed when it began
    LIVE = "live"  #: the changes after that
    ACTIVATING = "activating"  #: the consumer was told to become active and has not answered yet
    ENDED = "ended"


class TapProducerStream:
    """The stream of one vbucket on one connection."""

    def __init__(
        self,
        connection: "TapProducer",
        vbucket: SourceVbucket,
        tap_position: TapPosition,
        *,
        began: int | None = None,
        broken: bool = False,
        flushed: bool = False,
        told_by: int = 0,
        announced: bool = False,
    ) -> None:
        """Resume at the consumer's position, if the history still continues from there.

        ``began`` is the vbucket's seqno when the consumer connected: later changes are new to it. ``broken`` means that
        an earlier stream could not continue from this position and is replaced by this one, perhaps inside a backfill
        that it had ``announced``. After a flush, which message ``told_by`` told the consumer of, everything is new.
        """
        self.connection = connection
        self.vbucket = vbucket
        self.plan = connection.plan
        #: It is in the connection's queue of streams that may have something to send; it had more in its last turn.
        self.queued, self.has_more = False, True
        self.phase = TapPhase.BACKFILL
        #: The consumer was told that a backfill begins, and not yet that it is over.
        self.announced = announced
        #: This stream has a backfill to close.
        self._backfills = False
        #: It ended early: what it has sent, and answers to it, no longer count.
        self.stopped = False
        #: Where a reconnect resumes after that.
        self._stopped_at: TapPosition | None = None
        #: How many changes were sent, in total and in the backfill.
        self.changes_sent = self.backfilled = 0
        #: Sent up to here, acknowledged up to here.
        self.seqno = 0
        self.acked_seqno = 0
        #: The seqno before each message that was refused temporarily, and how many there are.
        self.holds: dict[int, int] = {}
        #: The consumer may hold changes up to here, acknowledged or not, of this connection or an earlier one.
        self._reached = 0
        #: The rest of its position.
        self._since, self._until, self._known = tap_position.since, 0, 0
        #: A position that no longer exists; it counts until the consumer has answered the message that says so.
        self._before = tap_position if told_by else None
        self._told_by = told_by
        self._control: list[Request] = []  # rarely more than two: a deque would be ten times as large
        self._records = b""
        self._at = self._read_to = 0
        self._checkpoint = 0
        self._subscribed_to: SourceCursor | None = None
        #: It is subscribed to later changes only.
        self._fresh_only = False
        #: Live changes are sent already, while a message of the backfill waits to be sent again.
        self._backfill_open = False
        #: The next step waits for answers; until then new changes do not matter.
        self._awaits_step = False
        #: The consumer was told that its copy is pending, and has answered.
        self._said_pending = self._is_pending = False
        self.source_takeover = (
            SourceTakeover(connection.source, vbucket, connection.successor, self.wake) if self.plan.takeover else None
        )
        self.uuid = vbucket.failover_log.newest.vbucket_uuid
        #: Where the backfill ends, and where a dump ends.
        self.backfill_end = vbucket.consistent_seqno
        self._dump_end = 0
        if began is not None and self.plan.future_only:
            self.backfill_end = min(self.backfill_end, began)
        self.cursor = self._begin(tap_position, broken=broken, flushed=flushed)

    @property
    def number(self) -> int:
        """The number of its vbucket."""
        return self.vbucket.number

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.phase is TapPhase.ENDED

    @property
    def backlog(self) -> int:
        """The maximum number of changes that are not sent yet."""
        if self.ended:
            return 0
        if self.plan.dump:
            return max(0, self._dump_end - self.seqno)
        return max(0, self.vbucket.high_seqno - self.seqno)

    @property
    def tap_position(self) -> TapPosition:
        """Where a reconnect resumes: everything before was acknowledged."""
        if self._stopped_at is not None:
            return self._stopped_at
        if self._before is not None and not self.connection.was_answered(self._told_by):
            # It may have applied later changes but not this message, and so hold a mixture.
            return dataclasses.replace(self._before, position=LOST) if self._reached else self._before
        return self._position_at(min([self.acked_seqno, *self.holds]))

    def _position_at(self, seqno: int) -> TapPosition:
        """The position at a seqno that was sent. The consumer may hold more, up to the end of the newest snapshot."""
        return TapPosition(
            position=StreamPosition(self.uuid, seqno, Snapshot(seqno, max(seqno, self._reached))),
            known=max(seqno, self._known),
            since=self._since,
            until=self._until,
            acks=self.plan.acks,
            keys_only=self.plan.keys_only,
            dumping=self.plan.dump and not self.connection.done,
        )

    # Beginning

    def _begin(self, tap_position: TapPosition, *, broken: bool, flushed: bool) -> SourceCursor:
        if self.plan.takeover:
            self._queue(tap.SetVbucket(state=memcached.VbucketState.PENDING))
        if self.announced and not (flushed and self.plan.dump):
            self._say(Control.CLOSE_BACKFILL)  # of the stream that this one replaces
        start, leads_on = 0, not broken and self._leads_on(tap_position)
        # A client that was cut off in a backfill gets the rest. After the backfill it continues with live changes.
        if leads_on:
            start = tap_position.position.seqno
            self._reached, self._known, self._until = tap_position.reached, tap_position.known, tap_position.until
            is_first = start == 0 and not self.connection.continues_checkpoint(self.number)
            self._backfills = start < self._until or (not self.plan.future_only and (is_first or self.plan.dump))
            if self._backfills and start == 0:
                self._announce(tap_position.since)
        elif flushed:
            if not self.plan.dump:
                self.backfill_end = 0
            self._backfills = self.announced
            if self.plan.dump and not self.announced:
                self._announce(0)
        else:
            self._before, self._told_by = tap_position, _NEVER
            if tap_position.since > 0 and not broken:
                self.connection.warn(f"vbucket {self.number} starts over: the position of the client no longer exists")
            self.backfill_end = self.vbucket.consistent_seqno
            self._announce(0)
        self._dump_end = max(start, self.backfill_end)
        self.acked_seqno = start
        self.cursor = self._open(start)
        if not self._backfills or flushed:
            self._go_live()
        return self.cursor

    def _announce(self, since: int) -> None:
        """Say that a backfill begins. A full one makes the consumer drop its contents. Otherwise the CAS field,
        which control messages do not use, has the date from which changes are sent."""
        self._backfills = True
        self._queue(tap.Opaque(control=Control.INITIAL_VBUCKET_STREAM, cas=since))

    def _leads_on(self, tap_position: TapPosition) -> bool:
        """Whether the history still contains everything that the consumer may hold, and continues from there."""
        vbucket = self.vbucket
        reached = StreamPosition.at(tap_position.position.vbucket_uuid, tap_position.reached)
        back = rollback_by_snapshot(vbucket.failover_log, vbucket.high_seqno, vbucket.purge_seqno, reached)
        # At 0 it may still hold changes that it never acknowledged.
        return back is None and not (tap_position.known < vbucket.purge_seqno and tap_position.reached)

    def _open(self, start: int) -> SourceCursor:
        end = max(start, self._dump_end) if self.plan.dump else NO_END
        # Never equal to the name of an opened connection's cursor, which ends in a colon and the number.
        name = f"{self.connection.cursor_name} of {self.number}"
        if start < self.vbucket.purge_seqno:
            start = 0  # a cursor cannot begin below the purge seqno; some changes are sent again
        self._records, self._at = b"", 0
        self.seqno = self._read_to = start
        return self.connection.source.cursor(self.number, name, start, end, self.connection.options)

    # Sending

    def turn(self, max_bytes: int) -> None:
        """Send about this many bytes, as far as the window allows."""
        self.has_more = True
        connection, until = self.connection, self.connection.size + max_bytes
        # Stop at half: filling up the rest with many small pieces costs more than it brings.
        enough = until - max_bytes // 2
        try:
            while connection.size < enough and connection.room and self.phase is not TapPhase.ENDED:
                if self._at < len(self._records):
                    self._send_records()
                    if self._may_have_caught_up:
                        # Subscribing tells whether there is more, and costs less than looking for a snapshot.
                        self._wait()
                        break
                elif self._awaits_pending:
                    self._wait()
                    break
                elif self._control:
                    self._send_control()
                elif not self._go_on(until - connection.size):
                    self._wait()
                    break
        except (StatusError, StorageError) as error:
            self.stop(str(error))

    @property
    def _may_have_caught_up(self) -> bool:
        """Whether a snapshot is sent and there is nothing to decide before the next."""
        return (
            self.phase is TapPhase.LIVE
            and self.cursor.snapshot is None
            and self._at >= len(self._records)
            and self.source_takeover is None
            and not self._control
        )

    def _send_records(self) -> None:
        connection, plan = self.connection, self.plan
        laid = self._laid_out()
        if laid.compressed:
            self._records, self._at = inflated_records(self._records[self._at :]), 0
            laid = self._laid_out()
        before, self._at = self.seqno, laid.at
        done = laid.at >= len(self._records)
        self.seqno = self._read_to if done else laid.seqno
        self.changes_sent += laid.sent
        if self.phase is TapPhase.BACKFILL:
            self.backfilled += laid.sent
        connection.tired += laid.tired
        if laid.sent:
            connection.send_changes(self, laid.messages, laid.sent, before)
        elif plan.acks and not self._awaits_answers:
            self.acked_seqno = self.seqno  # none of them was wanted, so no answer will come

    def _laid_out(self) -> Laid:
        plan = self.plan
        return lay_out(
            self._records,
            self._at,
            self.connection.next_opaque,
            self.connection.changes_max,
            plan.tap_flags,
            self._since,
            self._until,
            1 if plan.copies else 0,
            3 if plan.acks else 0,
        )

    def _send_control(self) -> None:
        message = self._control.pop(0)
        number = self.connection.send(message, self)
        if isinstance(message, tap.SetVbucket):
            self._said_pending = True
        elif isinstance(message, tap.Opaque) and message.control is Control.INITIAL_VBUCKET_STREAM:
            self.announced = True
            if self._told_by == _NEVER:
                self._told_by = number  # the consumer is told to start over
        elif isinstance(message, tap.Opaque) and message.control is Control.CLOSE_BACKFILL:
            self.announced = False

    def not_told(self, number: int) -> None:
        """The consumer has refused to start over."""
        if self._told_by == number:
            self._told_by = _NEVER

    def _go_on(self, max_bytes: int) -> bool:
        """Take the next step; False if there is none now."""
        cursor = self.cursor
        self._awaits_step = False
        if self._backfill_open and self._is_backfilled:
            self._backfill_open = False
            self._say(Control.CLOSE_BACKFILL)
            return True
        if cursor.snapshot is not None:
            self._records, self._at = cursor.read_records(max_bytes), 0
            self._read_to = cursor.seqno
            if not self._records:
                self.seqno = self._read_to
            return True
        if cursor.end_reason is not None:
            return self._history_ended(cursor.end_reason)
        if self.phase is TapPhase.BACKFILL and cursor.seqno >= self.backfill_end:
            return self._end_backfill()
        if self.phase is TapPhase.ACTIVATING:
            return self._finish_takeover()
        if self._may_make_dead():
            self._make_dead()
            return True
        snapshot = cursor.next_snapshot()
        if snapshot is None:
            return self._activate()
        self._reached = max(self._reached, snapshot.end)
        if self.phase is TapPhase.LIVE:
            self._tell_checkpoint()
        return True

    @property
    def _is_backfilled(self) -> bool:
        """Whether the consumer has acknowledged the whole backfill, or acknowledges nothing."""
        return not self._awaits_answers or min([self.acked_seqno, *self.holds]) >= self.backfill_end

    def _end_backfill(self) -> bool:
        """The backfill is sent: close it when it is acknowledged.

        Live changes do not wait for messages that were refused temporarily.
        """
        if not self._is_backfilled and not self.holds:
            self._awaits_step = True
            return False
        if self._is_backfilled:
            self._say(Control.CLOSE_BACKFILL)
        else:
            self._backfill_open = True
        self._go_live()
        return True

    def _go_live(self) -> None:
        self.phase = TapPhase.LIVE
        self._checkpoint = 0
        self._tell_checkpoint()

    def _tell_checkpoint(self) -> None:
        """Announce a new checkpoint to the clients that asked for it."""
        if not (self.plan.checkpoints or self.plan.registered):
            return
        found = self.cursor.checkpoint
        if found == self._checkpoint or self.plan.dump:
            return
        if self.plan.checkpoints:
            if self._checkpoint:
                self._queue(tap.CheckpointEnd(checkpoint=self._checkpoint))
            self._queue(tap.CheckpointStart(checkpoint=found))
        if self.plan.registered and self.cursor.in_open_checkpoint:
            self._say(Control.OPEN_CHECKPOINT)
        self._checkpoint = found

    # The history breaks, or ends

    def _history_ended(self, reason: str) -> bool:
        if reason == "ok":
            if self._awaits_answers:
                self._awaits_step = True
                return False
            if self._backfills:
                self._say(Control.CLOSE_BACKFILL)
            self._flush_control()
            self.end()
        elif reason == "flushed":
            self.connection.flushed()
        elif self.connection.source.vbucket(self.number) is not self.vbucket:
            self.stop("the vbucket was removed")
        elif self.source_takeover is not None and not self.source_takeover.dead:
            self.stop(f"it became {self.vbucket.state.value} before it was handed over")
        elif reason == "state changed" and self._leads_on(self._position_at(self.seqno)):
            self.uuid = self.vbucket.failover_log.newest.vbucket_uuid
            self.cursor = self._open(self.seqno)
        elif self.source_takeover is not None:
            self.stop(f"its history was {reason} after it was handed over")
        else:
            self.connection.warn(f"vbucket {self.number} starts over: its history was {reason}")
            self.connection.restart(self)
        return True

    def end(self) -> None:
        """End the stream."""
        self.phase = TapPhase.ENDED
        self.cursor.close()
        self._control.clear()
        self._records, self._at = b"", 0

    def stop(self, why: str) -> None:
        """Stop sending this vbucket, and log the reason.

        The consumer may still apply messages behind one that it refused; they do not count as acknowledged.
        """
        if not self.stopped:
            self._stopped_at = self.tap_position
            self.stopped = True
        if not self.ended:
            self.connection.warn(f"vbucket {self.number} is no longer sent: {why}")
            self.end()

    # Takeover

    @property
    def _awaits_pending(self) -> bool:
        """Whether the consumer has not yet answered if it can take the vbucket: nothing is sent before."""
        return self._said_pending and self.plan.acks and not self._is_pending

    def refused_as_active(self, piece: Piece) -> bool:
        """The consumer's copy is active and stays so; False if that was not the question.

        If our copy is dead, an earlier takeover was completed and its answer lost: there is nothing more to hand over.
        """
        if self.source_takeover is None or piece.data[1] != tap.SetVbucket.declaration.opcode:
            return False
        if self.vbucket.state is VbucketState.DEAD:
            self.source_takeover.confirm_takeover()
            self.connection.warn(f"vbucket {self.number} was handed over before: the consumer's copy is active")
            self.end()
        else:
            self.stop("the consumer's copy is active too")
        return True

    def _may_make_dead(self) -> bool:
        """Whether few changes are left and the consumer's copy is pending, if it acknowledges."""
        return (
            self.source_takeover is not None
            and not self.source_takeover.dead
            and self.phase is TapPhase.LIVE
            and (not self.plan.acks or self._is_pending)
            and self.source_takeover.is_near(self.seqno)
        )

    def answered(self, piece: Piece) -> None:
        """The piece is done: the consumer has it, or the refused message waits to be sent again."""
        if piece.again:
            self.let_go(piece.before_seqno)
        else:
            self.acked_seqno = max(self.acked_seqno, piece.seqno)
        self._look_again()

    def let_go(self, before_seqno: int) -> None:
        """A message that was refused temporarily is acknowledged, or replaced."""
        count = self.holds.pop(before_seqno, 0)
        if count > 1:
            self.holds[before_seqno] = count - 1

    def hold(self, before_seqno: int) -> None:
        """A message was refused temporarily: until it is acknowledged, a reconnect resumes before it."""
        self.holds[before_seqno] = self.holds.get(before_seqno, 0) + 1
        self._look_again()

    def _look_again(self) -> None:
        if self._awaits_step or self._backfill_open:
            self.wake()

    def acked(self, piece: Piece) -> None:
        """The consumer has acknowledged this piece."""
        if self.stopped:
            return
        self.answered(piece)
        if self.source_takeover is not None and piece.data[1] == tap.SetVbucket.declaration.opcode:
            self._is_pending = True
            if self.phase is TapPhase.ACTIVATING:
                self.source_takeover.confirm_takeover()
        if self.source_takeover is not None:
            self.wake()

    @property
    def _awaits_answers(self) -> bool:
        return self.plan.acks and self.connection.awaits_answers(self)

    def _make_dead(self) -> None:
        assert self.source_takeover is not None
        self.cursor.close()
        self.source_takeover.make_dead()
        self.cursor = self._open(self.seqno)

    def _activate(self) -> bool:
        """Everything is sent: make the consumer's copy active, once it has acknowledged everything and ours is dead on
        disk."""
        source_takeover = self.source_takeover
        if source_takeover is None or not source_takeover.durable or self._awaits_answers:
            return False
        self._queue(tap.SetVbucket(state=memcached.VbucketState.ACTIVE))
        self.phase = TapPhase.ACTIVATING
        return True

    def _finish_takeover(self) -> bool:
        if self.plan.acks and not (self.source_takeover is not None and self.source_takeover.over):
            return False
        self.end()
        return True

    # Inside

    def _say(self, control: Control) -> None:
        self._queue(tap.Opaque(control=control))

    def _queue(self, message: Request) -> None:
        message.vbucket = self.number
        self._control.append(message)

    def _flush_control(self) -> None:
        while self._control:
            self._send_control()

    def _wait(self) -> None:
        """Nothing to send: subscribe to the cursor."""
        self.has_more = False
        if self.ended:
            return
        # While an answer is awaited, only the end of the history matters, not new changes.
        fresh_only = self.phase is TapPhase.ACTIVATING or self._awaits_pending or self._awaits_step
        if self._subscribed_to is self.cursor and (fresh_only or not self._fresh_only):
            return  # a subscription to later changes only may have missed some
        self._subscribed_to, self._fresh_only = self.cursor, fresh_only
        self.cursor.subscribe(self._called, fresh=fresh_only)

    def _called(self) -> None:
        self._subscribed_to = None
        self.wake()

    def wake(self) -> None:
        """It may have something to send."""
        self.connection.ready(self)
