"""Values that come compressed: inflated within a limit, because a few bytes can claim to be gigabytes."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import WireError
from upriver.wire.framing import VALUE_BYTES_MAX

#: The bit of the datatype that says: compressed with Snappy.
SNAPPY: Final = 0x02
_CODEC: Final = pa.Codec("snappy")


def inflated(value: bytes, limit: int = VALUE_BYTES_MAX) -> bytes:
    """The value that was compressed; refuses one that is damaged or larger than ``limit``."""
    size = _announced_size(value)
    if size > limit:
        raise WireError(0, f"a value of at most {limit:,} bytes", f"one that inflates to {size:,}")
    if not size:
        return b""
    try:
        return bytes(_CODEC.decompress(value, size))
    except (OSError, pa.ArrowException) as error:
        raise WireError(0, "a value compressed with Snappy", str(error)) from None


def inflated_batch(records: pa.RecordBatch, limit: int = VALUE_BYTES_MAX) -> pa.RecordBatch:
    """A batch of changes in which no value is compressed any more."""
    if "datatype" not in records.schema.names:
        return records
    compressed = pc.bit_wise_and(records.column("datatype"), pa.scalar(SNAPPY, pa.uint8()))
    if not pc.max(compressed).as_py():
        return records
    datatypes = records.column("datatype").to_pylist()
    values = [
        inflated(value, limit) if datatype & SNAPPY else value
        for datatype, value in zip(datatypes, records.column("value").to_pylist(), strict=True)
    ]
    plain = pa.array([datatype & ~SNAPPY for datatype in datatypes], pa.uint8())
    for name, column in (("value", pa.array(values, pa.binary())), ("datatype", plain)):
        place = records.schema.get_field_index(name)
        records = records.set_column(place, records.schema.field(place), column)
    return records


def _announced_size(value: bytes) -> int:
    """The number of bytes that stands before the compressed ones, seven bits in each byte."""
    size = shift = 0
    for byte in value[:5]:
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return size
        shift += 7
    raise WireError(0, "a value compressed with Snappy", "one without a length")
