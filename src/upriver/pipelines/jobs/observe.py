"""Watches a change stream: rates by event and key prefix over time windows, hot keys, value sizes, expirations.

A complete window is written as a line of JSON or as a Parquet file. The counts are stored beside the checkpoint,
together with the number of the batch, so that a repeated batch is not counted twice. The CAS of a change gives its
time.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from upriver.errors import OptionError
from upriver.files import write_atomically
from upriver.options import as_count, as_seconds, as_text, option
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.options import PipelineOptions
from upriver.pipelines.core.row_pipeline import InTask, RowPipeline
from upriver.pipelines.jobs.windows import COUNTS, Window, Windows, counted

_STATE: Final = "windows.json"
_EVENTS: Final = ("mutation", "deletion", "expiration")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions(PipelineOptions):
    """The options of observe."""

    to: str = option(
        "-",
        as_text,
        "where to write windows: - for JSON lines on standard output, FILE.jsonl, or a directory for Parquet files",
        "PLACE",
    )
    window: float = option(10.0, as_seconds, "length of a window, in whole seconds")
    late: float = option(5.0, as_seconds, "how late a change may arrive and still count in its window")
    delimiter: str = option(":", as_text, "text that ends the prefix of a key")
    top: int = option(10, as_count, "number of prefixes and hot keys to report")
    keep: int = option(360, as_count, "number of windows to keep for the plot")
    plot: str | None = option(None, as_text, "draw the windows into a picture at the end", "FILE.png")

    def __post_init__(self) -> None:
        if self.window < 1 or self.window != int(self.window):
            raise OptionError("window", f"{self.window:g}s", "it must be a time in whole seconds")
        # Files are written late: check now that their directory exists.
        for name, file in (("to", self.to if self.to.endswith(".jsonl") else None), ("plot", self.plot)):
            if file is not None and not Path(file).absolute().parent.is_dir():
                raise OptionError(name, file, "the directory does not exist: create it")
            if file is not None and Path(file).is_dir():
                raise OptionError(name, file, "this is a directory: give a file")


class Observe(RowPipeline):
    """Counts changes by event and key prefix, with hot keys, value sizes, expirations and deletions."""

    name = "observe"
    options_type = ObserveOptions
    options: ObserveOptions

    def __init__(self, options: ObserveOptions) -> None:
        super().__init__(options)
        self.windows = Windows(int(options.window), options.keep, options.late)
        self.owns_output = options.to == "-"
        self._changes = dict.fromkeys(_EVENTS, 0)

    @property
    def target(self) -> str:
        """The absolute path of the file or directory."""
        return self.options.to if self.owns_output else str(Path(self.options.to).absolute())

    def open(self, directory: RunDirectory) -> None:
        """Load the stored counts, unless they are of batches that the checkpoint has lost: these come again."""
        super().open(directory)
        kept = directory.read(_STATE)
        self.windows = Windows(int(self.options.window), self.options.keep, self.options.late)
        if kept is not None and kept["batch"] <= directory.logged:
            self.windows.restore(kept)

    def in_task(self) -> InTask:
        """Count the rows."""
        return _Counting(self.windows.seconds, self.options.delimiter)

    def apply(self, found: pa.Table, batch_number: int) -> None:
        """Add the counts of a batch."""
        assert self.directory is not None
        if found.num_rows and batch_number > self.windows.batch:
            rows = found.to_pylist()
            self.windows.add(rows, batch_number)
            for row in rows:
                if row["event"] in self._changes:
                    self._changes[row["event"]] += row["changes"]
        self._tell(self.windows.over())
        self.directory.write(_STATE, self.windows.as_json())

    def counts(self) -> dict[str, int]:
        """The number of changes by event."""
        return {f"{event}s": count for event, count in self._changes.items()}

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]] | None:
        """The window of the last changes."""
        window = self.windows.newest
        return None if window is None else (TABLE_COLUMNS, list(table_rows(window, self.options.top)))

    def conclude(self) -> None:
        """Write the incomplete windows too, and draw the picture."""
        if self.directory is not None:
            self._tell(self.windows.over(all_of_them=True))
            self.directory.write(_STATE, self.windows.as_json())
            if self.options.plot is not None:
                from upriver.pipelines.jobs.plotting import plot

                plot(list(self.windows.windows.values()), Path(self.options.plot), self.options.top)

    def _tell(self, windows: Sequence[Window]) -> None:
        place, top = self.options.to, self.options.top
        if not windows:
            return
        if place != "-" and not place.endswith(".jsonl"):
            _write_parquet(Path(place), windows, top)
            return
        lines = "".join(json.dumps(window.as_json(top), ensure_ascii=False) + "\n" for window in windows)
        if place != "-":
            with open(place, "a") as file:
                file.write(lines)
        elif not sys.stdout.isatty():  # a terminal shows the table
            sys.stdout.write(lines)
            sys.stdout.flush()


class _Counting(InTask):
    """The work of a Spark task."""

    columns = ("event", "key", "cas", "expiry", "length(value) AS size")
    schema = COUNTS

    def __init__(self, seconds: int, delimiter: str) -> None:
        self._seconds = seconds
        self._delimiter = delimiter

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield counted(batch, self._seconds, self._delimiter)


TABLE_COLUMNS: Final = ("prefix or key", "stored/s", "deleted/s", "expired/s", "mean bytes", "largest", "expiring")


def table_rows(window: Window, top: int) -> Iterator[Sequence[Any]]:
    """The rows that show a window: the total, the busiest prefixes and the hottest keys."""

    def rate(changes: int) -> float:
        return round(changes / window.seconds, 1)

    total = window.by_event()
    events = [rate(total[event].changes) if event in total else 0.0 for event in _EVENTS]
    yield ("(all)", *events, *_sizes(total.get("mutation")))
    for prefix in list(window.by_prefix())[:top]:
        counts = [window.of(prefix, event) for event in _EVENTS]
        yield (prefix or "(none)", *(rate(count.changes) for count in counts), *_sizes(counts[0]))
    for hot in window.as_json(top)["hot_keys"]:
        yield (f"key {hot['key']}", rate(hot["changes"]), 0.0, 0.0, 0, 0, 0)


def _sizes(count: Any) -> tuple[int, int, int]:
    if count is None or not count.changes:
        return 0, 0, 0
    return round(count.bytes / count.changes), count.largest, count.expiring


def _write_parquet(directory: Path, windows: Sequence[Window], top: int) -> None:
    """One file per window; a window that changes later replaces its file."""
    directory.mkdir(parents=True, exist_ok=True)
    for window in windows:
        table = pa.Table.from_pylist(list(window.rows(top)), schema=COUNTS)
        begins = pa.array([window.start * 10**6] * table.num_rows, pa.timestamp("us", "UTC"))
        table = table.set_column(0, "window", begins)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        write_atomically(directory / f"window-{window.start}.parquet", sink.getvalue().to_pybytes())
