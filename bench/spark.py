"""How close the Spark source comes to a source without a network, and how fast the sink is.

    python -m bench.spark [read] [vbuckets] [micro] [sink] [memory] [--rows N] [--rounds N]

A node in a separate process holds changes with 16-byte keys and 128-byte values. Spark has two cores and the node takes
its share of them. Each part compares within one run, in turns, and the best round of each counts. On a busy machine
look at the CPU time beside the rates: that of Spark, its workers and the node together.

read      a batch into the no-op sink, beside a source that yields the same record batches pre-built (the ceiling), and
          one that decodes message by message and yields tuples (the naive one)
vbuckets  the same changes in 1,024 vbuckets and in 16
micro     micro-batches of few rows with 2 tasks, beside Spark's own rate source: what is added to each
sink      rows into an empty node, and the same rows again; with and without meta
memory    the largest resident size that a Python worker had while it read a range far larger than that
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql import SparkSession

from bench.spark_sources import TASKS, VALUE, CeilingSource, NaiveSource
from bench.streams import fill
from upriver.client import SyncKvClient
from upriver.node import start

PARTS: Final = ("read", "vbuckets", "micro", "sink", "memory")


# The node, in a separate process


def serve(vbuckets: int, changes: int) -> None:
    """Serve a node with this many changes in each vbucket until the input ends."""
    with start(vbuckets=vbuckets) as node:
        if changes:
            fill(node, vbuckets, changes, VALUE)
        print(node.port, flush=True)
        sys.stdin.read()


@contextmanager
def node_with(vbuckets: int, rows: int) -> Iterator[str]:
    """The address of a node that holds this many rows."""
    command = [sys.executable, "-m", "bench.spark", "--serve", f"{vbuckets}:{rows // vbuckets}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


# Spark


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    """Two cores, and settings as docs/spark.md recommends them."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)  # workers import the sources to compare with
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(TASKS),
        "spark.python.unix.domain.socket.enabled": "true",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = SparkSession.builder.master(f"local[{TASKS}]").appName("upriver-bench")
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("FATAL")
    session.dataSource.register(CeilingSource)
    session.dataSource.register(NaiveSource)
    try:
        yield session
    finally:
        session.stop()


class Cost(NamedTuple):
    """What something took."""

    seconds: float
    #: CPU seconds of this process and its descendants.
    cpu_s: float

    def best(self, other: "Cost | None") -> "Cost":
        return self if other is None else Cost(min(self.seconds, other.seconds), min(self.cpu_s, other.cpu_s))

    def rate(self, rows: int) -> str:
        return f"{rows / self.seconds / 1e6:6.2f} M rows/s, {self.cpu_s / rows * 1e6:5.2f} µs of processor a row"


def cost_of(work: Callable[[], Any]) -> Cost:
    before, started = cpu_seconds(), time.perf_counter()
    work()
    return Cost(time.perf_counter() - started, cpu_seconds() - before)


