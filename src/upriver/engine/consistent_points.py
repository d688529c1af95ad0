"""Consistent points: the seqnos at which a copy of a vbucket equalled a state that the source once had.

An active copy writes the history itself and is consistent at every seqno. A copy that receives history is consistent
only at the end of a snapshot: inside, some keys are new already, while older versions of other keys were left out
because they change again further on. A rollback goes to a consistent point, never to a mixture.
"""

from collections.abc import Iterable
from typing import Final

#: Single seqnos beyond this many are forgotten, oldest first; a rollback then goes further back than it must.
RANGES_MAX: Final = 256


class ConsistentPoints:
    """Ranges of consistent seqnos, ascending, both ends included."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Iterable[tuple[int, int]] = ((0, 0),)) -> None:
        self._ranges = [(low, high) for low, high in ranges]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(self._ranges)

    @property
    def newest(self) -> int:
        return self._ranges[-1][1] if self._ranges else 0

    @property
    def newest_range_start(self) -> int:
        """The first seqno of the newest range: the copy itself wrote everything from there on, or nothing."""
        return self._ranges[-1][0] if self._ranges else 0

    def add(self, seqno: int) -> None:
        """The copy was consistent at this seqno, the highest so far."""
        if not self._ranges or seqno > self._ranges[-1][1]:
            self._ranges.append((seqno, seqno))
            del self._ranges[:-RANGES_MAX]

    def extend(self, seqno: int) -> None:
        """The copy itself wrote everything from the newest consistent seqno up to this one."""
        low, high = self._ranges[-1] if self._ranges else (0, 0)
        if seqno > high:
            self._ranges[-1:] = [(low, seqno)]

    def truncate(self, seqno: int) -> None:
        """Nothing above ``seqno`` exists any more."""
        self._ranges = [(low, min(high, seqno)) for low, high in self._ranges if low <= seqno]

    def at_or_below(self, seqno: int, floor: int) -> int:
        """The newest consistent seqno from ``floor`` to ``seqno``; 0, the empty state, if there is none."""
        for low, high in reversed(self._ranges):
            if low <= seqno:
                found = min(high, seqno)
                return found if found >= floor else 0
        return 0
