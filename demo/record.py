"""Records what happens during the demo, for the report and the picture."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from upriver.pipelines import RunProgress


@dataclass(slots=True)
class Record:
    """Progress of the pipelines, and the times of events at the nodes, since the demo's start."""

    started: float = field(default_factory=time.monotonic)
    progress: dict[str, list[tuple[float, RunProgress]]] = field(default_factory=dict)
    moments: list[tuple[float, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def take(self, progress: RunProgress) -> None:
        """Record the progress of a pipeline."""
        with self._lock:
            self.progress.setdefault(progress.pipeline, []).append((self.seconds, progress))

    def last(self, pipeline: str) -> RunProgress | None:
        """Its last progress."""
        with self._lock:
            told = self.progress.get(pipeline)
            return told[-1][1] if told else None

    def mark(self, what: str) -> None:
        """Record an event."""
        self.moments.append((self.seconds, what))

    def behind(self, pipeline: str) -> tuple[int, float]:
        """The largest lag in changes and in seconds since the first event at the nodes."""
        told = [progress for at, progress in self.progress[pipeline] if at >= self.moments[0][0]]
        return max(each.lag_changes or 0 for each in told), max(each.lag_s or 0.0 for each in told)

    def draw(self, path: Path) -> None:
        """Plot rows and lag of each pipeline over time, with the events."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        figure, (rows, lag) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 6), layout="constrained")
        for name, told in sorted(self.progress.items()):
            times = [at for at, _ in told]
            rows.plot(times, [progress.rows / 1000 for _, progress in told], label=name)
            lag.plot(times, [(progress.lag_changes or 0) / 1000 for _, progress in told], label=name)
        for axes, title in ((rows, "changes written (thousands)"), (lag, "changes behind (thousands)")):
            axes.set_ylabel(title)
            axes.grid(visible=True, alpha=0.3)
            for at, _ in self.moments:
                axes.axvline(at, color="0.5", linestyle="--", linewidth=0.8)
        top = rows.get_ylim()[1]
        for at, what in self.moments:
            rows.text(at, top, f" {what}", rotation=90, va="top", ha="right", fontsize=8, color="0.3")
        rows.legend(loc="lower right")
        lag.set_xlabel("seconds")
        figure.suptitle("A table and an index follow two nodes that are written to, killed and moved")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
