import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.manual_clock import Clock
from upriver.engine import Bucket, CursorEnd, CursorEnded, Options, Retention, Vbucket
from upriver.engine.maintenance import GARBAGE_BYTES_MIN
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.errors import OutOfMemory, RollbackRequired, TemporaryFailure
from upriver.model import Change, Event, VbucketState
from upriver.model.record import PREFIX, Record, pack, size_at, unpack

DAY = 24 * 3600
#: The largest there are.
CHUNK_BYTES = 256 * 1024


def opened(path: Path, clock: Clock, **retention: float) -> Bucket:
    storage = LmdbStorage(path / "data")
    bucket = Bucket(storage, vbuckets=2, clock=clock, retention=Retention(**retention))  # type: ignore[arg-type]
    if not list(bucket):
        bucket.create_vbuckets()
    return bucket


def checkpoint(bucket: Bucket) -> None:
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()


def do(bucket: Bucket, duty: str) -> int:
    return sum(1 for _ in getattr(bucket.maintenance, duty)())


def history(vbucket: Vbucket) -> list[int]:
    return [c.seqno for s in vbucket.changes(options=Options(history=True)) for c in s]


def test_the_pager_expires_what_is_not_read(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock)
    vbucket, replica = bucket.vbucket(0), bucket.vbucket(1)
    for number in range(3000):
        vbucket.set(b"key%d" % number, b"v", expiry=10 if number % 3 == 0 else 0)
        replica.set(b"key%d" % number, b"v", expiry=10)
    replica.set_state(VbucketState.REPLICA)
    do(bucket, "expire")
    assert vbucket.high_seqno == 3000
    clock.pass_by(11)
    do(bucket, "expire")
    do(bucket, "expire")
    assert (vbucket.table.items, vbucket.table.tombstones, vbucket.high_seqno) == (2000, 1000, 4000)
    assert replica.high_seqno == 3000
    expired = [c for s in vbucket.changes(3000) for c in s]
    assert {change.event for change in expired} == {Event.EXPIRATION}
    assert bucket.statistics().operations["expiration"] == 1000
    bucket.close()


