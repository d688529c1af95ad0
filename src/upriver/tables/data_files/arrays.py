"""Between Arrow and numpy by buffers: ``pa.array``, ``pa.scalar`` and ``to_numpy`` import pandas, which takes a new
worker longer than everything else together.
"""

from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_PLAIN: Final = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


def integers(column: pa.Array) -> NDArray[Any]:
    """The numbers of a column without nulls, in place."""
    kind = column.type
    letter = "i" if pa.types.is_signed_integer(kind) else "u"
    width = kind.bit_width // 8
    if not len(column):
        return np.empty(0, f"{letter}{width}")
    return np.frombuffer(column.buffers()[1], f"{letter}{width}", len(column), column.offset * width)


def is_valid(column: pa.Array) -> NDArray[np.bool_]:
    """Whether each value of a column is not null."""
    bits = column.buffers()[0]
    if bits is None or not column.null_count:
        return np.full(len(column), column.null_count == 0)
    first = column.offset // 8
    found = np.unpackbits(np.frombuffer(bits, np.uint8)[first:], bitorder="little")
    start = column.offset - 8 * first
    return found[start : start + len(column)].astype(np.bool_)


def bits(mask: NDArray[np.bool_]) -> pa.Buffer:
    """Booleans in Arrow's layout: eight per byte, the lowest bit first."""
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def booleans(mask: NDArray[np.bool_]) -> pa.Array:
    """A mask as an Arrow array."""
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits(mask)])


def flags(column: pa.Array) -> NDArray[np.bool_]:
    """Booleans as a mask; a null is false."""
    if not len(column):
        return np.empty(0, np.bool_)
    first = column.offset // 8
    found = np.unpackbits(np.frombuffer(column.buffers()[1], np.uint8)[first:], bitorder="little")
    start = column.offset - 8 * first
    mask = found[start : start + len(column)].astype(np.bool_)
    return mask & is_valid(column) if column.null_count else mask


def without_views(kind: pa.DataType) -> pa.DataType:
    """The plain type in the place of a view, which delta-rs writes and Arrow cannot filter."""
    return _PLAIN.get(kind, kind)


def plain_columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with plain types in the place of views."""
    fields = [field.with_type(without_views(field.type)) for field in rows.schema]
    return rows if pa.schema(fields).equals(rows.schema) else rows.cast(pa.schema(fields))
