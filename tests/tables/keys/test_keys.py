"""The compiled loops and their plain twin give the same results."""

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from upriver.tables.keys import plain_keys

_keys = pytest.importorskip("upriver.tables.keys._keys")
BOTH = pytest.mark.parametrize("codec", [_keys, plain_keys], ids=["compiled", "plain"])

SEED = bytes(range(16))
#: SipHash-2-4 with 128 bits of output over 0, 1, 2, …, by length: the vectors of the reference implementation (up to 63
#: bytes), and longer messages as OpenSSL hashes them (``openssl mac -macopt size:16 SIPHASH``).
VECTORS = {
    2: "8177228da4a45dc7fca38bdef60affe4",
    3: "9c70b60c5267a94e5f33b6b02985ed51",
    4: "f88164c12d9c8faf7d0f6e7c7bcd5579",
    7: "a1f1ebbed8dbc153c0b84aa61ff08239",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    9: "264499060ad9baabc47f8b02bb6d71ed",
    10: "00110dc378146956c95447d3f3d0fbba",
    15: "5493e99933b0a8117e08ec0f97cfc3d9",
    16: "6ee2a4ca67b054bbfd3315bf85230577",
    17: "473d06e8738db89854c066c47ae47740",
    18: "a426e5e423bf4885294da481feaef723",
    31: "2939b0183223fafc1723de4f52c43d35",
    32: "7c3956ca5eeafc3e363e9d556546eb68",
    63: "5150d1772f50834a503e069a973fbd7c",
    64: "1eaf077dc0d4cd3f8cad4d383658a74b",
    255: "1c9bb67528165f8e468248e3799b0eab",
    256: "67a00304d3834c4612eaee7b5f579acb",
    257: "1b25fee1ef6fbb23179c26056c2995fc",
    300: "ce005a406d14b36d5386b5f7a7e1b311",
}
entries_lists = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3), st.integers(0, 9)), max_size=150
).map(
    lambda rows: np.array(
        [(vbucket << 48 | high, low << 32 | position) for vbucket, high, low, position in rows], np.uint64
    ).reshape(-1, 2)
)


