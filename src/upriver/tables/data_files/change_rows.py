"""Rows of changes, as tasks receive them, on the way to rows of a table."""

from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from upriver.tables.data_files.arrays import bits, booleans, integers, is_valid
from upriver.tables.keys.entries import is_text
from upriver.tables.schema import OWN

#: The columns that a table needs.
CHANGE_COLUMNS: Final = (
    "vbucket",
    "seqno",
    "rev_seqno",
    "cas",
    "event",
    "key",
    "value",
    "flags",
    "expiry",
    "datatype",
)
#: The first letters of mutation, deletion and expiration.
_MUTATION, _REMOVALS = ord("m"), (ord("d"), ord("e"))
_OFFSETS: Final = {pa.string(): np.int32, pa.large_string(): np.int64}


def without_foreign_columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The columns that a table needs. ``ValueError`` if one is missing, or a key is."""
    missing = [name for name in CHANGE_COLUMNS if name not in rows.schema.names]
    if missing:
        raise ValueError(f"the rows have no column {', '.join(missing)}")
    if rows.column("key").null_count or rows.column("vbucket").null_count:
        raise ValueError("a row without a key is not a change of a key")
    return rows.select(list(CHANGE_COLUMNS))


def split(rows: pa.RecordBatch, bytes_max: int) -> list[pa.RecordBatch]:
    """The rows in pieces of at most this size, or of one row."""
    if rows.num_rows < 2 or rows.nbytes <= bytes_max:
        return [rows] if rows.num_rows else []
    half = rows.num_rows // 2
    return [*split(rows.slice(0, half), bytes_max), *split(rows.slice(half), bytes_max)]


def vbuckets_in(rows: pa.RecordBatch) -> NDArray[np.uint16]:
    """The vbucket of each row."""
    return integers(rows.column("vbucket")).astype(np.uint16)


def is_mutation(rows: pa.RecordBatch) -> NDArray[np.bool_]:
    """Whether each row is a mutation; others are deletions and expirations. ``ValueError`` for rows of other events."""
    events = rows.column("event")
    if events.type not in _OFFSETS or events.null_count:
        raise ValueError(f"the column event must hold texts, and has {events.type} with {events.null_count} nulls")
    if not len(events):
        return np.empty(0, np.bool_)
    kind = _OFFSETS[events.type]
    _, offsets, letters = events.buffers()
    starts = np.frombuffer(offsets, kind, len(events), events.offset * np.dtype(kind).itemsize)
    first = np.frombuffer(letters, np.uint8)[starts]
    found: NDArray[np.bool_] = first == _MUTATION
    if not (found | np.isin(first, _REMOVALS)).all():
        raise ValueError("the event of a row is not mutation, deletion or expiration")
    values = rows.column("value")
    if values.null_count and (found & ~is_valid(values)).any():
        raise ValueError("a mutation has no value; read with values to fill a table")
    return found


def chosen(rows: pa.RecordBatch, mask: NDArray[np.bool_]) -> pa.RecordBatch:
    """The rows of a mask."""
    return rows if mask.all() else rows.filter(booleans(mask))


def own_columns(rows: pa.RecordBatch, raw: pa.Array) -> list[pa.Array]:
    """The columns of ours in a table, for these mutations."""
    keys = rows.column("key").cast(pa.binary()) if rows.column("key").type != pa.binary() else rows.column("key")
    texts, others = _keys(keys)
    found = {"_key": texts, "_raw_key": others, "_raw": raw}
    return [found[field.name] if field.name in found else _number(rows, field) for field in OWN]


def _number(rows: pa.RecordBatch, field: pa.Field) -> pa.Array:
    column = rows.column(field.name.removeprefix("_"))
    return column if column.type == field.type else column.cast(field.type)


def _keys(keys: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Keys that are text, and the others; both share the bytes of the keys."""
    mask = is_text(keys)
    _, offsets, data = keys.buffers()
    if mask.all():
        return pa.Array.from_buffers(pa.string(), len(keys), [None, offsets, data], 0, keys.offset), pa.nulls(
            len(keys), pa.binary()
        )
    if keys.offset:  # validity bits start at the first row
        offsets = pa.py_buffer(np.frombuffer(offsets, np.int32, len(keys) + 1, keys.offset * 4))
    texts = pa.Array.from_buffers(pa.string(), len(keys), [bits(mask), offsets, data])
    return texts, pa.Array.from_buffers(pa.binary(), len(keys), [bits(~mask), offsets, data])
