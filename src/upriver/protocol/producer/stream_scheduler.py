"""Whose turn it is, where many streams share a connection.

Who woke up goes first, so that a live change waits for no backfill of millions; after three of them one has its turn
that had more to send in its last one, so that nobody starves.
"""

from collections import deque
from typing import Final, Generic, Protocol, TypeVar

#: What a connection puts together at once, at most. The peer reads it while the next is made, and falls asleep when
#: it has read everything: with less it does so more often, and sending takes longer the more often it does; with more,
#: what was made leaves the processor's cache.
PIECE_BYTES: Final = 1024 * 1024
#: What a connection sends in a turn: with less, turns cost more than the bytes that they move; with more, others wait.
TURN_BYTES: Final = 1024 * 1024
#: What a stream gets at least when its turn comes, if there is so much room: less would cost more than it sends.
TURN_BYTES_MIN: Final = 256 * 1024
#: What filters may look at in a turn of a connection, whether anything passes or not: a few milliseconds, after which
#: others have theirs.
FILTERED_BYTES_MAX: Final = 48 * 1024
#: So many that woke up may go before one that is busy.
WOKEN_IN_A_ROW: Final = 3


class TakesTurns(Protocol):
    """A stream, as far as its turns are concerned."""

    #: It stands in the queue of those that may have something to send.
    queued: bool


T = TypeVar("T", bound=TakesTurns)


class StreamScheduler(Generic[T]):
    """The streams that may have something to send: those that woke up, and those that had more in their last turn."""

    __slots__ = ("_busy", "_in_a_row", "_woken")

    def __init__(self) -> None:
        self._woken: deque[T] = deque()
        self._busy: deque[T] = deque()
        #: How many that woke up have gone before one that is busy.
        self._in_a_row = 0

    def share(self, left: int) -> int:
        """How many of so many bytes the stream may have whose turn it is: its share, or enough to pay."""
        return left if left <= TURN_BYTES_MIN else max(TURN_BYTES_MIN, left // (len(self) + 1))

    def __bool__(self) -> bool:
        return bool(self._woken or self._busy)

    def __len__(self) -> int:
        return len(self._woken) + len(self._busy)

    def wake(self, stream: T, *, last: bool = False) -> bool:
        """It may have something to send; False if it stands in the queue already.

        With ``last`` it waits for all that are busy, instead of going before them.
        """
        return self._enter(self._busy if last else self._woken, stream)

    def again(self, stream: T, *, first: bool = False) -> bool:
        """It had more to send than its turn had room for; with ``first`` it goes on before the others that are busy."""
        entered = self._enter(self._busy, stream)
        if entered and first:
            self._busy.rotate(1)
        return entered

    def next(self) -> T | None:
        """Whose turn it is; None if nobody has anything to send."""
        if self._woken and not (self._busy and self._in_a_row >= WOKEN_IN_A_ROW):
            stream = self._woken.popleft()
            self._in_a_row = self._in_a_row + 1 if self._busy else 0
        elif self._busy:
            stream = self._busy.popleft()
            self._in_a_row = 0
        else:
            return None
        stream.queued = False
        return stream

    def remove(self, stream: T) -> None:
        """It sends nothing more: its place would hold it, and what it sends belongs to nobody."""
        if stream.queued:
            (self._woken if stream in self._woken else self._busy).remove(stream)
            stream.queued = False

    def clear(self) -> None:
        """Nobody sends anything any more."""
        self._woken.clear()
        self._busy.clear()

    @staticmethod
    def _enter(queue: deque[T], stream: T) -> bool:
        if stream.queued:
            return False
        stream.queued = True
        queue.append(stream)
        return True
