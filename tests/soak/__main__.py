"""Run a soak: ``python -m tests.soak --minutes 30``."""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.soak.run import soak


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Write while nodes are killed and moved.")
    parser.add_argument("--minutes", type=float, default=30, help="how long to run")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the faults and of the keys")
    parser.add_argument("--directory", type=Path, help="keep the data and the logs of the nodes here")
    options = parser.parse_args(arguments)
    print(f"a soak of {options.minutes:g} minutes, seed {options.seed}", flush=True)
    if options.directory is not None:
        options.directory.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(soak(options.directory, options.minutes * 60, options.seed))
    else:
        with tempfile.TemporaryDirectory(prefix="upriver-soak-") as directory:
            result = asyncio.run(soak(Path(directory), options.minutes * 60, options.seed))
    print(result)
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
