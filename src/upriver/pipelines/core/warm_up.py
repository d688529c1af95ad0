"""The first query of a process has Spark for itself until its first batch is done.

A JVM that is new loads and initialises thousands of classes during the first batch. Two queries that did so at the same
moment have been seen to fail inside Spark, and once to stand still for minutes, it is not known why. Later queries find
everything there.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

#: Nobody waits longer for another one's first batch.
PATIENCE_S: Final = 60.0


class WarmUp:
    """Who may start a query now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._first: object | None = None
        self._until = 0.0
        self._is_over = False

    def may_start(self, who: object) -> bool:
        """Whoever asks first may, the others when it is ready."""
        with self._lock:
            if self._first is None:
                self._first, self._until = who, self._clock() + PATIENCE_S
            return self._is_over or self._first is who or self._clock() >= self._until

    def is_ready(self, who: object) -> None:
        """Its first batch is done."""
        with self._lock:
            self._is_over = self._is_over or self._first is who

    def gave_up(self, who: object) -> None:
        """It has ended without a batch: another one may be the first."""
        with self._lock:
            if self._first is who:
                self._first = None


#: There is one Spark for each process.
WARM_UP: Final = WarmUp()
