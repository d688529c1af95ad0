"""Noops: how each side notices that the other is gone.

A producer sends a noop at regular intervals, whatever else it sends, because consumers count on it. Anything that comes
back counts as an answer: a consumer that works through a full socket buffer acknowledges bytes long before it reads the
noop behind them.
"""

import enum
from typing import Final

#: The default of deployed servers.
NOOP_INTERVAL_S: Final = 180.0


class Verdict(enum.Enum):
    """What to do at a point in time."""

    NOTHING = "nothing"
    ASK = "ask"
    DEAD = "dead"


class NoopSender:
    """The producer's side: sends one noop per interval; if nothing is heard until the next one is due, the peer is
    gone."""

    __slots__ = ("_asked_at", "_unheard", "enabled", "interval_s")

    def __init__(self, now: float) -> None:
        self.enabled = False
        self.interval_s = NOOP_INTERVAL_S
        self._asked_at = now
        self._unheard = False

    @property
    def deadline(self) -> float | None:
        """When to call ``check`` again; None for never."""
        return self._asked_at + self.interval_s if self.enabled else None

    def restart(self, now: float) -> None:
        """Count from now, because the settings have changed."""
        self._asked_at, self._unheard = now, False

    def heard(self) -> None:
        """Something came from the peer."""
        self._unheard = False

    def check(self, now: float) -> Verdict:
        """What to do now."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return Verdict.NOTHING
        if self._unheard:
            return Verdict.DEAD
        self._asked_at, self._unheard = now, True
        return Verdict.ASK


class SilenceWatch:
    """The consumer's side: a producer that promised noops and sends nothing for two intervals is gone."""

    __slots__ = ("_last_at", "interval_s")

    def __init__(self, interval_s: float, now: float) -> None:
        self.interval_s = interval_s
        self._last_at = now

    @property
    def deadline(self) -> float | None:
        """When the silence has lasted too long; None for never."""
        return self._last_at + 2 * self.interval_s if self.interval_s else None

    def heard(self, now: float) -> None:
        """Something came from the peer."""
        self._last_at = now

    def is_dead(self, now: float) -> bool:
        """Whether the peer has been silent for too long."""
        return self.deadline is not None and now >= self.deadline
