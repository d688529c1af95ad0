"""How fast changes become rows of a table, beside what Spark does with the same changes.

    python -m bench.targets [load] [large] [memory] [batches] [trickle] [merge] [scan] [latency] [verify] [--rows N]

A node in a process of its own holds the documents; Spark has two cores, and the node takes its share of them. Each part
compares within one run, after a warm-up.

load      documents of about 190 bytes in batches of 200,000, beside plain Spark: ``from_json`` into Parquet files
large     the same with documents of 6 KB
memory    the resident sizes of driver and workers while all documents are loaded in one batch
batches   sixty batches of new keys: the last ten beside the first ten
trickle   twenty batches of 100 random updates: bytes written per byte changed, compaction included
merge     10,000 random updates, beside Delta's MERGE (in the environment that UPRIVER_DELTA_PYTHON names, which
          ``make delta-environment`` makes; skipped without it)
scan      a full scan by DuckDB and Polars after all this, beside the same rows compacted; with UPRIVER_DELTA_PYTHON
          also by Spark with Delta
latency   from a set on the node until a query of the table shows it
verify    ``upriver table verify`` of all rows
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.streaming.query import StreamingQuery

from bench.spark import descendants, spark_session
from upriver.client import SyncKvClient
from upriver.node import start
from upriver.pipelines import run
from upriver.pipelines.core.session import FILE_MANAGER, FILE_MANAGER_SETTING
from upriver.pipelines.core.workers import SparkWorkers
from upriver.pipelines.jobs.mirror import Mirror
from upriver.pipelines.targets.tables import compact_table
from upriver.tables import Table, TableStorage

PARTS: Final = ("load", "large", "memory", "batches", "trickle", "merge", "scan", "latency", "verify")
VBUCKETS: Final = 64
BATCH: Final = 200_000
LOADING_ROUNDS: Final = 3
SCHEMA: Final = "name string, price double, stock long, open boolean, tags string, text string"


def document(number: int, size: int, version: int = 0) -> bytes:
    """A document with six fields and about this size."""
    known = {
        "name": f"document {number}",
        "price": number % 1000 + 0.25,
        "stock": number + version,
        "open": number % 2 == 0,
        "tags": ["a", f"b{number % 10}"],
    }
    text = json.dumps(known)[:-1] + ', "text": "'
    words = f"{number * 2654435761 % 2**32:08x} "
    return (text + (words * (size // len(words) + 1))[: max(0, size - len(text) - 2)] + '"}').encode()


# The node, in a process of its own


def serve() -> None:
    """A node without a disk, until the input ends."""
    with start(vbuckets=VBUCKETS) as node:
        print(node.port, flush=True)
        sys.stdin.read()


@contextmanager
def node_process() -> Iterator[str]:
    """The address of a node."""
    command = [sys.executable, "-m", "bench.targets", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def fill(address: str, numbers: range, size: int) -> None:
    """Write documents, from a process of its own."""
    told = json.dumps([address, numbers.start, numbers.stop, size])
    subprocess.run([sys.executable, "-m", "bench.targets", "--fill", told], check=True)


def fill_here(address: str, first: int, last: int, size: int) -> None:
    """Write documents."""
    numbers = range(first, last)
    with SyncKvClient(address) as kv:
        for first in range(numbers.start, numbers.stop, 20_000):
            some = range(first, min(first + 20_000, numbers.stop))
            kv.set_many({f"document:{n:08}": document(n, size) for n in some})


# The two sides


class Run:
    """One mirror, over several runs."""

    def __init__(self, address: str, folder: Path, **options: Any) -> None:
        self.table = folder / "table"
        self._folder = folder
        self._options = {"source": address, "to": self.table, **options}

    def __call__(self) -> float:
        """Bring the table up to date; returns seconds."""
        started = time.perf_counter()
        run(Mirror.of(**self._options), checkpoint=self._folder / "checkpoint", once=True)
        return time.perf_counter() - started

    def opened(self) -> Table:
        """The table."""
        return Table.open(TableStorage.of(self.table))

    def written(self) -> int:
        """Bytes of all files, also of those that the table no longer needs."""
        return sum(file.size for file in TableStorage.of(self.table).list())


class TimedMirror(Mirror):
    """A mirror that notes how long each batch takes."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.spent: list[float] = []
        self.query: StreamingQuery | None = None

    def start(self, changes: DataFrame, checkpoint: str, *, once: bool = False) -> StreamingQuery:
        self.query = super().start(changes, checkpoint, once=once)
        return self.query

    def _apply_frame(self, frame: DataFrame, batch_number: int) -> None:
        started = time.perf_counter()
        super()._apply_frame(frame, batch_number)
        self.spent.append(time.perf_counter() - started)


