import random
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import reference_table
from tests.support.depth import examples
from tests.support.manual_clock import Clock
from upriver.engine import Bucket, Vbucket
from upriver.engine.key_scan import KeyScan
from upriver.engine.table import _table
from upriver.model import VbucketState

BACKENDS: list[ModuleType] = [reference_table, _table]

keys = st.binary(min_size=1, max_size=4)
step = st.one_of(
    st.tuples(st.sampled_from(["set", "set", "delete", "expire"]), keys),
    st.tuples(st.just("page"), st.binary(max_size=4)),
)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)
@settings(max_examples=examples(100), deadline=None)
@given(steps=st.lists(step, max_size=80), window=st.integers(1, 8), walked=st.integers(0, 8), limit=st.integers(0, 12))
def test_every_page_is_what_sorting_gives(
    backend: ModuleType, steps: list[tuple[str, bytes]], window: int, walked: int, limit: int
) -> None:
    clock = Clock()
    held: set[bytes] = set()
    scanned = backend.Table(0, backend.Ledger(clock))
    scanned.active = True
    scan = KeyScan(scanned, window, walked)
    for what, key in steps:
        if what == "page":
            assert scan.page(key, limit) == sorted(k for k in held if k >= key)[:limit]
        elif what == "set":
            scanned.set(key, b"")
            held.add(key)
        elif what == "expire":
            scanned.set(key, b"", 0, 5)
            held.discard(key)
            clock.pass_by(5)
        elif key in held:
            scanned.delete(key)
            held.discard(key)
    assert scan.page(b"", 10**6) == sorted(held)
    assert scanned.smallest_keys(b"", limit) == sorted(held)[:limit]
    assert all(scanned.holds(key) == (key in held) for what, key in steps)


def large(bucket: Bucket, count: int) -> Vbucket:
    vbucket = bucket.vbucket(0)
    numbers = list(range(count))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        vbucket.set(b"key-%06d" % number, b"")
    return vbucket


def test_pages_of_a_large_vbucket_cost_few_walks(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    vbucket = large(bucket, 3000)
    scan, walks = KeyScan(vbucket.table, 500, 1000), list[bytes]()
    walk = scan._walk

    def counted(start: bytes, count: int) -> None:
        walks.append(start)
        walk(start, count)

    monkeypatch.setattr(scan, "_walk", counted)
    found: list[bytes] = []
    while page := scan.page(found[-1] + b"\0" if found else b"", 10):
        found += page
        vbucket.set(b"other", b"")  # a writer that continues does not restart the scan
    assert found == [*(b"key-%06d" % number for number in range(3000)), b"other"]
    assert len(walks) == 7
    assert len(scan._keys) <= 1000


def test_a_page_larger_than_the_window_leaves_no_large_window(bucket: Bucket) -> None:
    vbucket = large(bucket, 2000)
    scan = KeyScan(vbucket.table, 100, 1000)
    assert len(scan.page(b"", 1500)) == 1500
    assert scan._keys == []


def test_another_history_is_scanned_from_the_beginning(bucket: Bucket) -> None:
    vbucket = large(bucket, 200)
    vbucket.scanned = KeyScan(vbucket.table, 50, 10)
    assert vbucket.scan(b"", 2) == [b"key-000000", b"key-000001"]
    vbucket.set_state(VbucketState.REPLICA)
    vbucket.roll_back(100)
    vbucket.set_state(VbucketState.ACTIVE)
    for number in range(100):  # the same seqnos, other keys
        vbucket.set(b"another-%03d" % number, b"")
    assert vbucket.scan(b"", 2) == [b"another-000", b"another-001"]
    vbucket.flush()
    for number in range(200):
        vbucket.set(b"a-third-%03d" % number, b"")
    assert vbucket.scan(b"", 1000) == [b"a-third-%03d" % number for number in range(200)]
