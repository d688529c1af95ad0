"""Writes rows of Spark to a cluster, in a task.

Theory of operation. Rows are sent in batches, with many rows in flight at once. So that their order does not matter,
each batch keeps only the last row of a key: by (branch, seqno) if the rows have them, else by their order. While one
batch is in flight the next one is prepared; it is sent when every row of the first is answered. With meta, a row that
the cluster has in the same or a newer version changes nothing. So a batch that Spark runs again changes nothing.
"""

import dataclasses
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem, LocalFileSystem

from upriver.client import SyncKvClient
from upriver.errors import InvalidArguments, KeyExists, KeyNotFound, RowsRefused, StatusError, TooBig
from upriver.model import CHANGES, Event
from upriver.spark.options import WriteOptions
from upriver.wire import VALUE_BYTES_MAX
from upriver.wire.dialects.memcached import MetaOption

#: The maximum number of refused rows in a message.
SAMPLES_MAX: Final = 5
#: The maximum size of the rows in flight; a single row may exceed it.
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
#: Refusals of a deletion of a missing key, and of a version that is older than the cluster's: not failures.
_KNOWN: Final = (KeyNotFound, KeyExists)
_EVENTS: Final = {event.name.lower(): int(event) for event in (Event.MUTATION, Event.DELETION, Event.EXPIRATION)}
#: Numbers of a change that are written.
_NUMBERS: Final = ("flags", "expiry", "cas", "rev_seqno", "datatype")
_OF_VBUCKETS: Final = {event.name.lower() for event in Event} - _EVENTS.keys()


@dataclasses.dataclass
class WriteOutcome:
    """The outcome of the rows of a task."""

    written: int = 0
    #: Rows that the cluster had in the same or a newer version.
    known: int = 0
    refused: int = 0
    samples: list[str] = dataclasses.field(default_factory=list)

    def __add__(self, other: "WriteOutcome") -> "WriteOutcome":
        samples = [*self.samples, *other.samples][:SAMPLES_MAX]
        return WriteOutcome(
            self.written + other.written, self.known + other.known, self.refused + other.refused, samples
        )

    def __str__(self) -> str:
        return f"{self.written} rows written, {self.known} known already, {self.refused} refused"


