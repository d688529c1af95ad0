"""How close a consumer's batches come to a reader that discards everything.

    python -m bench.consumer [--megabytes N] [--rounds N]

A node in a separate process holds changes with 64-byte values. A reader in another process takes all of them, once as
raw bytes that are discarded, once through ``Consumer`` as Arrow batches, asynchronously and synchronously. Rounds
alternate, the best of each counts, and the ratio matters most. The last line shows the memory of a consumer that reads
a backlog far larger than its window.
"""

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.streams import KEY, fill, read_and_discard
from upriver.client import Consumer
from upriver.node import start
from upriver.wire import dcp

VALUE = b"v" * 64
SIZE = len(dcp.Mutation(by_seqno=1, key=KEY % 1, value=VALUE).encode())


# In separate processes


def serve(vbuckets: int, changes: int) -> None:
    """Serve a filled node until the input ends."""
    with start(vbuckets=max(vbuckets, 1)) as node:
        fill(node, vbuckets, changes, VALUE)
        print(node.port, flush=True)
        sys.stdin.read()


def consume(port: int, total: int, synchronous: bool) -> None:
    """Print the time for all changes, and the growth of memory."""
    before = peak_bytes()
    started = time.perf_counter()
    if synchronous:
        with Consumer.sync(f"127.0.0.1:{port}") as consumer:
            received = 0
            for batch in consumer:
                received += len(batch)
                if received >= total:
                    break
            print(time.perf_counter() - started, peak_bytes() - before, flush=True)
        return
    asyncio.run(_consume(port, total, started, before))


async def _consume(port: int, total: int, started: float, before: int) -> None:
    received = 0
    async with Consumer(f"127.0.0.1:{port}") as consumer:
        async for batch in consumer:
            received += len(batch)
            if received >= total:
                break
        print(time.perf_counter() - started, peak_bytes() - before, flush=True)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The measurement


@contextmanager
def filled_node(vbuckets: int, changes: int) -> Iterator[int]:
    command = [sys.executable, "-m", "bench.consumer", "--serve", f"{vbuckets}:{changes}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def timed(mode: str, port: int, total: int, vbuckets: int) -> tuple[float, int]:
    command = [sys.executable, "-m", "bench.consumer", "--read", f"{mode}:{port}:{total}:{vbuckets}"]
    seconds, *memory = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), int(memory[0]) if memory else 0


def compare(vbuckets: int, megabytes: int, rounds: int) -> None:
    """Print the lines of one number of vbuckets."""
    per_vbucket = megabytes * 10**6 // SIZE // vbuckets
    changes = per_vbucket * vbuckets
    wire_bytes = changes * SIZE + vbuckets * (40 + 44)
    best: dict[str, float] = {}
    memory: dict[str, int] = {}
    with filled_node(vbuckets, per_vbucket) as port:
        for _ in range(rounds):
            for mode, total in (("discard", wire_bytes), ("async", changes), ("sync", changes)):
                seconds, memory[mode] = timed(mode, port, total, vbuckets)
                best[mode] = min(best.get(mode, seconds), seconds)
    for mode in ("discard", "async", "sync"):
        share = best["discard"] / best[mode]
        more = "" if mode == "discard" else f", {share:4.2f} of discarding, {memory[mode] / 1e6:.0f} MB more memory"
        print(f"{vbuckets:5d} vbuckets, {mode:8}: {changes / best[mode] / 1e6:6.2f} M changes/s{more}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.consumer", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        vbuckets, changes = map(int, options.serve.split(":"))
        serve(vbuckets, changes)
    elif options.read:
        mode, port, total, vbuckets = options.read.split(":")
        if mode == "discard":
            read_and_discard(int(port), int(total), int(vbuckets), 0)
        else:
            consume(int(port), int(total), mode == "sync")
    else:
        print(f"{os.cpu_count()} cores, {options.megabytes} MB a round")
        compare(1, options.megabytes, options.rounds)
        compare(1024, options.megabytes, options.rounds)


if __name__ == "__main__":
    main()
