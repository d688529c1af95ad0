"""Reading the history of a vbucket: cursors, and the snapshots that they yield.

Theory of operation. A cursor is a seqno and a name: it holds no records, so it pins no memory. It finds the next
records by the seqno alone, in memory or, where values were evicted, in the stored blocks. It announces a snapshot
(start, end] in which each key appears once, in the version that was current at the end, and then reads it piece by
piece. The end is fixed when the snapshot is announced; compaction and purge keep the versions that an announced
snapshot still needs. A cursor that falls behind all limits is ended as too slow: its stream breaks, but never lacks a
change.

A snapshot ends only at a consistent point of our own copy, and the first snapshot of a cursor reaches at least the high
seqno at its opening (docs/semantics.md): with less, a consumer that is cut off can mistake a mixture for a state.
"""

import enum
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

import pyarrow as pa

# Selecting rows needs it. Importing it for the first filtered stream would block the node.
import pyarrow.compute

from upriver.engine.filters import KeyPattern, LargeValues, ValueFilter
from upriver.errors import NotSupported, OutOfRange, RollbackRequired, TemporaryFailure, UpriverError
from upriver.model import (
    BODY_LENGTH_OFFSET,
    EVENTS,
    HEADER,
    MUTATION_EXTRAS,
    NO_END,
    Change,
    Event,
    Snapshot,
    changes_in,
)

if TYPE_CHECKING:
    from upriver.engine.vbucket import Vbucket

READ_BYTES: Final = 256 * 1024
#: A filter looks at this many bytes in one read, however few pass and however few were asked for: a millisecond or two.
#: A slow pattern gets this much time instead, and then counts as if it had looked at all of them.
FILTERED_BYTES: Final = 32 * 1024
FILTERED_S: Final = 0.002
#: The table compares a key's prefix for this many changes in one read, in about the same time.
PREFIXED_SEQNOS: Final = 32 * 1024

#: opcode, key length, extras length, datatype, body length, by_seqno: the fields of a frame that a filter needs.
_FRAME: Final = struct.Struct(">xBHBB2xI12xQ")
#: The size of a row besides its key and value.
_ROW_BYTES: Final = HEADER.size + MUTATION_EXTRAS.size


class CursorEnd(enum.Enum):
    """Why nothing more comes from a cursor."""

    OK = "ok"
    CLOSED = "closed"
    STATE_CHANGED = "state changed"
    FLUSHED = "flushed"
    ROLLED_BACK = "rolled back"
    TOO_SLOW = "too slow"


class CursorEnded(UpriverError):
    """A cursor was read after its end; ``reason`` says why it ended."""

    def __init__(self, name: str, reason: CursorEnd) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"cursor {self.name!r} has ended: {self.reason.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which changes a cursor reads, and how."""

    keys_only: bool = False
    key_prefix: bytes = b""
    key_pattern: KeyPattern | None = None
    value_filter: ValueFilter | None = None
    #: Only changes that are on disk.
    persisted_only: bool = False
    #: End with the version that was current at the end seqno, and nothing beyond it.
    exact_end: bool = False
    #: Every retained version instead of the newest ones.
    history: bool = False

    @property
    def filtered(self) -> bool:
        """Whether Python code must look at each change."""
        return self.key_pattern is not None or self.value_filter is not None


#: Everything, in the newest versions.
PLAIN: Final = Options()


