"""Reading history: frames and Arrow columns from memory and from a warm disk, against memcpy in the same run.

The share of memcpy compares the bytes of the read frames with a copy of the same bytes, contiguous in memory that no
cache holds, in the same process. Times are this thread's CPU time.

python -m bench.engine_history [items]
"""

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from upriver.engine import Bucket
from upriver.engine.vbucket import Vbucket
from upriver.model import vbucket_of

READ_BYTES = 1 << 20


def memcpy_bandwidth(parts: list[Vbucket]) -> float:
    """Copies the same frames, contiguous in memory, in pieces of the size of a read into one buffer."""
    source, target = memoryview(b"".join(all_frames(parts))), memoryview(bytearray(READ_BYTES))

    def copy() -> int:
        for place in range(0, len(source) - READ_BYTES, READ_BYTES):
            target[:] = source[place : place + READ_BYTES]
        return len(source) - len(source) % READ_BYTES

    return best_of(7, copy)


def all_frames(parts: list[Vbucket]) -> Iterator[bytes]:
    for vbucket in parts:
        for snapshot in vbucket.changes():
            yield from snapshot.frames(READ_BYTES)


def best_of(times: int, work: Callable[[], int]) -> float:
    best = 0.0
    for _ in range(times):
        began = time.thread_time()
        amount = work()
        best = max(best, amount / (time.thread_time() - began))
    return best


def into_buffer(parts: list[Vbucket]) -> int:
    """As a stream does it: frames of whole chunks into one recycled buffer."""
    count, buffer = 0, bytearray(READ_BYTES)
    for vbucket in parts:
        position, high = 0, vbucket.high_seqno
        while position < high:
            _, found, position, *_ = vbucket.table.read_into(buffer, position, high, high)
            count += found
    return count


def frames(parts: list[Vbucket]) -> int:
    count = 0
    for vbucket in parts:
        with vbucket.open_cursor("bench") as cursor:
            while cursor.next_snapshot() is not None:
                cursor.read(READ_BYTES)
            count += cursor.changes_read
    return count


def columns(parts: list[Vbucket]) -> int:
    count = 0
    for vbucket in parts:
        with vbucket.open_cursor("bench") as cursor:
            while cursor.next_snapshot() is not None:
                cursor.read_columns(READ_BYTES)
            count += cursor.changes_read
    return count


def evict_everything(bucket: Bucket) -> None:
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    for vbucket in bucket:
        for _ in range(2):
            position = 0
            while True:
                position, _ = vbucket.table.sweep(position, 0, 0, 0, vbucket.table.checkpointed_seqno)
                if not position:
                    break


def measure(path: str, count: int, vbuckets: int) -> None:
    frame_bytes = 24 + 31 + 16 + 128
    with Bucket.open(path, vbuckets=vbuckets, queue_bytes_max=0, background=False) as bucket:
        bucket.create_vbuckets()
        parts = list(bucket)
        keys = [b"key-%012d" % i for i in range(count)]

        def show(name: str, work: Callable[[list[Vbucket]], int]) -> None:
            rate = best_of(5, lambda: work(parts))
            share = rate * frame_bytes / memcpy
            print(f"  {name:42} {rate / 1e6:6.1f} M changes/s, {share:5.2f} of memcpy")

        for key in keys:
            parts[vbucket_of(key, vbuckets)].set(key, b"v" * 128)
        bucket.flusher.step()
        memcpy = memcpy_bandwidth(parts)
        print(f"{count} changes of {frame_bytes} bytes, {vbuckets} vbuckets; memcpy {memcpy / 1e9:.1f} GB/s")
        show("memory, all live: frames into a buffer", into_buffer)
        show("memory, all live: frames", frames)
        show("memory, all live: Arrow columns", columns)
        random.Random(1).shuffle(keys)
        for key in keys[: count // 2]:
            parts[vbucket_of(key, vbuckets)].set(key, b"w" * 128)
        bucket.flusher.step()
        show("memory, a third superseded: frames", into_buffer)
        show("memory, a third superseded: columns", columns)
        evict_everything(bucket)
        assert bucket.statistics().resident_ratio < 0.01
        show("warm disk, superseded dropped: frames", frames)
        show("warm disk, superseded dropped: columns", columns)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    directory = tempfile.mkdtemp(prefix="upriver-bench-")
    try:
        for vbuckets in (1024, 16):
            measure(f"{directory}/{vbuckets}", count, vbuckets)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
