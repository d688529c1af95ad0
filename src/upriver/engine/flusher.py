"""From memory to disk: group commit, checkpoints, and the waiters for them.

Theory of operation. ``step`` gathers everything that changed since the last step into one batch and commits it. A batch
holds one group with the new records of all vbuckets, the changed descriptions, and the cuts of histories that were
rolled back. All are gathered under the journal's lock and committed together, so the disk always shows one moment of
the bucket. If the commit fails, nothing is lost: the changes stay in memory and are gathered again. Until a commit
succeeds, writes are refused and waiters are told of the failure.

Groups are cheap to write and expensive to read. When they have grown large, a *checkpoint* moves them into blocks, some
megabytes with each batch: it writes the records of one vbucket after the other from memory as blocks. When all vbuckets
are done, it drops the groups that existed at its beginning, also some with each batch. A vbucket that is larger than a
slice takes several: blocks then reach up to some seqno and the groups still count, because loading skips known records;
only the last slice raises the group from which records count. So a crash between two slices leaves nothing in doubt.
*Compaction* works in the same way and removes records from old blocks that memory no longer holds.

Cutting a history back needs no rewriting: its description remembers the *cut* (in all groups before this one, records
count only up to that seqno) until a checkpoint has left those groups behind.

``step`` runs in the calling thread, as tests use it; ``start`` runs it in a thread of its own.
"""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, Protocol

from upriver.engine.durability_waiters import Done, Failed, Wait, told
from upriver.engine.journal import Journal
from upriver.engine.malloc_tuning import MallocTuning
from upriver.engine.storage.block_cache import BlockCache
from upriver.engine.storage.disk_space import DiskSpace
from upriver.engine.storage.interface import BLOCK_BYTES, Block, Storage, WriteBatch
from upriver.engine.table import Ledger, Table, collect
from upriver.engine.vbucket import Vbucket, notify
from upriver.errors import CorruptData, StorageError

log = logging.getLogger(__name__)

#: A checkpoint starts at this many bytes in groups or this many groups, and moves this much with each batch.
CHECKPOINT_BYTES: Final = 32 * 2**20
CHECKPOINT_GROUPS: Final = 50_000
SLICE_BYTES: Final = 2 * 2**20
#: A slice is at least this many times as large as the new group: groups that grow during a checkpoint shrink again.
SLICE_SHARE: Final = 2
#: A commit with a slice should not take longer than this; if it does, the next slices are smaller.
SLICE_S: Final = 0.05
#: After a crash, CAS values start this far after the clock and the last CAS, in case the clock was set back: 17 s.
CAS_MARGIN: Final = 2**34
#: This much memory is kept for the next group.
ROOM_BYTES_MAX: Final = 8 * 2**20
RETRY_S: Final = 0.5
#: A batch drops at most this many groups; a vbucket with this many cuts gets a checkpoint, which removes them.
DROPPED_GROUPS_MAX: Final = 1000
CUTS_MAX: Final = 64

#: In groups before this number, records count only up to this seqno.
Cut = tuple[int, int]


class Vbuckets(Protocol):
    """The parts of a bucket that the flusher uses."""

    @property
    def tables(self) -> Sequence[Table | None]: ...

    def existing(self, number: int) -> Vbucket | None: ...

    def numbers(self) -> list[int]: ...


@dataclass(slots=True)
class _Gathered:
    """A batch, and the state to update when it is committed."""

    batch: WriteBatch = field(default_factory=WriteBatch)
    group_bytes: int = 0
    tables: list[Table] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)
    trims: dict[int, int] = field(default_factory=dict)
    #: Waiters for everything, and for changes of histories that this batch cuts.
    waits: list[Wait] = field(default_factory=list)
    #: How far blocks reach with this batch, and from which group on records count.
    checkpointed: dict[int, tuple[Table, int, int]] = field(default_factory=dict)
    #: The passes whose blocks it rewrites.
    compactions: list["_Compaction"] = field(default_factory=list)
    #: Bytes of garbage that are removed, by vbucket.
    reclaimed: Counter[int] = field(default_factory=Counter)
    cuts: dict[int, list[Cut]] = field(default_factory=dict)


