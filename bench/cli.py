"""How fast the command line copies and compares: dump to Parquet, load of Parquet, diff of two equal nodes.

    python -m bench.cli [--documents N] [--rounds N]

Node, command, and for `diff` a second node run in separate processes, as a user would start them. The best round
counts. The time is that of the whole command, including the start of Python. The CPU time of the command, printed
beside it, depends less on the load of the machine.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

VALUE_BYTES = 64
COMMAND = [sys.executable, "-m", "upriver"]


@contextmanager
def served() -> Iterator[str]:
    """The address of a node in a separate process."""
    command = [*COMMAND, "serve", "--port", "0", "--vbuckets", "1024", "--log-level", "error"]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    try:
        yield node.stdout.readline().split(" is served on ")[1].split(",")[0].strip()
    finally:
        node.terminate()
        node.wait()
        node.stdout.close()


def timed(*arguments: str) -> tuple[float, float]:
    """Seconds and CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run([*COMMAND, *arguments], check=True, stderr=subprocess.DEVNULL)
    elapsed = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def best(rounds: int, *arguments: str) -> tuple[float, float]:
    """The shortest time, and the least CPU time, of this many rounds."""
    times = [timed(*arguments) for _ in range(rounds)]
    return min(each[0] for each in times), min(each[1] for each in times)


def make(path: Path, documents: int) -> None:
    """A Parquet file of documents."""
    keys = pa.array([b"key:%010d" % number for number in range(documents)], pa.binary())
    values = pa.array([os.urandom(VALUE_BYTES // 2).hex().encode() for _ in range(documents)], pa.binary())
    pq.write_table(pa.table({"key": keys, "value": values}), path, row_group_size=128 * 1024)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    count, rounds = options.documents, options.rounds
    with tempfile.TemporaryDirectory() as directory, served() as first, served() as second:
        source, target = Path(directory, "in.parquet"), Path(directory, "out.parquet")
        make(source, count)
        start_s, start_cpu_s = best(rounds, "version")
        loads = [timed("load", str(source), address) for address in (first, second, *[first] * (rounds - 2))]
        load_s, load_cpu_s = min(each[0] for each in loads), min(each[1] for each in loads)
        dump_s, dump_cpu_s = best(rounds, "dump", "-o", str(target), first)
        diff_s, diff_cpu_s = best(rounds, "diff", first, second)
    print(f"{count:,} documents with {VALUE_BYTES}-byte values; a command that does nothing takes {start_s:.2f} s")
    for name, seconds, cpu_s, goal in (
        ("dump to Parquet", dump_s, dump_cpu_s, 800),
        ("load of Parquet", load_s, load_cpu_s, 300),
    ):
        work_s, work_cpu_s = max(seconds - start_s, 1e-9), max(cpu_s - start_cpu_s, 1e-9)
        print(
            f"{name}: {seconds:.2f} s, {count / work_s / 1000:,.0f} k/s beyond the start, "
            f"{count / work_cpu_s / 1000:,.0f} k per processor second (goal {goal} k/s)"
        )
    print(f"diff of two equal nodes: {diff_s:.2f} s, {diff_cpu_s:.2f} s of processor (goal 5 s with 1 M)")


if __name__ == "__main__":
    main()
