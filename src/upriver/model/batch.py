"""Changes in bulk: one Arrow schema for the engine, the wire and Spark."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from upriver.model.change import Change, Event

#: One row per change, in stream order. The columns have the names of the fields of ``Change``.
CHANGES = pa.schema(
    [
        pa.field("vbucket", pa.uint16(), nullable=False),
        pa.field("event", pa.uint8(), nullable=False),
        pa.field("seqno", pa.uint64(), nullable=False),
        pa.field("rev_seqno", pa.uint64(), nullable=False),
        pa.field("cas", pa.uint64(), nullable=False),
        pa.field("flags", pa.uint32(), nullable=False),
        pa.field("expiry", pa.uint32(), nullable=False),
        pa.field("lock_time", pa.uint32(), nullable=False),
        pa.field("datatype", pa.uint8(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
    ]
)


def change_batch(changes: Iterable[Change]) -> pa.RecordBatch:
    """A record batch of these changes, in their order."""
    rows = list(changes)
    columns = [pa.array([getattr(row, field.name) for row in rows], type=field.type) for field in CHANGES]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGES)


def changes_in(batch: pa.RecordBatch) -> Iterator[Change]:
    """The rows of a batch as single changes, for code where speed does not matter."""
    for row in batch.to_pylist():
        yield Change(**{**row, "event": Event(row["event"])})
