"""Items in memory: sets, gets and bytes an item, against a dictionary of slotted objects in the same run.

python -m bench.engine_items [items]
"""

import gc
import sys
import time
from collections.abc import Callable

from upriver.engine import Bucket
from upriver.engine.backend import COMPILED
from upriver.model import vbucket_of

KEY_BYTES, VALUE_BYTES = 16, 128


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Slotted:
    """What a store in plain Python keeps for a version."""

    __slots__ = ("cas", "datatype", "expiry", "flags", "key", "rev_seqno", "seqno", "superseded_by", "time", "value")


class SlottedStore:
    """The straightforward store: a dictionary of slotted objects, and the history as a list of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.items: dict[bytes, Slotted] = {}
        self.history: list[Slotted] = []
        self.cas = self.seqno = 0

    def set(self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0) -> tuple[int, int]:
        now = self.clock()
        old = self.items.get(key)
        version = Slotted()
        version.key = key
        version.value = value
        version.flags = flags
        version.expiry = expiry + int(now) if expiry else 0
        version.datatype = 0
        version.time = int(now)
        version.superseded_by = 0
        self.seqno += 1
        version.seqno = self.seqno
        self.cas = version.cas = max(self.cas + 1, int(now * 1e9) & ~0xFFFF)
        if old is None:
            version.rev_seqno = 1
        else:
            version.rev_seqno = old.rev_seqno + 1
            old.superseded_by = version.seqno
        self.items[key] = version
        self.history.append(version)
        return version.cas, version.seqno

    def get(self, key: bytes) -> tuple[bytes, int, int]:
        version = self.items[key]
        if version.expiry and version.expiry <= self.clock():
            raise KeyError(key)
        return version.value, version.flags, version.cas


def timed(calls: list[Callable[..., object]], keys: list[bytes], *arguments: bytes) -> float:
    began = time.perf_counter()
    for call, key in zip(calls, keys, strict=True):
        call(key, *arguments)
    return len(keys) / (time.perf_counter() - began)


def measure(count: int, vbuckets: int = 1024) -> dict[str, float]:
    keys = [b"key-%012d" % i for i in range(count)]
    owners = [vbucket_of(key, vbuckets) for key in keys]
    value = b"v" * VALUE_BYTES
    with Bucket.open(None, vbuckets=vbuckets, queue_bytes_max=0, background=False) as bucket:
        bucket.create_vbuckets()
        parts = [bucket.vbucket(number) for number in range(vbuckets)]
        sets = [parts[owner].set for owner in owners]
        gets = [parts[owner].get for owner in owners]
        gc.collect()
        gc.disable()
        before = resident_bytes()
        result = {"set": timed(sets, keys, value)}
        result["bytes"] = (resident_bytes() - before) / count
        result["get"] = timed(gets, keys)
        result["replace"] = timed(sets, keys, value)
    del sets, gets, parts
    stores = [SlottedStore(time.time) for _ in range(vbuckets)]
    sets = [stores[owner].set for owner in owners]
    reads = [stores[owner].get for owner in owners]
    values = [bytes(VALUE_BYTES) for _ in keys]
    before = resident_bytes()
    began = time.perf_counter()
    for call, key, own in zip(sets, keys, values, strict=True):
        call(key, own)
    result["slotted_set"] = count / (time.perf_counter() - began)
    result["slotted_bytes"] = (resident_bytes() - before) / count + VALUE_BYTES + 33 + KEY_BYTES + 33
    result["slotted_get"] = timed(reads, keys)
    gc.enable()
    return result


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    r = measure(count)
    print(f"{count} items of {KEY_BYTES} + {VALUE_BYTES} bytes over 1,024 vbuckets, compiled: {COMPILED}")
    print(f"  set      {r['set'] / 1e6:6.2f} M/s   {r['set'] / r['slotted_set']:5.2f} x slotted objects")
    print(f"  replace  {r['replace'] / 1e6:6.2f} M/s")
    print(f"  get      {r['get'] / 1e6:6.2f} M/s   {r['get'] / r['slotted_get']:5.2f} x slotted objects")
    print(f"  memory   {r['bytes']:6.0f} bytes an item, slotted objects {r['slotted_bytes']:.0f}")
    few = measure(count, 16)
    print(f"  1,024 vbuckets take {few['set'] / r['set']:.2f} (set) and {few['get'] / r['get']:.2f} (get) of 16's time")


if __name__ == "__main__":
    main()
