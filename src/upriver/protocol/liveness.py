"""Is the other side still there? Noops, and what their absence means."""

from typing import Final

#: What deployed servers use unless told otherwise.
NOOP_INTERVAL_S: Final = 180.0


class NoopSender:
    """The producer's side: asks after each interval without an answer to wait for; silence for another one is death."""

    __slots__ = ("_asked_at", "_last_at", "enabled", "interval_s")

    def __init__(self, now: float) -> None:
        self.enabled = False
        self.interval_s = NOOP_INTERVAL_S
        self._last_at = now
        self._asked_at: float | None = None

    @property
    def deadline(self) -> float | None:
        """When to look again; None for never."""
        return self._last_at + self.interval_s if self.enabled else None

    def heard(self, now: float) -> None:
        """The answer came."""
        self._asked_at, self._last_at = None, now

    def check(self, now: float) -> str:
        """What is to be done now: "ask", "dead" or nothing."""
        if not self.enabled or now < self._last_at + self.interval_s:
            return ""
        if self._asked_at is not None:
            return "dead"
        self._asked_at = self._last_at = now
        return "ask"


class SilenceWatch:
    """The consumer's side: whoever promised noops and sends nothing for two intervals is gone."""

    __slots__ = ("_last_at", "interval_s")

    def __init__(self, interval_s: float, now: float) -> None:
        self.interval_s = interval_s
        self._last_at = now

    @property
    def deadline(self) -> float | None:
        return self._last_at + 2 * self.interval_s if self.interval_s else None

    def heard(self, now: float) -> None:
        self._last_at = now

    def is_dead(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline
