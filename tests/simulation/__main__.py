"""Run seeds: ``python -m tests.simulation --seeds 0-10000``, or one of them again with everything that happened."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from tests.simulation.mutations import MUTATIONS, broken
from tests.simulation.scenario import Outcome, run, shrink

CHUNK = 50


def try_seeds(seeds: range, mutation: str = "") -> list[Outcome]:
    """Those of the seeds that failed."""
    with broken(mutation):
        return [outcome for outcome in map(run, seeds) if outcome.problem]


def _chunks(seeds: range) -> Iterator[range]:
    for first in range(seeds.start, seeds.stop, CHUNK):
        yield range(first, min(first + CHUNK, seeds.stop))


def run_many(seeds: range, jobs: int, mutation: str = "", failures_max: int = 10) -> list[Outcome]:
    """Run all seeds on this number of processes; stop early when enough have failed."""
    began, done, failed, chunks = time.monotonic(), 0, [], _chunks(seeds)
    with ProcessPoolExecutor(jobs) as pool:
        running = [(chunk, pool.submit(try_seeds, chunk, mutation)) for chunk in islice(chunks, 2 * jobs)]
        while running:
            chunk, future = running.pop(0)
            failed += future.result()
            done += len(chunk)
            rate = done / (time.monotonic() - began)
            print(
                f"\r{done} of {len(seeds)} seeds, {len(failed)} failed, {rate:.0f}/s ",
                end="",
                file=sys.stderr,
                flush=True,
            )
            if len(failed) < failures_max and (following := next(chunks, None)) is not None:
                running.append((following, pool.submit(try_seeds, following, mutation)))
    print(file=sys.stderr)
    return failed


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or int(first) + 1))


def main() -> int:
    """The command line; 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=_range, default=range(2000), help="from and up to, as in 0-2000")
    parser.add_argument("--seed", type=int, help="only this one, with its history")
    parser.add_argument(
        "--verbose", action="store_true", help="print the whole history, not only the shortest that fails"
    )
    parser.add_argument("--mutation", default="", choices=["", *MUTATIONS], help="break something on purpose")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if given.seed is not None:
        with broken(given.mutation):
            outcome = run(given.seed)
            print(shrink(outcome) if outcome.problem and not given.verbose else outcome)
        return bool(outcome.problem)
    failed = run_many(given.seeds, given.jobs, given.mutation)
    for outcome in failed[:3]:
        with broken(given.mutation):
            print(shrink(outcome))
    for outcome in failed:
        print(f"seed {outcome.seed}: {outcome.problem}  (make simulate SEED={outcome.seed} VERBOSE=1)")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
