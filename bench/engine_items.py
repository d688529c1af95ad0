"""Items in memory: sets, gets, bulk application, bytes per item; beside a dictionary of slotted objects in one run.

Reads use fresh key objects in random order, like a server that parses them from its input. Each round has a separate
process, so that no store works in memory that another has fragmented. The rounds of the stores alternate, and the best
of three counts. Times are this thread's CPU time.

    python -m bench.engine_items [items]
"""

import gc
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from upriver.engine import Bucket
from upriver.model import VbucketState, vbucket_of

KEY_BYTES, VALUE_BYTES = 16, 128
Calls = Sequence[Callable[..., object]]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Slotted:
    """What a store in plain Python keeps for a version, and returns."""

    __slots__ = ("cas", "datatype", "expiry", "flags", "key", "rev_seqno", "seqno", "superseded_by", "time", "value")

    def __init__(self, *fields: Any) -> None:
        (
            self.key,
            self.value,
            self.flags,
            self.expiry,
            self.datatype,
            self.cas,
            self.seqno,
            self.rev_seqno,
            self.time,
        ) = fields
        self.superseded_by = 0


class SlottedStore:
    """The straightforward vbucket: a dictionary of slotted objects, and the history as a list of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.active = True
        self.items: dict[bytes, Slotted] = {}
        self.history: list[Slotted] = []
        self.locks: dict[bytes, float] = {}
        self.cas = self.seqno = self.gets = self.sets = self.pending = 0

    def set(
        self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, cas: int = 0, datatype: int = 0
    ) -> tuple[int, int]:
        if not self.active or not 0 < len(key) <= 250 or len(value) > 20 << 20 or key in self.locks:
            raise ValueError(key)
        self.sets += 1
        now = self.clock()
        old = self.items.get(key)
        if cas and (old is None or old.cas != cas):
            raise ValueError(cas)
        self.seqno += 1
        self.cas = max(self.cas + 1, int(now * 1e9) & ~0xFFFF)
        rev_seqno = 1 if old is None else old.rev_seqno + 1
        expiry = expiry + int(now) if expiry else 0
        version = Slotted(key, value, flags, expiry, datatype, self.cas, self.seqno, rev_seqno, int(now))
        if old is not None:
            old.superseded_by = version.seqno
        self.items[key] = version
        self.history.append(version)
        self.pending += len(key) + len(value)
        return self.cas, self.seqno

    def get(self, key: bytes) -> Slotted:
        if not self.active:
            raise ValueError(key)
        self.gets += 1
        version = self.items.get(key)
        if version is None or version.value is None or (version.expiry and version.expiry <= self.clock()):
            raise KeyError(key)
        if self.locks and key in self.locks:
            raise ValueError(key)
        return version


def timed(calls: Calls, keys: list[bytes], values: Sequence[bytes] | None = None) -> float:
    gc.collect()
    gc.disable()
    began = time.thread_time()
    if values is None:
        for call, key in zip(calls, keys, strict=True):
            call(key)
    else:
        for call, key, value in zip(calls, keys, values, strict=True):
            call(key, value)
    took = time.thread_time() - began
    gc.enable()
    return len(keys) / took


def measure(parts: Sequence[Any], count: int) -> dict[str, float]:
    keys = [b"key-%012d" % i for i in range(count)]
    values = [bytes(VALUE_BYTES) for _ in keys]
    asked = [b"key-%012d" % i for i in random.Random(1).sample(range(count), count)]
    sets: Calls = [parts[vbucket_of(key, len(parts))].set for key in keys]
    gets: Calls = [parts[vbucket_of(key, len(parts))].get for key in asked]
    before = resident_bytes()
    result = {"set": timed(sets, keys, values)}
    result["bytes"] = (resident_bytes() - before) / count
    result["get"] = timed(gets, asked)
    result["replace"] = timed(sets, keys, values)
    return result


def engine(count: int, vbuckets: int) -> dict[str, float]:
    with Bucket.open(None, vbuckets=vbuckets, queue_bytes_max=0, background=False) as bucket:
        bucket.create_vbuckets()
        return measure(list(bucket), count)


def slotted(count: int, vbuckets: int) -> dict[str, float]:
    result = measure([SlottedStore(time.time) for _ in range(vbuckets)], count)
    result["bytes"] += VALUE_BYTES + KEY_BYTES + 2 * 33  # keys and values are objects that it references
    return result


def received(count: int) -> dict[str, float]:
    """Changes of 64-byte values of one vbucket, applied to copies in pieces of 256 KiB as they come from a peer."""
    with Bucket.open(None, vbuckets=1, queue_bytes_max=0, background=False) as bucket:
        source = bucket.create_vbucket(0)
        for number in range(count):
            source.set(b"key-%012d" % number, bytes(64))
        frames = [piece for snapshot in source.changes() for piece in snapshot.frames()]
        batches = [piece for snapshot in source.changes() for piece in snapshot.batches()]
    result = {"frames": 0.0, "batches": 0.0}
    for _ in range(3):
        for name, pieces in (("frames", frames), ("batches", batches)):
            with Bucket.open(None, vbuckets=1, queue_bytes_max=0, background=False) as bucket:
                copy = bucket.create_vbucket(0, VbucketState.REPLICA)
                copy.begin_snapshot(0, count)
                apply: Callable[..., object] = copy.apply_frames if name == "frames" else copy.apply_batch
                began = time.thread_time()
                for piece in pieces:
                    apply(piece)
                result[name] = max(result[name], count / (time.thread_time() - began))
                assert copy.table.items == count
    return result


Round = Callable[[int, int], dict[str, float]]


def alternating(rounds: Sequence[tuple[Round, int]], count: int) -> list[dict[str, float]]:
    """Each store's best figures, and its memory in the first round."""
    results: list[list[dict[str, float]]] = [[] for _ in rounds]
    for _ in range(3):
        for (run, vbuckets), result in zip(rounds, results, strict=True):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                result.append(process.submit(run, count, vbuckets).result())
    best = [{name: max(each[name] for each in result) for name in result[0]} for result in results]
    return [{**most, "bytes": result[0]["bytes"]} for most, result in zip(best, results, strict=True)]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    ours, theirs, few = alternating([(engine, 1024), (slotted, 1024), (engine, 16)], count)
    print(f"{count} items of {KEY_BYTES} + {VALUE_BYTES} bytes over 1,024 vbuckets")
    for name in ("set", "replace", "get"):
        print(
            f"  {name:8} {ours[name] / 1e6:5.2f} M/s, {ours[name] / theirs[name]:4.2f} x slotted objects; "
            f"1,024 vbuckets take {few[name] / ours[name]:4.2f} of 16's time"
        )
    applied = received(min(count, 500_000))
    for name, rate in applied.items():
        print(f"  applying received {name:8} {rate / 1e6:5.2f} M/s")
    print(f"  memory   {ours['bytes']:5.0f} bytes an item, slotted objects {theirs['bytes']:.0f}")


if __name__ == "__main__":
    main()