class Cursor:
    """A named place in a vbucket's history."""

    def __init__(self, vbucket: "Vbucket", name: str, start_seqno: int, end_seqno: int, options: Options) -> None:
        table = vbucket.table
        consistent_seqno = table.consistent_seqno
        if start_seqno > end_seqno:
            raise OutOfRange(f"start {start_seqno} lies beyond end {end_seqno}", vbucket=vbucket.number)
        if not 0 <= start_seqno <= table.high_seqno:
            raise OutOfRange(
                f"start {start_seqno} does not lie between 0 and the high seqno {table.high_seqno}",
                vbucket=vbucket.number,
            )
        if 0 < start_seqno < table.purge_seqno:
            raise RollbackRequired("deletions in between were purged", vbucket=vbucket.number, seqno=0)
        if options.exact_end and consistent_seqno >= end_seqno != vbucket.consistent_at_or_below(end_seqno):
            raise OutOfRange(f"the state at {end_seqno} is not retained", vbucket=vbucket.number)
        self.vbucket = vbucket
        self.table = table
        self.name = name
        self.options = options
        #: Everything up to here was read.
        self.seqno = start_seqno
        self.end_seqno = end_seqno
        #: The announced snapshot, while it is not read to its end.
        self.snapshot: Snapshot | None = None
        #: Whether some of its values are read from disk.
        self.from_disk = False
        #: Whether the announced snapshot begins where a checkpoint does.
        self.begins_checkpoint = False
        #: Passes callbacks of the flusher's thread on to the reader's thread; None calls them where they happen.
        self.deliver: Callable[[Callable[[], object]], object] | None = None
        self.ended: CursorEnd | None = None
        self.changes_read = 0
        #: The number of expirations among them, and the last seqno; counted only when reading frames.
        self.expirations_read = 0
        self.last_read_seqno = start_seqno
        #: The bytes that a filter has looked at, so that the reader can yield to others.
        self.bytes_filtered = 0
        #: Judges values that are too large to look at in between; None looks at them where they are read.
        self.large_values: LargeValues | None = None
        #: Whether the next change is being judged: nothing more is read until then.
        self.undecided = False
        #: The seqno of the last change that was judged, and whether it passes.
        self._judged = 0, False
        #: The frames that begin with the change that is being judged, and the seqno up to which they go.
        self._kept: tuple[bytes, int] | None = None
        self._on_decided: Callable[[], object] | None = None
        pattern = options.key_pattern
        self._key_prefix = options.key_prefix or (b"" if pattern is None else pattern.prefix)
        #: Whether the table leaves out keys without the prefix of a filter, which takes time although nothing is read.
        self._looks_at_prefixes = options.filtered and bool(self._key_prefix)
        is_prefix = pattern is not None and pattern.is_prefix and not options.key_prefix
        #: Whether Python code must look at the other changes.
        self._looks_at_each = options.filtered and not (is_prefix and options.value_filter is None)
        self._may_take_long = options.key_pattern is not None and options.key_pattern.may_take_long
        self._first_end: int | None = consistent_seqno
        if start_seqno == end_seqno:
            self.end(CursorEnd.OK)

    def __enter__(self) -> "Cursor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def backlog(self) -> int:
        """How many seqnos lie before the end of the history."""
        return max(0, min(self.end_seqno, self.vbucket.high_seqno) - self.seqno)

    @property
    def end_reason(self) -> str | None:
        """Why nothing more comes, in words; None before the end."""
        return None if self.ended is None else self.ended.value

    @property
    def checkpoint(self) -> int:
        """The id of the checkpoint that the next change belongs to."""
        return self.vbucket.checkpoints.id_after(self.seqno)

    @property
    def in_open_checkpoint(self) -> bool:
        """Whether that checkpoint is still open."""
        return self.vbucket.checkpoints.end_after(self.seqno) is None

    def settle_for(self, seqno: int) -> None:
        """Let the first snapshot end at ``seqno`` or later, for readers that do not continue with live changes."""
        if self._first_end is not None:
            self._first_end = min(self._first_end, seqno)

    def close(self) -> None:
        """Stop reading; there are no more callbacks."""
        self.end(CursorEnd.CLOSED)
        self.vbucket.wait_no_longer(self)

    def end(self, reason: CursorEnd) -> None:
        """Nothing more comes; the first reason stays."""
        if self.ended is None:
            self.ended = reason
            self.snapshot = None
            self._kept = None
        if self.vbucket.cursors.get(self.name) is self:  # another one may have taken the name since
            del self.vbucket.cursors[self.name]

    def next_snapshot(self) -> Snapshot | None:
        """Announce the next snapshot; None if there is nothing new, or nothing more comes.

        A snapshot after the first ends where a checkpoint does, if the state there is still retained.
        """
        if self.ended is not None:
            return None
        if self.snapshot is not None:
            return self.snapshot
        self.begins_checkpoint, checkpoint_end = self.vbucket.checkpoints.around(self.seqno)
        end = self._snapshot_end()
        if end is None or end <= self.seqno:
            return None
        if (
            checkpoint_end is not None
            and self._first_end is None
            and self.seqno < checkpoint_end < end
            and self.vbucket.consistent_at_or_below(checkpoint_end) == checkpoint_end
        ):
            end = checkpoint_end
        self._first_end = None
        self.snapshot = Snapshot(self.seqno, end)
        self.from_disk = self.table.first_evicted(self.seqno, end) != 0
        return self.snapshot

    def _snapshot_end(self) -> int | None:
        options = self.options
        end = self.table.consistent_seqno
        if options.persisted_only:
            end = self.vbucket.consistent_at_or_below(min(end, self.table.persisted_seqno))
        if self._first_end is not None and end < self._first_end:
            return None
        if options.exact_end and end >= self.end_seqno:
            if self.vbucket.consistent_at_or_below(self.end_seqno) != self.end_seqno:
                raise OutOfRange(f"the state at {self.end_seqno} is not retained", vbucket=self.vbucket.number)
            return self.end_seqno
        return end

    def read(self, max_bytes: int = READ_BYTES, opaque: int = 0) -> bytes:
        """The next `dcp` frames of the announced snapshot; ``snapshot`` is None again when it is read out."""
        snapshot = self._announced()
        if self._kept is not None:  # judged meanwhile; copying it once more would take as long
            (frames, done), self._kept, count, last, expirations = self._kept, None, 0, 0, 0
        else:
            upto, block = self._source(snapshot)
            frames, count, done, last, expirations = self.table.read(
                self.seqno,
                upto,
                snapshot.end,
                FILTERED_BYTES if self._looks_at_each else max_bytes,
                opaque,
                self.options.history,
                self.options.keys_only and self.options.value_filter is None,
                self._key_prefix,
                block,
            )
        if self._looks_at_each:
            read, read_to = frames, done
            frames, count, done, last, expirations = self._filtered(frames, max_bytes, done)
            if self.undecided and done == self.seqno:
                self._kept = read, read_to
        if count:
            self.last_read_seqno = last
            self.expirations_read += expirations
        self._advance(done, count, snapshot)
        return frames

    def read_records(self, max_bytes: int = READ_BYTES) -> bytes:
        """The same as records, which also hold the time of a change and TAP's time to live."""
        if self.options.filtered or self.options.history or self.options.key_prefix:
            raise NotSupported("a filtered cursor cannot read records")
        snapshot = self._announced()
        upto, block = self._source(snapshot)
        records, count, done = self.table.read_records(
            self.seqno, upto, snapshot.end, max_bytes, self.options.keys_only, block
        )
        self._advance(done, count, snapshot)
        return records

    def read_into(self, buffer: bytearray | memoryview, opaque: int = 0) -> int:
        """The same into a buffer that the stream reuses; returns the number of bytes.

        If the buffer is too small for the next change, it returns 0 and the cursor does not advance.
        """
        if self.options.filtered:
            raise NotSupported("a filtered cursor cannot read into a buffer")
        snapshot = self._announced()
        upto, block = self._source(snapshot)
        size, count, done, last, expirations = self.table.read_into(
            buffer,
            self.seqno,
            upto,
            snapshot.end,
            opaque,
            self.options.history,
            self.options.keys_only,
            self._key_prefix,
            block,
        )
        if count:
            self.last_read_seqno = last
            self.expirations_read += expirations
        self._advance(done, count, snapshot)
        return size

    def read_columns(self, max_bytes: int = READ_BYTES) -> pa.RecordBatch:
        """The same as an Arrow batch of ``model.CHANGES``."""
        snapshot = self._announced()
        upto, block = self._source(snapshot)
        batch, done = self.table.read_columns(
            self.seqno,
            upto,
            snapshot.end,
            FILTERED_BYTES if self._looks_at_each else max_bytes,
            self.options.history,
            self.options.keys_only and self.options.value_filter is None,
            self._key_prefix,
            block,
        )
        if self._looks_at_each:
            batch, done = self._filtered_columns(batch, max_bytes, done)
        self._advance(done, batch.num_rows, snapshot)
        return batch

    def subscribe(self, callback: Callable[[], object], *, fresh: bool = False) -> None:
        """Call back once when there may be more to read, or at the end: at once if that is so already.

        With ``fresh`` only later changes count. The writer or the flusher's thread runs the callback, which must only
        take note; where ``deliver`` is set, it passes on the callbacks about changes that reached the disk.
        """
        if fresh:
            self.vbucket.when_changed(callback, owner=self)
            return
        if self.options.persisted_only and self.deliver is not None:
            callback = partial(self.deliver, callback)
        with self.vbucket.journal.lock:  # the flusher cannot run between the check and the registration
            if self.ended is None and self.snapshot is None:
                end = self._snapshot_end()
                if end is None or end <= self.seqno:
                    self.vbucket.when_changed(callback, persisted=self.options.persisted_only, owner=self)
                    return
        callback()

    def when_decided(self, callback: Callable[[], object]) -> None:
        """Call back once when the next change is judged: at once if it is already."""
        self._on_decided = callback
        if not self.undecided:
            self._decided()

    def _decided(self) -> None:
        callback, self._on_decided = self._on_decided, None
        if callback is not None and self.ended is None:
            callback()

    def _passes(self, wanted: ValueFilter, event: int, value: memoryview, datatype: int, seqno: int) -> bool | None:
        """Whether a value passes; None while that is being judged."""
        if self.large_values is None or not wanted.takes_long(event, value, datatype):
            return wanted.passes(event, bytes(value), datatype)
        if self._judged[0] == seqno:
            return self._judged[1]
        self.undecided = True

        def done(passes: bool | None) -> None:
            if passes is not None:
                self._judged = seqno, passes
            self.undecided = False
            self._decided()

        deliver = self.deliver or (lambda callback: callback())
        self.large_values.judge(wanted, value, datatype, lambda passes: deliver(partial(done, passes)))
        return None

    def check_not_cut_short(self) -> None:
        """Raise if the cursor ended before its end seqno."""
        if self.ended is not CursorEnd.OK:
            self._check()

    def _check(self) -> None:
        if self.ended is not None:
            raise CursorEnded(self.name, self.ended)

    def _announced(self) -> Snapshot:
        if self.ended is not None:  # checked here, because live changes are read one at a time
            self._check()
        assert self.snapshot is not None, "next_snapshot comes before read"
        return self.snapshot

    def _source(self, snapshot: Snapshot) -> tuple[int, bytes | None]:
        """How far the next read goes, and the stored block with the evicted values."""
        end = min(snapshot.end, self.seqno + PREFIXED_SEQNOS) if self._looks_at_prefixes else snapshot.end
        if self.options.keys_only and self.options.value_filter is None:
            return end, None
        evicted = self.table.first_evicted(self.seqno, end)
        if not evicted:
            return end, None
        if self.vbucket.read_block is None:
            raise TemporaryFailure("values are on disk, but the bucket has no disk", vbucket=self.vbucket.number)
        block, last = self.vbucket.read_block(evicted)
        return min(last, end), block

    def _advance(self, done: int, count: int, snapshot: Snapshot) -> None:
        if self._looks_at_prefixes:
            self.bytes_filtered += FILTERED_BYTES * (done - self.seqno) // PREFIXED_SEQNOS
        self.seqno = done
        self.changes_read += count
        if done >= snapshot.end:
            self.snapshot = None
            if done >= self.end_seqno:
                self.end(CursorEnd.OK)

    def _filtered(self, frames: bytes, max_bytes: int, done: int) -> tuple[bytes, int, int, int, int]:
        """The frames that pass, up to ``max_bytes``; their number, the seqno up to which all were looked at, the last
        seqno, and the number of expirations."""
        pattern, wanted, keys_only = self.options.key_pattern, self.options.value_filter, self.options.keys_only
        kept: list[bytes] = []
        size = offset = last = expirations = 0
        seen, late, view = self.seqno, False, memoryview(frames)
        deadline = perf_counter() + FILTERED_S
        while offset < len(frames):
            if late:
                done = seen
                break
            opcode, key_length, extras, datatype, body, seqno = _FRAME.unpack_from(frames, offset)
            key = offset + HEADER.size + extras
            value, end = key + key_length, offset + HEADER.size + body
            passes: bool | None = pattern is None or pattern.passes(frames[key:value])
            if passes and wanted is not None:
                passes = self._passes(wanted, EVENTS[opcode], view[value:end], datatype, seqno)
            if passes is None:
                done = seen
                break
            if passes:
                # A slice of all bytes copies nothing.
                frame = _without_value(frames[offset:value], value - key + extras) if keys_only else frames[offset:end]
                if kept and size + len(frame) > max_bytes:
                    done = seen
                    break
                kept.append(frame)
                size += len(frame)
                last = seqno
                expirations += EVENTS[opcode] is Event.EXPIRATION
            seen, offset = seqno, end
            late = self._may_take_long and perf_counter() > deadline
        self.bytes_filtered += FILTERED_BYTES if late else offset
        return b"".join(kept), len(kept), done, last, expirations

    def _filtered_columns(self, batch: pa.RecordBatch, max_bytes: int, done: int) -> tuple[pa.RecordBatch, int]:
        """The same for rows."""
        pattern, wanted, keys_only = self.options.key_pattern, self.options.value_filter, self.options.keys_only
        rows = array("q")
        size = looked_at = 0
        late = False
        deadline = perf_counter() + FILTERED_S
        events, keys, values, datatypes = (batch[name].to_pylist() for name in ("event", "key", "value", "datatype"))
        for row, key in enumerate(keys):
            if late:
                done = batch["seqno"][row - 1].as_py()
                break
            length = _ROW_BYTES + len(key) + len(values[row])
            passes: bool | None = pattern is None or pattern.passes(key)
            if passes and wanted is not None:
                seqno = batch["seqno"][row].as_py()
                passes = self._passes(wanted, events[row], memoryview(values[row]), datatypes[row], seqno)
            if passes is None:
                done = batch["seqno"][row - 1].as_py() if row else self.seqno
                break
            if passes:
                if rows and size + length > max_bytes:
                    done = batch["seqno"][row - 1].as_py()
                    break
                rows.append(row)
                size += length
            looked_at += length
            late = self._may_take_long and perf_counter() > deadline
        self.bytes_filtered += FILTERED_BYTES if late else looked_at
        # Arrays are made of buffers: to make one of a list, Arrow wants to know all that pandas has.
        batch = batch.take(pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)]))
        return _rows_without_values(batch) if keys_only else batch, done


