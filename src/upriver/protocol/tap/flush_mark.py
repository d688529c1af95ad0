"""The engine-specific data of our flushes: a number that identifies one flush on every path.

Engine-specific data of other engines says nothing about which flush it is, so it is not taken for a mark.
"""

from typing import Final

_OURS: Final = b"upriver:"
_SIZE: Final = 8


def marked(mark: int) -> bytes:
    """The engine-specific data of a flush with this mark."""
    return _OURS + mark.to_bytes(_SIZE, "big")


def mark_in(private: bytes) -> int:
    """The mark in the engine-specific data of a flush; 0 if another engine sent it."""
    if len(private) != len(_OURS) + _SIZE or not private.startswith(_OURS):
        return 0
    return int.from_bytes(private[len(_OURS) :], "big")
