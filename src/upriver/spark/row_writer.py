"""Writes rows of Spark to a cluster, in a task.

Theory of operation. Rows are sent in batches, with many rows in flight at once. So that their order does not matter,
each batch keeps only the last row of a key: by (branch, seqno) if the rows have them, else by their order. While one
batch is in flight the next one is prepared; it is sent when every row of the first is answered. With meta, a row that
the cluster has in the same or a newer version changes nothing. So a batch that Spark runs again changes nothing.

A document may be in another vbucket than its key's, and a key in several: see ``Placement``. Answers name only keys, so
the rows of one key go out one after the other.
"""

import dataclasses
import uuid
from collections import Counter
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
from upriver.wire.codec import key_vbuckets
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
            placement = Placement(self._options.source_vbuckets, client.cluster_map.vbuckets)

            def send(changes: pa.RecordBatch) -> "Future[dict[bytes, StatusError]]":
                return sender.submit(
                    client.write_batch,
                    changes,
                    with_meta=self._with_meta,
                    options=self._meta_options,
                    keep_vbuckets="vbucket" in changes.schema.names,
                )

            for rows in self._pieces(self._possible(batch, placement, outcome) for batch in batches):
                for changes in layers(as_changes(rows, with_meta=self._with_meta, places=placement.of(rows))):
                    if in_flight is not None:
                        outcome += self._counted(*in_flight)
                    in_flight = rows, changes.num_rows, send(changes)
            if in_flight is not None:
                outcome += self._counted(*in_flight)
        return outcome

    def _possible(self, rows: pa.RecordBatch, placement: "Placement", outcome: WriteOutcome) -> pa.RecordBatch:
        """The rows without those that no node could store; what happens to these is the same as with refused ones."""
        rows, unplaced = placement.without_forgotten(rows)
        outcome.known += unplaced
        wrong = impossible(rows) | placement.refused(rows)
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


