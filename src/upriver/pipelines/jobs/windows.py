"""Counts of changes by time window, key prefix and event, with hot keys, in bounded memory.

Each Spark task counts its rows (``counted``), and the driver adds the counts (``Windows``). Only the newest windows are
kept, each with its largest prefixes and hottest keys; the rest is added up under the name ``…``. The count of a key
that is rare in some batches may be too low, but never too high.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: A count from a task: of a prefix and event, or (without an event) of a key.
COUNTS: Final = pa.schema(
    [
        ("window", pa.int64()),
        ("name", pa.string()),
        ("event", pa.string()),
        ("changes", pa.int64()),
        ("bytes", pa.int64()),
        ("largest", pa.int64()),
        ("expiring", pa.int64()),
    ]
)
#: Maximum number of prefixes and of hot keys of a window.
PREFIXES_MAX: Final = 500
KEYS_MAX: Final = 500
OTHERS: Final = "…"
#: A CAS below this (nanoseconds, in 2001) is not a time.
_TIME_MIN: Final = 10**18


class Count(NamedTuple):
    """Counts for one prefix and event in a window."""

    changes: int = 0
    bytes: int = 0
    largest: int = 0
    #: Number of values with an expiry.
    expiring: int = 0

    def __add__(self, other: tuple[Any, ...]) -> "Count":
        changes, size, largest, expiring = other
        return Count(self.changes + changes, self.bytes + size, max(self.largest, largest), self.expiring + expiring)


def counted(batch: pa.RecordBatch, seconds: int, delimiter: str, now: float | None = None) -> pa.RecordBatch:
    """The counts of rows that have an event, key, CAS, expiry, and the value or its size."""
    size = batch.column("size") if "size" in batch.schema.names else pc.binary_length(batch.column("value"))
    keys = pc.fill_null(batch.column("key"), b"")
    columns = {
        "window": _windows(batch.column("cas"), seconds, time.time() if now is None else now),
        "name": _prefixes(keys, delimiter),
        "event": batch.column("event"),
        "size": pc.fill_null(size, 0).cast(pa.int64()),
        "expiring": pc.fill_null(pc.greater(batch.column("expiry"), 0), False).cast(pa.int64()),
    }
    table = pa.table(columns)
    groups = table.group_by(["window", "name", "event"]).aggregate(
        [([], "count_all"), ("size", "sum"), ("size", "max"), ("expiring", "sum")]
    )
    order = ["window", "name", "event", "count_all", "size_sum", "size_max", "expiring_sum"]
    by_prefix = pa.table([groups.column(name) for name in order], schema=COUNTS)
    hot = pa.table({"window": columns["window"], "name": _text(keys)}).filter(pc.greater(pc.binary_length(keys), 0))
    hot = hot.group_by(["window", "name"]).aggregate([([], "count_all")])
    hot = hot.sort_by([("count_all", "descending"), ("name", "ascending")]).slice(0, 4 * KEYS_MAX)
    nothing = pa.nulls(hot.num_rows, pa.int64())
    no_event = pa.nulls(hot.num_rows, pa.string())
    by_key = pa.table(
        [hot.column("window"), hot.column("name"), no_event, hot.column("count_all"), nothing, nothing, nothing],
        schema=COUNTS,
    )
    return pa.concat_tables([by_prefix, by_key]).combine_chunks().to_batches()[0]


def _windows(cas: pa.Array, seconds: int, now: float) -> pa.Array:
    """The second at which the window of each change starts; a change without a time happened now."""
    stamps = pc.fill_null(cas, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    times = np.where(stamps >= _TIME_MIN, stamps // 10**9, int(now))
    return pa.array(times // seconds * seconds)


def _prefixes(keys: pa.Array, delimiter: str) -> pa.Array:
    """The text before the delimiter; empty for a key without one."""
    text = _text(keys)
    place = pc.find_substring(text, delimiter)
    first = pc.list_element(pc.split_pattern(text, delimiter, max_splits=1), 0)
    return pc.if_else(pc.less(place, 0), pa.scalar(""), first)


def _text(keys: pa.Array) -> pa.Array:
    """Keys as text; invalid UTF-8 is escaped."""
    try:
        return keys.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([key.decode(errors="backslashreplace") for key in keys.to_pylist()], pa.string())


@dataclass
class Window:
    """The counts of one time window."""

    start: int
    seconds: int
    groups: dict[tuple[str, str], Count] = field(default_factory=dict)
    keys: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, event: str | None, count: tuple[Any, ...]) -> None:
        """Add a count from a task."""
        if event is None:
            self.keys[name] += count[0]
            return
        known = (name, event) in self.groups or len({prefix for prefix, _ in self.groups} | {name}) <= PREFIXES_MAX
        place = (name if known else OTHERS, event)
        self.groups[place] = self.groups.get(place, Count()) + count

    def trim(self) -> None:
        """Drop the keys that are not hot."""
        if len(self.keys) > KEYS_MAX:
            self.keys = Counter(dict(self.keys.most_common(KEYS_MAX)))

    def by_event(self) -> dict[str, Count]:
        """All prefixes together."""
        return self._summed(1)

    def by_prefix(self) -> dict[str, Count]:
        """All events together, the busiest prefix first."""
        found = self._summed(0)
        return dict(sorted(found.items(), key=lambda entry: (-entry[1].changes, entry[0])))

    def of(self, prefix: str, event: str) -> Count:
        """One event of one prefix."""
        return self.groups.get((prefix, event), Count())

    def as_json(self, top: int) -> dict[str, Any]:
        """For a line of JSON."""
        return {
            "window": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.start)),
            "seconds": self.seconds,
            "events": {name: self._told(count) for name, count in sorted(self.by_event().items())},
            "prefixes": {
                name: {event: self._told(self.of(name, event)) for event in sorted(self._events(name))}
                for name in list(self.by_prefix())[:top]
            },
            "hot_keys": [{"key": key, "changes": count} for key, count in self._hottest(top)],
        }

    def rows(self, top: int) -> Iterator[dict[str, Any]]:
        """For a table: a row for each prefix and event, and (without an event) for each hot key."""
        for (name, event), count in sorted(self.groups.items()):
            yield {"window": self.start, "name": name, "event": event, **count._asdict()}
        for key, changes in self._hottest(top):
            yield {"window": self.start, "name": key, "event": None, "changes": changes}

    def _hottest(self, top: int) -> list[tuple[str, int]]:
        return sorted(self.keys.items(), key=lambda entry: (-entry[1], entry[0]))[:top]

    def _events(self, prefix: str) -> set[str]:
        return {event for name, event in self.groups if name == prefix}

    def _summed(self, place: int) -> dict[str, Count]:
        found: dict[str, Count] = {}
        for names, count in self.groups.items():
            found[names[place]] = found.get(names[place], Count()) + count
        return found

    def _told(self, count: Count) -> dict[str, Any]:
        mean = round(count.bytes / count.changes, 1) if count.changes else 0.0
        return {
            "changes": count.changes, "per_s": round(count.changes / self.seconds, 3), "mean_bytes": mean,
            "largest_bytes": count.largest, "expiring": count.expiring,
        }  # fmt: skip


class Windows:
    """The newest windows. A window is complete when changes arrive that are more than ``late_s`` later."""

    def __init__(self, seconds: int, keep: int, late_s: float) -> None:
        self.seconds = seconds
        self._keep = keep
        self._late_s = late_s
        self.windows: dict[int, Window] = {}
        #: The last counted batch, so that none is counted twice.
        self.batch = -1
        #: Windows that were written since their last change.
        self._told: set[int] = set()

    def add(self, rows: Iterable[Mapping[str, Any]], batch: int) -> None:
        """Add the counts of a batch, unless it was counted before."""
        if batch <= self.batch:
            return
        self.batch = batch
        changed = set()
        for row in rows:
            start = row["window"]
            window = self.windows.setdefault(start, Window(start, self.seconds))
            count = (row["changes"], row["bytes"] or 0, row["largest"] or 0, row["expiring"] or 0)
            window.add(row["name"], row["event"], count)
            changed.add(start)
        self._told -= changed
        for start in changed:
            self.windows[start].trim()
        for start in sorted(self.windows)[: -self._keep]:
            if start in self._told:
                del self.windows[start]

    def over(self, *, all_of_them: bool = False) -> list[Window]:
        """The complete windows that were not written yet; marks them as written."""
        newest = max(self.windows, default=0)
        found = [
            self.windows[start]
            for start in sorted(self.windows)
            if start not in self._told and (all_of_them or start + self.seconds + self._late_s <= newest)
        ]
        self._told |= {window.start for window in found}
        return found

    @property
    def newest(self) -> Window | None:
        """The window of the last changes."""
        return self.windows[max(self.windows)] if self.windows else None

    def as_json(self) -> dict[str, Any]:
        """All counts, to resume from."""
        return {
            "batch": self.batch,
            "seconds": self.seconds,
            "told": sorted(self._told),
            "windows": [
                {
                    "start": window.start,
                    "groups": [[*names, *count] for names, count in window.groups.items()],
                    "keys": window.keys,
                }
                for window in self.windows.values()
            ],
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """The counts from ``as_json``; windows of another length are dropped."""
        self.batch = int(kept["batch"])
        if kept["seconds"] != self.seconds:
            return
        self._told = set(kept["told"])
        for each in kept["windows"]:
            window = self.windows[each["start"]] = Window(each["start"], self.seconds)
            window.keys = Counter(each["keys"])
            window.groups = {(name, event): Count(*count) for name, event, *count in each["groups"]}
