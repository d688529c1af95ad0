"""What all peers together make the node hold: who holds how much, and who goes when it is too much.

One peer is bounded by limits of his own, but a thousand of them are not. So there is a limit for the sum too, and when
it is passed, not he pays who came last but who has held most for longest: a request that comes in pieces, or an answer
that is being read, is soon gone by itself; what a silent peer has left here stays.
"""

from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

Holder = TypeVar("Holder")

#: How much of the limit is left when it was passed: so the next who comes does not pass it again at once.
LEFT_SHARE: Final = 0.875


class BufferBudget(Generic[Holder]):
    """The bytes of one kind, by who makes the node hold them, and since when."""

    __slots__ = ("_held", "total_bytes")

    def __init__(self) -> None:
        self.total_bytes = 0
        self._held: dict[Holder, tuple[int, float]] = {}

    def __iter__(self) -> Iterator[Holder]:
        """Everybody who holds something; it may change meanwhile."""
        return iter(list(self._held))

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._held

    def hold(self, holder: Holder, size: int, since: float) -> None:
        """It is so many bytes now, and has been there since then; 0 if it is gone."""
        self.total_bytes += size - self._held.get(holder, (0, 0.0))[0]
        if size:
            self._held[holder] = (size, since)
        else:
            self._held.pop(holder, None)

    def release(self, holder: Holder) -> int:
        """Nothing is held for it any more; how much it was."""
        before = self.total_bytes
        self.hold(holder, 0, 0.0)
        return before - self.total_bytes

    def too_much(self, bytes_max: int, now: float, may_go: Callable[[Holder], bool] = lambda _: True) -> list[Holder]:
        """Who has to go: nobody while the sum is within the limit, else who has held most for longest.

        Never one who holds less than his share of the limit. Those who hold more are enough, if all of them may go.
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
