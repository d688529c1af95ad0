"""Tuning of the C library's malloc: return unused memory to the system, and keep memory that is needed again at once.

A group, its checksummed copy and LMDB's pages for it are some megabytes each. The flusher's thread allocates and frees
them with every commit. The C library keeps the freed memory of a thread for its next use, in pieces that seldom fit.

The opposite happens too. A stream builds some hundred kilobytes at a time and frees them when they are sent. By default
the C library may return all of that to the system each time and get it back page by page, which takes longer than
everything else that a node does to send it.

With another C library nothing happens.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Final

#: Trim after this many bytes were allocated and freed.
RETURNED_BYTES: Final = 16 * 2**20
#: Bytes that a thread may keep for reuse: a few stream messages and their parts.
KEPT_BYTES: Final = 8 * 2**20
#: Blocks of this size are mapped and unmapped one by one.
MAPPED_BYTES: Final = 4 * 2**20
#: The C library's numbers for the two settings, and the environment variables that may set them already.
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
    """Let the C library keep some megabytes of freed memory, unless the environment configures it."""
    if _set is not None and not any(name in os.environ for name in _SETTINGS):
        _set(_M_TRIM_THRESHOLD, KEPT_BYTES)
        _set(_M_MMAP_THRESHOLD, MAPPED_BYTES)


class MallocTuning:
    """Trims the heap of the C library now and then."""

    def __init__(self, returned_bytes: int = RETURNED_BYTES) -> None:
        self._returned_bytes = returned_bytes
        self._bytes = 0
        self.trims = 0

    def used(self, size: int) -> None:
        """Note that this many bytes were allocated and freed."""
        self._bytes += size
        if self._bytes >= self._returned_bytes:
            self._bytes = 0
            if _trim is not None:
                self.trims += 1
                _trim(0)
