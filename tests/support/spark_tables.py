"""A table that a query fills, and what the tests of streams compare it with: in the end it must equal the node."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from upriver.client import Consumer, SyncKvClient
from upriver.model import Event
from upriver.spark import describe_offset

PATIENCE_S = 240
EVENTS_OF_VBUCKETS = ("rollback", "reset", "flush")


class Table:
    """Keeps the newest version of each key by (branch, seqno), tombstones included, and follows rollbacks."""

    def __init__(self, address: str) -> None:
        self.address = address
        #: Called with a batch's number before and after its rows are applied; may raise.
        self.before: Callable[[int], object] = lambda number: None
        self.after: Callable[[int], object] = lambda number: None
        self.events: list[str] = []
        self.rows = 0
        self._held: dict[int, dict[bytes, tuple[int, int, bytes | None]]] = {}

    @property
    def contents(self) -> dict[bytes, bytes]:
        """The live values."""
        return {key: value for held in self._held.values() for key, (_, _, value) in held.items() if value is not None}

    def apply(self, frame: DataFrame, number: int) -> None:
        """What a query's ``foreachBatch`` does."""
        self.before(number)
        self.take([row.asDict() for row in frame.collect()])
        self.after(number)

    def take(self, rows: list[dict[str, Any]]) -> None:
        """Apply the rows of a batch."""
        for row in sorted(rows, key=lambda row: (row["branch"], row["seqno"])):
            self.rows += 1
            if row["event"] in EVENTS_OF_VBUCKETS:
                self.events.append(row["event"])
                self._go_back(row)
                continue
            held, key, value = self._held.setdefault(row["vbucket"], {}), bytes(row["key"]), row["value"]
            known = held.get(key)
            if known is None or (row["branch"], row["seqno"]) > known[:2]:
                held[key] = row["branch"], row["seqno"], None if value is None else bytes(value)

    def _go_back(self, row: dict[str, Any]) -> None:
        held = self._held.setdefault(row["vbucket"], {})
        if row["event"] != "rollback":
            held.clear()
            return
        above = [key for key, (_, seqno, _) in held.items() if seqno > row["seqno"]]
        with SyncKvClient(self.address) as kv:
            found = kv.get_many(above)
        for key in above:
            held[key] = row["branch"], row["seqno"], found[key].value if key in found else None


def start_query(
    spark: SparkSession, table: Table, checkpoint: Path, *, available_now: bool = False, **options: Any
) -> StreamingQuery:
    """A query that fills the table."""
    frame = stream_of(spark, table.address, **options)
    return fill(frame, table, checkpoint, available_now=available_now)


def stream_of(spark: SparkSession, address: str, **options: Any) -> DataFrame:
    """The changes as a streaming DataFrame."""
    reader = spark.readStream.format("upriver").option("address", address)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


def fill(frame: DataFrame, table: Table, checkpoint: Path, *, available_now: bool = False) -> StreamingQuery:
    """Let this frame fill the table."""
    writer = frame.writeStream.foreachBatch(table.apply).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(availableNow=True) if available_now else writer).start()


def catch_up(spark: SparkSession, table: Table, checkpoint: Path, **options: Any) -> None:
    """Read what there is, in a query of its own: a new one, or one that comes back to its checkpoint."""
    query = start_query(spark, table, checkpoint, available_now=True, **options)
    assert query.awaitTermination(PATIENCE_S)


def lose_commit(checkpoint: Path) -> None:
    """Forget that the last batch with rows was committed, and the batches without rows that follow it."""
    ends = {int(file.name): _seqnos(file) for file in (checkpoint / "offsets").glob("[0-9]*")}
    last = max(number for number, seqnos in ends.items() if seqnos != ends.get(number - 1))
    for folder, first in (("offsets", last + 1), ("commits", last)):
        for number in range(first, max(ends) + 1):
            for name in (f"{number}", f".{number}.crc"):
                (checkpoint / folder / name).unlink(missing_ok=True)


def _seqnos(logged: Path) -> list[int]:
    return [place["seqno"] for place in describe_offset(logged.read_text().splitlines()[-1]).values()]


def contents_at(address: str) -> dict[bytes, bytes]:
    """What the node or cluster holds, read without Spark."""
    found: dict[bytes, bytes] = {}
    with Consumer.sync(address, end="latest") as consumer:
        for batch in consumer:
            for change in batch.changes():
                if change.event is Event.MUTATION:
                    found[change.key] = change.value
                else:
                    found.pop(change.key, None)
    return found


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return when the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s in vain: {what}"
        time.sleep(0.01)


class PausedTasks:
    """Tasks that pause in the middle of their rows until the test resumes them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._paused, self._resumed = directory / "paused", directory / "resumed"

    def pause(self, frame: DataFrame) -> DataFrame:
        """The same rows; a task that has the first of them waits."""
        paused, resumed, patience_s = str(self._paused), str(self._resumed), PATIENCE_S

        def hold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import os
            import time

            for batch in batches:
                open(paused, "w").close()
                deadline = time.monotonic() + patience_s
                while not os.path.exists(resumed) and time.monotonic() < deadline:
                    time.sleep(0.01)
                yield batch

        return frame.mapInArrow(hold, frame.schema)

    def wait(self) -> None:
        """Wait until a task has paused."""
        wait_until(self._paused.exists, "no task has paused")

    def resume(self) -> None:
        """Let all tasks go on."""
        self._resumed.touch()


def kill_workers(driver: int | None = None) -> int:
    """Kill the Python workers of a driver's Spark as an out-of-memory killer would; how many there were.

    The driver is this process, or the one with this id.
    """
    parents, driver = _parents(), driver or os.getpid()
    workers = [
        pid for pid in parents if _is_daemon(pid) and _is_daemon(parents[pid]) and _is_below(pid, driver, parents)
    ]
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(workers)


def _parents() -> dict[int, int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    return parents


def _is_daemon(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False