class RowWriter:
    """The writes of one task."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._with_meta = options.mode == "meta"
        force = self._with_meta and options.conflicts == "force"
        self._meta_options = MetaOption.SKIP_CONFLICT_RESOLUTION if force else None

    def write(self, batches: Iterable[pa.RecordBatch]) -> WriteOutcome:
        """Write all rows; the options say what happens to refused ones."""
        outcome = WriteOutcome()
        in_flight: tuple[pa.RecordBatch, int, Future[dict[bytes, StatusError]]] | None = None
        with SyncKvClient(self._options.cluster) as client, ThreadPoolExecutor(1, "upriver-writing") as sender:
            for rows in self._pieces(self._possible(batch, outcome) for batch in batches):
                changes = as_changes(rows, with_meta=self._with_meta)
                if in_flight is not None:
                    outcome += self._counted(*in_flight)
                sent = sender.submit(client.write_batch, changes, with_meta=self._with_meta, options=self._meta_options)
                in_flight = rows, changes.num_rows, sent
            if in_flight is not None:
                outcome += self._counted(*in_flight)
        return outcome

    def _possible(self, rows: pa.RecordBatch, outcome: WriteOutcome) -> pa.RecordBatch:
        """The rows without those that no node could store; what happens to these is the same as with refused ones."""
        wrong = impossible(rows)
        if not wrong:
            return rows
        numbers = sorted(wrong)
        refused = rows.take(pa.array(numbers, pa.int64()))
        failed = dict(zip(_keys(refused), (wrong[number] for number in numbers), strict=True))
        found = self._refused(refused, failed)
        outcome.refused += found.refused
        outcome.samples = [*outcome.samples, *found.samples][:SAMPLES_MAX]
        kept = np.ones(rows.num_rows, bool)
        kept[numbers] = False
        return rows.filter(pa.array(kept))

    def _pieces(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows in pieces that are sent together."""
        for batch in batches:
            per_row = max(1, batch.nbytes // max(1, batch.num_rows))
            together = max(1, min(self._options.batch_rows, BATCH_BYTES_MAX // per_row))
            for at in range(0, batch.num_rows, together):
                yield batch.slice(at, together)

    def _counted(self, rows: pa.RecordBatch, changes: int, sent: "Future[dict[bytes, StatusError]]") -> WriteOutcome:
        """Wait for the answers, and count them."""
        refused = sent.result()
        failed = {key: error for key, error in refused.items() if not isinstance(error, _KNOWN)}
        return WriteOutcome(changes - len(refused), len(refused) - len(failed)) + self._refused(rows, failed)

    def _refused(self, rows: pa.RecordBatch, failed: dict[bytes, StatusError]) -> WriteOutcome:
        """Fail, ignore or save refused rows."""
        samples = [f"{key!r}: {error}" for key, error in list(failed.items())[:SAMPLES_MAX]]
        if failed and self._options.errors_as == "fail":
            raise RowsRefused(len(failed), samples)
        if failed and self._options.dead_letter_path is not None:
            save_refused(rows, failed, self._options.dead_letter_path)
        return WriteOutcome(refused=len(failed), samples=samples)


def impossible(rows: pa.RecordBatch) -> dict[int, StatusError]:
    """The rows that no node could store, by number.

    A mutation without a value mostly comes from a read with ``keysOnly``. Written as an empty document it would destroy
    the real one. A value that is too large would make the node close the connection, and with it all rows in flight.
    A number that its field in a message cannot hold has no meaning.
    """
    names = rows.schema.names
    values = rows.column("value") if "value" in names else pa.nulls(rows.num_rows, pa.binary())
    found: dict[int, StatusError] = {}
    if "event" in names:
        missing = pc.and_(values.is_null(), pc.fill_null(pc.equal(rows.column("event"), "mutation"), False))
        reason = InvalidArguments("a mutation needs a value; a row that deletes has the event deletion")
        found |= dict.fromkeys(pc.indices_nonzero(missing).to_pylist(), reason)
    large = pc.greater(pc.fill_null(pc.binary_length(values), 0), VALUE_BYTES_MAX)
    for number in pc.indices_nonzero(large).to_pylist():
        size = pc.binary_length(values.slice(number, 1))[0].as_py()
        found[number] = TooBig(f"the value has {size:,} bytes, the maximum is {VALUE_BYTES_MAX:,}")
    for name in _NUMBERS:
        if name in names:
            found |= _out_of_range(name, rows.column(name))
    return found


def _out_of_range(name: str, column: pa.Array) -> dict[int, StatusError]:
    """The rows whose number does not fit into its field. Numbers of 64 bits have all bits of the unsigned ones."""
    kind = CHANGES.field(name).type
    is_large = kind == pa.uint64()
    if pa.types.is_null(column.type) or (is_large and column.type == pa.int64()):
        return {}
    wrong = pc.less(column, 0)
    if not is_large:
        wrong = pc.or_(wrong, pc.greater(column, pa.scalar(2**kind.bit_width - 1, pa.int64())))
    allowed = "it must not be negative" if is_large else f"it must be from 0 to {2**kind.bit_width - 1:,}"
    return {
        number: InvalidArguments(f"{name} is {column[number].as_py():,}; {allowed}")
        for number in pc.indices_nonzero(pc.fill_null(wrong, False)).to_pylist()
    }


def as_changes(batch: pa.RecordBatch, *, with_meta: bool) -> pa.RecordBatch:
    """Rows as changes: the last row of each key."""
    names = batch.schema.names
    missing = {"key", *(("cas", "rev_seqno") if with_meta else ())} - set(names)
    if missing:
        raise ValueError(f"missing column {', '.join(sorted(missing))}; the rows have {', '.join(names)}")
    keys = batch.column("key").cast(pa.binary())
    if keys.null_count:
        raise ValueError(_about_nulls(batch))
    if len(keys.unique()) < batch.num_rows:
        batch = _last_of_each_key(batch)
    columns = {"event": _events(batch), "key": batch.column("key").cast(pa.binary()), "value": _values(batch)}
    for name in _NUMBERS:
        if name in names:
            columns[name] = _unsigned(batch.column(name), CHANGES.field(name).type)
    return pa.record_batch(columns)


def _last_of_each_key(batch: pa.RecordBatch) -> pa.RecordBatch:
    by = [name for name in ("branch", "seqno") if name in batch.schema.names]
    if by:
        batch = batch.sort_by([(name, "ascending") for name in by])
    last = {key: row for row, key in enumerate(_keys(batch))}
    return batch.take(pa.array(sorted(last.values())))


def _events(batch: pa.RecordBatch) -> pa.Array:
    if "event" not in batch.schema.names:
        # Without the column event, a row without a value is a deletion.
        has_value = "value" in batch.schema.names
        deletes = pc.is_null(batch.column("value")) if has_value else pa.repeat(pa.scalar(True), batch.num_rows)
        return pc.if_else(
            deletes, pa.scalar(int(Event.DELETION), pa.uint8()), pa.scalar(int(Event.MUTATION), pa.uint8())
        )
    given = batch.column("event").cast(pa.string())
    names, numbers = _events_known()
    codes = pc.index_in(given, names)
    if codes.null_count:
        unknown = pc.filter(given, pc.is_null(codes))[0].as_py()
        raise ValueError(f"unknown event {unknown!r}; choose from {', '.join(_EVENTS)}")
    return pc.take(numbers, codes)


@cache
def _events_known() -> tuple[pa.Array, pa.Array]:
    return pa.array(list(_EVENTS), pa.string()), pa.array(list(_EVENTS.values()), pa.uint8())


def _values(batch: pa.RecordBatch) -> pa.Array:
    if "value" not in batch.schema.names:
        return pa.repeat(pa.scalar(b"", pa.binary()), batch.num_rows)
    return batch.column("value").cast(pa.binary()).fill_null(b"")


def _unsigned(column: pa.Array, kind: pa.DataType) -> pa.Array:
    column = column.fill_null(0)
    return column.view(pa.uint64()) if kind == pa.uint64() and column.type == pa.int64() else column.cast(kind)


def _about_nulls(batch: pa.RecordBatch) -> str:
    """The message for a row without a key: mostly a rollback or reset, which writes to keys cannot repeat."""
    events = set(batch.column("event").to_pylist()) & _OF_VBUCKETS if "event" in batch.schema.names else set()
    if events:
        return (
            f"the rows report a {' and a '.join(sorted(events))} of the source, which this sink cannot repeat: "
            "use the pipeline replicate, or leave onRollback at fail"
        )
    return "a row has no key"


def save_refused(rows: pa.RecordBatch, refused: dict[bytes, StatusError], directory: str) -> None:
    """Save refused rows with their errors, so that they can be examined and written again."""
    is_url = "://" in directory
    files, path = FileSystem.from_uri(directory) if is_url else (LocalFileSystem(), directory)
    files.create_dir(path, recursive=True)
    numbers = [row for row, key in enumerate(_keys(rows)) if key in refused]
    table = pa.Table.from_batches([_last_of_each_key(rows.take(pa.array(numbers, pa.int64())))])
    errors = pa.array([str(refused[key]) for key in _keys(table)], pa.string())
    pq.write_table(table.append_column("error", errors), f"{path}/{uuid.uuid4().hex}.parquet", filesystem=files)


def _keys(rows: pa.RecordBatch | pa.Table) -> list[Any]:
    keys: list[Any] = rows.column("key").cast(pa.binary()).to_pylist()
    return keys
