"""Pauses between attempts, which grow and differ between clients."""

import random
from typing import Final

FIRST_S: Final = 0.02
LONGEST_S: Final = 5.0
_FACTOR: Final = 2.0
#: How long to retry an operation that has an end.
PATIENCE_S: Final = 60.0


class Backoff:
    """Growing pauses. Each is random, between half and all of its length, so that the clients of a restarted node do
    not all reconnect at once."""

    __slots__ = ("_longest_s", "_next_s", "attempts")

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._next_s = first_s
        self._longest_s = longest_s
        #: The number of pauses since the last success.
        self.attempts = 0

    def pause_s(self) -> float:
        """Return the length of the next pause."""
        length_s = min(self._next_s, self._longest_s)
        self._next_s = length_s * _FACTOR
        self.attempts += 1
        return length_s * random.uniform(0.5, 1.0)

    def reset(self, first_s: float = FIRST_S) -> None:
        """Start with short pauses again, after a success."""
        self._next_s = first_s
        self.attempts = 0
