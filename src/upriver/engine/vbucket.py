"""A vbucket: items, a role, and the branches of its history.

Theory of operation. The table holds items and history; this module decides who may write it. An *active* vbucket writes
its own history and is consistent at every seqno. A copy that receives history keeps the bounds of its current snapshot.
Inside the snapshot it holds a mixture, because the sender left out versions that change again further on, so it is
consistent only at the snapshot's end. Three rules follow. A rollback goes to a consistent point, or to nothing. A
promotion in mid-snapshot branches at the snapshot's start, the last point that all other copies are known to share. A
stream that we send ends its snapshots only at our own consistent points.

Every change of role, log or bounds is made under the journal's lock and stored in order, or all at once; the disk never
has a new log with an old history.
"""

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import pyarrow as pa

from upriver.engine.checkpoint_ids import Checkpoints
from upriver.engine.consistent_points import ConsistentPoints
from upriver.engine.cursor import PLAIN, Cursor, CursorEnd, Options, SnapshotReader
from upriver.engine.durability_waiters import Done
from upriver.engine.journal import Journal
from upriver.engine.keyvalue import KeyValue
from upriver.engine.table import Ledger, Table
from upriver.errors import (
    InvalidArguments,
    KeyExists,
    NotMyVbucket,
    OutOfOrder,
    OutOfRange,
    PositionError,
    TemporaryFailure,
    UpriverError,
)
from upriver.model import (
    NO_END,
    SEQNO_MAX,
    TTL_MAX,
    UUID_BITS,
    Change,
    Event,
    FailoverEntry,
    FailoverLog,
    Snapshot,
    StreamPosition,
    VbucketState,
    rollback_by_snapshot,
)

log = logging.getLogger(__name__)

Run = TypeVar("Run")
#: The marks of this many flushes are remembered.
FLUSH_MARKS_MAX: Final = 16


def new_uuid() -> int:
    """A random vbucket uuid, never 0."""
    return secrets.randbits(UUID_BITS) or new_uuid()