def _without_value(frame: bytes, body: int) -> bytes:
    """A frame of which the value was cut off."""
    out = bytearray(frame)
    struct.pack_into(">I", out, BODY_LENGTH_OFFSET, body)
    out[5] = 0  # without a value there is no datatype
    return bytes(out)


def _rows_without_values(batch: pa.RecordBatch) -> pa.RecordBatch:
    count = batch.num_rows
    nothing = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(bytes(4 * count + 4)), pa.py_buffer(b"")])
    raw = pa.Array.from_buffers(pa.uint8(), count, [None, pa.py_buffer(bytes(count))])
    for name, column in (("value", nothing), ("datatype", raw)):
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(place, batch.schema.field(place), column)
    return batch


class SnapshotReader:
    """One snapshot of ``Vbucket.changes``: iterate over it once, as single changes or as batches.

    It ends only where the snapshot does. If a change of state or a rollback cuts it short, or the reader was too slow,
    it raises: otherwise the reader would note the end of the snapshot and miss the rest.
    """

    def __init__(self, cursor: Cursor, snapshot: Snapshot) -> None:
        self._cursor = cursor
        self.start = snapshot.start
        self.end = snapshot.end
        self.from_disk = cursor.from_disk
        self.history = cursor.options.history
        self._left_out = False

    def __iter__(self) -> Iterator[Change]:
        for batch in self.batches():
            yield from changes_in(batch)

    def batches(self, max_bytes: int = READ_BYTES) -> Iterator[pa.RecordBatch]:
        """The changes as Arrow batches."""
        while self._goes_on():
            yield self._cursor.read_columns(max_bytes)

    def frames(self, max_bytes: int = READ_BYTES, opaque: int = 0) -> Iterator[bytes]:
        """The changes as `dcp` frames."""
        while self._goes_on():
            yield self._cursor.read(max_bytes, opaque)

    def skip(self) -> None:
        """Skip the rest of the snapshot."""
        snapshot = self._cursor.snapshot
        if snapshot is not None:
            self._left_out = True
            self._cursor._advance(snapshot.end, 0, snapshot)

    def _goes_on(self) -> bool:
        cursor = self._cursor
        if self._left_out:
            raise OutOfRange(
                "the snapshot was skipped: read it before asking for the next one", vbucket=cursor.vbucket.number
            )
        if cursor.seqno < self.end:
            cursor._check()
        return cursor.snapshot is not None and cursor.snapshot.end == self.end


__all__ = ["NO_END", "Cursor", "CursorEnd", "CursorEnded", "Event", "Options", "SnapshotReader"]
