"""The longest step of each duty with a million items in one vbucket, and operations that are one step, in CPU time.

python -m bench.engine_maintenance [items]
"""

import shutil
import sys
import tempfile
import time

from upriver.engine import Bucket, Retention
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.model import VbucketState, vbucket_of


def undo(bucket: Bucket, count: int) -> None:
    """Operations in one step: a small rollback, a rollback by half, and a flush."""
    vbucket = bucket.vbucket(0)
    bucket.ledger.quota_bytes = 0
    vbucket.flush()
    for i in range(count):
        vbucket.set(b"key-%012d" % i, b"v" * 128)
    for i in range(0, count, 20):
        vbucket.set(b"key-%012d" % i, b"w" * 128)
    for name, seqno in (("5 percent", count), ("half", count // 2)):
        vbucket.set_state(VbucketState.REPLICA)
        before = time.thread_time()
        vbucket.roll_back(seqno)
        print(f"  roll back {name}: {(time.thread_time() - before) * 1e3:6.2f} ms of CPU")
        vbucket.set_state(VbucketState.ACTIVE)
        for i in range(vbucket.table.items, count):
            vbucket.set(b"key-%012d" % i, b"v" * 128)
    before = time.thread_time()
    vbucket.flush()
    print(f"  flush: {(time.thread_time() - before) * 1e3:6.2f} ms of CPU")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    path = tempfile.mkdtemp(prefix="upriver-bench-")
    now = [1_800_000_000.0]
    retention = Retention(history_s=1, history_bytes=2**20, tombstone_s=10)
    try:
        bucket = Bucket(LmdbStorage(path), vbuckets=1, queue_bytes_max=0, clock=lambda: now[0], retention=retention)
        bucket.create_vbuckets()
        for i in range(count):
            key = b"key-%012d" % i
            bucket.vbucket(vbucket_of(key, 1)).set(key, b"v" * 128, expiry=100 if i % 10 == 0 else 0)
        for i in range(0, count, 2):
            key = b"key-%012d" % i
            bucket.vbucket(vbucket_of(key, 1)).set(key, b"w" * 128, expiry=100 if i % 10 == 0 else 0)
        bucket.flusher.request_checkpoint()
        bucket.flusher.drain()
        now[0] += 200
        for name in ("expire", "compact", "purge", "evict"):
            if name == "purge":
                bucket.flusher.request_checkpoint()
                bucket.flusher.drain()
                now[0] += 20
            if name == "evict":
                bucket.ledger.quota_bytes = bucket.ledger.memory_bytes // 2
            longest = total = 0.0
            steps, before = 0, time.thread_time()
            for _ in getattr(bucket.maintenance, name)():
                after = time.thread_time()
                longest, total, steps, before = max(longest, after - before), total + after - before, steps + 1, after
                before = time.thread_time()
            print(f"  {name:8} {steps:6} steps, {total:6.2f} s of CPU, the longest {longest * 1e3:6.2f} ms")
        bucket.flusher.drain()
        undo(bucket, count)
        bucket.close()
    finally:
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
