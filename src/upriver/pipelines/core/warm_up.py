"""The first query of a process uses Spark alone until its first batch is complete.

A new JVM loads and initialises thousands of classes during the first batch. Two queries that did so at the same time
have failed inside Spark, and once hung for minutes, for an unknown reason. Later queries are not affected.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

#: The longest time to wait for the first batch of another query.
PATIENCE_S: Final = 60.0


class WarmUp:
    """Decides which query may start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._first: object | None = None
        self._until = 0.0
        self._is_over = False

    def may_start(self, who: object) -> bool:
        """Whether this query may start: the first one at once, the others when it is ready."""
        with self._lock:
            if self._first is None:
                self._first, self._until = who, self._clock() + PATIENCE_S
            return self._is_over or self._first is who or self._clock() >= self._until

    def is_ready(self, who: object) -> None:
        """The first batch of the query is complete."""
        with self._lock:
            self._is_over = self._is_over or self._first is who

    def gave_up(self, who: object) -> None:
        """The query ended without a batch: another one may be the first."""
        with self._lock:
            if self._first is who:
                self._first = None


#: One for each process, as there is one Spark.
WARM_UP: Final = WarmUp()
