"""The way to disk: groups, write amplification, sustained flushing, checkpoints, opening and growth.

Times are wall-clock. On a busy machine the CPU time beside them says what a quiet one would need at least.

python -m bench.engine_disk [directory [part ...]]
"""

import gc
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from upriver.engine import Bucket
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.model import VbucketState, vbucket_of

VBUCKETS = 1024
RECORD_BYTES = 16 + 24 + 31 + 16 + 128 + 1


def written_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file.read().splitlines())["wchar"])


@contextmanager
def directory(root: str | None) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="upriver-bench-", dir=root)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def opened(path: str, vbuckets: int = VBUCKETS) -> Bucket:
    bucket = Bucket(LmdbStorage(path), vbuckets=vbuckets, queue_bytes_max=0)
    if not list(bucket):
        bucket.create_vbuckets()
        bucket.flusher.step()
    return bucket


def groups(root: str | None, per_second: int = 40_000, seconds: int = 40) -> None:
    """A steady load, committed every 50 ms, with checkpoints as they become due."""
    with directory(root) as path:
        bucket = opened(path)
        parts, rng = list(bucket), random.Random(1)
        per_group = per_second // 20
        plain: list[float] = []
        during: list[float] = []
        data = 0
        cpu: list[float] = []
        before = written_bytes()
        for group in range(seconds * 20):
            for _ in range(per_group):
                key = b"key-%012d" % rng.randrange(2_000_000)
                parts[vbucket_of(key, VBUCKETS)].set(key, rng.randbytes(8) * 16)
            data += per_group * RECORD_BYTES
            checkpointing = bucket.flusher.checkpointing
            began, cpu_began = time.perf_counter(), time.thread_time()
            bucket.flusher.step()
            (during if checkpointing else plain).append(time.perf_counter() - began)
            if not checkpointing:
                cpu.append(time.thread_time() - cpu_began)
            # The thread would continue the checkpoint until the next group.
            while bucket.flusher.checkpointing and time.perf_counter() - began < 0.04:
                slice_began = time.perf_counter()
                bucket.flusher.step()
                during.append(time.perf_counter() - slice_began)
            del group
        amplification = (written_bytes() - before) / data
        bucket.close()
    print(f"{per_second} items/s over {VBUCKETS} vbuckets, a group every 50 ms, {seconds} s of load")
    print(
        f"  a group is on disk in {statistics.median(plain) * 1e3:.1f} ms (95 %: {quantile(plain) * 1e3:.1f}), "
        f"{statistics.median(cpu) * 1e3:.1f} ms of CPU; as many bytes and an fsync: {synced(root, per_group):.1f}"
    )
    print(f"  bytes written per byte {amplification:.2f}")
    if during:
        print(
            f"  with a slice of a checkpoint: {statistics.median(during) * 1e3:.1f} ms, at most {max(during) * 1e3:.1f}"
        )


