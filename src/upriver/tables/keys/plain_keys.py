"""The plain twin of ``_keys``: the same functions with numpy, for machines without a C compiler."""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray


def sip_hash(seed: bytes, vbucket: int, key: bytes) -> bytes:
    """The whole hash of one key, 16 bytes."""
    message = np.frombuffer(vbucket.to_bytes(2, "little") + key, np.uint8)
    out = _sip(seed, message.reshape(1, -1))
    return out.astype("<u8").tobytes()


def hash_into(
    seed: bytes,
    vbuckets: NDArray[np.uint16],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    data: NDArray[np.uint8],
    first: int,
    entries: NDArray[np.uint64],
) -> None:
    """Fill one entry per key; positions start at ``first``."""
    count = len(entries)
    if len(seed) != 16 or len(vbuckets) < count or len(offsets) <= count:
        raise ValueError("arrays of different lengths")
    if count and (offsets[0] < 0 or offsets[count] > len(data)):
        raise ValueError("offsets outside of the data")
    starts = offsets[:count].astype(np.int64)
    lengths = offsets[1 : count + 1] - starts
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        messages = np.empty((len(rows), length + 2), np.uint8)
        messages[:, :2] = vbuckets[rows].astype("<u2").view(np.uint8).reshape(-1, 2)
        messages[:, 2:] = data[starts[rows, None] + np.arange(length)]
        out = _sip(seed, messages)
        entries[rows, 0] = vbuckets[rows].astype(np.uint64) << np.uint64(48) | out[:, 0] & np.uint64(2**48 - 1)
        low = out[:, 0] >> np.uint64(48) | (out[:, 1] & np.uint64(0xFFFF)) << np.uint64(16)
        entries[rows, 1] = low << np.uint64(32) | (first + rows).astype(np.uint64)


def sort_in_place(entries: NDArray[np.uint64]) -> None:
    """Sort entries by both numbers."""
    entries[:] = entries[np.lexsort((entries[:, 1], entries[:, 0]))]


def bounds_into(
    entries: NDArray[np.uint64], hashes: NDArray[np.uint64], first: NDArray[np.uint32], last: NDArray[np.uint32]
) -> None:
    """For each sorted hash, where the entries that have it begin and end."""
    if not len(first) == len(last) == len(hashes):
        raise ValueError("arrays of different lengths")
    highs, lows = entries[:, 0], entries[:, 1] >> np.uint64(32)
    begins, ends = np.searchsorted(highs, hashes[:, 0], "left"), np.searchsorted(highs, hashes[:, 0], "right")
    for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        low = hashes[number, 1] >> np.uint64(32)
        first[number] = begin + np.searchsorted(lows[begin:end], low, "left")
        last[number] = begin + np.searchsorted(lows[begin:end], low, "right")


def lower_bound(entries: NDArray[np.uint64], high: int) -> int:
    """The number of entries whose first number is below ``high``."""
    return bisect_left(entries[:, 0], high)


def text_into(offsets: NDArray[np.int32] | NDArray[np.int64], data: NDArray[np.uint8], found: NDArray[np.uint8]) -> int:
    """Whether each key is valid UTF-8; returns how many are."""
    count = len(found)
    if len(offsets) <= count or (count and (offsets[0] < 0 or offsets[count] > len(data))):
        raise ValueError("offsets outside of the data")
    for number in range(count):
        found[number] = _is_text(data[offsets[number] : offsets[number + 1]].tobytes())
    return int(found.sum())


def last_into(
    entries: NDArray[np.uint64],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    data: NDArray[np.uint8],
    found: NDArray[np.uint8],
) -> None:
    """Whether each of the sorted entries is the last one of its key. Positions are the numbers of the keys."""
    if len(found) != len(entries) or len(offsets) <= len(entries) or (len(entries) and offsets[-1] > len(data)):
        raise ValueError("arrays of different lengths")
    seen: set[tuple[int, int, bytes]] = set()
    for place in range(len(entries) - 1, -1, -1):
        high, low = entries[place].tolist()
        row = low & 0xFFFFFFFF
        name = (high, low >> 32, data[offsets[row] : offsets[row + 1]].tobytes())
        found[place] = name not in seen
        seen.add(name)


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def _sip(seed: bytes, messages: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """SipHash-2-4 with 128 bits of output over messages of one length, one per row."""
    count, length = messages.shape
    padded = np.zeros((count, length // 8 * 8 + 8), np.uint8)
    padded[:, :length] = messages
    padded[:, -1] = length & 0xFF
    words = padded.view("<u8").astype(np.uint64)
    k0, k1 = (np.uint64(int.from_bytes(part, "little")) for part in (seed[:8], seed[8:]))
    v = [
        np.full(count, k ^ np.uint64(number))
        for k, number in (
            (k0, 0x736F6D6570736575),
            (k1, 0x646F72616E646F6D ^ 0xEE),
            (k0, 0x6C7967656E657261),
            (k1, 0x7465646279746573),
        )
    ]
    for word in words.T:
        v[3] ^= word
        _rounds(v, 2)
        v[0] ^= word
    out = np.empty((count, 2), np.uint64)
    v[2] ^= np.uint64(0xEE)
    _rounds(v, 4)
    out[:, 0] = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= np.uint64(0xDD)
    _rounds(v, 4)
    out[:, 1] = v[0] ^ v[1] ^ v[2] ^ v[3]
    return out


def _rounds(v: list[NDArray[np.uint64]], count: int) -> None:
    for _ in range(count):
        v[0] += v[1]
        v[2] += v[3]
        v[1] = _rotated(v[1], 13) ^ v[0]
        v[3] = _rotated(v[3], 16) ^ v[2]
        v[0] = _rotated(v[0], 32)
        v[2] += v[1]
        v[0] += v[3]
        v[1] = _rotated(v[1], 17) ^ v[2]
        v[3] = _rotated(v[3], 21) ^ v[0]
        v[2] = _rotated(v[2], 32)


def _rotated(number: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    return number << np.uint64(bits) | number >> np.uint64(64 - bits)
