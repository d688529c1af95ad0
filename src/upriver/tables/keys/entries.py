"""Entries of keys: arrays of two 64-bit numbers per key, and the operations on whole arrays.

The first number is the vbucket in 16 bits and 48 bits of the key's hash; the second is 32 more bits of the hash and a
position in 32 bits. Sorted entries of one vbucket are one slice, and those of one key are next to each other.

The hash is SipHash-2-4 with 128 bits of output over vbucket and key, keyed with the table's seed, so that equal hashes
cannot be constructed by clients that choose keys. The loops are compiled if a C compiler was available (see ``CODEC``).
"""

from types import ModuleType
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from upriver.tables.keys import plain_keys

_codec: ModuleType
try:
    from upriver.tables.keys import _keys

    _codec, CODEC = _keys, "compiled"
except ImportError:  # built where there was no C compiler
    _codec, CODEC = plain_keys, "plain"

Entries = NDArray[np.uint64]
#: The version of the hash and of the layout of entries: files of other versions are built again.
HASH_VERSION: Final = 1
SEED_BYTES: Final = 16
ENTRY_BYTES: Final = 16
#: The vbucket of rows without a valid one.
NO_VBUCKET: Final = 0xFFFF
_POSITION: Final = np.uint64(0xFFFFFFFF)
_VBUCKET_SHIFT: Final = 48


def hash_keys(
    seed: bytes, vbuckets: NDArray[np.uint16], keys: pa.Array, first: int = 0, *, codec: ModuleType = _codec
) -> Entries:
    """One entry per key, unsorted; positions count from ``first``. Keys are binary or text; a null is an empty key."""
    found = np.empty((len(keys), 2), np.uint64)
    codec.hash_into(seed, np.ascontiguousarray(vbuckets, np.uint16), *_bytes_of(keys), first, found)
    return found


def no_entries() -> Entries:
    """An empty array of entries."""
    return np.empty((0, 2), np.uint64)


def sort_entries(entries: Entries, *, codec: ModuleType = _codec) -> Entries:
    """Sort in place."""
    codec.sort_in_place(entries)
    return entries


def find_entries(
    entries: Entries, hashes: Entries, *, codec: ModuleType = _codec
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """For each of the sorted hashes, where the entries that have it begin and end."""
    first, last = np.empty(len(hashes), np.uint32), np.empty(len(hashes), np.uint32)
    codec.bounds_into(entries, hashes, first, last)
    return first, last


def slice_of(entries: Entries, vbucket: int, *, codec: ModuleType = _codec) -> Entries:
    """The entries of a vbucket."""
    first = codec.lower_bound(entries, vbucket << _VBUCKET_SHIFT)
    last = len(entries) if vbucket >= NO_VBUCKET else codec.lower_bound(entries, (vbucket + 1) << _VBUCKET_SHIFT)
    return entries[first:last]


def vbuckets_of(entries: Entries, *, codec: ModuleType = _codec) -> list[int]:
    """The vbuckets of sorted entries."""
    found: list[int] = []
    at = 0
    while at < len(entries):
        vbucket = int(entries[at, 0]) >> _VBUCKET_SHIFT
        found.append(vbucket)
        at = len(entries) if vbucket >= NO_VBUCKET else codec.lower_bound(entries, (vbucket + 1) << _VBUCKET_SHIFT)
    return found


def positions_of(entries: Entries) -> NDArray[np.uint32]:
    """The positions of entries."""
    return (entries[:, 1] & _POSITION).astype(np.uint32)


def with_positions(entries: Entries, positions: NDArray[np.uint32]) -> Entries:
    """The same hashes at other positions."""
    found = entries.copy()
    found[:, 1] &= ~_POSITION
    found[:, 1] |= positions
    return found


def is_next_other(entries: Entries) -> NDArray[np.bool_]:
    """For sorted entries: whether the hash of the next entry differs, so that this one is the last of its hash."""
    found = np.ones(len(entries), np.bool_)
    highs, lows = entries[:, 0], entries[:, 1] >> np.uint64(32)
    np.not_equal(highs[1:], highs[:-1], out=found[:-1])
    found[:-1] |= lows[1:] != lows[:-1]
    return found


def is_last_of_key(entries: Entries, keys: pa.Array, *, codec: ModuleType = _codec) -> NDArray[np.bool_]:
    """For sorted entries: whether the key, not only the hash, does not come again. Positions are numbers of keys."""
    found = np.empty(len(entries), np.uint8)
    codec.last_into(entries, *_bytes_of(keys), found)
    return found.view(np.bool_)


def is_text(keys: pa.Array, *, codec: ModuleType = _codec) -> NDArray[np.bool_]:
    """Whether each key is valid UTF-8."""
    found = np.empty(len(keys), np.uint8)
    codec.text_into(*_bytes_of(keys), found)
    return found.view(np.bool_)


def _bytes_of(keys: pa.Array) -> tuple[NDArray[np.int32] | NDArray[np.int64], NDArray[np.uint8]]:
    """The offsets and the bytes of a column of keys."""
    _, offsets, data = keys.buffers()
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    if not len(keys):
        return np.zeros(1, np.int32), content
    if pa.types.is_large_binary(keys.type) or pa.types.is_large_string(keys.type):
        return np.frombuffer(offsets, np.int64, len(keys) + 1, keys.offset * 8), content
    return np.frombuffer(offsets, np.int32, len(keys) + 1, keys.offset * 4), content
