"""Operations on arrays of entries."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.tables.keys.entries import (
    NO_VBUCKET,
    hash_keys,
    is_last_of_key,
    is_next_other,
    is_text,
    no_entries,
    positions_of,
    slice_of,
    sort_entries,
    vbuckets_of,
    with_positions,
)

SEED = bytes(range(16))


def numbers(*vbuckets: int) -> np.ndarray:
    return np.array(vbuckets, np.uint16)


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()], ids=str)
def test_the_type_of_the_column_does_not_matter(kind: pa.DataType) -> None:
    keys = ["", "a", "b" * 30]
    expected = hash_keys(SEED, numbers(1, 2, 3), pa.array([key.encode() for key in keys]))
    assert (hash_keys(SEED, numbers(1, 2, 3), pa.array(keys, kind)) == expected).all()


def test_slices_and_nulls_and_nothing() -> None:
    keys = pa.array([b"x", b"abc", None, b"d"])
    whole = hash_keys(SEED, numbers(9, 1, 2, 3), keys)
    assert (hash_keys(SEED, numbers(1, 2, 3), keys.slice(1), 1) == whole[1:]).all()
    assert (whole[2] == hash_keys(SEED, numbers(2), pa.array([b""]), 2)[0]).all()
    assert hash_keys(SEED, numbers(), pa.array([], pa.binary())).shape == (0, 2)
    assert hash_keys(SEED, numbers(7), pa.nulls(1, pa.binary())).shape == (1, 2)


def test_vbucket_and_seed_are_part_of_the_hash() -> None:
    key = pa.array([b"key"])
    first, other, seeded = (
        hash_keys(seed, numbers(vbucket), key)[0] for seed, vbucket in ((SEED, 1), (SEED, 2), (bytes(16), 1))
    )
    assert int(first[0]) >> 48 == int(seeded[0]) >> 48 == 1
    assert len({int(each[0]) & 2**48 - 1 for each in (first, other, seeded)}) == 3


@given(st.lists(st.sampled_from([0, 3, 4, 1023, NO_VBUCKET]), max_size=30))
def test_a_vbucket_is_one_slice(vbuckets: list[int]) -> None:
    keys = pa.array([b"%d" % number for number in range(len(vbuckets))], pa.binary())
    entries = sort_entries(hash_keys(SEED, numbers(*vbuckets), keys))
    assert vbuckets_of(entries) == sorted(set(vbuckets))
    for vbucket in (0, 2, 3, 1023, NO_VBUCKET):
        found = positions_of(slice_of(entries, vbucket)).tolist()
        assert sorted(found) == [number for number, each in enumerate(vbuckets) if each == vbucket]


def test_positions_are_replaced() -> None:
    entries = hash_keys(SEED, numbers(1, 1), pa.array([b"a", b"b"]), 5)
    moved = with_positions(entries, np.array([9, 2**32 - 1], np.uint32))
    assert positions_of(entries).tolist() == [5, 6]
    assert positions_of(moved).tolist() == [9, 2**32 - 1]
    assert (moved[:, 1] >> np.uint64(32) == entries[:, 1] >> np.uint64(32)).all()


def test_the_last_of_a_hash_and_the_last_of_a_key() -> None:
    keys = pa.array([b"a", b"b", b"a", b"a"])
    entries = hash_keys(SEED, numbers(1, 1, 1, 2), keys)
    entries[1] = with_positions(entries[:1], np.array([1], np.uint32))  # as if b had the hash of a
    sort_entries(entries)
    assert positions_of(entries[is_next_other(entries)]).tolist() == [2, 3]
    assert positions_of(entries[is_last_of_key(entries, keys)]).tolist() == [1, 2, 3]
    assert is_next_other(no_entries()).tolist() == []


def test_text() -> None:
    assert is_text(pa.array([b"a", b"\xff", b""])).tolist() == [True, False, True]