def notify(callbacks: Iterable[Callable[[], object]]) -> None:
    """Call each of them; an error in one is logged and affects neither the caller nor the others."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            log.exception("a callback of the engine failed")


class Vbucket(KeyValue):
    """One vbucket of a bucket, in any role."""

    def __init__(self, number: int, ledger: Ledger, journal: Journal, operations: Counter[str]) -> None:
        super().__init__(Table(number, ledger), operations)
        self.number = number
        self.journal = journal
        self.state = VbucketState.DEAD
        #: The only connection that may take over a dead copy; empty if any may.
        self.successor = ""
        #: The successor owns it: no connection may take it over from this copy.
        self.taken_over = False
        self.failover_log = FailoverLog.fresh(new_uuid())
        self.consistent_points = ConsistentPoints()
        self.checkpoints = Checkpoints(self.table)
        #: No state below this seqno can be restored: versions were dropped.
        self.floor_seqno = 0
        #: Purged tombstones up to here are gone from memory; the disk may follow.
        self.purged_seqno = 0
        #: Whether it has something to stream: it was active once, or has received a snapshot.
        self.streamable = False
        #: Hops that its last flush may travel, and the marks of the flushes that it has seen, newest last.
        self.flush_ttl = TTL_MAX
        self.flush_marks: deque[int] = deque(maxlen=FLUSH_MARKS_MAX)
        #: Whether this copy assigns seqnos to received changes, because its peer sends none, as in TAP.
        self.assigns_seqnos = False
        #: Its bucket has deleted it; this object can change nothing any more.
        self.removed = False
        self.cursors: dict[str, Cursor] = {}
        #: Called when its role changes, or it becomes streamable; must only take note.
        self.on_role_change: Callable[[int], object] = lambda _: None
        #: Reads a stored block around a seqno: (records, last seqno).
        self.read_block: Callable[[int], tuple[bytes, int]] | None = None
        #: Callbacks for the next change, and for the next change on disk; by owner, so that they can be removed.
        self._waiting: dict[object, Callable[[], object]] = {}
        self._waiting_for_disk: dict[object, Callable[[], object]] = {}

    # Positions.

    @property
    def failover_log(self) -> FailoverLog:
        """Its branches; the table keeps the newest for the tokens of mutations."""
        return self._failover_log

    @failover_log.setter
    def failover_log(self, log: FailoverLog) -> None:
        self._failover_log = log
        self.table.vbucket_uuid = log.newest.vbucket_uuid

    @property
    def high_seqno(self) -> int:
        return self.table.high_seqno

    @property
    def persisted_seqno(self) -> int:
        return self.table.persisted_seqno

    @property
    def purge_seqno(self) -> int:
        return self.table.purge_seqno

    @property
    def position(self) -> StreamPosition:
        """The position of this copy, as in a stream request."""
        uuid, high = self.failover_log.newest.vbucket_uuid, self.table.high_seqno
        if self.state is VbucketState.ACTIVE:
            return StreamPosition.at(uuid, high)
        return StreamPosition(uuid, high, Snapshot(self.table.snapshot_start, self.table.snapshot_end))

    @property
    def consistent_seqno(self) -> int:
        """The last seqno at which this copy was consistent."""
        return self.table.consistent_seqno

    def rollback_for(self, position: StreamPosition) -> int | None:
        """The seqno to which a consumer at ``position`` must roll back first; None if it may continue."""
        return rollback_by_snapshot(self.failover_log, self.high_seqno, self.purge_seqno, position)

    def checkpoint_start(self, checkpoint: int) -> int | None:
        """The seqno after which the checkpoint with this id begins; None if it is not known."""
        return self.checkpoints.start_of(checkpoint)

    # Roles.

    def set_state(self, state: VbucketState, *, successor: str = "") -> None:
        """Change the role. Becoming active starts a new branch at the last seqno that all copies are known to share.

        A copy that becomes dead for a ``successor`` stores its name in the same write, until the role changes again. A
        copy that is dead without a successor gets one the same way; one with another successor refuses. The successor
        also gets the locks, as changes.
        """
        with self.journal.lock:
            self._check_changeable()
            if state is self.state and successor and not self.may_hand_over_to(successor):
                raise NotMyVbucket(
                    f"this copy was already handed over to {self.successor!r}, which may own it now",
                    vbucket=self.number,
                )
            if state is self.state and successor in ("", self.successor):
                return
            if self.state is VbucketState.ACTIVE:
                if successor:  # also if copies have got them already: a rollback or a restart may have ended them there
                    self.publish_locks()
                self._note_consistent()
                self._place(self.high_seqno)
            if state is VbucketState.ACTIVE:
                self._branch(self.consistent_seqno)
                self.assigns_seqnos = False
            self.state = state
            self.successor = successor
            self.taken_over = False
            self.table.active = state is VbucketState.ACTIVE
            self.table.ledger.expect(self.table.due())  # items expire only in active vbuckets
            self.journal.change(self.number)
        self.on_role_change(self.number)
        self.end_cursors(CursorEnd.STATE_CHANGED)

    def may_hand_over_to(self, successor: str) -> bool:
        """Whether this connection may take the copy over: it has no other successor, and is not taken over yet."""
        return self.successor in ("", successor) and not self.taken_over

    def confirm_takeover(self, successor: str) -> None:
        """Note, durably, that the successor is active: the takeover can be neither undone nor repeated."""
        with self.journal.lock:
            if self.state is VbucketState.DEAD and self.successor == successor and not self.taken_over:
                self.taken_over = True
                self.journal.change(self.number)

    def branch_after_crash(self) -> None:
        """Start a new branch: an unclean stop may have lost changes that consumers saw."""
        if self.state is VbucketState.ACTIVE or self.assigns_seqnos:
            with self.journal.lock:
                self._branch(self.consistent_seqno)
                self.journal.change(self.number)

    def _branch(self, seqno: int) -> None:
        self.scanned.forget()
        fresh = self.high_seqno == 0 and not self.streamable
        uuid = new_uuid()
        self.failover_log = FailoverLog.fresh(uuid) if fresh else self.failover_log.branch(uuid, seqno)
        self.streamable = True
        self._place(self.high_seqno)
        # A purge seqno above the high seqno came with an unfinished snapshot of the other branch.
        self.table.purge_seqno = min(self.table.purge_seqno, self.high_seqno)
        # From here on this copy is authoritative: its own state, mixture or not, is consistent by definition.
        self.consistent_points.add(self.high_seqno)

    def _place(self, seqno: int) -> None:
        self.table.snapshot_start = self.table.snapshot_end = seqno

    def _note_consistent(self) -> None:
        if self.state is VbucketState.ACTIVE:
            self.consistent_points.extend(self.high_seqno)

    # Receiving.

    def begin_snapshot(self, start: int, end: int, purge_seqno: int | None = None) -> None:
        """A marker: changes in (start, end] follow. The producer's purge seqno is used if it is known.

        If the end is not known yet, ``complete_snapshot`` sets it.
        """
        with self.journal.lock:
            self._check_receiving(end)
            try:
                position = self.position.announced(Snapshot(start, end))
            except PositionError as error:
                raise OutOfOrder(self.number, end, str(error)) from None
            if purge_seqno is None:
                purge_seqno = end if end != NO_END else 0
            if not 0 <= purge_seqno <= NO_END:
                raise InvalidArguments(f"invalid purge seqno {purge_seqno}", vbucket=self.number)
            if self.high_seqno == 0:  # whatever the start: some servers send the first seqno of the snapshot
                # A copy filled from nothing never gets the deletions before the end of this snapshot.
                self.table.purge_seqno = purge_seqno
                self.journal.change(self.number)
            if not self.streamable:
                self.streamable = True
                self.journal.change(self.number)
                self.on_role_change(self.number)
            start = position.snapshot.start
            if start < self.position.consistent_seqno:
                # The marker begins before our last consistent point. Until the snapshot ends, the consistent point at
                # its start counts: states in between are mixtures.
                start = self.consistent_points.at_or_below(start, self.floor_seqno)
            self.table.snapshot_start = start
            self.table.snapshot_end = position.snapshot.end
            self.table.touch()
            self._complete()

    def complete_snapshot(self) -> None:
        """The copy is consistent at its high seqno: said by a producer whose markers have no bounds."""
        with self.journal.lock:
            table = self.table
            self._check_receiving(table.high_seqno)
            if table.snapshot_start == 0:
                # As for a snapshot with a known end: the copy never got the deletions up to here.
                table.purge_seqno = max(table.purge_seqno, table.high_seqno)
            table.snapshot_end = table.high_seqno
            self.journal.change(self.number)
            self._complete()

    def apply(self, change: Change, ttl: int = TTL_MAX) -> None:
        """Apply the next change of the announced snapshot, with all its metadata."""
        with self.journal.lock:
            self._check_receiving(change.seqno)
            self._check_order(change.seqno)
            if change.vbucket != self.number:
                raise InvalidArguments(
                    f"the change belongs to vbucket {change.vbucket}, not to this one", vbucket=self.number
                )
            lock = None
            if change.lock_time and change.event == Event.MUTATION:
                lock = change.cas, self.table.ledger.ticks() + change.lock_time
            self._store(
                change.event,
                change.key,
                change.value,
                change.flags,
                change.expiry,
                change.datatype,
                change.cas,
                change.rev_seqno,
                change.seqno,
                ttl,
                lock=lock,
            )
            self._complete()

    def receive(
        self,
        event: Event,
        key: bytes,
        value: bytes = b"",
        *,
        flags: int = 0,
        expiry: int = 0,
        datatype: int = 0,
        cas: int = 0,
        rev_seqno: int = 0,
        ttl: int = TTL_MAX,
    ) -> int:
        """Apply a change of a peer that sends no seqnos, as in TAP, and return the seqno that this copy assigns.

        The history is this copy's own, under its own uuid, and consistent after every change.
        """
        self.assign_seqnos()
        with self.journal.lock:
            seqno = self.high_seqno + 1
            self._check_receiving(seqno)
            rev_seqno = rev_seqno or self.table.next_rev_seqno(key)
            cas = cas or self.table.ledger.next_cas(self.table.ledger.clock())
            before = self.table.snapshot_start, self.table.snapshot_end
            self._place(seqno)
            try:
                self._store(event, key, value, flags, expiry, datatype, cas, rev_seqno, seqno, ttl)
            except UpriverError:  # no room: the bounds must not run ahead of the changes
                self.table.snapshot_start, self.table.snapshot_end = before
                raise
            self._complete()
            return seqno

    def assign_seqnos(self) -> None:
        """Assign seqnos from here on, under a new uuid: a crash loses both together."""
        if self.assigns_seqnos:
            return
        with self.journal.lock:
            self._check_receiving(self.high_seqno + 1)
            was_streamable = self.streamable
            self._branch(self.consistent_seqno)
            self.assigns_seqnos = True
            self.journal.change(self.number)
            if not was_streamable:
                self.on_role_change(self.number)
        self.end_cursors(CursorEnd.STATE_CHANGED)  # readers know this copy by the old log

    def apply_frames(self, frames: bytes | bytearray | memoryview, ttl: int = TTL_MAX) -> int:
        """Apply a run of `dcp` change frames of this vbucket; returns their number.

        It stops at the first frame that is malformed or that ``apply`` would refuse. The frames before it are applied;
        the error says which frame it is, and a note how many were applied.
        """
        return self._receive(self.table.apply_frames, frames, ttl)

    def apply_batch(self, batch: pa.RecordBatch, ttl: int = TTL_MAX) -> int:
        """The same for the rows of a batch in the columns of ``model.CHANGES``, from any dialect."""
        return self._receive(self.table.apply_batch, batch, ttl)

    def _receive(self, apply: Callable[[Run, int], int], run: Run, ttl: int) -> int:
        with self.journal.lock:
            self._check_receiving(self.table.high_seqno + 1)
            try:
                return apply(run, ttl)
            finally:
                self._complete()

    def advance(self, seqno: int) -> None:
        """No changes follow up to ``seqno``: they were filtered out or purged."""
        with self.journal.lock:
            self._check_receiving(seqno)
            self._check_order(seqno)
            self.table.high_seqno = seqno
            self.table.touch()
            self._complete()

    def check_failover_log(self, log: FailoverLog) -> None:
        """Refuse the log of a producer that does not know the branch that this pending copy waits for.

        The source of the takeover may be dead, and then there may be no other copy of what this one has received. An
        operator who knows better makes it a replica first. A copy without changes has nothing to lose.
        """
        if self.state is VbucketState.PENDING and self.high_seqno:
            ours = self.failover_log.newest.vbucket_uuid
            if log.index(ours) is None:
                raise InvalidArguments(
                    f"this copy is pending on branch {ours}, which the producer does not know: make it a replica first",
                    vbucket=self.number,
                )

    def replace_failover_log(self, log: FailoverLog) -> None:
        """Replace our log by the producer's.

        Our consumers know us by the old log, and the next changes may belong to another branch, so their streams end
        and they ask again. A pending copy waits to take over its own branch. On a newer branch that knows it, it
        becomes a replica; it refuses all others.
        """
        with self.journal.lock:
            self._check_changeable()
            if self.state is VbucketState.ACTIVE:
                raise KeyExists("an active vbucket keeps its own failover log", vbucket=self.number)
            if log == self.failover_log:
                return
            self.check_failover_log(log)
            if self.state is VbucketState.PENDING and log.newest.vbucket_uuid != self.failover_log.newest.vbucket_uuid:
                self.set_state(VbucketState.REPLICA)
            self.failover_log = log
            self.assigns_seqnos = False
            self.journal.change(self.number)
        self.end_cursors(CursorEnd.STATE_CHANGED)

    def roll_back(self, seqno: int) -> int:
        """Restore the newest consistent point at or below ``seqno`` and return it; 0 is empty."""
        with self.journal.lock:
            self._check_changeable()
            if self.state is VbucketState.ACTIVE:
                raise KeyExists("an active vbucket cannot roll back", vbucket=self.number)
            if seqno < 0:
                raise OutOfRange(f"cannot roll back to seqno {seqno}", vbucket=self.number)
            if seqno >= self.high_seqno and self.consistent_seqno == self.high_seqno:
                return self.high_seqno
            state = self.consistent_points.at_or_below(seqno, self.floor_seqno)
            if state == 0:
                self._clear()
            else:
                self.table.truncate(state)
                self.consistent_points.truncate(state)
                self.checkpoints.cut()
                self._place(state)
                self.journal.trim(self.number, state)
                self.table.touch()  # the rest may have been in a group that no longer counts
            undone = self.journal.waiting.undone(self.table, state)
        notify(undone)
        self.end_cursors(CursorEnd.ROLLED_BACK)
        return state

    def start_over(self) -> None:
        """Drop everything and start a log of our own, for a peer that sends no log, as in TAP."""
        self._start_over()
        self.end_cursors(CursorEnd.STATE_CHANGED)  # consumers that ask again get the new log

    def _start_over(self) -> None:
        with self.journal.lock:
            undone = self._clear_copy()
            self.failover_log = FailoverLog.fresh(new_uuid())
            self.assigns_seqnos = True
            was_streamable, self.streamable = self.streamable, True  # an empty copy can be streamed too
        if not was_streamable:
            self.on_role_change(self.number)
        notify(undone)

    def clear(self) -> None:
        """Drop everything, as after a received flush; the log stays until the producer's replaces it."""
        with self.journal.lock:
            undone = self._clear_copy()
        notify(undone)
        self.end_cursors(CursorEnd.STATE_CHANGED)

    def _clear_copy(self) -> list[Done]:
        """Clear; returns the callbacks of waiters for changes that it wrote while it was active."""
        if self.state is VbucketState.ACTIVE:
            raise KeyExists("an active vbucket cannot be cleared; flush it instead", vbucket=self.number)
        self._check_changeable()
        self._clear()
        return self.journal.waiting.undone(self.table, 0)

    def flush(self, ttl: int = TTL_MAX, mark: int = 0) -> None:
        """Empty the vbucket under a new failover log, so that consumers that were away notice it.

        The mark identifies one flush on every path, so that it is not repeated when it comes back in a circle.
        """
        with self.journal.lock:
            if self.state is not VbucketState.ACTIVE:
                raise NotMyVbucket(vbucket=self.number)
            if refusal := self.table.ledger.refusal:
                raise TemporaryFailure(refusal, vbucket=self.number)
            self.flush_ttl = ttl
            self.flush_marks.append(mark or new_uuid())
            self._clear()
            self.failover_log = FailoverLog.fresh(new_uuid())
        self.end_cursors(CursorEnd.FLUSHED)

    def flush_copy(self, ttl: int, mark: int) -> None:
        """The same for a copy whose peer was flushed and sends no log, as in TAP."""
        with self.journal.lock:
            self._check_receiving(0)
            self.flush_ttl = ttl
            self.flush_marks.append(mark)
        self._start_over()
        self.end_cursors(CursorEnd.FLUSHED)

    def _clear(self) -> None:
        self.table.clear()
        self.checkpoints.cut()
        self.scanned.forget()
        self.consistent_points = ConsistentPoints()
        self.floor_seqno = self.purged_seqno = 0
        self.journal.trim(self.number, 0)

    def _check_here(self) -> None:
        if self.removed:
            raise NotMyVbucket(vbucket=self.number)

    def _check_changeable(self) -> None:
        self._check_here()
        self.journal.check_open(self.number)

    def _check_streamable(self) -> None:
        self._check_here()
        if self.state is not VbucketState.ACTIVE and not self.streamable:
            raise TemporaryFailure("there is nothing to stream yet", vbucket=self.number)

    def _check_receiving(self, seqno: int) -> None:
        self._check_changeable()
        if self.state is VbucketState.ACTIVE:
            raise OutOfOrder(self.number, seqno, "an active vbucket writes its own history")

    def _check_order(self, seqno: int) -> None:
        if seqno <= self.table.high_seqno:
            raise OutOfOrder(self.number, seqno, f"it does not follow {self.table.high_seqno}")
        if seqno > self.table.snapshot_end:
            raise OutOfOrder(self.number, seqno, f"the snapshot ends at {self.table.snapshot_end}")
        if seqno > SEQNO_MAX:
            raise OutOfOrder(self.number, seqno, f"seqnos end at {SEQNO_MAX}")

    def _complete(self) -> None:
        high = self.table.high_seqno
        if high == self.table.snapshot_end and high > self.consistent_points.newest:
            self.consistent_points.add(high)
            self.table.consistent_seqnos.append(high)

    # Sending.

    def open_cursor(
        self, name: str, start_seqno: int = 0, end_seqno: int = NO_END, options: Options | None = None
    ) -> Cursor:
        """Open a named cursor, from which snapshots are read."""
        self._check_streamable()
        if name in self.cursors:
            raise KeyExists(f"a cursor {name!r} exists already", vbucket=self.number)
        cursor = Cursor(self, name, start_seqno, end_seqno, options or PLAIN)
        if cursor.ended is None:
            self.cursors[name] = cursor
        return cursor

    def changes(
        self, start_seqno: int = 0, end_seqno: int | None = None, options: Options | None = None
    ) -> Iterator[SnapshotReader]:
        """The snapshots that lead from ``start_seqno`` to ``end_seqno``, or to where the history ends now.

        With ``persisted_only`` it ends at the last consistent point that is on disk now.
        """
        self._check_streamable()  # a copy that received nothing is not an empty one
        reached = self.consistent_seqno
        if options is not None and options.persisted_only:
            reached = self.consistent_at_or_below(min(reached, self.persisted_seqno))
        if end_seqno is None and reached <= start_seqno <= self.high_seqno:
            return  # a copy may be inside a snapshot whose rest has not arrived yet
        end = reached if end_seqno is None else end_seqno
        with self.open_cursor(f"changes-{secrets.token_hex(4)}", start_seqno, end, options) as cursor:
            cursor.settle_for(reached)
            while (snapshot := cursor.next_snapshot()) is not None:
                reader = SnapshotReader(cursor, snapshot)
                yield reader
                reader.skip()
            cursor.check_not_cut_short()

    def consistent_at_or_below(self, seqno: int) -> int:
        """The newest retained consistent point at or below ``seqno``; 0 for none."""
        with self.journal.lock:
            self._note_consistent()
            return self.consistent_points.at_or_below(seqno, self.floor_seqno)

    @property
    def exact_from(self) -> int:
        """Every version from this seqno on is retained, so every later state can be read.

        States below may be missing: their versions were dropped, or the copy received that history, in which each
        snapshot has only the last version of a key.
        """
        return max(self.floor_seqno, self.consistent_points.newest_range_start)

    def when_changed(self, callback: Callable[[], object], persisted: bool = False, owner: object = None) -> None:
        """Call back once, at the next change or, with ``persisted``, when the next one is on disk.

        An ``owner`` has at most one callback of each kind; ``wait_no_longer`` removes them.
        """
        owner = callback if owner is None else owner
        if persisted:
            with self.journal.lock:
                self._waiting_for_disk[owner] = callback
                self.journal.watched.add(self.number)
        else:
            self._waiting[owner] = callback
            self.table.on_change = self._wake

    def wait_no_longer(self, owner: object) -> None:
        """Remove the callbacks of ``owner``: a vbucket without writes would keep them for ever."""
        self._waiting.pop(owner, None)
        if self._waiting_for_disk:
            with self.journal.lock:
                self._waiting_for_disk.pop(owner, None)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        notify(waiting.values())

    def wake_persisted(self) -> None:
        """More is on disk: called by the flusher."""
        with self.journal.lock:
            waiting, self._waiting_for_disk = self._waiting_for_disk, {}
        notify(waiting.values())

    def end_cursors(self, reason: CursorEnd) -> None:
        """End all open cursors."""
        for cursor in list(self.cursors.values()):
            cursor.end(reason)
        self.wake_cursors()

    def wake_cursors(self) -> None:
        """Call all waiting callbacks."""
        self._wake()
        self.wake_persisted()

    # The description that is stored beside the records.

    def describe(self) -> dict[str, Any]:
        """The description for the disk; called under the journal's lock, right after ``collect``."""
        self._note_consistent()
        table = self.table
        return {
            "state": self.state.value,
            "heir": self.successor,
            "inherited": self.taken_over,
            "counts_itself": self.assigns_seqnos,
            "flush_marks": list(self.flush_marks),
            "log": [[entry.vbucket_uuid, entry.seqno] for entry in self.failover_log],
            "high": table.high_seqno if self.state is not VbucketState.ACTIVE else table.flushing_seqno,
            "snapshot": [table.snapshot_start, table.snapshot_end],
            "whole": self.consistent_points.ranges,
            "floor": self.floor_seqno,
            "purge": table.purge_seqno,
            "deleted_rev": table.deleted_rev_seqno,
            "streamable": self.streamable,
            "records_from_group": table.records_from_group,
            "checkpointed": table.checkpointed_seqno,
        }

    def restore(self, stored: dict[str, Any]) -> None:
        """Restore the description, before the records are loaded."""
        table = self.table
        self.state = VbucketState(stored["state"])
        self.successor = stored.get("heir", "")  # missing in older descriptions, as the next three
        self.taken_over = stored.get("inherited", False)
        self.assigns_seqnos = stored.get("counts_itself", False)
        self.flush_marks.extend(stored.get("flush_marks", ()))
        self.failover_log = FailoverLog(tuple(FailoverEntry(*entry) for entry in stored["log"]))
        self.consistent_points = ConsistentPoints(tuple(pair) for pair in stored["whole"])
        self.floor_seqno = stored["floor"]
        self.streamable = stored["streamable"]
        table.active = self.state is VbucketState.ACTIVE
        table.snapshot_start, table.snapshot_end = stored["snapshot"]
        table.purge_seqno = stored["purge"]
        table.deleted_rev_seqno = stored["deleted_rev"]
        table.records_from_group = stored["records_from_group"]
        table.checkpointed_seqno = stored["checkpointed"]

    def restored(self, stored: dict[str, Any]) -> None:
        """Finish restoring, after all records are loaded."""
        table = self.table
        table.high_seqno = max(table.high_seqno, stored["high"])
        table.persisted_seqno = table.flushing_seqno = table.high_seqno
        self.checkpoints.begin()
        for seqno in table.consistent_seqnos:
            self.consistent_points.add(seqno)
        table.consistent_seqnos = []
        if self.state is VbucketState.ACTIVE:
            self._place(self.high_seqno)
            # The description may name changes that were not in its batch yet.
            self.consistent_points.truncate(self.high_seqno)
            self.consistent_points.extend(self.high_seqno)
