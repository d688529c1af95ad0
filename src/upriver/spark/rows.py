"""Changes as rows of Spark: the schema, and record batches in it without an object for each row.

Spark has no unsigned numbers: the bits of seqnos, CAS and uuids are shown as signed 64-bit numbers. A deletion has no
value (null); a mutation may have an empty one. Rows about a whole vbucket (flush, rollback, reset) have no key, and a
rollback's value has both uuids as JSON.

Arrays are made from buffers: ``pa.array`` and ``pa.scalar`` import pandas, which takes a new worker longer than
everything else together.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa

from upriver.model import Event

if TYPE_CHECKING:
    from upriver.client.consumer import ColumnName

#: One row per change, as Spark writes a schema.
SCHEMA: Final = (
    "vbucket int, seqno long, rev_seqno long, cas long, event string, key binary, value binary, flags long, "
    "expiry long, lock_time long, datatype int, vbucket_uuid long, branch int, snapshot_start long, snapshot_end long"
)
_ARROW: Final[dict[str, pa.DataType]] = {
    "int": pa.int32(),
    "long": pa.int64(),
    "string": pa.string(),
    "binary": pa.binary(),
}
#: The columns by name, with the types that Spark expects in record batches.
FIELDS: Final = {name: _ARROW[kind] for name, kind in (part.split() for part in SCHEMA.split(", "))}
#: The same as an Arrow schema.
ROWS: Final = pa.schema(list(FIELDS.items()))


def numbers(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """These numbers as a column."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def bits(values: np.ndarray) -> pa.Buffer:
    """Booleans in Arrow's layout: eight per byte, the lowest bit first."""
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def unsigned_numbers(column: pa.Array) -> np.ndarray:
    """The values of a column of unsigned numbers."""
    width = column.type.bit_width // 8
    return np.frombuffer(column.buffers()[1], f"u{width}", len(column), column.offset * width)


def _texts(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(texts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    )


#: The names of events by their number.
_EVENTS: Final = _texts(["", *(event.name.lower() for event in Event)])


class Bounds(NamedTuple):
    """What the rows of a run share: their branch and their snapshot."""

    vbucket_uuid: int
    branch: int
    snapshot_start: int
    snapshot_end: int


_SHARED: Final = frozenset(Bounds._fields)
_POSITION_COLUMNS: Final = frozenset({"seqno", "vbucket_uuid", "snapshot_start", "snapshot_end"})


def columns_to_decode(columns: Sequence[str], *, keys_only: bool) -> "tuple[ColumnName, ...]":
    """The columns of changes that these columns of Spark need, and ``seqno`` to find the end of a range."""
    needed = {name for name in columns if name not in _SHARED and not (keys_only and name == "value")} | {"seqno"}
    if "value" in needed:
        needed.add("event")  # a deletion's value is null
    return cast("tuple[ColumnName, ...]", tuple(sorted(needed)))


class RowMaker:
    """Converts changes to the columns of a query."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        keys_only: bool = False,
        value_as_text: bool = False,
        has_positions: bool = True,
    ) -> None:
        """``has_positions`` is False for TAP, whose changes have no seqno, branch or snapshot."""
        unknown = [name for name in columns if name not in FIELDS]
        if unknown:
            raise ValueError(f"unknown column {', '.join(unknown)}; choose from {', '.join(FIELDS)}")
        self.columns = tuple(columns)
        self.to_decode = columns_to_decode(columns, keys_only=keys_only)
        self._keys_only = keys_only
        self._unknown = frozenset() if has_positions else _POSITION_COLUMNS
        self._value_type = pa.string() if value_as_text else pa.binary()
        types = FIELDS | {"value": self._value_type}
        self.schema = pa.schema([pa.field(name, types[name]) for name in columns])

    def rows(self, changes: pa.RecordBatch, runs: Sequence[tuple[int, Bounds]]) -> pa.RecordBatch:
        """The rows for these changes; ``runs`` has the number of rows and the bounds of each run."""
        return pa.RecordBatch.from_arrays(
            [self._column(name, changes, runs) for name in self.columns], schema=self.schema
        )

    def row(self, event: Event, vbucket: int, seqno: int, bounds: Bounds, value: bytes | None = None) -> pa.RecordBatch:
        """One row about a whole vbucket."""
        known = {"vbucket": vbucket, "seqno": signed(seqno), "event": event.name.lower(), "value": value}
        known |= {name: signed(number) for name, number in bounds._asdict().items()}
        known |= dict.fromkeys(self._unknown)
        return pa.RecordBatch.from_pylist([{name: known.get(name) for name in self.columns}], schema=self.schema)

    def _column(self, name: str, changes: pa.RecordBatch, runs: Sequence[tuple[int, Bounds]]) -> pa.Array:
        kind = self.schema.field(name).type
        if name in self._unknown:
            return pa.nulls(changes.num_rows, kind)
        if name in _SHARED:
            shared = [signed(getattr(bounds, name)) for _, bounds in runs]
            dtype = np.int32 if kind == pa.int32() else np.int64
            return numbers(np.repeat(np.array(shared, dtype), [count for count, _ in runs]), kind)
        if name == "value":
            return self._values(changes, kind)
        column = changes.column(name)
        if name == "event":
            return _EVENTS.take(column.cast(pa.int8()))
        # The bits of 64-bit numbers are reused without a copy; smaller numbers are widened.
        return column.view(kind) if column.type == pa.uint64() else column.cast(kind)

    def _values(self, changes: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
        if self._keys_only:
            return pa.nulls(changes.num_rows, kind)
        values = changes.column("value")
        is_mutation = unsigned_numbers(changes.column("event")) == int(Event.MUTATION)
        _, offsets, data = values.buffers()
        if values.offset:  # the buffers of a slice are those of the whole array
            offsets = offsets.slice(values.offset * 4)
        array = pa.Array.from_buffers(pa.binary(), len(values), [bits(is_mutation), offsets, data])
        return _as_text(array) if kind == pa.string() else array


def _as_text(values: pa.Array) -> pa.Array:
    """Values as text. Invalid bytes are replaced: one picture in a bucket must not end a query."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if value is None else value.decode(errors="replace") for value in values.to_pylist()]
        return pa.array(texts, pa.string())


#: The metadata key with which a column says that it holds documents, and their schema.
DOCUMENTS: Final = "upriver.documents"


def document_metadata(value_format: str, value_schema: str | None) -> dict[str, str] | None:
    """The metadata of the value column, from which ``changes()`` knows how to parse it."""
    return {DOCUMENTS: value_schema or ""} if value_format == "json" else None


def signed(number: int) -> int:
    """The same 64 bits with a sign."""
    return number - 2**64 if number >= 2**63 else number


def unsigned(number: int) -> int:
    """The same 64 bits without a sign."""
    return number + 2**64 if number < 0 else number


def rollback_value(old_uuid: int, new_uuid: int) -> bytes:
    """The value of a rollback's row."""
    return json.dumps({"old_uuid": f"{old_uuid:#x}", "new_uuid": f"{new_uuid:#x}"}).encode()
