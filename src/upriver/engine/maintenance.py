"""What a bucket does when nobody asks: expire, purge, compact, evict; in steps of some thousand records.

Theory of operation. Each duty is a generator that yields after every small step, so that no call holds the
caller up for long; ``run`` goes through the duties in turn until its time is used up and goes on there the
next time.

Compaction raises a vbucket's *floor*: states below it can no longer be restored, and versions that were
superseded at or below it are dropped from memory, then from disk. It happens only when history is both older
and larger than the limits, or when memory is short: then whatever its age. Purge drops old tombstones and
moves the floor above them, for a version that outlived its tombstone would come back to life at the next
start. Neither passes what an open cursor still needs, unless history grows beyond twice its limit, or beyond
its share of the quota while memory is short: then compaction ends the cursor as too slow. Only what stands in
blocks on disk is dropped or evicted, so the disk can always replace what memory lost.

Below its floor a vbucket may hold what was dropped before: the disk follows later, so a restart brings it back, and a
cursor may have been in the way. Such vbuckets are remembered and swept again.
"""

import math
from collections import Counter
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
#: While memory is short cursors may hold up to this share of the quota in superseded versions.
PINNED_SHARE: Final = 0.125
#: Nor may groups hold more than this share then: less than what deletions may take beyond the quota, or they would
#: stop at it, because what they ended can go only when they stand in blocks.
GROUPS_SHARE: Final = 1 / 32
#: The blocks of a vbucket are rewritten when about this share of them is garbage, if that is not just a little: there,
#: or as much in all vbuckets as they hold.
GARBAGE_SHARE: Final = 0.25
GARBAGE_BYTES_MIN: Final = 2**20
#: How long a write that found no room looks for some, and after what time it looks again where there was none.
RELIEF_S: Final = 0.01
LOOK_AGAIN_S: Final = 0.05
#: Tombstones are looked for so often within their time, and at least each minute.
PURGES: Final = 100
PURGE_INTERVAL_S_MAX: Final = 60.0
#: Where little is written old history is moved into blocks so often at most: many small blocks are dear.
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
        #: What is left on disk of what memory has dropped, by number of the vbucket.
        self._garbage: Counter[int] = Counter()
        #: Vbuckets that may hold versions superseded at or below their floor, and up to where those are gone.
        self._unswept: dict[Vbucket, int] = {}
        #: Per vbucket on which branch, up to where and since when all was seen; and what was seen long enough ago.
        self._marks: dict[int, tuple[int, int, float, int]] = {}
        self._purged_s = -PURGE_INTERVAL_S_MAX
        self._moved_s = -BLOCKS_INTERVAL_S
        #: Where each open stream stood when tombstones were last looked for.
        self._looked_at: WeakKeyDictionary[Cursor, int] = WeakKeyDictionary()
        self._duties = self._rounds()
        #: The round under way for those who found no room, at which commit it began and what it has freed; and at which
        #: commit one freed nothing.
        self._relief = self._relief_round()
        self._relief_since = -1
        self._relieved_bytes = 0
        self._fruitless_at = -1
        self._look_again_s = 0.0

    def run(self, budget_s: float = 0.01) -> None:
        """Do what is due for about this long."""
        began = thread_time()
        before = began
        while before - began < budget_s:
            try:
                more = next(self._duties)
            except BaseException:
                self._duties = self._rounds()  # what failed is begun anew the next time
                raise
            now = thread_time()
            self.longest_step_s = max(self.longest_step_s, now - before)
            before = now
            if not more:
                return

    def run_all(self) -> None:
        """One whole round of every duty, due or not, however long it takes."""
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
        if not self._purged_s <= now < self._purged_s + interval_s:  # clocks go back too
            self._purged_s = now
            yield from self.purge()

    # Expiry.

    def expire(self) -> Iterator[None]:
        """The pager: items of active vbuckets that nobody reads expire too."""
        ledger, all_seen = self.ledger, False
        ledger.due_s = math.inf  # whoever writes from now on says when he expects us
        try:
            for vbucket in self.vbuckets():
                if vbucket.state is VbucketState.ACTIVE:
                    yield from self._expire(vbucket)
                    if not ledger.may_expire():
                        return
                else:
                    vbucket.table.end_locks()  # those that came with changes end here too
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
                # Only what stands in blocks can go: where little is written no checkpoint would come by itself.
                wants_blocks |= table.seqno_before(before, vbucket.consistent_seqno) > table.checkpointed_seqno
                yield
                yield from self._purge(vbucket, NO_END, before)
                # What came with a time in the future is as old as what came after it.
                old = self._surely_old(vbucket, before)
                yield
                yield from self._purge(vbucket, old, ANY_TIME)
        if wants_blocks and self.flusher.storage.keeps_records:
            self.flusher.request_checkpoint()

    def _end_stuck(self, vbucket: Vbucket) -> None:
        """Tombstones wait for open streams; if memory is short not for one that stands where it stood the last time."""
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
        # Everything in the way of an open stream stays.
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
        # Who came in between and needs these deletions has time until the next round.
        if 0 < highest <= self._slowest(vbucket) and self._raise_floor(vbucket, highest, purge_to=highest):
            yield from self._sweep(vbucket, highest, before)

    def _surely_old(self, vbucket: Vbucket, before: int) -> int:
        """The last seqno that stood here for long enough, whatever times the changes up to it came with.

        Either a change behind it is old enough, or we saw it ourselves long enough ago: a vbucket that
        nobody writes to must not keep such tombstones for ever.
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
        """Drop superseded versions that are both too old and too many, or all that can go if memory is short."""
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
            # Neither too new nor pinned: it waits for a checkpoint, which does not come where little is written.
            wants_blocks |= limit == vbucket.table.checkpointed_seqno < old
            if limit > vbucket.floor_seqno and self._raise_floor(vbucket, limit):
                yield from self._sweep(vbucket)
        if wants_blocks and ledger.history_bytes > retention.history_bytes:
            self._move_old()

    def _move_old(self) -> None:
        """Make blocks of what is in groups only, unless that was done just now."""
        now = self.ledger.clock()
        if self.flusher.storage.keeps_records and not self._moved_s <= now < self._moved_s + BLOCKS_INTERVAL_S:
            self._moved_s = now
            self.flusher.request_checkpoint()

    def loaded(self, vbucket: Vbucket) -> None:
        """All of it came from disk, which may not have followed up to its floor."""
        if vbucket.floor_seqno:
            self._unswept[vbucket] = 0

    def sweep(self) -> Iterator[None]:
        """Drop what still stands below the floors, as far as no cursor needs it."""
        for vbucket, swept in list(self._unswept.items()):
            if vbucket.removed or vbucket.floor_seqno <= swept or not vbucket.table.history_bytes:
                self._unswept.pop(vbucket, None)
            elif self._droppable(vbucket, vbucket.floor_seqno) > swept:
                yield from self._sweep(vbucket)

    def _limit(self, vbucket: Vbucket) -> int:
        """Neither beyond what is in blocks nor beyond the last whole state."""
        return min(vbucket.table.checkpointed_seqno, vbucket.consistent_seqno)

    def _slowest(self, vbucket: Vbucket) -> int:
        """How far all open cursors have read."""
        return min((cursor.seqno for cursor in vbucket.cursors.values()), default=NO_END)

    def _pinned(self, cursor: Cursor) -> int:
        """How far the floor may rise before the cursor misses something.

        An announced snapshot needs the state at its end; a stream of every version all that it has not read.
        """
        if cursor.options.history:
            return cursor.seqno
        return NO_END if cursor.snapshot is None else cursor.snapshot.end

    def _unpinned(self, vbucket: Vbucket, limit: int) -> int:
        """Keep what cursors need, or end them if that has become too much."""
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
        """Announce that states below ``floor`` are gone; refused if a cursor came in between.

        Deletions up to ``purge_to`` count as gone from here on: who resumes below must roll back.
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
        """Versions superseded at or below this are needed by nobody."""
        return min([floor, *map(self._pinned, vbucket.cursors.values())])

    def _sweep(self, vbucket: Vbucket, purge_to: int = 0, purge_before: int = 0) -> Iterator[None]:
        table, position, floor = vbucket.table, 0, vbucket.floor_seqno
        swept, freed = floor, 0
        try:
            while True:
                with vbucket.journal.lock:
                    if vbucket.floor_seqno < floor:  # cleared meanwhile: another history
                        return
                    # A cursor that was opened since the last step reads what is left, and all of that.
                    purge_to = min(purge_to, self._slowest(vbucket))
                    swept = min(swept, self._droppable(vbucket, floor))
                    history, tombstones = table.history_bytes, table.tombstones
                    position, _ = table.sweep(position, swept, purge_to, purge_before, 0)
                    # Counted here, because whoever writes between two steps adds as much again.
                    freed += history - table.history_bytes + 100 * (tombstones - table.tombstones)
                yield
                if not position or position > floor:
                    break
        finally:
            self._note_garbage(vbucket, freed)
        self._unswept[vbucket] = swept  # the next look forgets it, if that was all
        vbucket.purged_seqno = max(vbucket.purged_seqno, purge_to)
        if purge_to:
            vbucket.journal.change(vbucket.number)

    def _note_garbage(self, vbucket: Vbucket, freed: int) -> None:
        self._garbage[vbucket.number] += freed
        if self._garbage.total() > max(GARBAGE_BYTES_MIN, self.ledger.memory_bytes):
            looked_at = self.vbuckets()
            self._garbage = Counter({each.number: self._garbage[each.number] for each in looked_at})  # others are gone
        else:
            looked_at = [vbucket] if self._garbage[vbucket.number] > GARBAGE_BYTES_MIN else []
        for each in looked_at:
            if self._garbage[each.number] > GARBAGE_SHARE * each.table.memory_bytes:
                del self._garbage[each.number]
                if self.flusher.storage.keeps_records:
                    self.flusher.request_compaction(each)

    # Eviction.

    def _short_of_memory(self) -> bool:
        return 0 < self.ledger.quota_bytes * HIGH_WATER < self.ledger.memory_bytes

    def _request_blocks(self) -> None:
        """Only what stands in blocks can go from memory."""
        if self.flusher.storage.keeps_records and (
            not any(v.table.checkpointed_seqno for v in self.vbuckets())
            or self.flusher.group_bytes > self.ledger.quota_bytes * GROUPS_SHARE
        ):
            self.flusher.request_checkpoint()

    def evict(self) -> Iterator[None]:
        """Drop values from memory that can be read back, those first that nobody read."""
        if not self._short_of_memory() or not self.flusher.storage.keeps_records:
            return
        self._request_blocks()
        for _ in range(2):  # the first time around what was read lately is spared
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

    def evict_loaded(self, table: Table) -> None:
        """A store may be larger than memory: while it is loaded, keep only metadata of what exceeds the quota."""
        position = 0
        while self._short_of_memory():
            position, _ = table.sweep(position, 0, 0, 0, table.checkpointed_seqno)
            if not position:
                return

    def relieve(self) -> bool:
        """A write found no room: drop and evict some now, a bounded amount, beginning where the last one ended.

        True if more can go soon, because the disk is behind: what is not there cannot go.
        """
        self._free()
        ledger, flusher = self.ledger, self.flusher
        behind = ledger.pending_bytes > 0 or flusher.group_bytes > ledger.quota_bytes * GROUPS_SHARE
        return behind and (flusher.storage.keeps_records or ledger.history_bytes > 0)

    def _free(self) -> None:
        """When a whole round has freed nothing there is nothing to free, until something more is on disk or some time
        has passed: those who are refused meanwhile are refused at once.
        """
        if self._fruitless_at == self.flusher.commits and monotonic() < self._look_again_s:
            return
        ledger, began = self.ledger, thread_time()
        while ledger.memory_bytes >= ledger.quota_bytes * HIGH_WATER and thread_time() - began < RELIEF_S:
            before = ledger.memory_bytes
            ended = next(self._relief, True)
            self._relieved_bytes += max(0, before - ledger.memory_bytes)
            if ended:
                # Only a round that saw all of what is on disk now can tell.
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