def cpu_seconds() -> float:
    """The CPU time of this process and of its descendants."""
    ticks = 0
    for pid in [os.getpid(), *descendants()]:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants() -> list[int]:
    """All processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])

    def descends(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return [pid for pid in parents if descends(pid)]


def read_all(spark: SparkSession, name: str, **options: object) -> None:
    """A batch read into the no-op sink."""
    reader = spark.read.format(name)
    for option, value in options.items():
        reader = reader.option(option, str(value))
    reader.load().write.format("noop").mode("overwrite").save()


def best_of(rounds: int, works: dict[str, Callable[[], Any]]) -> dict[str, Cost]:
    """The least of each, taken in turns after one round that does not count."""
    best: dict[str, Cost] = {}
    for turn in range(rounds + 1):
        for name, work in works.items():
            cost = cost_of(work)
            if turn:
                best[name] = cost.best(best.get(name))
    return best


# The parts


def read(spark: SparkSession, rows: int, rounds: int) -> None:
    few = rows // 8  # two vbuckets of the sixteen: tuples take their time
    with node_with(16, rows) as address:
        port = address.rpartition(":")[2]
        best = best_of(
            rounds,
            {
                "ceiling": lambda: read_all(spark, "ceiling", rows=rows),
                "upriver": lambda: read_all(spark, "upriver", address=address),
                "naive": lambda: read_all(spark, "naive", port=port, vbuckets=2, rows=few),
            },
        )
    counts = {"ceiling": rows, "upriver": rows, "naive": few}
    for name, cost in best.items():
        print(f"batch read, {name:8}: {cost.rate(counts[name])}", flush=True)
    share = best["ceiling"].seconds / best["upriver"].seconds
    by_cpu = best["ceiling"].cpu_s / best["upriver"].cpu_s
    print(f"batch read: {share:.2f} of the ceiling, by processor time {by_cpu:.2f} (goal 0.60)", flush=True)
    times = best["naive"].seconds / few / (best["upriver"].seconds / rows)
    by_cpu = best["naive"].cpu_s / few / (best["upriver"].cpu_s / rows)
    print(f"batch read: {times:.1f} × the naive source, by processor time {by_cpu:.1f} (goal 3)", flush=True)


def vbuckets(spark: SparkSession, rows: int, rounds: int) -> None:
    with node_with(16, rows) as few, node_with(1024, rows) as many:
        best = best_of(
            rounds,
            {
                "16": lambda: read_all(spark, "upriver", address=few),
                "1024": lambda: read_all(spark, "upriver", address=many),
            },
        )
    for name, cost in best.items():
        print(f"{name:>5} vbuckets: {cost.rate(rows)}", flush=True)
    more = best["1024"].seconds / best["16"].seconds - 1
    by_cpu = best["1024"].cpu_s / best["16"].cpu_s - 1
    print(f"1,024 vbuckets cost {more:+.0%}, by processor time {by_cpu:+.0%} (goal at most +20 %)", flush=True)


def micro(spark: SparkSession, batches: int, rounds: int) -> None:
    """Micro-batches as fast as they go, in turns; the median time of each from trigger to commit."""
    taken: dict[str, list[int]] = {}
    cpu_ms: dict[str, float] = {}
    with node_with(16, 0) as address, SyncKvClient(address) as kv:
        reader = spark.readStream.format("upriver").option("address", address)
        rate = spark.readStream.format("rate").option("rowsPerSecond", 100).option("numPartitions", TASKS)
        for turn in range(rounds + 1):
            for name, frame in (("rate", rate.load()), ("upriver", reader.load())):

                def write(name: str = name) -> None:
                    if name == "upriver":  # the rate source makes its own rows
                        kv.set_many({f"{time.monotonic_ns()}:{n}": VALUE for n in range(20)})

                times, cpu = _durations(frame, batches, write)
                if turn:
                    taken.setdefault(name, []).extend(times)
                    cpu_ms[name] = min(cpu, cpu_ms.get(name, cpu))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    more = medians["upriver"] - medians["rate"]
    for name, times in taken.items():
        told = (
            f"median {medians[name]:.0f} ms, lowest {min(times)}, of {len(times)}; {cpu_ms[name]:.0f} ms of processor"
        )
        print(f"micro-batch, {name:8}: {told}", flush=True)
    lowest = min(taken["upriver"]) - min(taken["rate"])
    print(f"micro-batch: {more:+.0f} ms to the rate source, lowest {lowest:+d} (goal at most +60)", flush=True)


def _durations(frame: Any, batches: int, write: Callable[[], None]) -> tuple[list[int], float]:
    """The time and CPU time of micro-batches with rows, without the first few, in which workers start."""
    skipped = 4
    before = cpu_seconds()
    with tempfile.TemporaryDirectory() as directory:
        query = frame.writeStream.format("noop").option("checkpointLocation", str(Path(directory) / "c")).start()
        found: dict[int, int] = {}
        seen = -1
        while len(found) < batches + skipped:
            if query.exception() is not None:
                raise query.exception()
            if len(found) > seen:  # the one before is through
                seen = len(found)
                before = cpu_seconds() if seen == skipped else before
                write()
            time.sleep(0.01)
            for progress in query.recentProgress:
                if progress["numInputRows"]:
                    found[progress["batchId"]] = progress["durationMs"]["triggerExecution"]
        cpu_ms = (cpu_seconds() - before) * 1000 / (len(found) - skipped)
        query.stop()
    return [found[number] for number in sorted(found)][skipped:], cpu_ms


def sink(spark: SparkSession, rows: int, rounds: int) -> None:
    frame = spark.range(rows, numPartitions=TASKS).selectExpr(
        "cast(lpad(cast(id AS string), 16, '0') AS binary) AS key",
        f"cast(repeat('v', {len(VALUE)}) AS binary) AS value",
        *("'mutation' AS event", "1L AS rev_seqno", "id + 1 AS cas"),
    )
    without = best_of(1, {"noop": lambda: frame.write.format("noop").mode("overwrite").save()})["noop"]
    print(f"sink, the rows alone: {without.rate(rows)}", flush=True)
    for mode in ("upsert", "meta"):
        best: dict[str, Cost] = {}
        for turn in range(rounds + 1):
            with node_with(64, 0) as address:
                writer = frame.write.format("upriver").option("address", address).option("mode", mode).mode("append")
                for name in ("new", "again"):
                    cost = cost_of(writer.save)
                    if turn:
                        best[name] = cost.best(best.get(name))
        for name, cost in best.items():
            print(f"sink, {mode}, {name:5}: {cost.rate(rows)} (goal 0.30)", flush=True)


def memory(spark: SparkSession, rows: int) -> None:
    with node_with(16, rows) as address:
        read_all(spark, "upriver", address=address)
    peaks = [peak for peak in map(_peak_mib, _workers()) if peak]
    print(f"memory: largest worker {max(peaks):.0f} MiB of {len(peaks)} (goal at most 300)", flush=True)


def _workers() -> list[int]:
    """The Python workers of this process's Spark."""
    return [pid for pid in descendants() if "pyspark" in _command(pid)]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text()
        return "" if "java" in command.split("\0")[0] else command
    return ""


def _peak_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spark", description=__doc__)
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*map(int, options.serve.split(":")))
        return
    print(f"{os.cpu_count()} cores, {options.rows} rows, the best of {options.rounds} rounds", flush=True)
    with spark_session() as spark:
        works: dict[str, Callable[[], None]] = {
            "read": lambda: read(spark, options.rows, options.rounds),
            "vbuckets": lambda: vbuckets(spark, options.rows, options.rounds),
            "micro": lambda: micro(spark, 15, options.rounds),
            "sink": lambda: sink(spark, min(options.rows, 1_000_000), options.rounds),
            "memory": lambda: memory(spark, options.rows),
        }
        for part in options.parts:
            works[part]()


if __name__ == "__main__":
    main()
