"""A bucket: its vbuckets, its data directory and the threads between them.

Theory of operation. One thread works with the vbuckets; the flusher's thread only reads what they wrote and
puts it on disk. Opening loads everything that was stored: blocks first, then the groups that no checkpoint
has moved yet. Whether the last stop was clean stands in the store and is taken back, durably, before
anybody is served; so if it is not there at the next start, changes may have been seen by consumers that the
disk never saw, and every active vbucket starts a new branch.
"""

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

from upriver.engine.backend import Ledger, Table, replay, stored_value
from upriver.engine.flusher import CHECKPOINT_BYTES, SLICE_BYTES, Flusher
from upriver.engine.journal import Journal
from upriver.engine.lmdb_storage import LmdbStorage
from upriver.engine.maintenance import Maintenance, Retention
from upriver.engine.memory_storage import MemoryStorage
from upriver.engine.statistics import BucketStatistics, bucket_statistics
from upriver.engine.storage import Batch, Storage
from upriver.engine.vbucket import Vbucket
from upriver.errors import CorruptData, InvalidArguments, KeyExists, NotMyVbucket, StorageError
from upriver.model import VbucketState
from upriver.model.vbucket import VBUCKETS_MAX

QUEUE_BYTES_MAX = 256 * 2**20


class Bucket:
    """N vbuckets in one data directory, or in memory only."""

    def __init__(
        self,
        storage: Storage,
        *,
        vbuckets: int = VBUCKETS_MAX,
        ack: Literal["memory", "disk"] = "memory",
        quota_bytes: int = 0,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        clock: Callable[[], float] = time.time,
        retention: Retention | None = None,
        interval_s: float = 0.05,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        facts = storage.facts()
        if vbuckets & (vbuckets - 1) or not 0 < vbuckets <= VBUCKETS_MAX:
            raise InvalidArguments(f"a bucket has a power of two up to {VBUCKETS_MAX} vbuckets, not {vbuckets}")
        if facts.get("vbuckets", vbuckets) != vbuckets:
            raise StorageError(storage.path, f"has {facts['vbuckets']} vbuckets, not {vbuckets}")
        self.storage = storage
        self.ack = ack
        #: The name of the store, for telling copies apart.
        self.store: str = facts.get("store") or secrets.token_hex(8)
        self.operations: Counter[str] = Counter()
        self.ledger = Ledger(clock, quota_bytes, queue_bytes_max)
        self.journal = Journal()
        self._vbuckets: list[Vbucket | None] = [None] * vbuckets
        #: The tables by number of their vbucket, for compiled code that serves many requests in one call.
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
        self._load(facts, vbuckets)
        self.ledger.relief = self.maintenance.relieve

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        vbuckets: int = VBUCKETS_MAX,
        ack: Literal["memory", "disk"] = "memory",
        quota_bytes: int = 0,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        clock: Callable[[], float] = time.time,
        retention: Retention | None = None,
        interval_s: float = 0.05,
        background: bool = True,
    ) -> "Bucket":
        """Open the bucket in a directory, or one in memory; ``background`` gives the flusher its thread."""
        storage: Storage = MemoryStorage() if path is None else LmdbStorage(path)
        try:
            bucket = cls(
                storage,
                vbuckets=vbuckets,
                ack=ack,
                quota_bytes=quota_bytes,
                queue_bytes_max=queue_bytes_max,
                clock=clock,
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
        """The vbucket in whatever state, or None."""
        return self._vbuckets[number] if 0 <= number < len(self._vbuckets) else None

    def numbers(self) -> list[int]:
        """The numbers of the vbuckets that exist."""
        return [vbucket.number for vbucket in self]

    def vbucket(self, number: int) -> Vbucket:
        """The vbucket in whatever state; its operations refuse what the state does not allow."""
        found = self.existing(number)
        if found is None:
            raise NotMyVbucket(vbucket=number)
        return found

    def create_vbucket(self, number: int, state: VbucketState = VbucketState.ACTIVE) -> Vbucket:
        """A new, empty vbucket."""
        if not 0 <= number < len(self._vbuckets):
            raise NotMyVbucket(vbucket=number)
        if self._vbuckets[number] is not None:
            raise KeyExists("the vbucket is there already", vbucket=number)
        vbucket = self._new(number)
        with self.journal.lock:
            self._vbuckets[number], self.tables[number] = vbucket, vbucket.table
            # Whatever older vbucket of this number the disk remembers is void.
            self.journal.trim(number, 0)
            vbucket.set_state(state)
        return vbucket

    def create_vbuckets(self, state: VbucketState = VbucketState.ACTIVE) -> None:
        """All vbuckets that are not there yet."""
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

    def flush(self) -> None:
        """Empty every active vbucket."""
        for vbucket in self:
            if vbucket.state is VbucketState.ACTIVE:
                vbucket.flush()

    # Durability.

    def acknowledge(self, vbucket: Vbucket, seqno: int, callback: Callable[[], object]) -> None:
        """Call back when the change may be answered: now, or with ``ack=disk`` when it is on disk."""
        if self.ack == "disk":
            self.flusher.when_persisted(vbucket, seqno, callback)
        else:
            callback()

    def sync(self, timeout_s: float | None = None) -> bool:
        """Wait until everything done so far is on disk; False if it took too long."""
        if self.flusher.running:
            done = threading.Event()
            self.flusher.barrier(done.set)
            return done.wait(timeout_s)
        self.flusher.step()
        return True

    def backup(self, path: str | os.PathLike[str]) -> None:
        """A consistent copy while running; opened, it is as after a crash at this moment."""
        self.sync()
        self.storage.backup(os.fspath(path))

    def maintain(self, budget_s: float = 0.01) -> None:
        """Expire, purge, compact and evict for about this long; call it regularly."""
        self.maintenance.run(budget_s)

    def statistics(self) -> BucketStatistics:
        """What there is to know."""
        return bucket_statistics(self)

    def close(self) -> None:
        """Write everything and mark the stop as clean."""
        if self._closed:
            return
        self.flusher.stop()
        try:
            while self.flusher.step():
                pass
            self.storage.commit(Batch(facts={"clean": True, "cas": self.ledger.last_cas}))
        finally:
            self._closed = True
            self.storage.close()

    def abandon(self) -> None:
        """Let go of the directory as a crash would: nothing more is written."""
        self.flusher.stop()
        self._closed = True
        self.storage.close()

    # Loading.

    def _new(self, number: int) -> Vbucket:
        vbucket = Vbucket(number, self.ledger, self.journal, self.operations)
        if self.storage.keeps_records:
            vbucket.table.fetch = lambda seqno: self._fetch(number, seqno)
            vbucket.read_block = lambda seqno: self._read_block(number, seqno)
        return vbucket

    def _read_block(self, number: int, seqno: int) -> tuple[bytes, int]:
        blocks = self.storage.blocks(number, seqno - 1, 1)
        if not blocks:
            raise CorruptData(self.storage.path, f"change {seqno} of vbucket {number} is not on disk")
        return blocks[0].records, blocks[0].upto

    def _fetch(self, number: int, seqno: int) -> bytes:
        value = stored_value(self._read_block(number, seqno)[0], seqno)
        if value is None:
            raise CorruptData(self.storage.path, f"change {seqno} of vbucket {number} is not on disk")
        return value

    def _load(self, facts: dict[str, Any], vbuckets: int) -> None:
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
            self._load_records()
            for number, description in descriptions.items():
                self.vbucket(number).restored(description)
        except CorruptData as error:
            raise CorruptData(self.storage.path, error.why) from None
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptData(self.storage.path, f"a description cannot be understood: {error!r}") from error
        if facts and not facts.get("clean"):
            for vbucket in self:
                vbucket.branch_after_crash()
        self._begin(vbuckets)

    def _load_records(self) -> None:
        loaded: Table | None = None
        for number, records in self.storage.all_blocks():
            table = self.tables[number]
            if table is None:
                raise CorruptData("", f"there are records of vbucket {number} but no description")
            if loaded is not None and loaded is not table:
                self.maintenance.evict_loaded(loaded)
            table.load(records)
            loaded = table
        for number, group in self.storage.groups():
            replay(number, group, self.tables)
            self.flusher.next_group = number + 1
            self.flusher.group_bytes += len(group)
        for table in self.tables:
            if table is not None:
                self.maintenance.evict_loaded(table)

    def _begin(self, vbuckets: int) -> None:
        """Durably no longer clean, and on new branches if it was not, before anybody is served."""
        changed, _ = self.journal.take()
        descriptions: dict[int, dict[str, Any] | None] = {}
        for number in changed:
            description = self.vbucket(number).describe()
            description["state_from_group"] = self.flusher.next_group
            descriptions[number] = description
        facts = {"vbuckets": vbuckets, "clean": False, "cas": self.ledger.last_cas, "store": self.store}
        self.storage.commit(Batch(descriptions=descriptions, facts=facts))