def synced(root: str | None, items: int) -> float:
    """Milliseconds for writing a group's bytes into a file and waiting for the disk: the minimum for any store."""
    data, times = os.urandom(items * RECORD_BYTES), []
    with directory(root) as path, open(os.path.join(path, "file"), "wb", buffering=0) as file:
        for _ in range(40):
            began = time.perf_counter()
            file.write(data)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def quantile(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


def checkpoints(root: str | None, count: int = 1_000_000, per_group: int = 2000) -> None:
    """The time of a commit with a slice, with everything still in groups; and of one that rolls it back."""
    for vbuckets in (1, 16, VBUCKETS):
        with directory(root) as path:
            bucket = opened(path, vbuckets)
            bucket.flusher.checkpoint_bytes = 2**40
            parts, numbers = list(bucket), itertools.count()

            def write(items: int, bucket: Bucket = bucket, numbers: Iterator[int] = numbers) -> float:
                for number in itertools.islice(numbers, items):
                    key = b"key-%012d" % number
                    bucket.vbucket(vbucket_of(key, len(bucket))).set(key, b"v" * 128)
                began = time.perf_counter()
                bucket.flusher.step()
                return time.perf_counter() - began

            for _ in range(count // 20_000):
                write(20_000)
            plain = [write(per_group) for _ in range(40)]
            bucket.flusher.request_checkpoint()
            during = []
            while bucket.flusher.checkpointing:
                during.append(write(per_group))
            for _ in range(count // 20_000):
                write(20_000)
            parts[0].set_state(VbucketState.REPLICA)
            parts[0].roll_back(parts[0].high_seqno - 100)
            cut = write(0)
            bucket.close()
        print(
            f"checkpoint of {count} items in {vbuckets} vbuckets: {len(during)} commits with a slice take "
            f"{statistics.median(during) * 1e3:.1f} ms (95 %: {quantile(during) * 1e3:.1f}, at most "
            f"{max(during) * 1e3:.1f}), without {statistics.median(plain) * 1e3:.1f} (at most {max(plain) * 1e3:.1f}); "
            f"one that cuts a vbucket back {cut * 1e3:.1f}"
        )


def sustained(root: str | None, count: int = 3_000_000) -> None:
    """Write as fast as possible, with all checkpoints."""
    with directory(root) as path:
        bucket = opened(path)
        calls = [vbucket.set for vbucket in bucket]
        keys = [b"key-%012d" % i for i in range(count)]
        owners = [vbucket_of(key, VBUCKETS) for key in keys]
        value, flushing, cpu = b"v" * 128, 0.0, 0.0
        for start in range(0, count, 20_000):
            for place in range(start, start + 20_000):
                calls[owners[place]](keys[place], value)
            began, cpu_began = time.perf_counter(), time.thread_time()
            bucket.flusher.step()
            flushing += time.perf_counter() - began
            cpu += time.thread_time() - cpu_began
        began, cpu_began = time.perf_counter(), time.thread_time()
        bucket.flusher.drain()
        flushing += time.perf_counter() - began
        cpu += time.thread_time() - cpu_began
        print(
            f"sustained flush: {count / flushing / 1e6:.2f} M items/s, {count / cpu / 1e6:.2f} M per second of CPU, "
            "checkpoints included"
        )
        bucket.close()


def load(path: str, count: int, vbuckets: int) -> tuple[float, float]:
    """Seconds until all items are in blocks on disk, and to read them back as frames."""
    bucket = opened(path, vbuckets)
    parts = list(bucket)
    calls = [vbucket.set for vbucket in parts]
    keys = [b"key-%012d" % i for i in range(count)]
    owners = [vbucket_of(key, vbuckets) for key in keys]
    value = b"v" * 128
    gc.collect()
    began = time.perf_counter()
    for place in range(count):
        calls[owners[place]](keys[place], value)
        if place % 20_000 == 19_999:
            bucket.flusher.step()
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    loaded = time.perf_counter() - began
    began, buffer = time.perf_counter(), bytearray(1 << 20)
    for vbucket in parts:
        with vbucket.open_cursor("backfill") as cursor:
            while cursor.next_snapshot() is not None:
                cursor.read_into(buffer)
    backfilled = time.perf_counter() - began
    bucket.close()
    return loaded, backfilled


def reopened(path: str, vbuckets: int, clean: bool) -> tuple[float, float]:
    """Seconds and CPU seconds to open in a separate process, which then stops cleanly or is killed."""
    program = f"""
import os, time
from upriver.engine.bucket import Bucket
from upriver.engine.storage.lmdb import LmdbStorage
began, cpu = time.perf_counter(), time.process_time()
bucket = Bucket(LmdbStorage({path!r}), vbuckets={vbuckets})
print(time.perf_counter() - began, time.process_time() - cpu, flush=True)
bucket.close() if {clean} else os._exit(0)
"""
    output = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout
    seconds, cpu = map(float, output.split())
    return seconds, cpu


def opening(root: str | None) -> None:
    for count in (1_000_000, 5_000_000):
        with directory(root) as path:
            load(path, count, VBUCKETS)
            reopened(path, VBUCKETS, clean=True)  # the first touch of memory can cost more than the rest
            clean = reopened(path, VBUCKETS, clean=False)
            killed = reopened(path, VBUCKETS, clean=True)
            print(
                f"open with {count} items: {clean[0]:.2f} s ({clean[1]:.2f} of CPU) after a clean stop, "
                f"{killed[0]:.2f} s ({killed[1]:.2f}) after a kill"
            )


def growth(root: str | None) -> None:
    results: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for _ in range(5):
        for count, vbuckets in ((100_000, VBUCKETS), (1_000_000, VBUCKETS), (1_000_000, 16)):
            with directory(root) as path:
                loaded, backfilled = load(path, count, vbuckets)
                results.setdefault((count, vbuckets), []).append(
                    (loaded, backfilled, min(reopened(path, vbuckets, clean=True)[0] for _ in range(2)))
                )
    medians = {case: [statistics.median(run[i] for run in runs) for i in range(3)] for case, runs in results.items()}
    for i, name in enumerate(("load", "backfill", "recovery")):
        few, many = medians[(100_000, VBUCKETS)][i], medians[(1_000_000, VBUCKETS)][i]
        print(
            f"{name:9} 100 k {few:.3f} s, 1 M {many:.3f} s: {many / few:.1f}-fold; "
            f"1,024 vbuckets take {many / medians[(1_000_000, 16)][i]:.2f} of 16's time"
        )


def main() -> None:
    root = sys.argv[1] if len(sys.argv) > 1 else None
    print(f"disk: {os.path.abspath(root) if root else tempfile.gettempdir()}")
    for part in (groups, checkpoints, sustained, opening, growth):
        if not sys.argv[2:] or part.__name__ in sys.argv[2:]:
            part(root)


if __name__ == "__main__":
    main()
