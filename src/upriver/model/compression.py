"""Values that were compressed: inflated within a limit, because a few bytes can claim to be gigabytes."""

from typing import Final

import pyarrow as pa

from upriver.errors import WireError

#: The bit of the datatype that says: compressed with Snappy.
SNAPPY: Final = 0x02
#: No value is larger, compressed or not.
INFLATED_BYTES_MAX: Final = 20 * 1024 * 1024
_CODEC: Final = pa.Codec("snappy")


def inflated(value: bytes, limit: int = INFLATED_BYTES_MAX) -> bytes:
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


def _announced_size(value: bytes) -> int:
    """The number of bytes that stands before the compressed ones, seven bits in each byte."""
    size = shift = 0
    for byte in value[:5]:
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return size
        shift += 7
    raise WireError(0, "a value compressed with Snappy", "one without a length")
