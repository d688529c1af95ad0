"""A picture of observed windows: rates over time, the busiest prefixes, expirations and deletions, hot keys."""

import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from upriver.pipelines.jobs.windows import Window

_COLOURS: Final = {"mutation": "#2a6f97", "deletion": "#c1121f", "expiration": "#e09f3e"}
_PREFIXES_MAX: Final = 6
_NAME_MAX: Final = 32


def plot(windows: Sequence[Window], path: Path, top: int) -> None:
    """Draw the windows, and gaps where there were no changes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    (rates, prefixes), (ends, keys) = figure.subplots(2, 2)
    filled = _without_gaps(windows)
    times = [datetime.datetime.fromtimestamp(window.start, datetime.UTC) for window in filled]
    for event, colour in _COLOURS.items():
        values = [_rate(window, event) for window in filled]
        rates.plot(times, values, label=f"{event}s", color=colour, drawstyle="steps-post", linewidth=1.5)
    _finish(rates, "changes/s by event", "changes/s")
    busiest: Counter[str] = Counter()
    for window in windows:
        busiest.update({name: count.changes for name, count in window.by_prefix().items()})
    names = [name for name, _ in busiest.most_common(_PREFIXES_MAX)]
    shares = [[window.by_prefix()[n].changes / window.seconds if n in window.by_prefix() else 0.0 for window in filled]
              for n in names]  # fmt: skip
    if names:
        prefixes.stackplot(times, *shares, labels=[_short(name) or "(none)" for name in names], step="post")
    _finish(prefixes, "changes/s by key prefix", "changes/s")
    below = [0.0] * len(filled)
    width = filled[0].seconds / 86400 if filled else 1.0
    for event in ("deletion", "expiration"):
        values = [_rate(window, event) * window.seconds for window in filled]
        ends.bar(times, values, width=width, bottom=below, label=f"{event}s", color=_COLOURS[event], align="edge")
        below = [low + value for low, value in zip(below, values, strict=True)]
    _finish(ends, "how keys end, in each window", "keys")
    hot: Counter[str] = Counter()
    for window in windows:
        hot.update(window.keys)
    hottest = hot.most_common(top)[::-1]
    keys.barh([_short(key) for key, _ in hottest], [count for _, count in hottest], color=_COLOURS["mutation"])
    keys.set_title("hot keys", fontsize=11)
    keys.set_xlabel("changes")
    figure.savefig(path, dpi=110)


def _finish(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(axis="x", rotation=25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="upper left")


def _without_gaps(windows: Sequence[Window]) -> list[Window]:
    """All windows from the first to the last, up to what a picture can show. The last one is added again at its end, so
    that it has a width."""
    known = {window.start: window for window in windows}
    if not known:
        return []
    seconds = windows[0].seconds
    first, last = min(known), max(known)
    if (last - first) // seconds > 5000:
        return [known[start] for start in sorted(known)]
    return [known.get(start, Window(start, seconds)) for start in range(first, last + 2 * seconds, seconds)]


def _rate(window: Window, event: str) -> float:
    found = window.by_event().get(event)
    return found.changes / window.seconds if found else 0.0


def _short(name: str) -> str:
    shown = name if len(name) <= _NAME_MAX else name[: _NAME_MAX - 1] + "…"
    return shown.replace("$", r"\$")  # a dollar would start a formula
