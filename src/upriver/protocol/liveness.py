"""Is the other side still there? Noops, and what their absence means.

A producer asks at regular intervals, whatever else it sends, because consumers count on it. Whatever comes back proves
life, not only the answer: a consumer that works through a full socket buffer acknowledges bytes long before it reads
the noop that stands behind them.
"""

import enum
from typing import Final

#: What deployed servers use unless told otherwise.
NOOP_INTERVAL_S: Final = 180.0


class Verdict(enum.Enum):
    """What is to be done at a point in time."""

    NOTHING = "nothing"
    ASK = "ask"
    DEAD = "dead"


class NoopSender:
    """The producer's side: asks once in an interval; if nothing at all is heard until the next, the peer is dead."""

    __slots__ = ("_asked_at", "_unheard", "enabled", "interval_s")

    def __init__(self, now: float) -> None:
        self.enabled = False
        self.interval_s = NOOP_INTERVAL_S
        self._asked_at = now
        self._unheard = False

    @property
    def deadline(self) -> float | None:
        """When to look again; None for never."""
        return self._asked_at + self.interval_s if self.enabled else None

    def restart(self, now: float) -> None:
        """The settings have changed: count from now."""
        self._asked_at, self._unheard = now, False

    def heard(self) -> None:
        """Something came from the other side."""
        self._unheard = False

    def check(self, now: float) -> Verdict:
        """What is to be done now."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return Verdict.NOTHING
        if self._unheard:
            return Verdict.DEAD
        self._asked_at, self._unheard = now, True
        return Verdict.ASK


class SilenceWatch:
    """The consumer's side: whoever promised noops and sends nothing for two intervals is gone."""

    __slots__ = ("_last_at", "interval_s")

    def __init__(self, interval_s: float, now: float) -> None:
        self.interval_s = interval_s
        self._last_at = now

    @property
    def deadline(self) -> float | None:
        """When the silence becomes death; None for never."""
        return self._last_at + 2 * self.interval_s if self.interval_s else None

    def heard(self, now: float) -> None:
        """Something came."""
        self._last_at = now

    def is_dead(self, now: float) -> bool:
        """Has it been silent for too long?"""
        return self.deadline is not None and now >= self.deadline
