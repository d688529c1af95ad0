"""Compressed values."""

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import WireError
from upriver.model import Change, Event, change_batch, changes_in
from upriver.model.compression import (
    INFLATED_BYTES_MAX,
    INFLATION_MAX,
    SNAPPY,
    inflated,
    inflated_batch,
    inflated_size,
    plain,
)
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


def test_a_batch_is_inflated_where_it_says_so() -> None:
    rows = [
        Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"a", value=deflated(b"x" * 100), datatype=SNAPPY | 1),
        Change(vbucket=1, event=Event.MUTATION, seqno=2, key=b"b", value=deflated(b"kept as it is"), datatype=1),
    ]
    first, second = changes_in(inflated_batch(change_batch(rows)))
    assert (first.value, first.datatype) == (b"x" * 100, 1)
    assert second == rows[1]
    assert list(changes_in(inflated_batch(change_batch([*rows, rows[0]]).slice(1, 1)))) == rows[1:]
    untouched = change_batch(rows[1:])
    assert inflated_batch(untouched) is untouched


def test_a_wrong_claim_of_compression_leaves_the_bytes_as_they_are() -> None:
    assert plain(deflated(b"x"), SNAPPY | 1) == b"x"
    assert plain(b"\xff" * 8, SNAPPY) == b"\xff" * 8
    assert plain(deflated(b"x"), 1) == deflated(b"x")
    wrong = [Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"a", value=b"\xff" * 8, datatype=SNAPPY)]
    with pytest.raises(WireError):
        inflated_batch(change_batch(wrong))
    (change,) = changes_in(inflated_batch(change_batch(wrong), plain))
    assert (change.value, change.datatype) == (b"\xff" * 8, 0)


@pytest.mark.parametrize("wrong", [b"\0abc", b"\x80\0abc", b"\5", b"\xff\xff\xff\xff\x0fabc", b"\x80\x80\x80\x0aA"])
def test_nothing_is_made_of_something_and_not_everything_of_little(wrong: bytes) -> None:
    with pytest.raises(WireError, match=f"{len(wrong)} bytes for"):
        inflated(wrong)
    assert plain(wrong) == wrong
    assert inflated_size(wrong) == len(wrong)


@pytest.mark.parametrize("event", [Event.MUTATION, Event.DELETION, Event.EXPIRATION])
def test_where_there_is_no_value_there_is_nothing_to_inflate(event: Event) -> None:
    (change,) = changes_in(
        inflated_batch(change_batch([Change(vbucket=1, event=event, seqno=1, key=b"a", datatype=SNAPPY)]))
    )
    assert (change.value, change.datatype) == (b"", 0)


def test_how_much_is_made_of_little() -> None:
    assert 20 < 10_000_000 / len(deflated(bytes(10_000_000))) < INFLATION_MAX


def test_no_caller_waits_for_pandas() -> None:
    """Arrow's own functions import it when they are called first, on an event loop where others wait."""
    script = (
        "import sys, pyarrow as pa;"
        "from upriver.engine import Bucket;"
        "from upriver.model.compression import inflated_batch;"
        "bucket = Bucket.open(None, vbuckets=1, background=False);"
        "vbucket = bucket.create_vbucket(0);"
        "vbucket.set(b'k', pa.Codec('snappy').compress(b'x' * 99, asbytes=True), datatype=2);"
        "cursor = vbucket.open_cursor('c');"
        "cursor.next_snapshot();"
        "batch = inflated_batch(cursor.read_columns());"
        "assert 'pandas' not in sys.modules;"
        "assert batch['value'].to_pylist() == [b'x' * 99]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
