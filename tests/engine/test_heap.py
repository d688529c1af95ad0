import ctypes
import subprocess
import sys

import pytest

from upriver.engine.heap import Heap

#: Takes and gives back 200 MB in a thread of its own, so that what is left in between keeps the C library from
#: returning it by itself; then says how much anonymous memory there was before and after.
PROGRAM = """
import threading
from upriver.engine.heap import Heap

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
    Heap().used(200_000_000)
    print(before, anonymous())

kept = []
thread = threading.Thread(target=come_and_go)
thread.start()
thread.join()
"""


CAN_ASK = hasattr(ctypes.CDLL(None), "malloc_trim")


@pytest.mark.skipif(not CAN_ASK, reason="this C library cannot be asked")
def test_memory_that_came_and_went_is_given_back() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True, timeout=60).stdout
    before, after = map(int, output.split())
    assert after < before - 100_000_000


def test_it_asks_after_so_many_bytes() -> None:
    heap = Heap(returned_bytes=1000)
    for size, trims in ((999, 0), (0, 0), (1, 1), (999, 1), (5000, 2), (999, 2)):
        heap.used(size)
        assert heap.trims == (trims if CAN_ASK else 0)
