import ctypes
import os
import subprocess
import sys

import pytest

from upriver.engine.malloc_tuning import MallocTuning

#: Takes and gives back 200 MB in a thread of its own, so that what is left in between keeps the C library from
#: returning it by itself; then says how much anonymous memory there was before and after.
PROGRAM = """
import threading
from upriver.engine.malloc_tuning import MallocTuning

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) * 1024

def come_and_go():
    pinned = []
    for _ in range(20):
        taken = [b"x" * 100_000 for _ in range(100)]
        for _ in taken:
            pinned.append(b"x" * 2000)
        kept.append(taken)
    for taken in kept:
        taken.clear()
    kept.append(pinned)
    before = anonymous()
    MallocTuning().used(200_000_000)
    print(before, anonymous())

kept = []
thread = threading.Thread(target=come_and_go)
thread.start()
thread.join()
"""

#: Puts pieces together as a stream does, in a thread of its own; prints how often the system had to provide a page.
PIECES = """
import resource, threading
from upriver.engine.malloc_tuning import keep_for_next_use

def send():
    for _ in range(200):
        b"".join([b"marker" + bytes(200_000) for _ in range(3)])

def count():
    send()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    send()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

keep_for_next_use()
thread = threading.Thread(target=count)
thread.start()
thread.join()
"""


CAN_ASK = hasattr(ctypes.CDLL(None), "malloc_trim")


@pytest.mark.skipif(not CAN_ASK, reason="this C library cannot be asked")
def test_memory_that_came_and_went_is_given_back() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True, timeout=60).stdout
    before, after = map(int, output.split())
    assert after < before - 100_000_000


def faults(**environment: str) -> int:
    alone = {name: each for name, each in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PIECES]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60, env=alone | environment).stdout)


@pytest.mark.skipif(not CAN_ASK, reason="this C library cannot be asked")
def test_what_a_stream_sends_is_put_together_in_memory_that_was_used_before() -> None:
    assert faults() < 200  # else 200 times 300 of them
    assert faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 20_000  # who says so gets that


def test_it_asks_after_so_many_bytes() -> None:
    tuning = MallocTuning(returned_bytes=1000)
    for size, trims in ((999, 0), (0, 0), (1, 1), (999, 1), (5000, 2), (999, 2)):
        tuning.used(size)
        assert tuning.trims == (trims if CAN_ASK else 0)