def count_walks(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that runs maintenance until nothing is due; it returns how often the vbuckets were walked."""
    vbuckets = bucket.maintenance.vbuckets
    walk = Mock(side_effect=vbuckets)
    monkeypatch.setattr(bucket.maintenance, "vbuckets", walk)

    def turns() -> int:
        walk.reset_mock()
        for _ in range(5):
            bucket.maintain(1.0)
        return walk.call_count

    return turns


def test_nothing_is_looked_at_before_its_time(bucket: Bucket, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    vbucket = bucket.vbucket(0)
    turns = count_walks(bucket, monkeypatch)
    vbucket.set(b"lasting", b"v")
    bucket.maintain()
    assert turns() == 0
    vbucket.set(b"soon", b"v", expiry=10)
    vbucket.set(b"later", b"v", expiry=20)
    clock.pass_by(9)
    assert turns() == 0
    clock.pass_by(1)
    assert turns() > 0
    assert vbucket.table.find(b"soon").event == Event.EXPIRATION  # type: ignore[union-attr]
    assert turns() == 0
    clock.pass_by(10)
    assert turns() > 0
    assert (vbucket.table.items, vbucket.high_seqno) == (1, 5)
    assert turns() == 0


def test_locks_are_looked_for_when_one_ends(bucket: Bucket, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    vbucket, copy = bucket.vbucket(0), bucket.create_vbucket(1, VbucketState.REPLICA)
    vbucket.set(b"k", b"v")
    bucket.maintain()
    turns = count_walks(bucket, monkeypatch)
    vbucket.get_and_lock(b"k", 5)
    copy.begin_snapshot(0, 2)
    copy.apply(Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"a", lock_time=7))
    frames = Change(vbucket=1, event=Event.MUTATION, seqno=2, key=b"b", lock_time=9)
    copy.apply_frames(pack(Record(change=frames, time=0))[PREFIX.size :])
    for passed, left in ((4, 3), (1, 2), (2, 1), (2, 0)):
        clock.pass_by(passed)
        assert (turns() > 0) == (left < 3)
        assert len(vbucket.table.locks) + len(copy.table.locks) == left
    assert turns() == 0


@pytest.mark.parametrize("state", [VbucketState.ACTIVE, VbucketState.REPLICA])
def test_locks_of_one_vbucket_are_looked_at_in_a_step(bucket: Bucket, clock: Clock, state: VbucketState) -> None:
    """Copies have them too, and there may be a thousand."""
    bucket.create_vbuckets()
    for vbucket in bucket:
        vbucket.set(b"k", b"v")
        vbucket.get_and_lock(b"k", 10)
        vbucket.set_state(state)
    clock.pass_by(11)
    left = [len([v for v in bucket if v.table.locks]) for _ in bucket.maintenance.expire()]
    assert left == [3, 2, 1, 0]


def test_a_copy_that_becomes_active_lets_items_expire(
    bucket: Bucket, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    vbucket = bucket.vbucket(0)
    vbucket.set(b"k", b"v", expiry=10)
    vbucket.set_state(VbucketState.REPLICA)
    clock.pass_by(20)
    turns = count_walks(bucket, monkeypatch)
    turns()
    assert turns() == 0, "what does not expire here is not looked for again and again"
    assert vbucket.table.items == 1
    vbucket.set_state(VbucketState.ACTIVE)
    turns()
    assert vbucket.table.tombstones == 1


def test_what_was_loaded_expires_too(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock)
    bucket.vbucket(0).set(b"in a block", b"v", expiry=10)
    checkpoint(bucket)
    bucket.vbucket(1).set(b"in a group", b"v", expiry=20)
    bucket.close()
    bucket = opened(quick_disk, clock)
    for _ in range(2):
        clock.pass_by(10)
        bucket.maintain(1.0)
    assert [vbucket.table.tombstones for vbucket in bucket] == [1, 1]
    bucket.close()


def test_tombstones_are_looked_for_each_minute(bucket: Bucket, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    vbucket = bucket.vbucket(0)
    vbucket.set(b"k", b"v")
    vbucket.delete(b"k")
    vbucket.set(b"last", b"v")
    bucket.flusher.step()
    turns = count_walks(bucket, monkeypatch)
    clock.pass_by(3 * DAY - 30)
    assert turns() == 1
    assert turns() == 0
    clock.pass_by(59)
    assert turns() == 0
    clock.pass_by(2)
    assert turns() == 1
    assert vbucket.table.tombstones == 0
    clock.pass_by(-DAY)  # somebody has set it right
    assert turns() == 1


def test_a_duty_that_failed_starts_again(bucket: Bucket, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    vbucket = bucket.vbucket(0)
    vbucket.set(b"k", b"v", expiry=10)
    clock.pass_by(10)
    vbuckets = bucket.maintenance.vbuckets

    def failing() -> list[Vbucket]:
        monkeypatch.setattr(bucket.maintenance, "vbuckets", vbuckets)
        raise MemoryError

    monkeypatch.setattr(bucket.maintenance, "vbuckets", failing)
    with pytest.raises(MemoryError):
        bucket.maintain(1.0)
    bucket.maintain(1.0)
    assert vbucket.table.tombstones == 1


def test_tombstones_are_purged_after_three_days(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock)
    vbucket = bucket.vbucket(0)
    for number in range(10):
        vbucket.set(b"key%d" % number, b"v")
    for number in range(5):
        vbucket.delete(b"key%d" % number)
        clock.pass_by(DAY)
    vbucket.set(b"last", b"")
    do(bucket, "purge")
    assert vbucket.purge_seqno == 0, "nothing is purged that is not in blocks yet"
    checkpoint(bucket)
    do(bucket, "purge")
    assert (vbucket.purge_seqno, vbucket.table.tombstones, vbucket.floor_seqno) == (12, 3, 12)
    bucket.flusher.request_compaction(vbucket)
    bucket.flusher.drain()
    bucket.close()
    bucket = opened(quick_disk, clock)
    vbucket = bucket.vbucket(0)
    assert (vbucket.purge_seqno, vbucket.table.items, vbucket.table.tombstones) == (12, 6, 3)
    vbucket.set(b"key0", b"back")
    assert vbucket.get(b"key0").rev_seqno == 3, "above every deleted revision, known or purged"
    bucket.close()


@pytest.mark.parametrize("idle", [False, True])
def test_a_deletion_from_the_future_is_purged_in_its_turn(quick_disk: Path, clock: Clock, idle: bool) -> None:
    bucket = opened(quick_disk, clock)
    vbucket = bucket.vbucket(0)
    for number in range(3):
        vbucket.set(b"key%d" % number, b"v")
        vbucket.delete_with_meta(b"key%d" % number, cas=2**62, rev_seqno=20 * number + 20, expiry=2**32 - 1)
    vbucket.set(b"last", b"")
    checkpoint(bucket)
    do(bucket, "purge")
    clock.pass_by(2 * DAY)
    do(bucket, "purge")
    assert vbucket.table.tombstones == 3, "they came two days ago"
    if not idle:
        vbucket.set(b"later", b"")
        checkpoint(bucket)
    clock.pass_by(2 * DAY)
    do(bucket, "purge")
    assert (vbucket.table.tombstones, vbucket.purge_seqno) == (0, 6)
    vbucket.delete(b"last")
    vbucket.set(b"end", b"")
    checkpoint(bucket)
    do(bucket, "purge")
    assert vbucket.table.tombstones == 1, "of today"
    bucket.close()


def test_what_was_seen_on_another_branch_says_nothing(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock)
    vbucket = bucket.vbucket(0)
    vbucket.set(b"key", b"v")
    vbucket.set(b"old", b"v")
    checkpoint(bucket)
    vbucket.delete(b"old")
    do(bucket, "purge")
    clock.pass_by(4 * DAY)
    vbucket.flush()
    for number in range(3):
        vbucket.delete_with_meta(b"key%d" % number, cas=2**62, rev_seqno=20 * number + 20, expiry=2**32 - 1)
    vbucket.set(b"last", b"")
    checkpoint(bucket)
    do(bucket, "purge")
    assert vbucket.table.tombstones == 3
    bucket.close()


def test_tombstones_are_purged_where_so_little_is_written_that_no_checkpoint_comes(
    quick_disk: Path, clock: Clock
) -> None:
    bucket = opened(quick_disk, clock)
    vbucket = bucket.vbucket(0)
    for number in range(100):
        vbucket.set(b"%d" % number, b"v")
        vbucket.delete(b"%d" % number)
    bucket.flusher.drain()
    for _ in range(3):
        clock.pass_by(2 * DAY)
        bucket.maintenance.run_all()
        bucket.flusher.drain()
    assert vbucket.table.tombstones <= 1, "the newest change is never dropped"
    bucket.close()


def test_a_stream_that_stands_still_does_not_fill_the_memory_with_tombstones(quick_disk: Path, clock: Clock) -> None:
    bucket = Bucket(LmdbStorage(quick_disk / "data"), vbuckets=1, clock=clock, quota_bytes=2 * 2**20)
    vbucket = bucket.create_vbucket(0)
    vbucket.set(b"first", b"v")
    stuck = vbucket.open_cursor("stuck", 1)
    number = 0
    for _ in range(20):
        for _ in range(2000):
            number += 1
            vbucket.set(b"%d" % number, b"v" * 20)
            vbucket.delete(b"%d" % number)
        checkpoint(bucket)
        clock.pass_by(4 * DAY)
        bucket.maintenance.run_all()
    assert stuck.ended is CursorEnd.TOO_SLOW
    assert vbucket.table.tombstones < 10_000
    bucket.close()


def test_the_pager_waits_for_the_disk_as_writers_do(clock: Clock) -> None:
    with Bucket.open(None, vbuckets=1, background=False, clock=clock, queue_bytes_max=10_000) as bucket:
        vbucket = bucket.create_vbucket(0)
        for number in range(500):
            vbucket.set(b"%d" % number, b"", expiry=5)
            bucket.flusher.step()
        clock.pass_by(10)
        rounds = 0
        while vbucket.table.items:
            bucket.maintenance.run_all()
            assert bucket.ledger.pending_bytes < 11_000
            bucket.flusher.step()
            rounds += 1
        assert rounds > 1


def test_purge_never_passes_an_open_stream(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock, tombstone_s=0)
    vbucket = bucket.vbucket(0)
    for number in range(10):
        vbucket.set(b"key%d" % number, b"v")
        vbucket.delete(b"key%d" % number)
    vbucket.set(b"last", b"")
    checkpoint(bucket)
    clock.pass_by(10)
    cursor = vbucket.open_cursor("slow", 9)
    do(bucket, "purge")
    assert (vbucket.purge_seqno, vbucket.table.tombstones) == (8, 6)
    cursor.close()
    do(bucket, "purge")
    assert (vbucket.purge_seqno, vbucket.table.tombstones) == (20, 0)
    bucket.close()


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("start", [0, 3000])
@pytest.mark.parametrize("every", [False, True])
def test_a_cursor_opened_during_a_purge_misses_no_deletion(clock: Clock, steps: int, start: int, every: bool) -> None:
    retention = Retention(tombstone_s=10)
    with Bucket.open(None, vbuckets=1, clock=clock, retention=retention, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)
        for number in range(3000):
            vbucket.set(b"key%d" % number, b"x" * 50)
        seen = set(vbucket.table.live_keys()) if start else set()
        for number in range(2000):
            vbucket.delete(b"key%d" % number)
        vbucket.set(b"last", b"")
        bucket.flusher.drain()
        clock.pass_by(100)
        purge = bucket.maintenance.purge()
        for _ in range(steps):
            next(purge, None)
        try:
            cursor = vbucket.open_cursor("late", start, options=Options(history=every))
        except RollbackRequired:
            assert vbucket.purge_seqno > start
            return
        while cursor.next_snapshot() is not None:
            while cursor.snapshot is not None:
                batch = cursor.read_columns(1000)
                for event, key in zip(batch["event"].to_pylist(), batch["key"].to_pylist(), strict=True):
                    (seen.add if event == Event.MUTATION else seen.discard)(key)
                next(purge, None)
        assert seen == set(vbucket.table.live_keys())


def test_a_purged_key_does_not_come_back_to_life(quick_disk: Path, clock: Clock) -> None:
    """The version that a purged tombstone ended must go from disk before, or with, the tombstone."""
    bucket = opened(quick_disk, clock, tombstone_s=0)
    bucket.flusher.slice_bytes = 1
    vbucket = bucket.vbucket(0)
    vbucket.set(b"key", b"v")
    checkpoint(bucket)
    vbucket.delete(b"key")
    checkpoint(bucket)
    vbucket.set(b"last", b"")
    checkpoint(bucket)
    clock.pass_by(10)
    bucket.flusher.request_compaction(vbucket)  # a pass begins before the purge and goes on after it
    bucket.flusher.step()
    do(bucket, "purge")
    for _ in range(10):
        bucket.flusher.step()
        bucket.abandon()
        bucket = opened(quick_disk, clock, tombstone_s=0)
        vbucket = bucket.vbucket(0)
        assert b"key" not in vbucket.table.live_keys()
        do(bucket, "purge")
        bucket.flusher.request_compaction(vbucket)
    bucket.close()


def test_history_is_kept_until_it_is_both_old_and_large(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock, history_s=100, history_bytes=5000)
    vbucket = bucket.vbucket(0)

    def write(count: int) -> None:
        for _ in range(count):
            vbucket.set(b"key", b"x" * 100)
        checkpoint(bucket)

    write(10)
    clock.pass_by(200)
    do(bucket, "compact")
    assert len(history(vbucket)) == 10, "old but small"
    write(90)
    clock.pass_by(50)
    do(bucket, "compact")
    assert history(vbucket) == list(range(10, 101)), "large, but only what is old goes"
    assert vbucket.floor_seqno == 10
    clock.pass_by(200)
    do(bucket, "compact")
    assert history(vbucket) == [100]
    bucket.close()


def test_history_is_dropped_where_so_little_is_written_that_no_checkpoint_comes(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock, history_s=100, history_bytes=5000)
    vbucket = bucket.vbucket(0)
    for number in range(20_000):
        vbucket.set(b"key%d" % (number % 100), b"x" * 100)
    bucket.flusher.drain()
    clock.pass_by(50)
    bucket.maintain(10)
    assert not bucket.flusher.checkpointing, "nothing is old enough"
    clock.pass_by(60)
    for _ in range(2):
        bucket.maintain(10)
        bucket.flusher.drain()
    assert len(history(vbucket)) == 100
    assert list(bucket.storage.groups()) == []
    assert sum(len(block.records) for block in bucket.storage.blocks(0)) < 100_000
    bucket.close()


def checkpoints_for_history(bucket: Bucket, clock: Clock, seconds: int) -> int:
    """How many are asked for while there is a write each second."""
    asked = 0
    for _ in range(seconds):
        bucket.vbucket(0).set(b"key", b"x" * 100)
        bucket.flusher.drain()
        clock.pass_by(1)
        bucket.maintain(10)
        asked += bucket.flusher.checkpointing
        bucket.flusher.drain()
    return asked


def test_old_history_is_moved_into_blocks_each_minute_at_most(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock, history_s=1, history_bytes=1000)
    assert checkpoints_for_history(bucket, clock, 200) == 4
    bucket.close()


def test_history_that_a_cursor_needs_is_not_moved_into_blocks_to_be_dropped(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock, history_s=1, history_bytes=10_000)
    vbucket = bucket.vbucket(0)
    for _ in range(60):
        vbucket.set(b"key", b"x" * 100)
    checkpoint(bucket)
    cursor = vbucket.open_cursor("slow", 10, options=Options(history=True))
    assert checkpoints_for_history(bucket, clock, 30) == 0
    assert vbucket.table.history_bytes > 10_000
    assert cursor.ended is None
    bucket.close()


def figures(bucket: Bucket) -> list[tuple[object, ...]]:
    """What statistics and streams tell of each vbucket."""
    told: list[tuple[object, ...]] = []
    for vbucket, known in zip(bucket, bucket.vbucket_statistics(), strict=True):
        seqnos = (known.high_seqno, known.persisted_seqno, known.purge_seqno, known.floor_seqno)
        sizes = (known.items, known.tombstones, known.history_bytes)
        contents = {change.key: change.value for snapshot in vbucket.changes() for change in snapshot}
        told.append((known.state, seqnos, sizes, contents, history(vbucket)))
    return told


@pytest.mark.parametrize("cleanly", [True, False])
def test_what_was_dropped_stays_dropped_over_a_restart(quick_disk: Path, clock: Clock, cleanly: bool) -> None:
    limits = {"history_s": 100, "history_bytes": 5000}
    bucket = opened(quick_disk, clock, **limits)
    for vbucket in bucket:
        for number in range(3000):
            vbucket.set(b"key%d" % (number % 300), b"%d" % number * 20)
    checkpoint(bucket)
    clock.pass_by(200)
    do(bucket, "compact")
    for vbucket in bucket:
        vbucket.set(b"key0", b"newest")
    bucket.flusher.drain()
    before, floors = figures(bucket), [vbucket.floor_seqno for vbucket in bucket]
    assert floors == [3000, 3000]
    bucket.close() if cleanly else bucket.abandon()

    bucket = opened(quick_disk, clock, **limits)
    assert [vbucket.floor_seqno for vbucket in bucket] == floors
    assert bucket.ledger.history_bytes > 100_000, "the disk had not followed yet"
    loaded_bytes = bucket.statistics().memory_bytes
    largest, held = 0, bucket.ledger.history_bytes
    for _ in bucket.maintenance.sweep():
        largest, held = max(largest, held - bucket.ledger.history_bytes), bucket.ledger.history_bytes
    assert 0 < largest <= CHUNK_BYTES
    assert figures(bucket) == before
    # Memory is taken in chunks and the index grows in steps, so it is not the same to the byte.
    assert bucket.statistics().memory_bytes < loaded_bytes / 2
    assert do(bucket, "sweep") == 0, "once is enough"
    replica = bucket.vbucket(0)
    replica.set_state(VbucketState.REPLICA)
    assert replica.roll_back(2999) == 0, "no state below the floor can be restored"
    bucket.close()


def test_what_comes_back_by_a_restart_leaves_the_disk_too(quick_disk: Path, clock: Clock) -> None:
    """Writes have stopped: what was garbage before counts again."""
    limits = {"history_s": 100, "history_bytes": 5000}
    bucket = opened(quick_disk, clock, **limits)
    vbucket = bucket.vbucket(0)
    for number in range(20_000):
        vbucket.set(b"key%d" % (number % 100), b"x" * 100)
    checkpoint(bucket)
    clock.pass_by(200)
    do(bucket, "compact")
    assert bucket.flusher.compacting
    while bucket.journal.changed:
        bucket.flusher.step()  # the new floor is on disk, a slice of the rewriting perhaps too
    bucket.abandon()
    bucket = opened(quick_disk, clock, **limits)
    bucket.maintenance.run_all()
    bucket.flusher.drain()
    assert sum(len(block.records) for block in bucket.storage.blocks(0)) < 100_000
    assert len(history(bucket.vbucket(0))) == 100
    bucket.close()


def test_a_little_garbage_in_each_of_many_vbuckets_is_much(quick_disk: Path, clock: Clock) -> None:
    retention = Retention(history_s=100, history_bytes=5000)
    bucket = Bucket(LmdbStorage(quick_disk / "data"), vbuckets=32, clock=clock, retention=retention)
    bucket.create_vbuckets()
    for number in range(600):
        for vbucket in bucket:
            vbucket.set(b"key%d" % (number % 10), b"x" * 100)
    checkpoint(bucket)
    clock.pass_by(200)
    bucket.maintenance.run_all()
    bucket.flusher.drain()
    stored = sum(len(block.records) for v in bucket for block in bucket.storage.blocks(v.number))
    assert stored < GARBAGE_BYTES_MIN + 32 * 10 * 250
    bucket.close()


def test_garbage_counts_however_much_is_written_meanwhile(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock, history_s=100, history_bytes=5000)
    vbucket = bucket.vbucket(0)
    for _ in range(5000):
        vbucket.set(b"key", b"x" * 1000)
    checkpoint(bucket)
    clock.pass_by(200)
    held = vbucket.table.history_bytes
    for _ in bucket.maintenance.compact():
        while vbucket.table.history_bytes < held:
            vbucket.set(b"key", b"x" * 1000)
    assert vbucket.floor_seqno == 5000
    assert bucket.flusher.compacting
    bucket.close()


def test_a_sweep_that_was_interrupted_starts_again(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock, history_s=100, history_bytes=5000)
    vbucket = bucket.vbucket(0)
    for number in range(3000):
        vbucket.set(b"key", b"%d" % number)
    checkpoint(bucket)
    clock.pass_by(200)
    round_ = bucket.maintenance.compact()
    while not vbucket.floor_seqno:
        next(round_)
    assert vbucket.table.history_bytes > 0
    do(bucket, "compact")
    assert vbucket.table.history_bytes > 0, "the floor is where it shall be"
    do(bucket, "sweep")
    assert vbucket.table.history_bytes == 0
    bucket.close()


def test_a_cursor_in_the_way_of_a_sweep_keeps_what_it_needs_until_it_is_gone(quick_disk: Path, clock: Clock) -> None:
    limits = {"history_s": 100, "history_bytes": 5000}
    bucket = opened(quick_disk, clock, **limits)
    for number in range(3000):
        bucket.vbucket(0).set(b"key", b"%d" % number)
    checkpoint(bucket)
    clock.pass_by(200)
    do(bucket, "compact")
    bucket.close()

    bucket = opened(quick_disk, clock, **limits)
    vbucket = bucket.vbucket(0)
    cursor = vbucket.open_cursor("slow", 1000, 3000, Options(history=True))
    do(bucket, "sweep")
    assert history(vbucket) == list(range(1000, 3001)), "what it has read is gone, the rest is there"
    assert do(bucket, "sweep") == 0, "in vain"
    cursor.end(CursorEnd.CLOSED)
    bucket.maintenance.run_all()
    assert history(vbucket) == [3000]
    bucket.close()


@pytest.mark.parametrize("cause", ["deletion", "clock"])
def test_a_time_in_the_future_does_not_stop_compaction(quick_disk: Path, clock: Clock, cause: str) -> None:
    bucket = opened(quick_disk, clock, history_s=10, history_bytes=5000)
    vbucket = bucket.vbucket(0)
    vbucket.set(b"first", b"")
    if cause == "deletion":
        vbucket.delete_with_meta(b"gone", cas=5, rev_seqno=1, expiry=2**32 - 1)
    else:
        clock.pass_by(30 * DAY)
        vbucket.set(b"gone", b"")
        clock.pass_by(-30 * DAY)
    for _ in range(3):
        for number in range(3000):
            vbucket.set(b"key%d" % (number % 10), b"x" * 100)
        checkpoint(bucket)
        do(bucket, "compact")
        assert vbucket.table.history_bytes > 5000, "what is young stays"
        clock.pass_by(100)
        do(bucket, "compact")
        assert (vbucket.table.history_bytes, vbucket.floor_seqno) == (0, vbucket.high_seqno)
    bucket.close()


def test_an_announced_snapshot_keeps_what_it_needs(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock, history_s=0, history_bytes=5000)
    vbucket = bucket.vbucket(0)
    for number in range(20):
        vbucket.set(b"key%d" % number, b"old" * 30)
    cursor = vbucket.open_cursor("slow")
    cursor.next_snapshot()
    cursor.read(1)
    for number in range(20):
        for _ in range(2):
            vbucket.set(b"key%d" % number, b"new" * 30)
    checkpoint(bucket)
    clock.pass_by(10)
    do(bucket, "compact")
    assert vbucket.floor_seqno == 20
    seqnos = []
    while cursor.snapshot is not None:
        seqnos += cursor.read_columns(1)["seqno"].to_pylist()
    assert seqnos == list(range(2, 21)), "not thinned"
    bucket.close()


@pytest.mark.parametrize("announced", [False, True])
def test_a_stream_of_every_version_is_never_thinned(quick_disk: Path, clock: Clock, announced: bool) -> None:
    bucket = opened(quick_disk, clock, history_s=0, history_bytes=15_000)
    vbucket = bucket.vbucket(0)
    for number in range(200):
        vbucket.set(b"key%d" % (number % 5), b"x" * 30)
    checkpoint(bucket)
    clock.pass_by(10)
    cursor = vbucket.open_cursor("every", 50, options=Options(history=True))
    if announced:
        cursor.next_snapshot()
    assert 15_000 < bucket.ledger.history_bytes < 30_000
    do(bucket, "compact")
    assert vbucket.floor_seqno == 50
    seqnos: list[int] = []
    while cursor.next_snapshot() is not None:
        seqnos += cursor.read_columns(1000)["seqno"].to_pylist()
    assert seqnos == list(range(51, 201))
    slow = vbucket.open_cursor("slow", 50, options=Options(history=True))
    for number in range(400):
        vbucket.set(b"key%d" % (number % 5), b"x" * 30)
    checkpoint(bucket)
    clock.pass_by(10)
    do(bucket, "compact")
    assert slow.ended is CursorEnd.TOO_SLOW
    bucket.close()


def test_a_cursor_beyond_all_limits_is_ended(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock, history_s=0, history_bytes=5000)
    vbucket, told = bucket.vbucket(0), []
    for number in range(20):
        vbucket.set(b"key%d" % number, b"old" * 30)
    cursor = vbucket.open_cursor("slow")
    cursor.next_snapshot()
    idle = vbucket.open_cursor("idle", 20)
    idle.subscribe(lambda: told.append(1))
    for _ in range(10):
        for number in range(20):
            vbucket.set(b"key%d" % number, b"new" * 30)
    checkpoint(bucket)
    clock.pass_by(10)
    do(bucket, "compact")
    assert cursor.ended is CursorEnd.TOO_SLOW
    with pytest.raises(CursorEnded, match="too slow"):
        cursor.read()
    assert idle.ended is None
    assert vbucket.table.history_bytes == 0
    bucket.close()


def test_eviction_brings_memory_below_the_quota(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock)
    vbucket = bucket.vbucket(0)
    for number in range(5000):
        vbucket.set(b"key%d" % number, b"value" * 100)
    checkpoint(bucket)
    bucket.ledger.quota_bytes = bucket.ledger.memory_bytes
    for _ in range(3):
        vbucket.get(b"key7")
        do(bucket, "evict")
    assert bucket.ledger.memory_bytes <= bucket.ledger.quota_bytes * 0.85
    statistics = bucket.statistics()
    assert 0 < statistics.resident_ratio < 1
    assert statistics.evicted_bytes > 0
    assert vbucket.get(b"key1").value == b"value" * 100
    values, kept = [], []
    with vbucket.open_cursor("records") as cursor:
        cursor.next_snapshot()
        assert cursor.from_disk
        while cursor.snapshot is not None:
            data, at = cursor.read_records(), 0
            while at < len(data):
                record = unpack(data, at)
                values.append(record.change.value)
                kept.append(record.ttl)
                at += size_at(data, at)
    assert (len(values), set(values), set(kept)) == (5000, {b"value" * 100}, {255})
    bucket.close()


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("maintained", [False, True])
def test_hot_keys_are_overwritten_for_ever(quick_disk: Path, clock: Clock, on_disk: bool, maintained: bool) -> None:
    quota = 2**20
    path = quick_disk / "data" if on_disk else None
    with Bucket.open(path, vbuckets=1, clock=clock, quota_bytes=quota, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)
        vbucket.set(b"key0", b"")
        slow = vbucket.open_cursor("slow", options=Options(history=True))
        slow.next_snapshot()
        refused = 0
        for number in range(50_000):
            try:
                vbucket.set(b"key%d" % (number % 100), b"x" * 128)
                refused = 0
            except TemporaryFailure:  # never out of memory: what is superseded can go when more is on disk
                refused += 1
                assert refused < 5, "for ever"
                bucket.flusher.drain()
            if number % 1000 == 0:
                bucket.flusher.drain()
                if maintained:
                    bucket.maintenance.run_all()
        assert slow.ended is CursorEnd.TOO_SLOW
        assert vbucket.table.items == 100
        assert bucket.ledger.memory_bytes <= quota + 1000


def test_a_write_without_room_that_cannot_be_made_is_refused_at_once(
    quick_disk: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bucket.open(quick_disk / "data", vbuckets=1, clock=clock, quota_bytes=4 * 2**20, background=False) as bucket:
        vbucket, rounds = bucket.create_vbucket(0), list[int]()

        def fill() -> None:
            for _ in range(10**6):
                vbucket.set(b"key%d" % vbucket.high_seqno, b"x" * 1000)

        with pytest.raises(TemporaryFailure):
            fill()
        begin = bucket.maintenance._relief_round

        def counted() -> Iterator[None]:
            rounds.append(1)
            return begin()

        monkeypatch.setattr(bucket.maintenance, "_relief_round", counted)
        monkeypatch.setattr("upriver.engine.maintenance.LOOK_AGAIN_S", 3600.0)
        for _ in range(1000):
            with pytest.raises(TemporaryFailure):
                vbucket.set(b"key", b"x")
        assert len(rounds) <= 2, "nothing is on disk, so nothing can go"
        checkpoint(bucket)
        high = vbucket.high_seqno
        with pytest.raises(TemporaryFailure):
            fill()
        assert vbucket.high_seqno > high + 1000, "values that are on disk make room"


def test_memory_is_out_when_the_disk_has_everything(quick_disk: Path, clock: Clock) -> None:
    with Bucket.open(quick_disk / "data", vbuckets=1, clock=clock, quota_bytes=2**20, background=False) as bucket:
        vbucket, refusals = bucket.create_vbucket(0), list[type[Exception]]()
        for number in range(10_000):  # nothing but metadata, which stays
            try:
                vbucket.set(b"key%0200d" % number, b"")
                refusals.clear()
            except (OutOfMemory, TemporaryFailure) as error:
                refusals.append(type(error))
                if len(refusals) == 5:
                    break
                bucket.flusher.drain()
        assert refusals[0] is TemporaryFailure
        assert refusals[-1] is OutOfMemory


def test_short_memory_spares_a_cursor_that_holds_little(clock: Clock) -> None:
    with Bucket.open(None, vbuckets=1, clock=clock, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)
        for number in range(1000):
            vbucket.set(b"key%d" % number, b"x" * 100)
        cursor = vbucket.open_cursor("reading")
        cursor.next_snapshot()
        for _ in range(2):
            for number in range(10):
                vbucket.set(b"key%d" % number, b"y" * 100)
        bucket.flusher.drain()
        bucket.ledger.quota_bytes = bucket.ledger.memory_bytes
        do(bucket, "compact")
        assert cursor.ended is None
        assert vbucket.floor_seqno == 1000
        assert cursor.read_columns(2**20).num_rows == 1000
        do(bucket, "compact")
        assert vbucket.table.history_bytes == 0, "no stream needs it any more"


def test_a_large_value_does_not_keep_its_memory(quick_disk: Path, clock: Clock) -> None:
    """Although nothing was written after it: with one in every vbucket, no client could write any more."""
    bucket = opened(quick_disk, clock)
    for vbucket in bucket:
        vbucket.set(b"large", b"v" * 2_000_000)
    checkpoint(bucket)
    bucket.ledger.quota_bytes = 1_000_000
    assert bucket.ledger.memory_bytes > 4_000_000
    do(bucket, "evict")
    assert bucket.ledger.memory_bytes < 500_000
    for vbucket in bucket:
        vbucket.set(b"small", b"v" * 100)
        assert vbucket.get(b"large").value == b"v" * 2_000_000
        assert vbucket.get(b"small").value == b"v" * 100
    bucket.close()


def test_nor_does_one_that_was_deleted(clock: Clock) -> None:
    retention = Retention(history_s=1, history_bytes=0)
    with Bucket.open(None, vbuckets=1, clock=clock, retention=retention, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)
        vbucket.set(b"large", b"v" * 2_000_000)
        vbucket.delete(b"large")
        bucket.flusher.drain()
        clock.pass_by(100)
        bucket.maintenance.run_all()
        assert bucket.ledger.memory_bytes < 200_000
        vbucket.set(b"small", b"v")
        assert history(vbucket) == [2, 3]


def test_memory_only_evicts_nothing(clock: Clock) -> None:
    with Bucket.open(None, vbuckets=1, clock=clock, quota_bytes=1000, background=False) as bucket:
        bucket.create_vbucket(0).set(b"k", b"v" * 2000)
        bucket.flusher.step()
        assert do(bucket, "evict") == 0
        assert bucket.vbucket(0).table.evicted == 0


def test_no_step_does_more_than_a_chunk(quick_disk: Path, clock: Clock) -> None:
    """However many items a vbucket has: that is what bounds a step's time."""
    bucket = opened(quick_disk, clock, history_s=1, history_bytes=1000, tombstone_s=10)
    vbucket, table = bucket.vbucket(0), bucket.vbucket(0).table
    for turn in range(2):
        for number in range(20_000):
            vbucket.set(b"key%d" % number, b"v" * 100, expiry=10 if turn and number % 2 else 0)
    checkpoint(bucket)
    clock.pass_by(11)

    def largest(duty: str, done: Callable[[], int]) -> tuple[int, int]:
        """How much it did in all, and in its largest step."""
        counts = [done(), *(done() for _ in getattr(bucket.maintenance, duty)())]
        return counts[-1] - counts[0], max(after - before for before, after in pairwise(counts))

    for duty, done, everything in (
        ("expire", lambda: vbucket.high_seqno, 10_000),
        ("compact", lambda: -table.history_bytes, table.history_bytes),
        ("purge", lambda: -table.tombstones, 10_000 - 1),
        ("evict", lambda: table.evicted, None),
    ):
        if duty == "purge":
            checkpoint(bucket)
            clock.pass_by(11)
        if duty == "evict":
            bucket.ledger.quota_bytes = bucket.ledger.memory_bytes
        total, step = largest(duty, done)
        assert total == everything if everything is not None else total > 1000
        assert 0 < step <= (CHUNK_BYTES if duty == "compact" else CHUNK_BYTES // 64), duty
    bucket.close()


def test_run_keeps_to_its_budget_and_goes_on_later(quick_disk: Path, clock: Clock) -> None:
    bucket = opened(quick_disk, clock)
    vbucket = bucket.vbucket(0)
    for number in range(30_000):
        vbucket.set(b"key%d" % number, b"v", expiry=10)
    clock.pass_by(20)
    bucket.maintain(0.0)
    bucket.maintain(0.000001)
    assert vbucket.table.items > 0
    deadline = time.monotonic() + 60
    while vbucket.table.items and time.monotonic() < deadline:
        bucket.maintain(0.005)
    assert vbucket.table.items == 0
    assert vbucket.high_seqno == 60_000
    bucket.maintenance.run_all()
    assert bucket.maintenance.longest_step_s < 0.5, "some milliseconds of CPU, and this much on any machine"
    bucket.close()
