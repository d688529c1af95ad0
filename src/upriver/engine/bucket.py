"""A bucket: its vbuckets, its data directory and the threads between them.

Theory of operation. One thread works with the vbuckets; the flusher's thread only reads their changes and writes them
to disk. Opening loads everything that was stored: blocks first, then the groups that no checkpoint has moved yet. A
clean stop is marked in the store. The mark is removed, durably, before the first request is served. If it is missing at
the next start, consumers may have seen changes that never reached the disk, and every active vbucket starts a new
branch.
"""

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal

from upriver.engine.cursor import CursorEnd
from upriver.engine.durability_waiters import Wait, not_on_disk
from upriver.engine.filters import LargeValues
from upriver.engine.flusher import CHECKPOINT_BYTES, SLICE_BYTES, Flusher
from upriver.engine.journal import CLOSED, Journal
from upriver.engine.maintenance import Maintenance, Retention
from upriver.engine.statistics import BucketStatistics, VbucketStatistics, bucket_statistics, vbucket_statistics
from upriver.engine.storage.interface import Storage, WriteBatch
from upriver.engine.storage.lmdb import LmdbStorage, cut
from upriver.engine.storage.memory import MemoryStorage
from upriver.engine.table import Ledger, Table, group_parts, replay, stored_value
from upriver.engine.vbucket import Vbucket, new_uuid
from upriver.errors import (
    CorruptData,
    DurabilityAmbiguous,
    InvalidArguments,
    KeyExists,
    NotMyVbucket,
    StorageError,
)
from upriver.model import VBUCKETS_MAX, VbucketState

QUEUE_BYTES_MAX: Final = 256 * 2**20
#: With a quota, the queue to disk has this share of it, but at least this size: queued changes exist several times.
QUEUE_SHARE: Final = 1 / 16
QUEUE_BYTES_MIN: Final = 8 * 2**20


def queue_bytes(quota_bytes: int) -> int:
    """The default limit for the bytes that wait for the disk."""
    if not quota_bytes:
        return QUEUE_BYTES_MAX
    return min(QUEUE_BYTES_MAX, max(QUEUE_BYTES_MIN, int(quota_bytes * QUEUE_SHARE)))


