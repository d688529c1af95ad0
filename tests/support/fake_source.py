"""A store for tests of the protocol: each vbucket is a list of changes in memory.

It implements ``Source``, ``SourceVbucket`` and ``SourceCursor`` of ``protocol.producer`` as plainly as possible. Every
version of every key is kept, a snapshot is computed when it is announced, and nothing is on disk until ``reach_disk``.
"""

import itertools
import json
import re
import struct
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa

from upriver.errors import InvalidArguments, KeyExists, NotMyVbucket, RollbackRequired, TemporaryFailure
from upriver.model import (
    OPAQUE_OFFSET,
    TTL_MAX,
    Change,
    Event,
    FailoverLog,
    Record,
    Snapshot,
    VbucketState,
    change_batch,
)
from upriver.model.record import PREFIX, pack
from upriver.protocol.producer.source import StreamOptions

#: A filter looks at this many bytes in one read.
FILTERED_READ_BYTES = 32 * 1024


class FakeVbucket:
    """One vbucket: a list of changes, a failover log and a role."""

    def __init__(self, source: "FakeSource", number: int, state: VbucketState) -> None:
        self.source = source
        self.number = number
        self.state = state
        self.successor = ""
        self.taken_over = False
        self.failover_log = FailoverLog.fresh(source.new_uuid())
        self.streamable = state is VbucketState.ACTIVE
        #: Every version of every key, in the order of their seqnos.
        self.versions: list[Record] = []
        self.high_seqno = 0
        self.persisted_seqno = 0
        self.purge_seqno = 0
        #: The seqnos at which this copy equalled a state of its source.
        self.consistent_points = [0]
        self.flush_ttl = TTL_MAX
        self.flush_marks: list[int] = []
        #: The seqnos at which a checkpoint was closed.
        self.checkpoint_ends: list[int] = []
        self.cursors: dict[str, FakeCursor] = {}
        self.waiting: dict[FakeCursor, Callable[[], object]] = {}
        self.waiting_for_disk: dict[FakeCursor, Callable[[], object]] = {}
        self._snapshot_end = 0
        self._revisions: Counter[bytes] = Counter()

    @property
    def consistent_seqno(self) -> int:
        """The newest consistent point."""
        return self.consistent_points[-1]

    def checkpoint_start(self, checkpoint: int) -> int | None:
        """Where a checkpoint begins."""
        starts = [0, *self.checkpoint_ends]
        return starts[checkpoint - 1] if 0 < checkpoint <= len(starts) else None

    # Writing and receiving

    def set(self, key: bytes, value: bytes = b"", **fields: Any) -> None:
        """A client writes a key."""
        self._check_active()
        self._append(Event.MUTATION, key, value, **fields)
        self._wake()

    def delete(self, key: bytes) -> None:
        """A client deletes a key."""
        self._check_active()
        self._append(Event.DELETION, key, expiry=int(self.source.now))
        self._wake()

    def expire(self, key: bytes) -> None:
        """The time of a key is over."""
        self._append(Event.EXPIRATION, key, expiry=int(self.source.now))
        self._wake()

    def receive(self, event: Event, key: bytes, value: bytes = b"", ttl: int = TTL_MAX) -> None:
        """A replica takes a change of a TAP peer, which tells no seqno."""
        self._append(event, key, value, ttl=ttl)
        if not self.streamable:
            self.streamable = True
            self.source.role_changes.append(self.number)
        self._wake()

    def begin_snapshot(self, end: int) -> None:
        """A replica hears of a snapshot."""
        self.streamable = True
        self._snapshot_end = end

    def apply(self, seqno: int, key: bytes, value: bytes = b"v") -> None:
        """A replica takes a change of the announced snapshot."""
        self._append(Event.MUTATION, key, value, seqno=seqno)
        self._wake()

    def advance(self, seqno: int) -> None:
        """A replica hears that nothing more comes up to this seqno."""
        self.high_seqno = seqno
        self._note_consistent()
        self._wake()

    def _append(
        self, event: Event, key: bytes, value: bytes = b"", *, seqno: int = 0, ttl: int = TTL_MAX, **fields: Any
    ) -> None:
        assigns_seqno = not seqno
        seqno = seqno or self.high_seqno + 1
        self._revisions[key] += 1
        change = Change(
            vbucket=self.number,
            event=event,
            seqno=seqno,
            rev_seqno=self._revisions[key],
            cas=seqno + 1000,
            key=key,
            value=value,
            **fields,
        )
        self.versions.append(Record(change=change, time=int(self.source.now), ttl=ttl))
        self.high_seqno = seqno
        self._note_consistent(always=assigns_seqno)

    def _note_consistent(self, *, always: bool = False) -> None:
        if always or self.high_seqno == self._snapshot_end:
            self.consistent_points.append(self.high_seqno)

    def _check_active(self) -> None:
        if self.state is not VbucketState.ACTIVE:
            raise NotMyVbucket(vbucket=self.number)

    # What happens to the whole vbucket

    def set_state(self, state: VbucketState, *, successor: str = "") -> None:
        """Give the copy a role. An active copy begins a new branch."""
        if state is self.state and successor and not self.may_hand_over_to(successor):
            raise NotMyVbucket(f"it was handed over to {self.successor!r}", vbucket=self.number)
        if state is self.state and successor in ("", self.successor):
            return
        if state is VbucketState.ACTIVE:
            uuid = self.source.new_uuid()
            fresh = not self.high_seqno and not self.streamable
            branch = self.consistent_seqno
            self.failover_log = FailoverLog.fresh(uuid) if fresh else self.failover_log.branch(uuid, branch)
            self.streamable = True
            self.consistent_points.append(self.high_seqno)
        self.state, self.successor, self.taken_over = state, successor, False
        self.source.role_changes.append(self.number)
        self.end_cursors("state changed")

    def may_hand_over_to(self, successor: str) -> bool:
        """Whether this successor may take the copy over."""
        return self.successor in ("", successor) and not self.taken_over

    def flush(self) -> None:
        """A client empties an active vbucket."""
        self._check_active()
        self._truncate(0)
        self.persisted_seqno = self.purge_seqno = 0
        self.checkpoint_ends = []
        self.flush_marks.append(self.source.new_uuid())
        self.failover_log = FailoverLog.fresh(self.source.new_uuid())
        self.end_cursors("flushed")

    def roll_back(self, seqno: int) -> None:
        """A replica discards what lies above the newest consistent point at or below this seqno."""
        self._truncate(max(point for point in self.consistent_points if point <= seqno))
        self.end_cursors("rolled back")

    def _truncate(self, seqno: int) -> None:
        self.versions = [version for version in self.versions if version.change.seqno <= seqno]
        self.high_seqno = self._snapshot_end = seqno
        self.consistent_points = [point for point in self.consistent_points if point <= seqno]

    def purge(self, seqno: int) -> None:
        """Forget the deletions up to this seqno, and what they superseded."""
        newest = {version.change.key: version for version in self.versions if version.change.seqno <= seqno}
        gone = {key for key, version in newest.items() if version.change.event is not Event.MUTATION}
        self.versions = [v for v in self.versions if not (v.change.key in gone and v.change.seqno <= seqno)]
        self.purge_seqno = seqno

    def create_checkpoint(self) -> None:
        """Close the open checkpoint and begin another."""
        self.checkpoint_ends.append(self.high_seqno)

    def end_cursors(self, reason: str) -> None:
        """All streams lose what they read from."""
        for cursor in list(self.cursors.values()):
            cursor.end(reason)
        self._wake()
        self.wake_for_disk()

    def _wake(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for callback in waiting.values():
            callback()

    def wake_for_disk(self) -> None:
        """Call those that wait for the disk."""
        waiting, self.waiting_for_disk = self.waiting_for_disk, {}
        for callback in waiting.values():
            callback()

    def visible(self, after: int, end: int, *, all_versions: bool) -> list[Record]:
        """What a snapshot (after, end] holds: the newest version of each key, or all of them."""
        versions = [version for version in self.versions if version.change.seqno <= end]
        if not all_versions:
            versions = list({version.change.key: version for version in versions}.values())
        return sorted((v for v in versions if v.change.seqno > after), key=lambda version: version.change.seqno)


class FakeCursor:
    """A position in a vbucket's list of changes."""

    def __init__(self, vbucket: FakeVbucket, name: str, start: int, end: int, options: StreamOptions) -> None:
        self.vbucket = vbucket
        self.name = name
        self.options = options
        self.seqno = self.last_read_seqno = start
        self.end_seqno = end
        self.changes_read = self.expirations_read = self.bytes_filtered = 0
        self.undecided = False
        self.snapshot: Snapshot | None = None
        self.from_disk = False
        self.begins_checkpoint = False
        self.end_reason: str | None = None
        self._filters = bool(options.key_filter or options.value_filter)
        #: The first snapshot reaches at least this seqno.
        self._first_end: int | None = vbucket.consistent_seqno
        #: What is not read yet of the announced snapshot.
        self._unread: deque[Record] = deque()
        vbucket.cursors[name] = self
        if start == end:
            self.end("ok")

    @property
    def checkpoint(self) -> int:
        return 1 + bisect_right(self.vbucket.checkpoint_ends, self.seqno)

    @property
    def in_open_checkpoint(self) -> bool:
        return self._checkpoint_end is None

    @property
    def _checkpoint_end(self) -> int | None:
        return next((end for end in self.vbucket.checkpoint_ends if end > self.seqno), None)

    def next_snapshot(self) -> Snapshot | None:
        if self.end_reason is not None:
            return None
        if self.snapshot is not None:
            return self.snapshot
        end = self._snapshot_end()
        if end <= self.seqno:
            return None
        checkpoint_end = self._checkpoint_end
        if self._first_end is None and checkpoint_end is not None:
            end = min(end, checkpoint_end)
        self._first_end = None
        self.begins_checkpoint = self.seqno in (0, *self.vbucket.checkpoint_ends)
        self.snapshot = Snapshot(self.seqno, end)
        self._unread = deque(self.vbucket.visible(self.seqno, end, all_versions=self.options.history))
        return self.snapshot

    def _snapshot_end(self) -> int:
        """Where the next snapshot ends; 0 if there is none yet."""
        points = self.vbucket.consistent_points
        if self.options.persisted_only:
            points = [point for point in points if point <= self.vbucket.persisted_seqno]
        end = points[-1]
        if self._first_end is not None and end < self._first_end:
            return 0
        return min(end, self.end_seqno) if self.options.exact_end else end

    # Reading

    def read(self, max_bytes: int, opaque: int) -> bytes:
        return b"".join(_frame(record, opaque) for record in self._take(max_bytes))

    def read_into(self, buffer: memoryview, opaque: int) -> int:
        assert not self._filters
        if self._unread and len(_frame(self._shown(self._unread[0]), opaque)) > len(buffer):
            return 0
        frames = self.read(len(buffer), opaque)
        buffer[: len(frames)] = frames
        return len(frames)

    def read_records(self, max_bytes: int) -> bytes:
        return b"".join(pack(record) for record in self._take(max_bytes))

    def read_columns(self, max_bytes: int) -> pa.RecordBatch:
        return change_batch(record.change for record in self._take(max_bytes))

    def when_decided(self, callback: Callable[[], object]) -> None:
        callback()

    def _take(self, max_bytes: int) -> list[Record]:
        """The next records that pass the filters, until they have this many bytes; at least one if there is one."""
        assert self.snapshot is not None
        taken: list[Record] = []
        size = filtered = 0
        while self._unread and filtered < FILTERED_READ_BYTES:
            record = self._shown(self._unread[0])
            length = len(_frame(record, 0))
            passes = self._passes(self._unread[0].change)
            if passes and taken and size + length > max_bytes:
                break
            self.seqno = self._unread.popleft().change.seqno
            filtered += length if self._filters else 0
            if passes:
                taken.append(record)
                size += length
                self.last_read_seqno = self.seqno
        self.bytes_filtered += filtered
        self.changes_read += len(taken)
        self.expirations_read += sum(record.change.event is Event.EXPIRATION for record in taken)
        if not self._unread:
            self.seqno = self.snapshot.end
            self.snapshot = None
            if self.seqno >= self.end_seqno:
                self.end("ok")
        return taken

    def _shown(self, record: Record) -> Record:
        if not self.options.keys_only:
            return record
        return replace(record, change=replace(record.change, value=b"", datatype=0))

    def _passes(self, change: Change) -> bool:
        if self.options.key_filter and not re.search(self.options.key_filter.encode(), change.key):
            return False
        if not self.options.value_filter:
            return True
        wanted = json.loads(self.options.value_filter)
        return bool(json.loads(change.value).get(wanted["field"]) == wanted["equals"])

    # Waiting and ending

    def subscribe(self, callback: Callable[[], object], *, fresh: bool = False) -> None:
        nothing_new = self.end_reason is None and self.snapshot is None and self._snapshot_end() <= self.seqno
        if fresh or (nothing_new and not self.options.persisted_only):
            self.vbucket.waiting[self] = callback
        elif nothing_new:
            self.vbucket.waiting_for_disk[self] = callback
        else:
            callback()

    def close(self) -> None:
        self.end("closed")
        self.vbucket.waiting.pop(self, None)
        self.vbucket.waiting_for_disk.pop(self, None)

    def end(self, reason: str) -> None:
        """Nothing more comes; the first reason stays."""
        if self.end_reason is None:
            self.end_reason = reason
            self.snapshot = None
            self._unread.clear()
        if self.vbucket.cursors.get(self.name) is self:
            del self.vbucket.cursors[self.name]


def _frame(record: Record, opaque: int) -> bytes:
    frame = bytearray(pack(record)[PREFIX.size :])
    struct.pack_into(">I", frame, OPAQUE_OFFSET, opaque)
    return bytes(frame)


class FakeSource:
    """Vbuckets by number, and callbacks that wait for the disk."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self.by_number: dict[int, FakeVbucket] = {}
        #: The vbuckets that have changed role, or have something to stream for the first time.
        self.role_changes: list[int] = []
        self._waiting: list[Callable[[], object]] = []
        self._uuids = itertools.count(0xF001)

    def new_uuid(self) -> int:
        """A vbucket uuid that was not used before."""
        return next(self._uuids)

    def create_vbucket(self, number: int, state: VbucketState = VbucketState.ACTIVE) -> FakeVbucket:
        """Make a vbucket."""
        vbucket = self.by_number[number] = FakeVbucket(self, number, state)
        self.role_changes.append(number)
        return vbucket

    def delete_vbucket(self, number: int) -> None:
        """Remove a vbucket."""
        self.by_number.pop(number).end_cursors("state changed")

    def reach_disk(self) -> bool:
        """Everything done so far is on disk; False if it was already."""
        behind = [v for v in self.by_number.values() if v.persisted_seqno != v.high_seqno]
        waiting, self._waiting = self._waiting, []
        for vbucket in behind:
            vbucket.persisted_seqno = vbucket.high_seqno
            vbucket.wake_for_disk()
        for callback in waiting:
            callback()
        return bool(behind or waiting)

    # What a producer asks for

    def vbucket(self, number: int) -> FakeVbucket | None:
        return self.by_number.get(number)

    def vbuckets(self) -> list[int]:
        return sorted(self.by_number)

    def check(self, options: StreamOptions) -> None:
        try:
            re.compile(options.key_filter)
            if options.value_filter:
                json.loads(options.value_filter)
        except (re.error, ValueError) as error:
            raise InvalidArguments(str(error)) from None

    def cursor(self, vbucket: int, name: str, start: int, end: int, options: StreamOptions) -> FakeCursor:
        found = self.by_number[vbucket]
        if not found.streamable:
            raise TemporaryFailure("there is nothing to stream yet", vbucket=vbucket)
        if name in found.cursors:
            raise KeyExists(f"there is a cursor {name!r} already", vbucket=vbucket)
        if 0 < start < found.purge_seqno:
            raise RollbackRequired("deletions in between were purged", vbucket=vbucket, seqno=0)
        return FakeCursor(found, name, start, end, options)

    def set_state(self, vbucket: int, state: VbucketState, *, successor: str = "") -> None:
        self.by_number[vbucket].set_state(state, successor=successor)

    def confirm_takeover(self, vbucket: int, successor: str) -> None:
        found = self.by_number.get(vbucket)
        if found is not None and found.state is VbucketState.DEAD and found.successor == successor:
            found.taken_over = True

    def when_durable(self, callback: Callable[[], object]) -> None:
        self._waiting.append(callback)
