"""Changes as rows of Spark: the schema, and record batches fitted to it without an object for each row.

Spark has no unsigned numbers: seqnos, CAS and uuids are shown as 64-bit numbers with a sign, by the same bits. A
deletion has no value (null); a mutation may have an empty one. Rows of a whole vbucket (flush, rollback, reset) have no
key, and a rollback's value tells both uuids as JSON.
"""

import json
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.model import Event

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
#: The columns by name, as Spark wants them in record batches.
FIELDS: Final = {name: _ARROW[kind] for name, kind in (part.split() for part in SCHEMA.split(", "))}
_EVENTS: Final = pa.array([""] + [event.name.lower() for event in Event], pa.string())


class Bounds(NamedTuple):
    """What the rows of a batch share: where they lie in the history of their vbucket."""

    vbucket_uuid: int
    branch: int
    snapshot_start: int
    snapshot_end: int


_SHARED: Final = frozenset(Bounds._fields)


def columns_to_decode(columns: Sequence[str], *, keys_only: bool) -> tuple[str, ...]:
    """Which columns of a batch of changes are needed for these of Spark; one at least, to count the rows."""
    needed = {name for name in columns if name not in _SHARED and not (keys_only and name == "value")}
    if "value" in needed:
        needed.add("event")  # a deletion's value is null
    return tuple(sorted(needed)) or ("vbucket",)


class RowMaker:
    """Fits batches of changes to the columns that a query asked for."""

    def __init__(self, columns: Sequence[str], *, keys_only: bool = False, value_as_text: bool = False) -> None:
        unknown = [name for name in columns if name not in FIELDS]
        if unknown:
            raise ValueError(f"there is no column {', '.join(unknown)}; there are {', '.join(FIELDS)}")
        self.columns = tuple(columns)
        self.to_decode = columns_to_decode(columns, keys_only=keys_only)
        self._keys_only = keys_only
        self._value_type = pa.string() if value_as_text else pa.binary()
        types = FIELDS | {"value": self._value_type}
        self.schema = pa.schema([pa.field(name, types[name]) for name in columns])

    def rows(self, changes: pa.RecordBatch, runs: Sequence[tuple[int, Bounds]]) -> pa.RecordBatch:
        """The rows of Spark for these changes: so many of them with these bounds, so many with those."""
        return pa.RecordBatch.from_arrays(
            [self._column(name, changes, runs) for name in self.columns], schema=self.schema
        )

    def row(self, event: Event, vbucket: int, seqno: int, bounds: Bounds, value: bytes | None = None) -> pa.RecordBatch:
        """One row that concerns a whole vbucket."""
        known = {"vbucket": vbucket, "seqno": signed(seqno), "event": event.name.lower(), "value": value}
        known |= {name: signed(number) for name, number in bounds._asdict().items()}
        return pa.RecordBatch.from_pylist([{name: known.get(name) for name in self.columns}], schema=self.schema)

    def _column(self, name: str, changes: pa.RecordBatch, runs: Sequence[tuple[int, Bounds]]) -> pa.Array:
        kind = self.schema.field(name).type
        if name in _SHARED:
            numbers = [signed(getattr(bounds, name)) for _, bounds in runs]
            dtype = np.int32 if kind == pa.int32() else np.int64
            return pa.array(np.repeat(np.array(numbers, dtype), [count for count, _ in runs]))
        if name == "value":
            return self._values(changes, kind)
        column = changes.column(name)
        if name == "event":
            return _EVENTS.take(column.cast(pa.int8()))
        # The same bits with a sign need no copy; smaller numbers are widened, which keeps their value.
        return column.view(kind) if column.type == pa.uint64() else column.cast(kind)

    def _values(self, changes: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
        if self._keys_only:
            return pa.nulls(changes.num_rows, kind)
        values = changes.column("value")
        is_mutation = pc.equal(changes.column("event"), pa.scalar(int(Event.MUTATION), pa.uint8()))
        _, offsets, data = values.buffers()
        if values.offset or is_mutation.offset:  # buffers of a slice begin elsewhere
            return pc.if_else(is_mutation, values, pa.scalar(None, values.type)).cast(kind)
        # A boolean array's bits are just what says which values are there.
        array = pa.Array.from_buffers(pa.binary(), len(values), [is_mutation.buffers()[1], offsets, data])
        return array.cast(kind) if kind != pa.binary() else array


def signed(number: int) -> int:
    """The same 64 bits with a sign."""
    return number - 2**64 if number >= 2**63 else number


def unsigned(number: int) -> int:
    """The same 64 bits without a sign."""
    return number + 2**64 if number < 0 else number


def rollback_value(old_uuid: int, new_uuid: int) -> bytes:
    """What a rollback's row says in its value."""
    return json.dumps({"old_uuid": f"{old_uuid:#x}", "new_uuid": f"{new_uuid:#x}"}).encode()
