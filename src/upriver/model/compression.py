"""Compressed values: inflated within a limit, because a few bytes can claim to be gigabytes."""

from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Final

import pyarrow as pa

from upriver.errors import WireError

#: The datatype bit for compression with Snappy.
SNAPPY: Final = 0x02
#: No value is larger, compressed or not.
INFLATED_BYTES_MAX: Final = 20 * 1024 * 1024
#: Snappy makes at most this many bytes of one.
INFLATION_MAX: Final = 22
#: All datatypes without the compression bit.
_UNCOMPRESSED: Final = bytes(datatype for datatype in range(256) if not datatype & SNAPPY)
_CODEC: Final = pa.Codec("snappy")


def inflated(value: bytes, limit: int = INFLATED_BYTES_MAX) -> bytes:
    """Inflate a value; raises if it is damaged or larger than ``limit``."""
    size = _announced_size(value)
    if size > limit:
        raise WireError(0, f"a value of at most {limit:,} bytes", f"one that inflates to {size:,}")
    if not size:
        return b""
    try:
        return bytes(_CODEC.decompress(value, size))
    except (OSError, pa.ArrowException) as error:
        raise WireError(0, "a value compressed with Snappy", str(error)) from None


def plain(value: bytes, datatype: int = SNAPPY) -> bytes:
    """The value, inflated if needed; if the writer set the compression bit wrongly, the bytes are the value."""
    if not datatype & SNAPPY:
        return value
    try:
        return inflated(value)
    except WireError:
        return value


def inflated_size(value: bytes) -> int:
    """The inflated size that a compressed value claims; for other bytes, their number."""
    try:
        return _announced_size(value)
    except WireError:
        return len(value)


def inflated_batch(records: pa.RecordBatch, inflate: Callable[[bytes], bytes] = inflated) -> pa.RecordBatch:
    """The batch with all values inflated."""
    datatypes = _datatypes(records)
    if not datatypes.translate(None, _UNCOMPRESSED):
        return records
    # Without Arrow's functions and lists: the first call of those imports pandas, for half a second.
    values = [
        inflate(value) if value and datatype & SNAPPY else value
        for datatype, value in zip(datatypes, records.column("value").to_pylist(), strict=True)
    ]
    offsets = array("i", [0, *accumulate(map(len, values))])
    columns = {
        "value": [pa.py_buffer(offsets), pa.py_buffer(b"".join(values))],
        "datatype": [pa.py_buffer(bytes(datatype & ~SNAPPY for datatype in datatypes))],
    }
    for name, buffers in columns.items():
        place = records.schema.get_field_index(name)
        column = pa.Array.from_buffers(records.schema.field(place).type, len(values), [None, *buffers])
        records = records.set_column(place, records.schema.field(place), column)
    return records


def _datatypes(records: pa.RecordBatch) -> bytes:
    """The buffers of the values, if there are any."""
    if not {"value", "datatype"} <= set(records.schema.names):
        return b""
    column = records.column("datatype")
    data = column.buffers()[1]
    return b"" if data is None else bytes(data[column.offset : column.offset + len(column)])


def _announced_size(value: bytes) -> int:
    """The inflated size, stored before the compressed bytes with seven bits in each byte."""
    size = shift = 0
    for place, byte in enumerate(value[:5]):
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            # Few bytes cannot inflate to many, and none not to any: this is not Snappy.
            if (size == 0) != (len(value) == place + 1) or size > INFLATION_MAX * len(value):
                raise WireError(0, "a value compressed with Snappy", f"{len(value):,} bytes for {size:,}")
            return size
        shift += 7
    raise WireError(0, "a value compressed with Snappy", "one without a length")
