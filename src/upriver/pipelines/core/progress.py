"""The progress of a running pipeline and its summary: rows/s, lag, batches, restarts."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

#: The period over which the rate is measured.
RATE_S: Final = 10.0
#: Maximum number of remembered observations of the source; beyond that, every second one is dropped.
_LOOKS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a pipeline at one moment."""

    pipeline: str
    seconds: float
    rows: int
    rows_per_s: float
    #: Number of changes of the source that are not applied yet; None while unknown.
    lag_changes: int | None
    #: Age of the oldest of them, as far as observed; None while unknown.
    lag_s: float | None
    batches: int
    restarts: int
    counts: Mapping[str, int] = field(default_factory=dict)
    #: The failure that it is waiting out, if any.
    waiting_for: str = ""
    #: What the user should know about the results.
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For a line of JSON, with the counts at the top level."""
        said = {name: value for name, value in asdict(self).items() if name != "counts"}
        if not self.warnings:
            del said["warnings"]
        said |= {"seconds": round(self.seconds, 1), "rows_per_s": round(self.rows_per_s, 1)}
        if self.lag_s is not None:
            said["lag_s"] = round(self.lag_s, 1)
        return {**said, **self.counts}


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a run."""

    pipeline: str
    checkpoint: str
    last: RunProgress
    #: Whether it was stopped before it was complete.
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        """For the last line of JSON."""
        return {"summary": True, **self.last.as_json(), "checkpoint": self.checkpoint, "interrupted": self.interrupted}


class Lag:
    """The lag in changes, and in seconds since the source was first ahead."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: deque[tuple[float, int]] = deque()
        self.changes: int | None = None

    def seen(self, done: Mapping[int, int], source: Mapping[int, int]) -> None:
        """Record the applied seqno and the source's seqno of each vbucket."""
        self.changes = sum(max(0, seqno - done.get(vbucket, 0)) for vbucket, seqno in source.items())
        there = sum(source.values())
        while self._looks and self._looks[-1][1] > there:
            self._looks.pop()  # the source rolled back
        if not self._looks or self._looks[-1][1] < there:
            self._looks.append((self._clock(), there))
        while self._looks and self._looks[0][1] <= there - self.changes:
            self._looks.popleft()
        if len(self._looks) > _LOOKS_MAX:
            self._looks = deque(list(self._looks)[::2])  # keep the oldest

    @property
    def seconds(self) -> float | None:
        """The time since the source was first ahead of the applied changes; 0 if they are complete."""
        if self.changes is None:
            return None
        return self._clock() - self._looks[0][0] if self.changes and self._looks else 0.0


class Meter:
    """The progress events of one query, added up over its restarts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows = 0
        self.batches = 0
        self._clock = clock
        self._run = ""
        self._last = -1
        self._started = clock()
        self._recent: deque[tuple[float, int]] = deque()

    def take(self, event: Mapping[str, Any], rows_of: Callable[[Mapping[str, Any]], int]) -> bool:
        """Take one progress event; returns whether it reports a new batch."""
        run, number = str(event.get("runId")), int(event.get("batchId", -1))
        if run != self._run:
            self._run, self._last = run, -1
        rows = 0 if number <= self._last else rows_of(event)
        if not rows:  # an idle query reports the number of its next batch
            return False
        self._last = number
        self.add(rows)
        return True

    def add(self, rows: int) -> None:
        """Count a batch with this many changes, unless it has none."""
        if rows:
            self.batches += 1
            self.rows += rows
            self._recent.append((self._clock(), rows))

    @property
    def rows_per_s(self) -> float:
        """The rate of the last seconds."""
        now = self._clock()
        while self._recent and self._recent[0][0] < now - RATE_S:
            self._recent.popleft()
        return sum(rows for _, rows in self._recent) / max(1.0, min(RATE_S, now - self._started))
