"""How long to wait before trying again: longer each time, never the same for two clients; and when to give up."""

import random
from typing import Final

FIRST_S: Final = 0.02
LONGEST_S: Final = 5.0
_FACTOR: Final = 2.0
#: How long to go on trying where somebody waits for the end.
PATIENCE_S: Final = 60.0


class Backoff:
    """The pauses between attempts. Each is drawn from the upper half of its length, so that the clients of a node that
    comes back do not all come at once."""

    __slots__ = ("_longest_s", "_next_s", "attempts")

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._next_s = first_s
        self._longest_s = longest_s
        #: How often there was a pause since the last success.
        self.attempts = 0

    def pause_s(self) -> float:
        """The next pause."""
        length_s = min(self._next_s, self._longest_s)
        self._next_s = length_s * _FACTOR
        self.attempts += 1
        return length_s * random.uniform(0.5, 1.0)

    def reset(self, first_s: float = FIRST_S) -> None:
        """It worked: begin with short pauses again."""
        self._next_s = first_s
        self.attempts = 0
