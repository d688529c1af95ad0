"""Compressed values."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import WireError
from upriver.model.compression import INFLATED_BYTES_MAX, inflated
from upriver.wire.framing import VALUE_BYTES_MAX


def deflated(value: bytes) -> bytes:
    return bytes(pa.Codec("snappy").compress(value))


def test_what_may_be_sent_plain_may_be_sent_compressed() -> None:
    assert INFLATED_BYTES_MAX == VALUE_BYTES_MAX


@given(st.binary(max_size=5000))
def test_round_trip(value: bytes) -> None:
    assert inflated(deflated(value)) == value


def test_nothing_larger_than_the_limit() -> None:
    bomb = deflated(bytes(10_000_000))
    with pytest.raises(WireError, match=r"at most 1,000 bytes, found one that inflates to 10,000,000"):
        inflated(bomb, 1000)
    with pytest.raises(WireError, match="without a length"):
        inflated(b"\xff" * 8)
    with pytest.raises(WireError, match="without a length"):
        inflated(b"")


@given(st.binary(min_size=1, max_size=64))
def test_damage_is_told(value: bytes) -> None:
    try:
        inflated(value, 1 << 20)
    except WireError:
        return
