"""The memory that all peers together make the node hold, and which peers are dropped when it is too much.

Each peer has limits, but a thousand peers need a limit for their sum too. When the total passes the limit, peers that
have held the most memory for the longest are dropped first, not the newest: a request in pieces, or an answer that is
being read, frees its memory soon; a silent peer's memory stays.
"""

from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

Holder = TypeVar("Holder")

#: The share of the limit to which the total is cut, so that the next peer does not exceed it again at once.
LEFT_SHARE: Final = 0.875


class BufferBudget(Generic[Holder]):
    """The bytes that each holder makes the node hold, and since when."""

    __slots__ = ("_held", "total_bytes")

    def __init__(self) -> None:
        self.total_bytes = 0
        self._held: dict[Holder, tuple[int, float]] = {}

    def __iter__(self) -> Iterator[Holder]:
        """All holders; the budget may change during the iteration."""
        return iter(list(self._held))

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._held

    def hold(self, holder: Holder, size: int, since: float) -> None:
        """Set the bytes that a holder holds, and since when; 0 if it holds nothing."""
        self.total_bytes += size - self._held.get(holder, (0, 0.0))[0]
        if size:
            self._held[holder] = (size, since)
        else:
            self._held.pop(holder, None)

    def release(self, holder: Holder) -> int:
        """Set a holder's bytes to 0; return how many it held."""
        before = self.total_bytes
        self.hold(holder, 0, 0.0)
        return before - self.total_bytes

    def too_much(self, bytes_max: int, now: float, may_go: Callable[[Holder], bool] = lambda _: True) -> list[Holder]:
        """The holders to drop if the total exceeds the limit: those with the most bytes for the longest first.

        A holder with less than its share of the limit is never dropped. Dropping the others is enough, if all may go.
        """
        if self.total_bytes <= bytes_max:
            return []
        left_max = int(bytes_max * LEFT_SHARE)
        share = left_max / len(self._held)
        candidates = [(holder, *held) for holder, held in self._held.items() if held[0] >= share and may_go(holder)]
        candidates.sort(key=lambda each: each[1] * (1 + now - each[2]))
        going, left = [], self.total_bytes
        while left > left_max and candidates:
            holder, size, _ = candidates.pop()
            going.append(holder)
            left -= size
        return going
