"""Background work of a bucket: expire, purge, compact, evict; in steps of some thousand records.

Theory of operation. Each duty is a generator that yields after every small step, so that no call blocks for long.
``run`` goes through the duties in turn until its time is used up, and continues there the next time.

Compaction raises a vbucket's *floor*: states below it can no longer be restored, and versions that were superseded at
or below it are dropped from memory, then from disk. It runs only when history is both older and larger than the limits,
or, at any age, when memory is short. Purge drops old tombstones and moves the floor above them, because an older
version without its tombstone would become current at the next start. Both stop at records that an open cursor still
needs, unless history grows beyond twice its limit, or beyond its share of the quota while memory is short: then
compaction ends the cursor as too slow. Only records in blocks on disk are dropped or evicted, so the disk can always
replace them.

A vbucket may hold versions below its floor: the disk follows later, so a restart brings them back, and a cursor may
have needed them. Such vbuckets are remembered and swept again.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Final
from weakref import WeakKeyDictionary

from upriver.engine.cursor import NO_END, Cursor, CursorEnd
from upriver.engine.flusher import Flusher
from upriver.engine.table import Ledger, Table
from upriver.engine.vbucket import Vbucket
from upriver.model import VbucketState

#: Eviction starts above the first share of the quota and stops below the second.
HIGH_WATER: Final = 0.85
LOW_WATER: Final = 0.75
#: While memory is short, cursors may hold up to this share of the quota in superseded versions.
PINNED_SHARE: Final = 0.125
#: Groups may then hold up to this share. It is less than the reserve for deletions: the versions that they delete can
#: be dropped only when the deletions are in blocks.
GROUPS_SHARE: Final = 1 / 32
#: The blocks of a vbucket are rewritten when about this share of them is garbage, and that is at least this much, or
#: all vbuckets together have as much garbage as data.
GARBAGE_SHARE: Final = 0.25
GARBAGE_BYTES_MIN: Final = 2**20
#: How long a write without room tries to free some, and how long after a failure the next one tries again.
RELIEF_S: Final = 0.01
LOOK_AGAIN_S: Final = 0.05
#: The purge runs this often within the lifetime of a tombstone, and at least every minute.
PURGES: Final = 100
PURGE_INTERVAL_S_MAX: Final = 60.0
#: With few writes, old history is moved into blocks at most this often: many small blocks are expensive.
BLOCKS_INTERVAL_S: Final = 60.0
#: Later than any time that a record can have.
ANY_TIME: Final = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long the past is kept."""

    history_s: float = 600.0
    history_bytes: int = 2**30
    tombstone_s: float = 3 * 24 * 3600.0