class Loaded(NamedTuple):
    """How long a load took: all of it, and its batches."""

    all_s: float
    batches_s: float

    @classmethod
    def since(cls, started: float, query: StreamingQuery | None) -> "Loaded":
        assert query is not None
        batches_ms = sum(json.loads(each.json)["durationMs"]["triggerExecution"] for each in query.recentProgress)
        return cls(time.perf_counter() - started, batches_ms / 1000)


def mirrored(spark: SparkSession, address: str, folder: Path, rows: int) -> Loaded:
    """A mirror, with the setting for checkpoints that its own Spark would have."""
    started = time.perf_counter()
    job = TimedMirror.of(source=address, to=folder / "table", max_rows=rows)
    spark.conf.set(FILE_MANAGER_SETTING, FILE_MANAGER)
    try:
        run(job, checkpoint=folder / "checkpoint", once=True)
    finally:
        spark.conf.unset(FILE_MANAGER_SETTING)
    return Loaded.since(started, job.query)


def plain_spark(spark: SparkSession, address: str, folder: Path, rows: int) -> Loaded:
    """The same changes with Spark alone: parsed by ``from_json``, into Parquet files."""
    started = time.perf_counter()
    options = {"address": address, "valueFormat": "string", "maxRowsPerTrigger": str(rows)}
    changes = spark.readStream.format("upriver").options(**options).load()
    parsed = changes.withColumn("value", fn.from_json("value", SCHEMA)).select(
        fn.col("key").cast("string"), "vbucket", "seqno", "rev_seqno", "cas", "flags", "expiry", "datatype", "value.*"
    )
    writer = parsed.writeStream.format("parquet").option("checkpointLocation", str(folder / "c"))
    query = writer.trigger(availableNow=True).start(str(folder / "t"))
    query.awaitTermination()
    return Loaded.since(started, query)


