"""The order in which the streams of one connection send.

Streams that just woke go first, so that a live change never waits behind a large backfill. After three of them, a
stream that had more to send in its last turn gets one, so that no stream starves.
"""

from collections import deque
from typing import Final, Generic, Protocol, TypeVar

#: The maximum number of bytes that a connection assembles at once. The peer reads one piece while we build the next;
#: when it runs out it blocks, and waking it costs time. Smaller pieces make it block more often; larger ones leave the
#: processor's cache.
PIECE_BYTES: Final = 1024 * 1024
#: The bytes that a connection sends in a turn. With fewer, turns cost more than sending; with more, other connections
#: wait.
TURN_BYTES: Final = 1024 * 1024
#: The minimum that a stream may send in its turn, if there is room; less would cost more than it sends.
TURN_BYTES_MIN: Final = 256 * 1024
#: The bytes that filters may read in a turn of a connection, whether they pass or not: a few milliseconds.
FILTERED_BYTES_MAX: Final = 48 * 1024
#: At most this many woken streams go before a busy one.
WOKEN_IN_A_ROW: Final = 3


class TakesTurns(Protocol):
    """A stream, as the scheduler sees it."""

    #: Whether it is in the queue.
    queued: bool


T = TypeVar("T", bound=TakesTurns)


class StreamScheduler(Generic[T]):
    """The streams that may have something to send: those that woke, and those that had more in their last turn."""

    __slots__ = ("_busy", "_in_a_row", "_woken")

    def __init__(self) -> None:
        self._woken: deque[T] = deque()
        self._busy: deque[T] = deque()
        #: How many woken streams have gone before a busy one.
        self._in_a_row = 0

    def share(self, left: int) -> int:
        """How many of the bytes that are left the next stream may send: its share, or the minimum."""
        return left if left <= TURN_BYTES_MIN else max(TURN_BYTES_MIN, left // (len(self) + 1))

    def __bool__(self) -> bool:
        return bool(self._woken or self._busy)

    def __len__(self) -> int:
        return len(self._woken) + len(self._busy)

    def wake(self, stream: T, *, last: bool = False) -> bool:
        """Queue a stream that may have something to send; False if it is queued already.

        With ``last`` it goes behind the busy streams instead of before them.
        """
        return self._enter(self._busy if last else self._woken, stream)

    def again(self, stream: T, *, first: bool = False) -> bool:
        """Queue a stream that had more to send than its turn allowed; with ``first`` before the other busy streams."""
        entered = self._enter(self._busy, stream)
        if entered and first:
            self._busy.rotate(1)
        return entered

    def next(self) -> T | None:
        """Take the next stream out of the queue; None if it is empty."""
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
        """Remove a stream that sends nothing more."""
        if stream.queued:
            (self._woken if stream in self._woken else self._busy).remove(stream)
            stream.queued = False

    def clear(self) -> None:
        """Remove all streams."""
        self._woken.clear()
        self._busy.clear()

    @staticmethod
    def _enter(queue: deque[T], stream: T) -> bool:
        if stream.queued:
            return False
        stream.queued = True
        queue.append(stream)
        return True
