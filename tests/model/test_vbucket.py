"""Vbuckets: the map that all clients agree on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.model import VbucketState, vbucket_of
from upriver.model.vbucket import VBUCKETS_MAX


def crc32(data: bytes) -> int:
    """The checksum, bit by bit, as a second opinion."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (0xEDB88320 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


@given(st.binary(max_size=50), st.sampled_from([1, 2, 64, 1000, 1024]))
def test_a_key_belongs_to_the_vbucket_of_its_checksum(key: bytes, vbuckets: int) -> None:
    assert vbucket_of(key, vbuckets) == ((crc32(key) >> 16) & 0x7FFF) % vbuckets
    assert 0 <= vbucket_of(key, vbuckets) < vbuckets


@pytest.mark.parametrize(("key", "vbucket"), [(b"", 0), (b"hello", 528), (b"foo", 115), (b"123456789", 1012)])
def test_known_keys_belong_to_known_vbuckets(key: bytes, vbucket: int) -> None:
    assert vbucket_of(key) == vbucket


def test_a_bucket_has_1024_vbuckets_unless_told_otherwise() -> None:
    assert VBUCKETS_MAX == 1024
    assert {vbucket_of(b"%d" % number) for number in range(20_000)} == set(range(1024))


def test_the_model_has_names_for_states_and_no_numbers() -> None:
    assert {state.value for state in VbucketState} == {"active", "replica", "pending", "dead"}