@contextmanager
def folder() -> Iterator[Path]:
    """A directory for one part."""
    path = Path(tempfile.mkdtemp(prefix="upriver-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def verdict(is_reached: bool) -> str:
    """A word for a goal."""
    return "ok" if is_reached else "MISSED"


def resident(pid: int) -> int:
    """The bytes of memory that a process has; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def is_python(pid: int) -> bool:
    """Whether a process is one of Python."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("python")
    except OSError:
        return False


# The parts


def memory(rows: int) -> None:
    """The command in a process of its own, everything in one batch."""
    with node_process() as address, folder() as place:
        fill(address, range(rows), 190)
        command = [
            sys.executable,
            "-m",
            "upriver",
            "run",
            "mirror",
            "--from",
            address,
            "--to",
            str(place / "table"),
            "--once",
        ]
        command += ["--checkpoint", str(place / "checkpoint"), "--max-rows", str(rows)]
        before = set(descendants())
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            driver = worker = 0
            while process.poll() is None:
                driver = max(driver, resident(process.pid))
                others = [pid for pid in set(descendants()) - before if pid != process.pid and is_python(pid)]
                worker = max([worker, *map(resident, others)])
                time.sleep(0.05)
        print(
            f"memory, {rows:,} rows at once: driver {driver / 1e6:.0f} MB, goal <= 300 {verdict(driver <= 300e6)}; "
            f"worker {worker / 1e6:.0f} MB, goal <= 500 {verdict(worker <= 500e6)}",
            flush=True,
        )


def loading(spark: SparkSession, rows: int, size: int, goal: float) -> None:
    """Loading beside plain Spark, in turns, by the time that batches take.

    The first round of each starts all workers and does not count.
    """
    with node_process() as address:
        fill(address, range(rows), size)
        ours, plain = [], []
        for _ in range(1 + LOADING_ROUNDS):
            with folder() as here, folder() as there:
                ours.append(mirrored(spark, address, here, BATCH))
                plain.append(plain_spark(spark, address, there, BATCH))
        pairs = list(zip(ours, plain, strict=True))[1:]
        ratio = statistics.median(theirs.batches_s / mine.batches_s for mine, theirs in pairs)
        with_start = statistics.median(theirs.all_s / mine.all_s for mine, theirs in pairs)
        best = [min(each.batches_s for each in side[1:]) for side in (ours, plain)]
        print(
            f"load {rows:,} documents of {size} bytes: {rows / best[0]:,.0f} rows/s, plain Spark "
            f"{rows / best[1]:,.0f} rows/s at their best: {ratio:.2f} x, goal >= {goal} {verdict(ratio >= goal)}; "
            f"with start and end of the query {with_start:.2f} x",
            flush=True,
        )


def batches(rows: int) -> None:
    """Sixty batches of new keys."""
    each = max(1000, rows // 60)
    with node_process() as address, folder() as place:
        fill(address, range(60 * each), 190)
        job = TimedMirror.of(source=address, to=place / "table", max_rows=each)
        run(job, checkpoint=place / "checkpoint", once=True)
        spent = job.spent[:60]
        first, last = statistics.median(spent[:10]), statistics.median(spent[50:])
        print(
            f"60 batches of {each:,} new keys: first {first:.2f} s, last {last:.2f} s: {last / first:.2f} x, "
            f"goal <= 1.3 {verdict(last / first <= 1.3)}",
            flush=True,
        )


def trickle(mirror: Run, address: str, rows: int) -> None:
    """Few updates per batch: how much is written."""
    choose, changed = random.Random(7), 0
    before, spent = mirror.written(), []
    with SyncKvClient(address) as kv:
        for turn in range(20):
            some = {f"document:{n:08}": document(n, 190, turn + 1) for n in choose.sample(range(rows), 100)}
            kv.set_many(some)
            changed += sum(len(value) + 17 for value in some.values())
            spent.append(mirror())
    ratio = (mirror.written() - before) / changed
    print(
        f"20 batches of 100 updates in {rows:,} rows: {ratio:.1f} bytes written per byte, goal <= 10 "
        f"{verdict(ratio <= 10)}; {statistics.median(spent):.2f} s each, start and end of the query included",
        flush=True,
    )


def merging(mirror: Run, address: str, rows: int) -> None:
    """Random updates beside Delta's MERGE."""
    count, choose = min(10_000, rows // 10), random.Random(11)
    with SyncKvClient(address) as kv:
        kv.set_many({f"document:{n:08}": document(n, 190, 99) for n in choose.sample(range(rows), count)})
    job = TimedMirror.of(source=address, to=mirror.table)
    run(job, checkpoint=mirror.table.parent / "checkpoint", once=True)
    spent = job.spent
    told = f"{count:,} random updates in {rows:,} rows: {spent[0]:.2f} s in the batch"
    words = _with_delta("bench.delta_merge", str(rows), str(count))
    if words is None:
        print(f"{told}; without UPRIVER_DELTA_PYTHON nothing to compare with", flush=True)
        return
    theirs = float(words[-1])
    print(f"{told}, MERGE {theirs:.2f} s: {theirs / spent[0]:.1f} x, goal >= 15 {verdict(theirs / spent[0] >= 15)}")


def _with_delta(module: str, *arguments: str) -> list[str] | None:
    """Run a module with the Python that has Spark with Delta; returns its words, or None without such a Python."""
    python = os.environ.get("UPRIVER_DELTA_PYTHON")
    if python is None:
        return None
    # This process has told its own Spark where it is.
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name}
    command = [python, "-m", module, *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def scan(spark: SparkSession, mirror: Run) -> None:
    """Scans of the table as it is, beside the same rows compacted."""
    compacted = mirror.table.parent / "compacted"
    shutil.copytree(mirror.table, compacted)
    table = Table.open(TableStorage.of(compacted))
    compact_table(table, SparkWorkers(spark))
    for name, read in (("DuckDB", _duckdb), ("Polars", _polars)):
        now, later = (min(_timed(read, path) for _ in range(5)) for path in (mirror.table, compacted))
        print(
            f"full scan in {name}: {now:.2f} s, compacted {later:.2f} s: {later / now:.2f}, goal >= 0.7 "
            f"{verdict(later / now >= 0.7)}",
            flush=True,
        )

    _scan_with_delta(mirror.table, compacted)


def _scan_with_delta(table: Path, compacted: Path) -> None:
    words = _with_delta("bench.delta_scan", str(table), str(compacted))
    if words is None:
        print("full scan in Spark with Delta: skipped without UPRIVER_DELTA_PYTHON", flush=True)
        return
    now, later = map(float, words[-2:])
    print(
        f"full scan in Spark with Delta: {now:.2f} s, compacted {later:.2f} s: {later / now:.2f}, goal >= 0.7 "
        f"{verdict(later / now >= 0.7)}",
        flush=True,
    )


def _timed(read: Callable[[Path], object], path: Path) -> float:
    started = time.perf_counter()
    read(path)
    return time.perf_counter() - started


def _duckdb(path: Path) -> object:
    import duckdb

    package = find_spec("duckdb_extension_delta")
    assert package is not None
    assert package.origin is not None
    (extension,) = Path(package.origin).parent.rglob("delta.duckdb_extension")
    connection = duckdb.connect(config={"autoinstall_known_extensions": False})
    connection.load_extension(str(extension))
    query = "SELECT count(*), sum(stock), max(length(text)), count(DISTINCT name) FROM delta_scan(?)"
    return connection.execute(query, [str(path)]).fetchall()


def _polars(path: Path) -> object:
    import polars as pl

    frame = pl.scan_delta(str(path))
    return frame.select(
        pl.len(), pl.col("stock").sum(), pl.col("text").str.len_bytes().max(), pl.col("name").n_unique()
    ).collect()


def latency(mirror: Run, address: str) -> None:
    """From a set until the table has it."""
    stop, spent = threading.Event(), []
    job = Mirror.of(source=address, to=mirror.table)
    thread = threading.Thread(
        target=lambda: run(job, checkpoint=mirror.table.parent / "checkpoint", stop=stop), daemon=True
    )
    thread.start()
    table = mirror.opened()
    app = next(iter(table.snapshot.txns))
    with SyncKvClient(address) as kv:
        for turn in range(25):
            table.refresh()
            number = table.snapshot.txns[app]
            started = time.perf_counter()
            kv.set("document:00000001", document(1, 190, 1000 + turn))
            while table.snapshot.txns[app] == number and time.perf_counter() - started < 60:
                table.refresh()
                time.sleep(0.005)
            spent.append(time.perf_counter() - started)
            time.sleep(0.5)  # idle again, which is what is measured
    stop.set()
    thread.join(60)
    steady = sorted(spent[5:])
    p50 = statistics.median(steady)
    print(f"set to visible, idle: p50 {p50:.2f} s, highest {steady[-1]:.2f} s, goal <= 1 {verdict(p50 <= 1)}")


def verify(mirror: Run, address: str, rows: int) -> None:
    """The command, start included."""
    command = [sys.executable, "-m", "upriver", "table", "verify", str(mirror.table), address]
    started = time.perf_counter()
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    spent = time.perf_counter() - started
    said = found.stderr.strip().splitlines()[-1] if found.stderr.strip() else ""
    print(f"verify {rows:,} rows: {spent:.1f} s, goal <= 10 {verdict(spent <= 10)}; {said}")


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fill", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.fill:
        fill_here(*json.loads(arguments.fill))
        return
    parts, rows = arguments.parts or PARTS, arguments.rows
    with spark_session() as spark:
        with node_process() as address, folder() as warm, folder() as warm_plain:
            fill(address, range(20_000), 190)
            Run(address, warm, max_rows=5_000)()
            plain_spark(spark, address, warm_plain, 5_000)
        if "load" in parts:
            loading(spark, rows, 190, 2.5)
        if "large" in parts:
            loading(spark, max(1000, rows // 12), 6000, 1.3)
        if "memory" in parts:
            memory(rows)
        if "batches" in parts:
            batches(rows)
        if {"trickle", "merge", "scan", "latency", "verify"} & set(parts):
            with node_process() as address, folder() as place:
                fill(address, range(rows), 190)
                mirror = Run(address, place)
                mirror()
                if "trickle" in parts:
                    trickle(mirror, address, rows)
                if "merge" in parts:
                    merging(mirror, address, rows)
                if "scan" in parts:
                    scan(spark, mirror)
                if "latency" in parts:
                    latency(mirror, address)
                if "verify" in parts:
                    mirror()
                    verify(mirror, address, rows)


if __name__ == "__main__":
    main()