class Maintenance:
    """The duties of one bucket."""

    def __init__(
        self, ledger: Ledger, flusher: Flusher, vbuckets: Callable[[], list[Vbucket]], retention: Retention
    ) -> None:
        self.ledger = ledger
        self.flusher = flusher
        self.vbuckets = vbuckets
        self.retention = retention
        self.longest_step_s = 0.0
        self.evicted_bytes = 0
        #: Vbuckets that may hold versions superseded at or below their floor, and the seqno up to which those are gone.
        self._unswept: dict[Vbucket, int] = {}
        #: By vbucket: branch, seqno and time of the last observation, and the seqno that was seen long enough ago.
        self._marks: dict[int, tuple[int, int, float, int]] = {}
        self._purged_s = -PURGE_INTERVAL_S_MAX
        self._moved_s = -BLOCKS_INTERVAL_S
        #: The position of each open cursor at the last purge.
        self._looked_at: WeakKeyDictionary[Cursor, int] = WeakKeyDictionary()
        self._duties = self._rounds()
        #: The current round for writes without room, the commit at which it began, and the bytes it has freed; then the
        #: commit at which a round freed nothing.
        self._relief = self._relief_round()
        self._relief_since = -1
        self._relieved_bytes = 0
        self._fruitless_at = -1
        self._look_again_s = 0.0

    def run(self, budget_s: float = 0.01) -> bool:
        """Do what is due for about this long; returns whether more is due."""
        began = thread_time()
        before = began
        while before - began < budget_s:
            try:
                more = next(self._duties)
            except BaseException:
                self._duties = self._rounds()  # the next call starts the duties again
                raise
            now = thread_time()
            self.longest_step_s = max(self.longest_step_s, now - before)
            before = now
            if not more:
                return False
        return True

    def run_all(self) -> None:
        """One complete round of every duty, due or not, however long it takes."""
        self._duties = self._rounds()
        self.ledger.due_s, self._purged_s, self._moved_s = 0.0, -PURGE_INTERVAL_S_MAX, -BLOCKS_INTERVAL_S
        while next(self._duties):
            pass

    def _rounds(self) -> Iterator[bool]:
        while True:
            for duty in (self._expire_if_due, self._purge_if_due, self.sweep, self.compact, self.evict):
                for _ in duty():
                    yield True
            yield False

    def _expire_if_due(self) -> Iterator[None]:
        if self.ledger.due_s <= self.ledger.clock():
            yield from self.expire()

    def _purge_if_due(self) -> Iterator[None]:
        now = self.ledger.clock()
        interval_s = min(PURGE_INTERVAL_S_MAX, self.retention.tombstone_s / PURGES)
        if not self._purged_s <= now < self._purged_s + interval_s:  # the clock may be set back
            self._purged_s = now
            yield from self.purge()

    # Expiry.

    def expire(self) -> Iterator[None]:
        """Expire items of active vbuckets that no client reads."""
        ledger, all_seen = self.ledger, False
        ledger.due_s = math.inf  # later writes lower it again
        try:
            for vbucket in self.vbuckets():
                if vbucket.state is VbucketState.ACTIVE:
                    yield from self._expire(vbucket)
                    if not ledger.may_expire():
                        return
                else:
                    vbucket.table.end_locks()  # locks that came with received changes end too
                    yield
                ledger.expect(vbucket.table.due())
            all_seen = True
        finally:
            if not all_seen:
                ledger.due_s = 0.0

    def _expire(self, vbucket: Vbucket) -> Iterator[None]:
        position, upto = 0, vbucket.high_seqno
        while True:
            keys, position = vbucket.table.expired(position)
            for key in keys:
                if not self.ledger.may_expire():
                    return
                vbucket.table.expire(key)
            yield
            if not position or position >= upto:
                break

    # Purge and compaction.

    def purge(self) -> Iterator[None]:
        """Drop tombstones that are old enough."""
        before = int(self.ledger.clock() - self.retention.tombstone_s)
        if before <= 0:
            return
        wants_blocks = False
        for vbucket in self.vbuckets():
            table = vbucket.table
            if table.tombstones:
                self._end_stuck(vbucket)
                # Only records in blocks can go, and with few writes no checkpoint would start by itself.
                wants_blocks |= table.seqno_before(before, vbucket.consistent_seqno) > table.checkpointed_seqno
                yield
                yield from self._purge(vbucket, NO_END, before)
                # A change with a time in the future is at least as old as the changes after it.
                old = self._surely_old(vbucket, before)
                yield
                yield from self._purge(vbucket, old, ANY_TIME)
        if wants_blocks and self.flusher.storage.keeps_records:
            self.flusher.request_checkpoint()

    def _end_stuck(self, vbucket: Vbucket) -> None:
        """End cursors that keep tombstones: while memory is short, those that have not moved since the last purge."""
        limit, short, ended = self._limit(vbucket), self._short_of_memory(), False
        for cursor in list(vbucket.cursors.values()):
            if short and self._looked_at.get(cursor) == cursor.seqno < limit:
                cursor.end(CursorEnd.TOO_SLOW)
                ended = True
            self._looked_at[cursor] = cursor.seqno
        if ended:
            vbucket.wake_cursors()

    def _purge(self, vbucket: Vbucket, upto: int, before: int) -> Iterator[None]:
        table = vbucket.table
        # Everything that an open stream has not read yet stays.
        limit = min(upto, self._limit(vbucket), self._slowest(vbucket))
        if not table.tombstones or not limit:
            return
        highest = position = 0
        while True:
            found, position = table.purgeable(position, limit, before)
            highest = max(highest, found)
            yield
            if not position or position >= limit:
                break
        # A new cursor that needs these deletions has time until the next round.
        if 0 < highest <= self._slowest(vbucket) and self._raise_floor(vbucket, highest, purge_to=highest):
            yield from self._sweep(vbucket, highest, before)

    def _surely_old(self, vbucket: Vbucket, before: int) -> int:
        """The last seqno that was here long enough ago, whatever times the changes up to it have.

        Either a later change is old enough, or we ourselves saw it long enough ago: a vbucket without writes must not
        keep such tombstones for ever.
        """
        now = self.ledger.clock()
        uuid, seqno, since, old = self._marks.get(vbucket.number, (0, 0, now, 0))
        if uuid != vbucket.failover_log.newest.vbucket_uuid or seqno > vbucket.high_seqno:
            uuid, seqno, since, old = vbucket.failover_log.newest.vbucket_uuid, vbucket.high_seqno, now, 0
        if min(since, now) < before:
            seqno, since, old = vbucket.high_seqno, now, seqno
        self._marks[vbucket.number] = (uuid, seqno, min(since, now), old)
        return max(old, vbucket.table.seqno_before(before, self._limit(vbucket)))

    def compact(self) -> Iterator[None]:
        """Drop superseded versions that are both too old and too many; while memory is short, all that can go."""
        ledger, retention = self.ledger, self.retention
        short = self._short_of_memory()
        if short:
            self._request_blocks()
        elif ledger.history_bytes <= retention.history_bytes:
            return
        cutoff, wants_blocks = int(ledger.clock() - retention.history_s), False
        for vbucket in sorted(self.vbuckets(), key=lambda v: -v.table.history_bytes):
            short = short and ledger.memory_bytes > ledger.quota_bytes * LOW_WATER
            if not (short or ledger.history_bytes > retention.history_bytes) or not vbucket.table.history_bytes:
                break
            limit = old = self._limit(vbucket)
            if not short:
                old = vbucket.table.seqno_before(cutoff, vbucket.consistent_seqno)
                limit = min(limit, old)
                yield
            limit = self._unpinned(vbucket, limit)
            # History that is neither too new nor pinned waits for a checkpoint, which does not start with few writes.
            wants_blocks |= limit == vbucket.table.checkpointed_seqno < old
            if limit > vbucket.floor_seqno and self._raise_floor(vbucket, limit):
                yield from self._sweep(vbucket)
        if wants_blocks and ledger.history_bytes > retention.history_bytes:
            self._move_old()

    def _move_old(self) -> None:
        """Move records from groups into blocks, unless that was done recently."""
        now = self.ledger.clock()
        if self.flusher.storage.keeps_records and not self._moved_s <= now < self._moved_s + BLOCKS_INTERVAL_S:
            self._moved_s = now
            self.flusher.request_checkpoint()

    def loaded(self, vbucket: Vbucket) -> None:
        """A loaded vbucket may hold versions below its floor, because the disk follows later."""
        if vbucket.floor_seqno:
            self._unswept[vbucket] = 0

    def sweep(self) -> Iterator[None]:
        """Drop versions below the floors that no cursor needs."""
        for vbucket, swept in list(self._unswept.items()):
            if vbucket.removed or vbucket.floor_seqno <= swept or not vbucket.table.history_bytes:
                self._unswept.pop(vbucket, None)
            elif self._droppable(vbucket, vbucket.floor_seqno) > swept:
                yield from self._sweep(vbucket)

    def _limit(self, vbucket: Vbucket) -> int:
        """The last seqno that is in blocks and consistent."""
        return min(vbucket.table.checkpointed_seqno, vbucket.consistent_seqno)

    def _slowest(self, vbucket: Vbucket) -> int:
        """How far all open cursors have read."""
        return min((cursor.seqno for cursor in vbucket.cursors.values()), default=NO_END)

    def _pinned(self, cursor: Cursor) -> int:
        """How far the floor may rise before the cursor misses something.

        An announced snapshot needs the state at its end; a stream of every version needs everything after its seqno.
        """
        if cursor.options.history:
            return cursor.seqno
        return NO_END if cursor.snapshot is None else cursor.snapshot.end

    def _unpinned(self, vbucket: Vbucket, limit: int) -> int:
        """Lower the limit to what cursors need, or end them if they hold too much."""
        pinning = [cursor for cursor in vbucket.cursors.values() if self._pinned(cursor) < limit]
        too_much = 2 * self.retention.history_bytes
        if self._short_of_memory():
            too_much = min(too_much, int(self.ledger.quota_bytes * PINNED_SHARE))
        if self.ledger.history_bytes > too_much:
            for cursor in pinning:
                cursor.end(CursorEnd.TOO_SLOW)
            vbucket.wake_cursors()
            return limit
        return min([limit, *map(self._pinned, pinning)])

    def _raise_floor(self, vbucket: Vbucket, floor: int, purge_to: int = 0) -> bool:
        """Announce that states below ``floor`` are gone; returns False if a cursor needs them.

        Deletions up to ``purge_to`` count as purged from here on: consumers that resume below must roll back.
        """
        if any(self._pinned(cursor) < floor for cursor in vbucket.cursors.values()):
            return False
        with vbucket.journal.lock:
            if floor > self._limit(vbucket):  # rolled back meanwhile
                return False
            before = vbucket.floor_seqno
            self._unswept[vbucket] = min(before, self._unswept.get(vbucket, before))
            vbucket.floor_seqno = max(before, floor)
            vbucket.table.purge_seqno = max(vbucket.table.purge_seqno, purge_to)
            vbucket.journal.change(vbucket.number)
        return True

    def _droppable(self, vbucket: Vbucket, floor: int) -> int:
        """Versions superseded at or below this seqno are not needed by any cursor."""
        return min([floor, *map(self._pinned, vbucket.cursors.values())])

    def _sweep(self, vbucket: Vbucket, purge_to: int = 0, purge_before: int = 0) -> Iterator[None]:
        table, position, floor = vbucket.table, 0, vbucket.floor_seqno
        swept, freed = floor, 0
        try:
            while True:
                with vbucket.journal.lock:
                    if vbucket.floor_seqno < floor:  # cleared meanwhile: this is another history
                        return
                    # A cursor that was opened since the last step reads all that is left.
                    purge_to = min(purge_to, self._slowest(vbucket))
                    swept = min(swept, self._droppable(vbucket, floor))
                    history, tombstones = table.history_bytes, table.tombstones
                    position, _ = table.sweep(position, swept, purge_to, purge_before, 0)
                    # Counted per step, because writes between two steps add history again.
                    freed += history - table.history_bytes + 100 * (tombstones - table.tombstones)
                yield
                if not position or position > floor:
                    break
        finally:
            self._note_garbage(vbucket, freed)
        self._unswept[vbucket] = swept  # the next sweep removes it, if that was all
        vbucket.purged_seqno = max(vbucket.purged_seqno, purge_to)
        if purge_to:
            vbucket.journal.change(vbucket.number)

    def _note_garbage(self, vbucket: Vbucket, freed: int) -> None:
        space = self.flusher.space
        space.dropped(vbucket.number, freed)
        if space.garbage_bytes > max(GARBAGE_BYTES_MIN, space.needed_bytes):
            looked_at = self.vbuckets()
        else:
            looked_at = [vbucket] if space.garbage_of(vbucket.number) > GARBAGE_BYTES_MIN else []
        for each in looked_at:
            if (
                space.garbage_of(each.number) > GARBAGE_SHARE * each.table.memory_bytes
                and self.flusher.storage.keeps_records
            ):
                self.flusher.request_compaction(each)

    # Eviction.

    def _short_of_memory(self) -> bool:
        return 0 < self.ledger.quota_bytes * HIGH_WATER < self.ledger.memory_bytes

    def _request_blocks(self) -> None:
        """Start a checkpoint if needed: only records in blocks can go from memory."""
        if self.flusher.storage.keeps_records and (
            not any(v.table.checkpointed_seqno for v in self.vbuckets())
            or self.flusher.group_bytes > self.ledger.quota_bytes * GROUPS_SHARE
        ):
            self.flusher.request_checkpoint()

    def evict(self) -> Iterator[None]:
        """Drop values from memory that can be read back, unread ones first."""
        if not self._short_of_memory() or not self.flusher.storage.keeps_records:
            return
        self._request_blocks()
        for _ in range(2):  # the first round spares values that were read recently
            for vbucket in self.vbuckets():
                position = 0
                while True:
                    if self.ledger.memory_bytes <= self.ledger.quota_bytes * LOW_WATER:
                        return
                    position, freed = vbucket.table.sweep(position, 0, 0, 0, vbucket.table.checkpointed_seqno)
                    self.evicted_bytes += freed
                    yield
                    if not position or position >= vbucket.table.checkpointed_seqno:
                        break

    def evict_loaded(self, table: Table, after: int = 0) -> int:
        """While loading a store that is larger than memory, keep only metadata beyond the quota.

        Returns the seqno after which to continue when more of the table is loaded.
        """
        while self._short_of_memory():
            following, _ = table.sweep(after, 0, 0, 0, table.checkpointed_seqno)
            if not following:
                break
            after = following
        return after

    def relieve(self) -> bool:
        """Free some memory for a write without room, a bounded amount, continuing where the last call ended.

        Returns whether more can go soon, because the disk is behind: only stored records can go.
        """
        self._free()
        ledger, flusher = self.ledger, self.flusher
        behind = ledger.pending_bytes > 0 or flusher.group_bytes > ledger.quota_bytes * GROUPS_SHARE
        return behind and (flusher.storage.keeps_records or ledger.history_bytes > 0)

    def _free(self) -> None:
        """When a complete round has freed nothing, the next round waits until more is on disk or some time has passed.
        Until then writes are refused at once.
        """
        if self._fruitless_at == self.flusher.commits and monotonic() < self._look_again_s:
            return
        ledger, began = self.ledger, thread_time()
        while ledger.memory_bytes >= ledger.quota_bytes * HIGH_WATER and thread_time() - began < RELIEF_S:
            before = ledger.memory_bytes
            ended = next(self._relief, True)
            self._relieved_bytes += max(0, before - ledger.memory_bytes)
            if ended:
                # Only a round that saw everything that is on disk now can tell.
                fruitless = not self._relieved_bytes and self._relief_since == self.flusher.commits
                self._relief, self._relief_since = self._relief_round(), self.flusher.commits
                self._relieved_bytes = 0
                if fruitless:
                    self._fruitless_at, self._look_again_s = self.flusher.commits, monotonic() + LOOK_AGAIN_S
                    return

    def _relief_round(self) -> Iterator[None]:
        yield from self.sweep()
        yield from self.compact()
        yield from self.evict()
