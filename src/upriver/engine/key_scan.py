"""The live keys of a vbucket in order, page by page.

Theory of operation. The index is a hash table, so the next keys in order are found by a walk over all records that
keeps the smallest. In a large vbucket one walk is enough for many pages: it keeps a *window* of some thousand keys,
from which pages are cut. The history since the walk says what has changed: new keys are inserted, deleted keys are
skipped. So a page costs its own keys and a small share of a walk. Small vbuckets are walked each time and keep no
window, so that all windows together take little memory compared with the data.
"""

from bisect import bisect_left
from typing import Final

from upriver.engine.table import Table

#: How many keys a window holds, and from how many records on there is one.
WINDOW_KEYS: Final = 4096
WALKED_MAX: Final = 16 * WINDOW_KEYS
#: Changes are read in pieces of this many bytes.
FOLLOWED_BYTES: Final = 2**20


class KeyScan:
    """Reads the keys of one table in order."""

    def __init__(self, table: Table, window_keys: int = WINDOW_KEYS, walked_max: int = WALKED_MAX) -> None:
        self._table = table
        self._window_keys = window_keys
        self._walked_max = walked_max
        #: All keys in [start, end) that existed at the seqno or were added since; None is the end of all keys.
        self._keys: list[bytes] = []
        self._start = b""
        self._end: bytes | None = b""
        self._seqno = 0

    def page(self, start: bytes, limit: int) -> list[bytes]:
        """The first ``limit`` live keys from ``start`` on."""
        table = self._table
        if table.items + table.tombstones <= self._walked_max:
            self.forget()
            return table.smallest_keys(start, limit)
        self._follow()
        found = self._cut(start, limit)
        if len(self._keys) > 2 * self._window_keys:
            self.forget()
        return found

    def _cut(self, start: bytes, limit: int) -> list[bytes]:
        found: list[bytes] = []
        while True:
            if not self._covers(start):
                self._walk(start, max(limit, self._window_keys))
            for place in range(bisect_left(self._keys, start), len(self._keys)):
                if len(found) >= limit:
                    return found
                if self._table.holds(self._keys[place]):
                    found.append(self._keys[place])
            if self._end is None or len(found) >= limit:
                return found
            start = self._end

    def forget(self) -> None:
        """Drop the window; the history that it followed has been replaced."""
        self._keys, self._start, self._end = [], b"", b""

    def _covers(self, start: bytes) -> bool:
        return self._start <= start and (self._end is None or start < self._end)

    def _walk(self, start: bytes, count: int) -> None:
        self._keys = self._table.smallest_keys(start, count)
        self._start = start
        # The smallest possible key after the last one has one zero byte more.
        self._end = self._keys[-1] + b"\0" if len(self._keys) == count else None
        self._seqno = self._table.high_seqno

    def _follow(self) -> None:
        """Insert the keys that were added since the walk, unless a new walk costs less."""
        high = self._table.high_seqno
        if not 0 <= high - self._seqno <= self._window_keys:
            self.forget()
        while self._end != b"" and self._seqno < high:
            batch, self._seqno = self._table.read_columns(self._seqno, high, high, FOLLOWED_BYTES, keys_only=True)
            for key in batch["key"].to_pylist():
                place = bisect_left(self._keys, key)
                if self._covers(key) and self._keys[place : place + 1] != [key]:
                    self._keys.insert(place, key)