class Placement:
    """Where rows go in a cluster, if they say where their source had them.

    A document may be in another vbucket than its key's. It stays in its vbucket if source and target have the same
    number of them. Otherwise it has no place: in the vbucket of its key it would replace the document there.
    """

    def __init__(self, source: int | None, target: int) -> None:
        #: The number of vbuckets of the source; None if it is unknown, 0 if the keys decide.
        self._source = source
        self._target = target

    def of(self, rows: pa.RecordBatch) -> pa.Array | None:
        """The vbucket of each row, after the refused ones are removed; None if the keys decide."""
        if self._source != self._target or not _says_where(rows):
            return None
        own = key_vbuckets(rows.column("key").cast(pa.binary()), self._target)
        return pc.coalesce(rows.column("vbucket").cast(pa.uint16()), own)

    def without_forgotten(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        """The rows without deletions of documents that have no place in the target, and the number of these."""
        if self._source in (None, 0, self._target) or not _says_where(rows):
            return rows, 0
        misplaced = self._misplaced(rows)
        if not pc.any(misplaced).as_py():
            return rows, 0
        kept = rows.filter(pc.invert(pc.and_(misplaced, pc.not_equal(_events(rows), int(Event.MUTATION)))))
        return kept, rows.num_rows - kept.num_rows

    def refused(self, rows: pa.RecordBatch) -> dict[int, StatusError]:
        """The rows that have no place, by number."""
        if self._source == 0 or not _says_where(rows):
            return {}
        found, given, target = dict[int, StatusError](), rows.column("vbucket"), self._target
        if self._source is None:
            why = "set sourceVbuckets to the number of vbuckets of its source, or to 0 to go by the key"
        elif self._source != target:
            why = f"it has no place here, because its source has {self._source} vbuckets and this cluster {target}"
        else:
            why = f"this cluster has {target} vbuckets"
        for number in pc.indices_nonzero(self._misplaced(rows)).to_pylist():
            vbucket = given[number].as_py()
            if self._source != target or not 0 <= vbucket < target:
                found[number] = InvalidArguments(f"it is in vbucket {vbucket} instead of its key's; {why}")
        return found

    def _misplaced(self, rows: pa.RecordBatch) -> pa.Array:
        """Which rows are in another vbucket than their key's."""
        own = key_vbuckets(rows.column("key").cast(pa.binary()).fill_null(b""), self._source or self._target)
        given = rows.column("vbucket").cast(pa.int64())
        wrong = pc.and_(pc.not_equal(given, own.cast(pa.int64())), pc.is_valid(rows.column("key")))
        return pc.fill_null(wrong, False)


def _says_where(rows: pa.RecordBatch | pa.Table) -> bool:
    """Whether the rows have keys and the vbuckets of the source."""
    names = rows.schema.names
    return "key" in names and "vbucket" in names and not pa.types.is_null(rows.schema.field("vbucket").type)


def layers(changes: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The changes in parts in which each key occurs once."""
    keys = changes.column("key")
    if len(keys.unique()) == changes.num_rows:
        return [changes]
    seen: Counter[bytes] = Counter()
    numbers = []
    for key in keys.to_pylist():
        numbers.append(seen[key])
        seen[key] += 1
    layer = pa.array(numbers, pa.int64())
    return [changes.filter(pc.equal(layer, number)) for number in range(max(numbers) + 1)]


def impossible(rows: pa.RecordBatch) -> dict[int, StatusError]:
    """The rows that no node could store, by number.

    A mutation without a value mostly comes from a read with ``keysOnly``. Written as an empty document it would destroy
    the real one. A value that is too large would make the node close the connection, and with it all rows in flight.
    A number that its field in a message cannot hold has no meaning.
    """
    names = rows.schema.names
    values = rows.column("value").cast(pa.binary()) if "value" in names else pa.nulls(rows.num_rows, pa.binary())
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


def as_changes(batch: pa.RecordBatch, *, with_meta: bool, places: pa.Array | None = None) -> pa.RecordBatch:
    """Rows as changes: the last row of each key, or of each key in each vbucket if they have ``places``."""
    names = batch.schema.names
    missing = {"key", *(("cas", "rev_seqno") if with_meta else ())} - set(names)
    if missing:
        raise ValueError(f"missing column {', '.join(sorted(missing))}; the rows have {', '.join(names)}")
    keys = batch.column("key").cast(pa.binary())
    if keys.null_count:
        raise ValueError(_about_nulls(batch))
    if len(keys.unique()) < batch.num_rows:
        last = _last_of_each_key(batch, places)
        batch, places = batch.take(last), None if places is None else places.take(last)
    columns = {} if places is None else {"vbucket": places}
    columns |= {"event": _events(batch), "key": batch.column("key").cast(pa.binary()), "value": _values(batch)}
    for name in _NUMBERS:
        if name in names:
            columns[name] = _unsigned(batch.column(name), CHANGES.field(name).type)
    return pa.record_batch(columns)


def _last_of_each_key(rows: pa.RecordBatch | pa.Table, places: pa.Array | None) -> pa.Array:
    """The numbers of the rows that count, in their order by (branch, seqno)."""
    by = [(name, "ascending") for name in ("branch", "seqno") if name in rows.schema.names]
    order = pc.sort_indices(rows, by) if by else pa.array(range(rows.num_rows), pa.uint64())
    keys, found = _keys(rows), places if places is not None else pa.nulls(rows.num_rows)
    where = found.to_pylist()
    last = {(where[row], keys[row]): row for row in order.to_pylist()}
    kept = set(last.values())
    return pa.array([row for row in order.to_pylist() if row in kept], pa.uint64())


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
    table = pa.Table.from_batches([rows.take(pa.array(numbers, pa.int64()))])
    places = table.column("vbucket").combine_chunks() if _says_where(table) else None
    table = table.take(_last_of_each_key(table, places))
    errors = pa.array([str(refused[key]) for key in _keys(table)], pa.string())
    pq.write_table(table.append_column("error", errors), f"{path}/{uuid.uuid4().hex}.parquet", filesystem=files)


def _keys(rows: pa.RecordBatch | pa.Table) -> list[Any]:
    keys: list[Any] = rows.column("key").cast(pa.binary()).to_pylist()
    return keys