class _Checkpoint:
    """One pass over the vbuckets that moves records from groups into blocks."""

    def __init__(self, numbers: list[int], to_group: int, group_bytes: int) -> None:
        #: The vbuckets still to do; the last one is in progress.
        self.numbers = numbers
        self.to_group = to_group
        self.group_bytes = group_bytes
        #: Vbucket, last seqno, and the group from which records count then. It is fixed when the vbucket's turn comes,
        #: so that the turn ends however much is written meanwhile.
        self.goal: tuple[int, int, int] | None = None


class _Compaction:
    """One pass over the blocks of a vbucket."""

    def __init__(self, vbucket: Vbucket) -> None:
        self.vbucket = vbucket
        self.position = 0
        #: The next blocks, once they are read.
        self.ahead: list[Block] | None = None
        # Fixed at the beginning: see Table.retain.
        self.tombstones_to = vbucket.purged_seqno


class Flusher:
    """Writes a bucket's changes to its storage."""

    def __init__(
        self,
        storage: Storage,
        ledger: Ledger,
        journal: Journal,
        vbuckets: Vbuckets,
        *,
        next_group: int = 1,
        interval_s: float = 0.05,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        self.storage = storage
        self.space = DiskSpace(storage, ledger)
        #: For reading evicted values.
        self.blocks = BlockCache(storage)
        self.ledger = ledger
        self.journal = journal
        self.vbuckets = vbuckets
        self.next_group = next_group
        self.interval_s = interval_s
        self.checkpoint_bytes = checkpoint_bytes
        self.slice_bytes = slice_bytes
        self.group_bytes = 0
        #: The oldest group that may still exist.
        self.first_group = next_group
        self.cuts: dict[int, list[Cut]] = {}
        self.commits = 0
        self.bytes_written = 0
        self.error: StorageError | None = None
        #: While true, nothing is written.
        self.paused = False
        self.waiting = journal.waiting
        self._checkpoint: _Checkpoint | None = None
        self._slice_bytes = slice_bytes
        #: The passes that were asked for, oldest first.
        self._compactions: dict[Vbucket, _Compaction] = {}
        self._dirty_since: float | None = None
        self._writing_since: float | None = None
        self._step_lock = threading.Lock()
        #: The buffer of the next group, once the one before is stored.
        self._room = bytearray()
        self._awake = threading.Event()
        self._hurry = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        ledger.wake = journal.wake = self._woken

    # Waiters.

    def when_persisted(
        self, vbucket: Vbucket, seqno: int, done: Done, failed: Failed | None = None, undone: Done | None = None
    ) -> Wait:
        """Call ``done`` when the change ``seqno`` is on disk: from the flusher's thread, or at once if it is there.

        If a write fails, ``failed`` is called instead, with the error; the change may still be stored later. Without
        ``failed`` the wait goes on until a write succeeds. If this copy rolls back below the change first, ``undone``
        is called; without it the wait ends when the cut is stored, as after a flush, which is a later write.
        """
        with self.journal.lock:
            wait = self.waiting.for_change(vbucket.table, seqno, done, failed, undone)
            call = told([wait]) if vbucket.table.persisted_seqno >= seqno else [self._urge]
        for each in call:
            each()
        return wait

    def barrier(self, done: Done, failed: Failed | None = None) -> Wait:
        """Call ``done`` when everything that was done before this call is on disk, or ``failed``, as above."""
        with self.journal.lock:
            wait = self.waiting.for_everything(done, failed)
        self._urge()
        return wait

    @property
    def queue_age_s(self) -> float:
        """How long the oldest change has waited, including a commit that hangs."""
        since = self._dirty_since if self._writing_since is None else self._writing_since
        return 0.0 if since is None else max(0.0, self.ledger.clock() - since)

    @property
    def cas_after_crash(self) -> int:
        """Where CAS values continue after a crash: above all that are given until the next commit."""
        return max(self.ledger.last_cas, int(self.ledger.clock() * 1e9)) + CAS_MARGIN

    # Work.

    def step(self) -> bool:
        """Write all pending changes; returns whether there were any. If it fails, they are kept for the next step."""
        with self._step_lock:
            gathered = _Gathered()
            began = perf_counter()
            try:
                self._read_ahead()
                if not self._gather(gathered):
                    return False
                if gathered.batch:
                    began = perf_counter()
                    self.storage.commit(gathered.batch)
            except BaseException as error:  # after any error, nothing that was taken may be lost
                self._failed(gathered, error)
                raise
            if gathered.batch:
                took_s = perf_counter() - began
                self._succeeded(gathered)
                self._adapt(gathered.batch, took_s)
            self._writing_since = None
            with self.journal.lock:
                # Also after an empty batch: there may be a new waiter for a vbucket that is gone already.
                due = told(gathered.waits) + self.waiting.persisted(self._reached)
            notify(due)
            return bool(gathered.batch)

    def _adapt(self, batch: WriteBatch, took_s: float) -> None:
        """Use smaller slices on a slow disk: commits during a checkpoint wait for them."""
        if batch.blocks and took_s > SLICE_S:
            self._slice_bytes = max(min(BLOCK_BYTES, self.slice_bytes), self._slice_bytes // 2)
        elif took_s < SLICE_S * 0.8:
            self._slice_bytes = min(self.slice_bytes, self._slice_bytes * 2)

    def pause(self) -> None:
        """Write no later changes until ``resume``; waiters for the disk wait that long.

        This does not wait for a batch that is being written: it holds only earlier changes.
        """
        with self.journal.lock:
            self.paused = True

    def resume(self) -> None:
        """Write again, starting with the changes made meanwhile."""
        self.paused = False
        self._urge()

    def request_checkpoint(self) -> None:
        """Move all groups into blocks, a slice with each step."""
        with self.journal.lock:
            if self._checkpoint is None:
                self._checkpoint = _Checkpoint(self.vbuckets.numbers(), self.next_group - 1, self.group_bytes)
        self._urge()

    @property
    def checkpointing(self) -> bool:
        return self._checkpoint is not None

    def request_compaction(self, vbucket: Vbucket) -> None:
        """Remove records that memory no longer holds from the vbucket's blocks."""
        with self.journal.lock:
            self._compactions.setdefault(vbucket, _Compaction(vbucket))
        self._urge()

    @property
    def compacting(self) -> bool:
        return bool(self._compactions)

    @property
    def _at_work(self) -> bool:
        """Whether each step does a slice of a longer task."""
        return self.checkpointing or self.compacting

    def drain(self) -> None:
        """Step until nothing waits, or until paused."""
        while self.step() or (self._at_work and not self.paused):
            pass

    def _gather(self, gathered: _Gathered) -> bool:
        """Gather all changes; returns False while paused."""
        with self.journal.lock:
            if self.paused:
                return False
            self._hurry.clear()
            gathered.waits = self.waiting.take_for_everything()
            here = self.vbuckets.tables
            gathered.tables = tables = [t for t in self.ledger.take_dirty() if here[t.vbucket] is t]
            if self._writing_since is None:
                self._writing_since = self._dirty_since
            self._dirty_since = None
            gathered.changed, gathered.trims = changed, trims = self.journal.take()
            gathered.waits += self.waiting.on_cut(trims)
            batch = gathered.batch
            if tables:
                group = collect(tables, self.storage.keeps_records, self._room)
                batch.group = (self.next_group, group)
                gathered.group_bytes = len(group)
                kept = group.obj
                self._room = kept if isinstance(kept, bytearray) and len(kept) <= ROOM_BYTES_MAX else bytearray()
            for number, seqno in trims.items():
                self._gather_trim(gathered, number, seqno)
            if self._checkpoint is not None:
                self._gather_checkpoint(gathered, self._checkpoint)
            self._gather_compactions(gathered)
            for number in changed | set(gathered.checkpointed):
                batch.descriptions[number] = self._description(gathered, number)
            if batch.group is not None:
                batch.facts["cas"] = self.cas_after_crash
                batch.facts["clean"] = False
        return True

    def _owner(self, table: Table) -> Vbucket | None:
        vbucket = self.vbuckets.existing(table.vbucket)
        return vbucket if vbucket is not None and vbucket.table is table else None

    def _gather_trim(self, gathered: _Gathered, number: int, seqno: int) -> None:
        """Cut the blocks, and remember the cut for older groups."""
        gathered.batch.trims[number] = seqno
        vbucket = self.vbuckets.existing(number)
        if seqno == 0 or vbucket is None:  # nothing in the groups counts
            gathered.cuts[number] = []
            if vbucket is not None:
                gathered.checkpointed[number] = (vbucket.table, 0, self.next_group)
        else:
            older = [cut for cut in self.cuts.get(number, ()) if cut[1] < seqno]
            gathered.cuts[number] = [*older, (self.next_group, seqno)]

    def _gather_checkpoint(self, gathered: _Gathered, checkpoint: _Checkpoint) -> None:
        """One slice: more than the new group, or the groups would never get smaller."""
        room, later = max(self._slice_bytes, SLICE_SHARE * gathered.group_bytes), []
        while checkpoint.numbers and room > 0:
            number = checkpoint.numbers[-1]
            vbucket = self.vbuckets.existing(number)
            if vbucket is None or number in gathered.trims:
                checkpoint.goal = None
                checkpoint.numbers.pop()
                if vbucket is not None:
                    later.append(number)  # this batch already cuts its blocks
                continue
            if checkpoint.goal is None or checkpoint.goal[0] != number:
                checkpoint.goal = (number, *self._reach(gathered, vbucket.table))
            size, complete = self._to_blocks(gathered, vbucket.table, *checkpoint.goal[1:], room)
            room -= size
            if complete:
                checkpoint.goal = None
                checkpoint.numbers.pop()
        checkpoint.numbers[:0] = later
        if not checkpoint.numbers:
            gathered.batch.drop_groups_to = min(checkpoint.to_group, self.first_group + DROPPED_GROUPS_MAX - 1)
            if not checkpoint.to_group and not gathered.checkpointed:
                self._checkpoint = None  # there was nothing to move

    def _reach(self, gathered: _Gathered, table: Table) -> tuple[int, int]:
        """How far the table is on disk with this batch, and the number of the following group."""
        if gathered.batch.group is None:
            return table.persisted_seqno, self.next_group
        return table.flushing_seqno, self.next_group + 1

    def _to_blocks(
        self, gathered: _Gathered, table: Table, upto: int, from_group: int, max_bytes: int
    ) -> tuple[int, bool]:
        """Add blocks of the records after the existing blocks; returns their bytes, and whether these were all."""
        position, size = table.checkpointed_seqno, 0
        while position < upto:
            if size >= max_bytes:
                gathered.checkpointed[table.vbucket] = (table, position, table.records_from_group)
                return size, False
            records, last = table.records(position, upto, BLOCK_BYTES)
            if not records:
                break
            gathered.batch.blocks.append(Block(table.vbucket, last, records))
            position, size = last, size + len(records)
        gathered.checkpointed[table.vbucket] = (table, upto, from_group)
        return size, True

    def _gather_compactions(self, gathered: _Gathered) -> None:
        """One slice of the oldest passes: several small vbuckets share a commit."""
        for pass_ in list(self._compactions.values()):
            if pass_.ahead is None:
                return
            if not self._compact(gathered, pass_, pass_.ahead):
                del self._compactions[pass_.vbucket]
            pass_.ahead = None

    def _read_ahead(self) -> None:
        """Read the blocks that the next batch rewrites before the lock is taken; only the flusher changes blocks.

        Most of what is read is garbage under load, so a slice frees more than the new group takes.
        """
        room = max(self._slice_bytes, SLICE_SHARE * self.ledger.pending_bytes)
        with self.journal.lock:
            passes = [] if self.paused else list(self._compactions.values())
        for pass_ in passes:
            if room <= 0:
                return
            try:
                pass_.ahead = self.storage.blocks(pass_.vbucket.number, pass_.position, room)
            except CorruptData as error:
                self._not_compacted(pass_, error)
            room -= sum(len(block.records) for block in pass_.ahead or ())

    def _not_compacted(self, pass_: _Compaction, error: CorruptData) -> None:
        """These blocks stay as they are; other vbuckets are still written."""
        log.error("%s: vbucket %d is not compacted: %s", self.storage.path, pass_.vbucket.number, error.why)
        pass_.ahead = []

    def _compact(self, gathered: _Gathered, pass_: _Compaction, old: list[Block]) -> int:
        """Rewrite the next blocks, in ascending order: a tombstone never goes before the versions that it deletes.

        Returns the number of bytes; 0 if the pass is over.
        """
        vbucket = pass_.vbucket
        if self._owner(vbucket.table) is not vbucket or vbucket.number in gathered.trims:
            return 0
        try:
            # Later blocks come from a commit that failed but took effect: a checkpoint writes them again.
            old = [block for block in old if block.upto <= vbucket.table.checkpointed_seqno]
            retained = [vbucket.table.retain(block.records, pass_.tombstones_to) for block in old]
        except CorruptData as error:
            self._not_compacted(pass_, error)
            return 0
        gathered.reclaimed[vbucket.number] += sum(map(len, (b.records for b in old))) - sum(map(len, retained))
        gathered.batch.removed += [(block.vbucket, block.upto) for block in old]
        merged: list[bytes] = []
        for block, records in zip(old, retained, strict=True):
            merged.append(records)
            if sum(map(len, merged)) >= BLOCK_BYTES or block is old[-1]:
                if any(merged):
                    gathered.batch.blocks.append(Block(vbucket.number, block.upto, b"".join(merged)))
                merged = []
        if old:
            pass_.position = old[-1].upto
            gathered.compactions.append(pass_)
        return sum(len(block.records) for block in old)

    def _description(self, gathered: _Gathered, number: int) -> dict[str, Any] | None:
        vbucket = self.vbuckets.existing(number)
        if vbucket is None:
            return None
        description = vbucket.describe()
        description["state_from_group"] = self.next_group + (1 if gathered.batch.group is not None else 0)
        if number in gathered.checkpointed:
            _, upto, from_group = gathered.checkpointed[number]
            description["checkpointed"] = upto
            description["records_from_group"] = from_group
            gathered.cuts[number] = [
                cut for cut in gathered.cuts.get(number, self.cuts.get(number, ())) if cut[0] > from_group
            ]
        description["cuts"] = gathered.cuts.get(number, self.cuts.get(number, []))
        return description

    def _succeeded(self, gathered: _Gathered) -> None:
        self.blocks.forget(gathered.batch.rewritten())
        with self.journal.lock:
            for table in gathered.tables:
                table.committed()
            for number, (table, upto, from_group) in gathered.checkpointed.items():
                # If it was cut back meanwhile, the next batch starts from there.
                table.checkpointed_seqno = min(upto, self.journal.trims.get(number, upto))
                table.records_from_group = from_group
            self.cuts.update(gathered.cuts)
            self._count(gathered.batch, gathered.group_bytes)
            for number, size in gathered.reclaimed.items():
                self.space.reclaimed(number, size)
            for number, seqno in gathered.trims.items():
                if not seqno:
                    self.space.cleared(number)
            self.space.pace(self.group_bytes)
            if self.error is not None:
                log.info("%s: writing again", self.storage.path)
                self.error, self.ledger.refusal = None, ""
            if not self.storage.keeps_records:
                for table in gathered.tables:
                    table.checkpointed_seqno = table.persisted_seqno
            elif (
                self.group_bytes >= self.checkpoint_bytes
                # Single writes that wait for the disk are a group each, and opening the store reads them all.
                or self.next_group - self.first_group > CHECKPOINT_GROUPS
                or any(len(c) > CUTS_MAX for c in gathered.cuts.values())
            ):
                self.request_checkpoint()
            watched = self.journal.take_watched(table.vbucket for table in gathered.tables)
        for number in watched:
            vbucket = self.vbuckets.existing(number)
            if vbucket is not None:
                vbucket.wake_persisted()

    def _count(self, batch: WriteBatch, group_bytes: int) -> None:
        if batch.group is not None:
            self.next_group += 1
            self.group_bytes += group_bytes
            self.bytes_written += group_bytes
        self.bytes_written += sum(len(block.records) for block in batch.blocks)
        self.commits += 1
        if batch.drop_groups_to:
            self.first_group = batch.drop_groups_to + 1
        checkpoint = self._checkpoint
        if checkpoint is not None and not checkpoint.numbers and self.first_group > checkpoint.to_group:
            self.group_bytes -= checkpoint.group_bytes
            self._checkpoint = None

    def _reached(self, table: Table) -> int:
        """How far the table is on disk; the maximum if its vbucket has been removed from disk."""
        gone = self._owner(table) is None and table.vbucket not in self.journal.trims
        return 2**64 if gone else table.persisted_seqno

    def _failed(self, gathered: _Gathered, error: BaseException) -> None:
        """Undo the gathering of the batch, and refuse writes until a commit succeeds."""
        why = error.why if isinstance(error, StorageError) else repr(error)
        self.blocks.forget(gathered.batch.rewritten())
        with self.journal.lock:
            if gathered.batch.group is not None:
                # The group may be on disk all the same, if the error came after the commit. Its number is not used
                # again: the next group holds the same records, and later cuts count for it as well.
                self.next_group += 1
            self.journal.give_back(gathered.changed, gathered.trims)
            if self._checkpoint is not None:
                # The vbuckets of this batch are not done, and a goal may refer to the group that was not written.
                done = set(gathered.checkpointed) - set(self._checkpoint.numbers)
                self._checkpoint.numbers += sorted(done)
                self._checkpoint.goal = None
            for pass_ in gathered.compactions:
                pass_.position = 0
                self._compactions.setdefault(pass_.vbucket, pass_)
            for table in gathered.tables:
                table.touch()
            if self.error is None:
                log.error("%s: cannot write: %s", self.storage.path, why)
            self.error = StorageError(self.storage.path, why)
            self.ledger.refusal = f"the disk does not take writes: {why}"
            due = self.waiting.failed(self.error)
        notify(due)

    # The thread.

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="upriver-flusher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; pending changes stay in memory."""
        if self._thread is not None:
            self._stopping.set()
            self._hurry.set()
            self._awake.set()
            self._thread.join()
            self._thread = None

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _woken(self) -> None:
        if self._dirty_since is None:
            self._dirty_since = self.ledger.clock()
        self._awake.set()

    def _urge(self) -> None:
        self._hurry.set()
        self._awake.set()

    def _run(self) -> None:
        tuning = MallocTuning()
        while True:
            self._awake.wait()
            # To be worth its fsync a group collects some milliseconds of changes, unless there are waiters.
            self._hurry.wait(self.interval_s)
            if self._stopping.is_set():
                return
            self._awake.clear()
            if self.paused:
                continue  # ``resume`` wakes it
            written = self.bytes_written
            try:
                self.step()
                tuning.used(self.bytes_written - written)
                if self._at_work:
                    self._urge()
            except Exception as error:
                if not isinstance(error, StorageError):
                    log.exception("%s: a flush failed and will be retried", self.storage.path)
                self._stopping.wait(RETRY_S)
                self._awake.set()
