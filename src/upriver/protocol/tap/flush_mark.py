"""The engine-specific data of our flushes: a number that identifies one flush on every path, and what it covers.

A flush of TAP means everything, but a node flushes only the vbuckets that are active there. Another node, which owns
the rest, must not lose what was written to those. So our flushes list their vbuckets, one bit for each. Engine-specific
data of other engines says nothing about which flush it is, so it is not taken for a mark.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

_OURS: Final = b"upriver:"
_SIZE: Final = 8


class FlushMark(NamedTuple):
    """Which flush it is, and the vbuckets that it empties."""

    number: int
    vbuckets: frozenset[int]


def marked(number: int, vbuckets: Iterable[int]) -> bytes:
    """The engine-specific data of this flush of these vbuckets, of which there is at least one."""
    bits = 0
    for vbucket in vbuckets:
        bits |= 1 << vbucket
    return _OURS + number.to_bytes(_SIZE, "big") + bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def mark_in(private: bytes) -> FlushMark | None:
    """The mark in the engine-specific data of a flush; None if another engine sent it."""
    if len(private) <= len(_OURS) + _SIZE or not private.startswith(_OURS):
        return None
    number, listed = private[len(_OURS) : len(_OURS) + _SIZE], private[len(_OURS) + _SIZE :]
    found = (8 * at + bit for at, byte in enumerate(listed) if byte for bit in range(8) if byte >> bit & 1)
    return FlushMark(int.from_bytes(number, "big"), frozenset(found))
