"""Work for TAP connections that takes milliseconds, in turns.

To begin the streams of a connection, or to note its positions when it closes, takes milliseconds for a thousand
vbuckets. When hundreds of clients connect or leave at once, all of this together must not delay other clients. So each
turn of the event loop does one piece of this work, for all connections together.
"""

from collections import deque
from collections.abc import Callable

from upriver.node.state import Scheduler


class TapTurns:
    """The work that waits for its turn, in order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: deque[Callable[[], object]] = deque()

    def add(self, work: Callable[[], object]) -> None:
        """Do the work in a later turn."""
        self._waiting.append(work)
        if len(self._waiting) == 1:
            self._scheduler.later(0.0, self._next)

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def _next(self) -> None:
        try:
            self._waiting[0]()
        finally:
            self._waiting.popleft()
            if self._waiting:
                self._scheduler.later(0.0, self._next)