def columns_of(keys: list[bytes]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    offsets = np.cumsum([0, *map(len, keys)]).astype(np.int32)
    return offsets, np.frombuffer(b"".join(keys), np.uint8)


def hashed(
    codec: ModuleType, seed: bytes, vbuckets: list[int], keys: list[bytes], first: int = 0
) -> NDArray[np.uint64]:
    found = np.zeros((len(keys), 2), np.uint64)
    codec.hash_into(seed, np.array(vbuckets, np.uint16), *columns_of(keys), first, found)
    return found


@BOTH
@pytest.mark.parametrize("length", VECTORS)
def test_hashes_are_those_of_the_reference(codec: ModuleType, length: int) -> None:
    message = bytes(number % 256 for number in range(length))
    vbucket = int.from_bytes(message[:2], "little")
    found = codec.sip_hash(SEED, vbucket, message[2:])
    assert found.hex() == VECTORS[length]
    high, low = hashed(codec, SEED, [vbucket], [message[2:]], 7)[0].tolist()
    assert high.to_bytes(8, "little") == found[:6] + message[:2]
    assert low.to_bytes(8, "little") == (7).to_bytes(4, "little") + found[6:10]


@given(
    st.lists(st.tuples(st.integers(0, 2**16 - 1), st.binary(max_size=40)), max_size=20),
    st.binary(min_size=16, max_size=16),
)
def test_twins_hash_alike(rows: list[tuple[int, bytes]], seed: bytes) -> None:
    vbuckets, keys = [vbucket for vbucket, _ in rows], [key for _, key in rows]
    assert (hashed(_keys, seed, vbuckets, keys) == hashed(plain_keys, seed, vbuckets, keys)).all()


@BOTH
def test_64_bit_offsets_hash_alike(codec: ModuleType) -> None:
    keys = [b"", b"abc", b"0123456789abcdef"]
    offsets, data = columns_of(keys)
    found = np.zeros((3, 2), np.uint64)
    codec.hash_into(SEED, np.arange(3, dtype=np.uint16), offsets.astype(np.int64), data, 0, found)
    assert (found == hashed(codec, SEED, [0, 1, 2], keys)).all()


@BOTH
def test_arrays_that_do_not_match_are_refused(codec: ModuleType) -> None:
    offsets, data = columns_of([b"a", b"b"])
    found = np.zeros((2, 2), np.uint64)
    with pytest.raises(ValueError):
        codec.hash_into(SEED, np.zeros(1, np.uint16), offsets, data, 0, found)
    with pytest.raises(ValueError):
        codec.hash_into(SEED, np.zeros(2, np.uint16), offsets + 9, data, 0, found)
    with pytest.raises(ValueError):
        codec.hash_into(SEED[:8], np.zeros(2, np.uint16), offsets, data, 0, found)
    with pytest.raises(ValueError):
        codec.bounds_into(found, found, np.zeros(1, np.uint32), np.zeros(2, np.uint32))
    with pytest.raises(ValueError):
        codec.text_into(offsets + 9, data, np.zeros(2, np.uint8))
    with pytest.raises(ValueError):
        codec.last_into(found, offsets[:2], data, np.zeros(2, np.uint8))


@BOTH
@given(entries=entries_lists)
def test_sorting(codec: ModuleType, entries: NDArray[np.uint64]) -> None:
    expected = sorted(map(tuple, entries.tolist()))
    codec.sort_in_place(entries)
    assert list(map(tuple, entries.tolist())) == expected


@BOTH
@pytest.mark.parametrize("bits", [0, 3, 12, 40, 64])
def test_sorting_many(codec: ModuleType, bits: int) -> None:
    """Evenly distributed hashes, many equal ones, and ones that differ in their last bits only."""
    source = np.random.default_rng(bits)
    entries = source.integers(0, 2**64, (20_000, 2), np.uint64, endpoint=False) & np.uint64(2**bits - 1)
    expected = entries[np.lexsort((entries[:, 1], entries[:, 0]))]
    codec.sort_in_place(entries)
    assert (entries == expected).all()


@BOTH
@given(entries=entries_lists, hashes=entries_lists)
def test_searching(codec: ModuleType, entries: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> None:
    _keys.sort_in_place(entries)
    _keys.sort_in_place(hashes)
    first, last = np.zeros(len(hashes), np.uint32), np.zeros(len(hashes), np.uint32)
    codec.bounds_into(entries, hashes, first, last)
    held = [(high, low >> 32) for high, low in entries.tolist()]
    for (high, low), start, end in zip(hashes.tolist(), first.tolist(), last.tolist(), strict=True):
        assert held[start:end] == [each for each in held if each == (high, low >> 32)]
        assert start == sum(each < (high, low >> 32) for each in held)


@BOTH
def test_searching_few_and_many(codec: ModuleType) -> None:
    entries = np.random.default_rng(0).integers(0, 2**63, (5_000, 2), np.uint64)
    codec.sort_in_place(entries)
    for step in (1, 7, 900, 4_999):
        wanted = np.ascontiguousarray(entries[::step])
        first, last = np.zeros(len(wanted), np.uint32), np.zeros(len(wanted), np.uint32)
        codec.bounds_into(entries, wanted, first, last)
        assert (first == np.arange(0, 5_000, step)).all()
        assert (last == first + 1).all()


@BOTH
@given(entries=entries_lists, high=st.integers(0, 2**50))
def test_lower_bound(codec: ModuleType, entries: NDArray[np.uint64], high: int) -> None:
    _keys.sort_in_place(entries)
    assert codec.lower_bound(entries, high) == int((entries[:, 0] < np.uint64(high)).sum())


@BOTH
@given(keys=st.lists(st.binary(max_size=12) | st.text(max_size=12).map(str.encode), max_size=10))
def test_text(codec: ModuleType, keys: list[bytes]) -> None:
    found = np.zeros(len(keys), np.uint8)
    count = codec.text_into(*columns_of(keys), found)
    expected = [is_text(key) for key in keys]
    assert found.astype(bool).tolist() == expected
    assert count == sum(expected)


@BOTH
def test_every_character_is_text_and_surrogates_are_not(codec: ModuleType) -> None:
    texts = [chr(code).encode() for code in (*range(0, 0xD800, 97), 0xD7FF, *range(0xE000, 0x110000, 997), 0x10FFFF)]
    others = [chr(code).encode("utf-8", "surrogatepass") for code in range(0xD800, 0xE000, 31)]
    others += [
        b"\xf4\x90\x80\x80",
        b"\xc0\x80",
        b"\xe0\x80\x80",
        b"\xf0\x80\x80\x80",
        b"\x80",
        b"abcdefgh\xff",
        b"\xe2\x82",
    ]
    for keys, expected in ((texts, 1), (others, 0)):
        found = np.full(len(keys), 1 - expected, np.uint8)
        codec.text_into(*columns_of(keys), found)
        assert (found == expected).all()


@BOTH
@given(rows=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([b"a", b"b", b"cc"])), max_size=30))
def test_the_last_entry_of_each_key_is_found_though_hashes_are_equal(
    codec: ModuleType, rows: list[tuple[int, bytes]]
) -> None:
    keys = [key for _, key in rows]
    entries = np.array([(hash_, number) for number, (hash_, _) in enumerate(rows)], np.uint64).reshape(-1, 2)
    _keys.sort_in_place(entries)
    found = np.zeros(len(rows), np.uint8)
    codec.last_into(entries, *columns_of(keys), found)
    last = {row: number for number, row in enumerate(rows)}
    assert sorted(entries[found.astype(bool), 1].tolist()) == sorted(last.values())


def is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True
