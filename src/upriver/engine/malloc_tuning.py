"""Giving memory back to the system that nobody uses any more, and keeping what is wanted again at once.

A group, its checksummed copy and LMDB's pages for it are some megabytes each, taken and given back with every commit by
the flusher's thread. The C library keeps what a thread has given back for its next use, in pieces that seldom fit.

It errs the other way, too. What a stream sends is put together in some hundred kilobytes and gone when it is sent; by
default the C library may hand all of that back to the system each time, only to be given it again page by page, which
takes longer than everything else that a node does to send it.

Where it cannot be asked nothing happens.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Final

#: After so many bytes that came and went it is worth asking.
RETURNED_BYTES: Final = 16 * 2**20
#: What a thread may keep for its next use: some pieces of a stream with their parts.
KEPT_BYTES: Final = 8 * 2**20
#: What is taken from the system, and given back, each for itself.
MAPPED_BYTES: Final = 4 * 2**20
#: The C library's numbers for the two, and where somebody may have set them already.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def _found(name: str, argument: type, *arguments: type) -> Callable[..., int] | None:
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [argument, *arguments], ctypes.c_int
    return lambda *values: int(found(*values))


_trim: Final = _found("malloc_trim", ctypes.c_size_t)
_set: Final = _found("mallopt", ctypes.c_int, ctypes.c_int)


def keep_for_next_use() -> None:
    """Let the C library keep some megabytes that were given back, unless the environment tells it what to keep."""
    if _set is not None and not any(name in os.environ for name in _SETTINGS):
        _set(_M_TRIM_THRESHOLD, KEPT_BYTES)
        _set(_M_MMAP_THRESHOLD, MAPPED_BYTES)


class MallocTuning:
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
