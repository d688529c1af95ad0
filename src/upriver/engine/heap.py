"""Giving memory back to the system that nobody uses any more.

A group, its checksummed copy and LMDB's pages for it are some megabytes each, taken and given back with every commit by
the flusher's thread. The C library keeps what a thread has given back for its next use, in pieces that seldom fit.
Where it cannot be asked nothing happens.
"""

import ctypes
from collections.abc import Callable
from typing import Final

#: After so many bytes that came and went it is worth asking.
RETURNED_BYTES: Final = 16 * 2**20


def _asked() -> Callable[[int], int] | None:
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda rest: int(found(rest))


_trim: Final = _asked()


class Heap:
    """Counts what came and went."""

    def __init__(self, returned_bytes: int = RETURNED_BYTES) -> None:
        self._returned_bytes = returned_bytes
        self._bytes = 0
        self.trims = 0

    def used(self, size: int) -> None:
        """So many bytes were taken and given back."""
        self._bytes += size
        if self._bytes >= self._returned_bytes:
            self._bytes = 0
            if _trim is not None:
                self.trims += 1
                _trim(0)
