from functools import partial
from pathlib import Path

import pytest

from tests.support.manual_clock import Clock
from upriver.engine import Bucket
from upriver.errors import KeyNotFound, TemporaryFailure
from upriver.model import VbucketState


def test_totals_are_the_sums_of_their_parts(quick_disk: Path, clock: Clock) -> None:
    with Bucket.open(quick_disk / "data", vbuckets=4, clock=clock, background=False) as bucket:
        bucket.create_vbuckets()
        for number in range(400):
            bucket.vbucket(number % 4).set(b"key%d" % (number // 2), b"value")
        bucket.vbucket(0).delete(b"key0")
        bucket.vbucket(1).set_state(VbucketState.REPLICA)
        clock.pass_by(3)
        s, parts = bucket.statistics(), bucket.vbucket_statistics()
        for name in ("items", "tombstones", "memory_bytes", "history_bytes", "queue_bytes"):
            assert getattr(s, name) == sum(getattr(part, name) for part in parts), name
        assert (s.items, s.tombstones) == (399, 1)
        assert s.queue_bytes > 0
        assert s.queue_age_s == 3
        assert s.resident_ratio == 1.0
        assert [part.state for part in parts] == ["active", "replica", "active", "active"]
        assert [part.high_seqno for part in parts] == [101, 100, 100, 100]
        assert [part.persisted_seqno for part in parts] == [0] * 4
        bucket.flusher.step()
        after, parts = bucket.statistics(), bucket.vbucket_statistics()
        assert (after.queue_bytes, after.queue_age_s) == (0, 0)
        assert [part.persisted_seqno for part in parts] == [101, 100, 100, 100]
        assert after.disk_bytes > 0
        assert after.bytes_written > after.items * 60
        assert after.store == s.store


def test_operations_are_counted_by_kind(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    vbucket.set(b"k", b"1")
    vbucket.add(b"j", b"")
    vbucket.increment(b"k")
    vbucket.increment(b"k")
    vbucket.get(b"k")
    try:
        vbucket.get(b"none")
    except KeyNotFound:
        vbucket.delete(b"k")
    counted = bucket.statistics().operations
    assert {name: count for name, count in counted.items() if count} == {
        "set": 1,
        "add": 1,
        "increment": 2,
        "get": 2,
        "get_miss": 1,
        "delete": 1,
    }


def test_what_is_refused_is_counted_too(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    bucket.ledger.refusal = "no room"
    for refused in (partial(vbucket.set, b"k", b"v"), partial(vbucket.add, b"k", b"v"), partial(vbucket.delete, b"k")):
        with pytest.raises(TemporaryFailure):
            refused()
    counted = bucket.statistics().operations
    assert (counted["set"], counted["add"], counted["delete"]) == (1, 1, 1)


def test_cursors_show_up_by_name(bucket: Bucket) -> None:
    vbucket = bucket.vbucket(0)
    for number in range(10):
        vbucket.set(b"key%d" % number, b"")
    with vbucket.open_cursor("replication to B", 4) as cursor:
        (shown,) = bucket.vbucket_statistics()[0].cursors
        assert (shown.name, shown.seqno, shown.backlog, shown.changes_read) == ("replication to B", 4, 6, 0)
        cursor.next_snapshot()
        cursor.read()
        (shown,) = bucket.vbucket_statistics()[0].cursors
        assert (shown.seqno, shown.backlog, shown.changes_read) == (10, 0, 6)
    assert bucket.vbucket_statistics()[0].cursors == ()
