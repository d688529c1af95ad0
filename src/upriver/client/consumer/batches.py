"""Batches of changes, and events of whole vbuckets."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from upriver.client.consumer.progress import Progress
from upriver.model import CHANGES, Change, Event, change_batch, changes_in
from upriver.protocol.consumer import Run

#: The columns that ``Batch.with_bounds`` adds.
BOUNDS: Final = pa.schema(
    [
        pa.field("vbucket_uuid", pa.uint64(), nullable=False),
        pa.field("snapshot_start", pa.uint64(), nullable=False),
        pa.field("snapshot_end", pa.uint64(), nullable=False),
    ]
)

#: The column of values that were not fetched.
_NO_VALUES: Final = CHANGES.field("value").with_nullable(True)


def without_values(records: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with null for each value: values that were not fetched must not look like empty ones."""
    index = records.schema.get_field_index("value")
    if index < 0:
        return records
    return records.set_column(index, _NO_VALUES, pa.nulls(records.num_rows, _NO_VALUES.type))


@dataclass(frozen=True, slots=True)
class Rollback:
    """The source lost everything after ``seqno``: undo it. The stream continues from there.

    A key that was changed after ``seqno`` may have its right version at or before it, which is not sent again: read
    every key that you hold above ``seqno`` from the source, tombstones included.
    """

    vbucket: int
    seqno: int
    old_uuid: int
    new_uuid: int
    event: Event = Event.ROLLBACK


@dataclass(frozen=True, slots=True)
class Reset:
    """The vbucket starts over: keys that do not come again are gone."""

    vbucket: int
    old_uuid: int = 0
    new_uuid: int = 0
    event: Event = Event.RESET
    seqno: int = 0


@dataclass(frozen=True, slots=True)
class Flush:
    """The vbucket was emptied."""

    vbucket: int
    event: Event = Event.FLUSH
    seqno: int = 0


VbucketEvent = Rollback | Reset | Flush


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes in order, of one or several vbuckets; or one event of a vbucket."""

    #: One row for each change, by the schema ``CHANGES``; with ``keys_only`` the values are null.
    records: pa.RecordBatch
    runs: tuple[Run, ...]
    #: The event of a vbucket; then the only row says the same.
    event: VbucketEvent | None = None
    #: The progress after this batch, for each vbucket in it.
    progress: dict[int, Progress] = field(default_factory=dict)
    #: Its size on the wire.
    wire_bytes: int = 0
    #: The number of the batch in its consumer's queue.
    number: int = 0

    def __len__(self) -> int:
        return int(self.records.num_rows)

    @classmethod
    def of_event(cls, event: VbucketEvent, progress: Progress, number: int = 0) -> "Batch":
        """The batch that reports this event."""
        row = Change(vbucket=event.vbucket, event=event.event, seqno=event.seqno, key=b"")
        run = Run(event.vbucket, 1, progress.position)
        return cls(change_batch([row]), (run,), event, {event.vbucket: progress}, number=number)

    def changes(self) -> Iterator[Change]:
        """Iterate over the rows."""
        return changes_in(self.records)

    def with_bounds(self) -> pa.RecordBatch:
        """The rows with three more columns: their branch, and the bounds of their snapshot."""
        ends, end = [], 0
        for run in self.runs:
            end += run.rows
            ends.append(end)
        columns = [
            [run.position.vbucket_uuid for run in self.runs],
            [run.position.snapshot.start for run in self.runs],
            [run.position.snapshot.end for run in self.runs],
        ]
        run_ends = pa.array(ends, pa.int32())
        expanded = [
            pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(run_ends, pa.array(values, pa.uint64())))
            for values in columns
        ]
        schema = pa.schema([*CHANGES, *BOUNDS]) if self.records.schema == CHANGES else None
        if schema is None:
            schema = pa.schema([*self.records.schema, *BOUNDS])
        return pa.RecordBatch.from_arrays([*self.records.columns, *expanded], schema=schema)