class Bucket:
    """N vbuckets in one data directory, or in memory only."""

    def __init__(
        self,
        storage: Storage,
        *,
        vbuckets: int = VBUCKETS_MAX,
        initial: Iterable[int] = (),
        ack: Literal["memory", "disk"] = "memory",
        quota_bytes: int = 0,
        queue_bytes_max: int | None = None,
        clock: Callable[[], float] = time.time,
        replicate_locks: bool = False,
        retention: Retention | None = None,
        interval_s: float = 0.05,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        facts = storage.facts()
        if vbuckets & (vbuckets - 1) or not 0 < vbuckets <= VBUCKETS_MAX:
            raise InvalidArguments(f"a bucket has a power of two up to {VBUCKETS_MAX} vbuckets, not {vbuckets}")
        if ack not in ("memory", "disk"):
            raise InvalidArguments(f"ack must be 'memory' or 'disk', not {ack!r}")
        if facts.get("vbuckets", vbuckets) != vbuckets:
            raise StorageError(storage.path, f"has {facts['vbuckets']} vbuckets, not {vbuckets}")
        self.storage = storage
        self.ack = ack
        #: The name of the store, which tells copies apart: a restored backup gets a new name.
        self.store: str = secrets.token_hex(8) if facts.get("copy") else facts.get("store") or secrets.token_hex(8)
        self.operations: Counter[str] = Counter()
        #: The large values that filters of streams look at.
        self.large_values = LargeValues()
        queue = queue_bytes(quota_bytes) if queue_bytes_max is None else queue_bytes_max
        # A clock that is given is the time of locks too.
        self.ledger = Ledger(clock, quota_bytes, queue, time.monotonic if clock is time.time else None)
        self.ledger.replicates_locks = replicate_locks
        self.journal = Journal()
        #: Called with the number of each vbucket that changes its role, is created, or becomes streamable; must only
        #: take note.
        self.role_listeners: list[Callable[[int], object]] = []
        self._vbuckets: list[Vbucket | None] = [None] * vbuckets
        #: The tables by number of their vbucket, for compiled code that answers many requests in one call.
        self.tables: list[Table | None] = [None] * vbuckets
        self._closed = False
        self.flusher = Flusher(
            storage,
            self.ledger,
            self.journal,
            self,
            interval_s=interval_s,
            checkpoint_bytes=checkpoint_bytes,
            slice_bytes=slice_bytes,
        )
        self.maintenance = Maintenance(self.ledger, self.flusher, lambda: list(self), retention or Retention())
        self._load(facts, vbuckets, initial)
        self.ledger.relief = self.maintenance.relieve

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        vbuckets: int = VBUCKETS_MAX,
        initial: Iterable[int] = (),
        ack: Literal["memory", "disk"] = "memory",
        quota_bytes: int = 0,
        queue_bytes_max: int | None = None,
        clock: Callable[[], float] = time.time,
        replicate_locks: bool = False,
        retention: Retention | None = None,
        interval_s: float = 0.05,
        background: bool = True,
    ) -> "Bucket":
        """Open the bucket in a directory, or one in memory; ``background`` gives the flusher its thread.

        A new bucket starts with the ``initial`` vbuckets, active. An existing bucket keeps its vbuckets, even if it has
        none: a node that handed over all of them does not own them again.
        """
        storage: Storage = MemoryStorage() if path is None else LmdbStorage(path)
        try:
            bucket = cls(
                storage,
                vbuckets=vbuckets,
                initial=initial,
                ack=ack,
                quota_bytes=quota_bytes,
                queue_bytes_max=queue_bytes_max,
                clock=clock,
                replicate_locks=replicate_locks,
                retention=retention,
                interval_s=interval_s,
            )
        except BaseException:
            storage.close()
            raise
        if background:
            bucket.flusher.start()
        return bucket

    def __enter__(self) -> "Bucket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Vbucket]:
        return iter([vbucket for vbucket in self._vbuckets if vbucket is not None])

    def __len__(self) -> int:
        return len(self._vbuckets)

    # Vbuckets.

    def existing(self, number: int) -> Vbucket | None:
        """The vbucket in any role, or None."""
        return self._vbuckets[number] if 0 <= number < len(self._vbuckets) else None

    def numbers(self) -> list[int]:
        """The numbers of the vbuckets that exist."""
        return [vbucket.number for vbucket in self]

    def vbucket(self, number: int) -> Vbucket:
        """The vbucket in any role; its operations check whether the role allows them."""
        found = self.existing(number)
        if found is None:
            raise NotMyVbucket(vbucket=number)
        return found

    def create_vbucket(self, number: int, state: VbucketState = VbucketState.ACTIVE) -> Vbucket:
        """A new, empty vbucket."""
        if not 0 <= number < len(self._vbuckets):
            raise NotMyVbucket(vbucket=number)
        self.journal.check_open(number)
        if self._vbuckets[number] is not None:
            raise KeyExists("the vbucket exists already", vbucket=number)
        vbucket = self._new(number)
        with self.journal.lock:
            self._vbuckets[number], self.tables[number] = vbucket, vbucket.table
            # The disk may hold an older vbucket with this number; it is void.
            self.journal.trim(number, 0)
            vbucket.set_state(state)
        return vbucket

    def create_vbuckets(self, state: VbucketState = VbucketState.ACTIVE) -> None:
        """Create all vbuckets that do not exist yet."""
        for number, vbucket in enumerate(self._vbuckets):
            if vbucket is None:
                self.create_vbucket(number, state)

    def delete_vbucket(self, number: int) -> None:
        """Remove a vbucket and everything in it."""
        vbucket = self.vbucket(number)
        vbucket.set_state(VbucketState.DEAD)
        with self.journal.lock:
            vbucket.removed = True
            vbucket.table.discard()
            self._vbuckets[number] = self.tables[number] = None
            self.journal.trim(number, 0)
        # Also if it was dead before: readers must notice that its data is gone.
        vbucket.end_cursors(CursorEnd.STATE_CHANGED)

    def flush(self) -> None:
        """Empty every active vbucket. This is a write, refused while the disk takes no writes."""
        mark = new_uuid()
        for vbucket in self:
            if vbucket.state is VbucketState.ACTIVE:
                vbucket.flush(mark=mark)

    # Durability.

    def acknowledge(
        self,
        vbucket: Vbucket,
        seqno: int,
        done: Callable[[], object],
        failed: Callable[[DurabilityAmbiguous], object] | None = None,
    ) -> Wait | None:
        """Call ``done`` when the change may be answered: now, or with ``ack=disk`` when it is on disk.

        If the disk fails first, ``failed`` is called instead: the change stays in memory and is stored when the disk
        takes writes again, so the caller must not repeat it. ``failed`` is also called if this copy rolls back below
        the change first: the copy that replaces it may have the change. The returned wait can be cancelled; it is None
        if ``done`` was called at once.
        """
        if self.ack != "disk":
            done()
            return None
        if failed is None:
            return self.flusher.when_persisted(vbucket, seqno, done)
        tell = failed

        def refused(error: StorageError) -> None:
            tell(DurabilityAmbiguous(not_on_disk(error), vbucket=vbucket.number))

        def undone() -> None:
            why = "the change was undone here by a rollback before it was on disk; the new owner may have it"
            tell(DurabilityAmbiguous(why, vbucket=vbucket.number))

        return self.flusher.when_persisted(vbucket, seqno, done, refused, undone)

    def sync(self, timeout_s: float | None = None) -> bool:
        """Wait until everything done so far is on disk; False if it took too long, an error if a write failed.

        While the flusher is paused, this waits until its thread resumes; without a thread it returns False at once.
        """
        if not self.flusher.running:
            self.flusher.step()
            return not self.flusher.paused
        settled, errors = threading.Event(), list[StorageError]()

        def failed(error: StorageError) -> None:
            errors.append(error)
            settled.set()

        wait = self.flusher.barrier(settled.set, failed)
        if not settled.wait(timeout_s):
            wait.cancel()
        if errors:
            raise errors[0]
        return settled.is_set()

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Write a consistent copy while running. It opens as after a crash at this moment, as another store.

        Raises ``StorageError`` if the disk takes neither the pending changes nor the copy, and while the flusher is
        paused.
        """
        if self.flusher.paused or not self.sync():
            raise StorageError(self.storage.path, "the flusher is paused; resume it to make a backup")
        self.storage.backup(os.fspath(path))

    def maintain(self, budget_s: float = 0.01) -> bool:
        """Expire, purge, compact and evict for about this long; call it regularly, and soon if it returns True."""
        return self.maintenance.run(budget_s)

    def statistics(self) -> BucketStatistics:
        """Statistics of the bucket; cheap enough to be asked often."""
        return bucket_statistics(self)

    def vbucket_statistics(self) -> list[VbucketStatistics]:
        """Statistics of each vbucket; a thousand take some milliseconds."""
        return [vbucket_statistics(vbucket) for vbucket in self]

    def close(self) -> None:
        """Write everything and mark the stop as clean."""
        if self._closed:
            return
        self.flusher.stop()
        self.flusher.resume()  # a clean stop leaves nothing unwritten
        try:
            while self.flusher.step():
                pass
            self.storage.commit(WriteBatch(facts={"clean": True, "cas": self.ledger.last_cas}))
        finally:
            self._release()

    def abandon(self) -> None:
        """Release the directory as a crash would: nothing more is written."""
        self.flusher.stop()
        self._release()

    def _release(self) -> None:
        self._closed = True
        self.large_values.close()
        self.journal.closed = True
        self.ledger.refusal = CLOSED  # no write would be stored any more
        self.storage.close()

    # Loading.

    def _new(self, number: int) -> Vbucket:
        vbucket = Vbucket(number, self.ledger, self.journal, self.operations)
        vbucket.on_role_change = self._role_changed
        if self.storage.keeps_records:
            vbucket.table.fetch = lambda seqno: self._fetch(number, seqno)
            vbucket.read_block = lambda seqno: self._read_block(number, seqno)
        return vbucket

    def _role_changed(self, number: int) -> None:
        for listener in self.role_listeners:
            listener(number)

    def _read_block(self, number: int, seqno: int) -> tuple[bytes, int]:
        block = self.flusher.blocks.block(number, seqno)
        return block.records, block.upto

    def _fetch(self, number: int, seqno: int) -> bytes:
        value = stored_value(self._read_block(number, seqno)[0], seqno)
        if value is None:
            raise CorruptData(self.storage.path, f"change {seqno} of vbucket {number} is not on disk")
        return value

    def _load(self, facts: dict[str, Any], vbuckets: int, initial: Iterable[int]) -> None:
        self.ledger.last_cas = facts.get("cas", 0)
        descriptions = self.storage.descriptions()
        try:
            for number, description in descriptions.items():
                vbucket = self._new(number)
                vbucket.restore(description)
                vbucket.table.state_from_group = description["state_from_group"]
                # Group numbers never repeat, even after a checkpoint has dropped all groups.
                self.flusher.next_group = max(
                    self.flusher.next_group,
                    description["state_from_group"],
                    description["records_from_group"],
                )
                self._vbuckets[number], self.tables[number] = vbucket, vbucket.table
                self.flusher.cuts[number] = [(group, seqno) for group, seqno in description.get("cuts", ())]
            self._load_records()
            for number, description in descriptions.items():
                self.vbucket(number).restored(description)
                self.maintenance.loaded(self.vbucket(number))
        except CorruptData as error:
            raise CorruptData(self.storage.path, error.why) from None
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptData(self.storage.path, f"the description of a vbucket is invalid: {error!r}") from error
        if facts and not facts.get("clean"):
            for vbucket in self:
                vbucket.branch_after_crash()
        if not facts:
            for number in initial:
                self.create_vbucket(number)
        self._begin(vbuckets)

    def _load_records(self) -> None:
        loaded, evicted_to = None, 0
        for number, records in self.storage.all_blocks():
            table = self.tables[number]
            if table is None:
                raise CorruptData("", f"there are records of vbucket {number} but no description")
            if loaded is not table:
                loaded, evicted_to = table, 0
            table.load(records)
            evicted_to = self.maintenance.evict_loaded(table, evicted_to)
        for table in self.tables:
            if table is not None:
                # Up to here the blocks count, even if groups hold more versions.
                table.high_seqno = max(table.high_seqno, table.checkpointed_seqno)
        self._load_groups()
        self._evict_loaded()

    def _evict_loaded(self) -> None:
        for table in self.tables:
            if table is not None:
                self.maintenance.evict_loaded(table)

    def _load_groups(self) -> None:
        """Load the groups; there may be very many, so each costs only its contents."""
        flusher, groups, asked_to, unchecked = self.flusher, 0, 0, 0
        for number, group in self.storage.groups():
            if number >= asked_to:
                limits, asked_to = self._limits(number)
                tables = [None if n in limits else table for n, table in enumerate(self.tables)]
            # Roles and bounds of the vbuckets with cuts are in their descriptions, which are newer than this group.
            replay(number, group, tables)
            if limits:
                self._replay_cut(number, group, limits)
            flusher.first_group = flusher.first_group if groups else number
            # Descriptions may start at a later group: the number of a group that was not written is not reused.
            groups, flusher.next_group = groups + 1, max(flusher.next_group, number + 1)
            flusher.group_bytes += len(group)
            unchecked += len(group)
            if 0 < self.ledger.quota_bytes * QUEUE_SHARE < unchecked:
                self._evict_loaded()  # this does nothing while there is room
                unchecked = 0
        if not groups:
            flusher.first_group = flusher.next_group

    def _limits(self, number: int) -> tuple[dict[int, int], int]:
        """The seqnos up to which vbuckets with later cuts count in this group, and where that ends."""
        limits: dict[int, int] = {}
        until = 2**64
        for vbucket, cuts in self.flusher.cuts.items():
            for before_group, seqno in cuts:
                if number < before_group:
                    limits[vbucket] = min(seqno, limits.get(vbucket, seqno))
                    until = min(until, before_group)
        return limits, until

    def _replay_cut(self, number: int, group: memoryview, limits: dict[int, int]) -> None:
        """Load only the changes that later cuts have left."""
        for vbucket, high, records in group_parts(number, group):
            table = self.tables[vbucket] if vbucket in limits else None
            if table is not None and number >= table.records_from_group and table.high_seqno < limits[vbucket]:
                table.load(records if high <= limits[vbucket] else cut(bytes(records), limits[vbucket]))

    def _begin(self, vbuckets: int) -> None:
        """Remove the mark of a clean stop and store new branches, durably, before the first request.

        A new bucket is stored with all its vbuckets or not at all: later, nothing tells which ones it should have.
        """
        changed, _ = self.journal.take()
        descriptions: dict[int, dict[str, Any] | None] = {}
        for number in changed:
            description = self.vbucket(number).describe()
            description["state_from_group"] = self.flusher.next_group
            description["cuts"] = self.flusher.cuts.get(number, [])
            descriptions[number] = description
        # Also for a crash before the first flush: CAS values given until then must not be given again.
        cas = self.flusher.cas_after_crash
        facts = {"vbuckets": vbuckets, "clean": False, "cas": cas, "store": self.store, "copy": False}
        self.storage.commit(WriteBatch(descriptions=descriptions, facts=facts))
