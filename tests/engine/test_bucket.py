import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.bucket_digest import digest
from tests.support.manual_clock import Clock
from upriver.engine import Bucket, CursorEnd, CursorEnded, Options, Retention
from upriver.engine.flusher import Flusher
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.engine.table import Ledger
from upriver.errors import (
    DataInUse,
    InvalidArguments,
    KeyExists,
    NotMyVbucket,
    OutOfMemory,
    StorageError,
    TemporaryFailure,
)
from upriver.model import Change, Event, FailoverLog, StreamPosition, VbucketState

MIB = 2**20


@pytest.fixture
def path(quick_disk: Path) -> Path:
    return quick_disk / "data"


def opened(path: Path | None, clock: Clock, **options: object) -> Bucket:
    return Bucket.open(path, **{"vbuckets": 4, "clock": clock, "background": False, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 3, 2048, -1])
def test_the_number_of_vbuckets_is_a_power_of_two(count: int) -> None:
    with pytest.raises(InvalidArguments):
        Bucket.open(None, vbuckets=count)


def test_an_acknowledgement_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidArguments, match="not 'dsik'"):
        Bucket.open(None, ack="dsik")  # type: ignore[arg-type]


def test_vbuckets_are_created_and_deleted(path: Path, clock: Clock) -> None:
    with opened(path, clock) as bucket:
        with pytest.raises(NotMyVbucket):
            bucket.vbucket(0)
        with pytest.raises(NotMyVbucket):
            bucket.create_vbucket(4)
        vbucket = bucket.create_vbucket(0)
        with pytest.raises(KeyExists):
            bucket.create_vbucket(0)
        vbucket.set(b"k", b"v")
        bucket.flusher.step()
        bucket.delete_vbucket(0)
        with pytest.raises(NotMyVbucket):
            vbucket.get(b"k")
        assert bucket.ledger.pending_bytes == 0
        assert bucket.create_vbucket(0).table.items == 0
        bucket.create_vbucket(1)
        bucket.delete_vbucket(1)
    with opened(path, clock) as bucket:
        assert bucket.numbers() == [0]
        assert (bucket.vbucket(0).high_seqno, bucket.vbucket(0).table.items) == (0, 0)


def test_a_new_bucket_is_on_disk_with_its_vbuckets_or_not_at_all(path: Path, clock: Clock) -> None:
    opened(path, clock, initial=[0, 2, 3]).abandon()  # nothing was flushed
    with opened(path, clock, initial=[1]) as bucket:
        assert [(v.number, v.state) for v in bucket] == [(n, VbucketState.ACTIVE) for n in (0, 2, 3)]
        bucket.vbucket(2).set(b"k", b"v")
    with opened(path, clock) as bucket:
        assert bucket.vbucket(2).get(b"k").value == b"v"


def test_a_bucket_that_gave_everything_away_gets_nothing_back_by_a_restart(path: Path, clock: Clock) -> None:
    with opened(path, clock, initial=[0, 1]) as bucket:
        for number in bucket.numbers():
            bucket.delete_vbucket(number)
    with opened(path, clock, initial=[0, 1]) as bucket:
        assert bucket.numbers() == []


def test_a_removed_vbucket_gives_back_its_memory_and_takes_nothing(path: Path, clock: Clock) -> None:
    with opened(path, clock) as bucket:
        before = bucket.ledger.memory_bytes
        removed = bucket.create_vbucket(0)
        for i in range(1000):
            removed.set(b"key%d" % i, b"v")
        bucket.delete_vbucket(0)
        assert bucket.ledger.memory_bytes == before
        present = bucket.create_vbucket(0)
        present.set(b"k", b"v")
        for refused in (
            lambda: removed.begin_snapshot(0, 1),
            lambda: removed.advance(1),
            lambda: removed.replace_failover_log(present.failover_log),
            lambda: removed.roll_back(0),
            lambda: removed.set_state(VbucketState.REPLICA),
            removed.clear,
            removed.flush,
        ):
            with pytest.raises(NotMyVbucket):
                refused()
    with opened(path, clock) as bucket:
        assert bucket.vbucket(0).get(b"k").value == b"v"


@pytest.mark.parametrize("state", VbucketState)
def test_readers_of_a_vbucket_learn_that_it_is_deleted(clock: Clock, state: VbucketState) -> None:
    """What is left of a snapshot that was announced must not look as if nothing was in it."""
    with Bucket.open(None, vbuckets=1, clock=clock, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)
        for i in range(10):
            vbucket.set(b"key%d" % i, b"v")
        vbucket.set_state(state)
        reading, waiting = vbucket.open_cursor("reading"), vbucket.open_cursor("waiting", 10)
        reading.next_snapshot()
        assert reading.read_columns(1).num_rows == 1
        called = []
        waiting.subscribe(lambda: called.append(True))
        bucket.delete_vbucket(0)
        assert (reading.ended, waiting.ended) == (CursorEnd.STATE_CHANGED, CursorEnd.STATE_CHANGED)
        assert called
        with pytest.raises(CursorEnded):
            reading.read_columns()


def test_a_clean_stop_changes_nothing(path: Path, clock: Clock) -> None:
    with opened(path, clock) as bucket:
        bucket.create_vbuckets()
        for i in range(100):
            bucket.vbucket(i % 4).set(b"key%d" % i, b"%d" % i, flags=i)
        bucket.vbucket(2).set_state(VbucketState.REPLICA)
        before = digest(bucket)
    for _ in range(2):
        with opened(path, clock) as bucket:
            assert digest(bucket) == before


def test_an_unclean_stop_branches_active_vbuckets_only(path: Path, clock: Clock) -> None:
    bucket = opened(path, clock)
    active, replica = bucket.create_vbucket(0), bucket.create_vbucket(1, VbucketState.REPLICA)
    active.set(b"k", b"on disk")
    replica.begin_snapshot(0, 9)
    replica.apply(Change(vbucket=1, event=Event.MUTATION, seqno=4, key=b"k", cas=1, rev_seqno=1))
    bucket.flusher.step()
    before = digest(bucket)
    active.set(b"k", b"lost")
    bucket.abandon()
    bucket = opened(path, clock)
    assert [entry.seqno for entry in bucket.vbucket(0).failover_log] == [1, 0]
    assert bucket.vbucket(0).get(b"k").value == b"on disk"
    assert digest(bucket, branched=True) == before
    bucket.abandon()
    bucket = opened(path, clock)
    assert [entry.seqno for entry in bucket.vbucket(0).failover_log] == [1, 1, 0]
    bucket.close()


@pytest.mark.parametrize("on_disk", [0, 1, 3])
def test_a_copy_that_counts_for_itself_branches_where_a_crash_took_what_others_saw(
    path: Path, clock: Clock, on_disk: int
) -> None:
    bucket = opened(path, clock)
    bucket.create_vbucket(1, VbucketState.REPLICA)
    bucket.flusher.step()
    copy = bucket.vbucket(1)
    for number in range(5):
        copy.receive(Event.MUTATION, b"seen-%d" % number, cas=number + 1)
        if number < on_disk:
            bucket.flusher.step()
    seen = copy.position
    bucket.abandon()
    bucket = opened(path, clock)
    copy = bucket.vbucket(1)
    assert copy.high_seqno == on_disk
    for number in range(8):
        copy.receive(Event.MUTATION, b"new-%d" % number, cas=number + 10)
    back_to = copy.rollback_for(seen)
    assert back_to is not None
    assert back_to <= on_disk, "a consumer that saw the five goes back to what is still there"
    bucket.close()
    with opened(path, clock) as bucket:
        position = copy.position
        assert bucket.vbucket(1).position == position, "a clean stop takes nothing"
        bucket.vbucket(1).receive(Event.MUTATION, b"more")
        assert bucket.vbucket(1).rollback_for(position) is None


def test_what_a_copy_counts_is_not_told_under_the_uuid_of_a_producer(path: Path, clock: Clock) -> None:
    with opened(path, clock) as bucket:
        copy = bucket.create_vbucket(1, VbucketState.REPLICA)
        copy.replace_failover_log(FailoverLog.fresh(77))
        copy.begin_snapshot(0, 2)
        for seqno in (1, 2):
            copy.apply(Change(vbucket=1, event=Event.MUTATION, seqno=seqno, key=b"%d" % seqno, cas=1, rev_seqno=1))
        cursor = copy.open_cursor("reader")
        copy.receive(Event.MUTATION, b"k")
        assert cursor.ended is CursorEnd.STATE_CHANGED
        assert copy.failover_log.newest.seqno == 2
        assert copy.rollback_for(StreamPosition.at(77, 2)) is None
        assert copy.rollback_for(StreamPosition.at(77, 3)) == 2


@pytest.mark.parametrize("dead_before", [False, True])
def test_the_successor_of_a_vbucket_is_on_disk_with_its_dead_state(path: Path, clock: Clock, dead_before: bool) -> None:
    bucket = opened(path, clock)
    vbucket = bucket.create_vbucket(1)
    if dead_before:
        vbucket.set_state(VbucketState.DEAD)
        bucket.flusher.step()
    vbucket.set_state(VbucketState.DEAD, successor="a->b")
    bucket.flusher.step()
    bucket.abandon()
    bucket = opened(path, clock)
    vbucket = bucket.vbucket(1)
    assert (vbucket.state, vbucket.successor) == (VbucketState.DEAD, "a->b")
    assert (vbucket.may_hand_over_to("a->b"), vbucket.may_hand_over_to("a->c")) == (True, False)
    vbucket.confirm_takeover("a->c")
    assert vbucket.may_hand_over_to("a->b")
    vbucket.confirm_takeover("a->b")
    bucket.flusher.step()
    bucket.abandon()
    bucket = opened(path, clock)
    vbucket = bucket.vbucket(1)
    assert not vbucket.may_hand_over_to("a->b")
    vbucket.set_state(VbucketState.DEAD)
    assert not vbucket.may_hand_over_to("a->b"), "it was dead before"
    vbucket.set_state(VbucketState.ACTIVE)
    assert vbucket.successor == ""
    assert vbucket.may_hand_over_to("a->c")
    bucket.close()


def test_a_flush_that_was_done_before_a_crash_is_known_again(path: Path, clock: Clock) -> None:
    bucket = opened(path, clock)
    bucket.create_vbucket(1).flush(9, mark=77)
    bucket.flusher.step()
    bucket.abandon()
    with opened(path, clock) as bucket:
        assert list(bucket.vbucket(1).flush_marks) == [77]


def test_cas_grows_over_restarts_even_if_the_clock_does_not(path: Path, clock: Clock) -> None:
    seen = []
    for stop in ("close", "abandon", "close"):
        bucket = opened(path, clock)
        if bucket.existing(0) is None:
            bucket.create_vbucket(0)
        seen += [bucket.vbucket(0).set(b"k%d" % i, b"")[0] for i in range(10)]
        bucket.flusher.step()
        seen.append(bucket.vbucket(0).set(b"k", b"perhaps never on disk")[0])
        getattr(bucket, stop)()
        clock.pass_by(-5000)
    assert seen == sorted(set(seen))


def test_cas_is_not_given_twice_by_crashes_before_the_first_flush(path: Path, clock: Clock) -> None:
    bucket = opened(path, clock)
    seen = [bucket.create_vbucket(0).set(b"k", b"on disk")[0]]
    bucket.flusher.step()
    for _ in range(3):
        bucket.abandon()
        bucket = opened(path, clock)
        seen.append(bucket.vbucket(0).set(b"k", b"lost")[0])
    bucket.close()
    assert seen == sorted(set(seen))


def test_cas_of_a_new_bucket_grows_over_a_crash_before_the_first_flush(path: Path, clock: Clock) -> None:
    seen = []
    for _ in range(3):
        bucket = opened(path, clock, initial=[0])
        clock.pass_by(10)
        seen.append(bucket.vbucket(0).set(b"k", b"lost")[0])
        bucket.abandon()
        clock.pass_by(-5000)
    assert seen == sorted(set(seen))


def test_opening_many_small_groups_checks_the_cuts_only_where_one_ends(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per group it would be a look at every vbucket: a minute for what can come together in an hour."""
    looks = []

    class Cuts(dict[int, list[tuple[int, int]]]):
        def items(self) -> Any:
            looks.append(self)
            return super().items()

    class WatchedFlusher(Flusher):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.cuts = Cuts()

    bucket = opened(path, clock)
    bucket.create_vbuckets()
    for i in range(50):
        bucket.vbucket(i % 4).set(b"key%d" % i, b"v")
        bucket.flusher.step()
        if left := {20: 3, 40: 4}.get(i):  # the second cut leaves more than the first
            bucket.vbucket(1).set_state(VbucketState.REPLICA)
            assert bucket.vbucket(1).roll_back(left) == left
            bucket.vbucket(1).set_state(VbucketState.ACTIVE)
            bucket.flusher.step()
    before = digest(bucket)
    bucket.close()
    monkeypatch.setattr("upriver.engine.bucket.Flusher", WatchedFlusher)
    bucket = opened(path, clock)
    assert digest(bucket) == before
    assert len(looks) == 3
    bucket.close()


def test_the_wrong_number_of_vbuckets_is_refused(path: Path, clock: Clock) -> None:
    opened(path, clock).close()
    with pytest.raises(StorageError, match="has 4 vbuckets, not 8"):
        opened(path, clock, vbuckets=8)
    opened(path, clock).close()


def test_the_queue_to_disk_is_bounded(path: Path, clock: Clock) -> None:
    with opened(path, clock, queue_bytes_max=10_000) as bucket:
        vbucket = bucket.create_vbucket(0)

        def fill() -> None:
            for i in range(1000):
                vbucket.set(b"key%d" % i, b"v" * 100)

        with pytest.raises(TemporaryFailure, match="queue"):
            fill()
        assert bucket.statistics().queue_bytes >= 10_000
        bucket.flusher.step()
        vbucket.set(b"k", b"v")


@pytest.mark.parametrize("crashes", [False, True])
def test_revisions_go_on_after_a_flush_and_a_restart(path: Path, clock: Clock, crashes: bool) -> None:
    bucket = opened(path, clock, initial=[0])
    for value in (b"1", b"2", b"3"):
        bucket.vbucket(0).set(b"k", value)
    bucket.close()
    bucket = opened(path, clock)  # what was loaded counts too
    bucket.flush()
    bucket.flusher.step()
    if crashes:
        bucket.abandon()
    else:
        bucket.close()
    with opened(path, clock) as bucket:
        bucket.vbucket(0).set(b"k", b"since")
        assert bucket.vbucket(0).get(b"k").rev_seqno == 4


def test_flush_empties_all_active_vbuckets_durably(path: Path, clock: Clock) -> None:
    bucket = opened(path, clock)
    bucket.create_vbuckets()
    for number in range(4):
        bucket.vbucket(number).set(b"k", b"v")
    bucket.vbucket(3).set_state(VbucketState.REPLICA)
    bucket.flush()
    bucket.flusher.step()
    bucket.abandon()
    with opened(path, clock) as bucket:
        assert [vbucket.table.items for vbucket in bucket] == [0, 0, 0, 1]
        assert [len(vbucket.failover_log) for vbucket in bucket] == [2, 2, 2, 1]
        assert [entry.seqno for entry in bucket.vbucket(0).failover_log] == [0, 0]


def test_a_backup_opens_as_after_a_crash(path: Path, clock: Clock) -> None:
    with opened(path, clock) as bucket:
        vbucket = bucket.create_vbucket(0)
        for i in range(100):
            vbucket.set(b"key%d" % i, b"v")
        bucket.backup(path.parent / "copy")
        before = digest(bucket)
        vbucket.set(b"later", b"")
        with opened(path.parent / "copy", clock) as copy:
            assert digest(copy, branched=True) == before


def test_a_backup_under_load_shows_one_moment(path: Path) -> None:
    """Changes go to the vbuckets in turn, so a copy of one moment holds an unbroken run of them."""
    bucket = Bucket.open(path, vbuckets=4, interval_s=0.001)
    bucket.flusher.checkpoint_bytes = 100_000
    bucket.create_vbuckets()
    stopping, written = threading.Event(), 0

    def back_up() -> None:
        try:
            for number in range(4):
                bucket.backup(path.parent / f"copy{number}")
        finally:
            stopping.set()

    thread = threading.Thread(target=back_up)
    thread.start()
    while not stopping.is_set() or written < 1000:
        try:
            bucket.vbucket(written % 4).set(b"key%d" % (written // 4 % 500), b"%d" % written * 20)
            written += 1
        except TemporaryFailure:
            bucket.sync(30)
    thread.join()
    bucket.close()
    last = -1
    for number in range(4):
        with Bucket.open(path.parent / f"copy{number}", vbuckets=4, background=False) as copy:
            highs = [vbucket.high_seqno for vbucket in copy]
            assert highs == sorted(highs, reverse=True)
            assert highs[0] - highs[-1] <= 1
            assert sum(highs) >= last, "a later copy holds no less"
            last = sum(highs)
            for vbucket in copy:
                assert vbucket.failover_log.newest.seqno == vbucket.high_seqno
                for change in (change for snapshot in vbucket.changes() for change in snapshot):
                    assert change.value == b"%d" % ((change.seqno - 1) * 4 + vbucket.number) * 20
    assert last > 0


def test_each_restored_copy_is_another_store_on_a_branch_of_its_own(path: Path, clock: Clock) -> None:
    with opened(path, clock) as bucket:
        bucket.create_vbucket(0).set(b"k", b"v")
        replica = bucket.create_vbucket(1, VbucketState.REPLICA)
        replica.begin_snapshot(0, 9)
        replica.apply(Change(vbucket=1, event=Event.MUTATION, seqno=4, key=b"k", cas=1, rev_seqno=1))
        bucket.backup(path.parent / "copy")
        original, log = bucket.store, bucket.vbucket(0).failover_log
        replica_log = replica.failover_log
    shutil.copytree(path.parent / "copy", path.parent / "again")
    stores, uuids = {original}, {log.newest.vbucket_uuid}
    for name in ("copy", "again"):
        with opened(path.parent / name, clock) as copy:
            stores.add(copy.store)
            uuids.add(copy.vbucket(0).failover_log.newest.vbucket_uuid)
            assert [e.seqno for e in copy.vbucket(0).failover_log] == [1, 0]
            assert copy.vbucket(0).failover_log.entries[1:] == log.entries
            assert copy.vbucket(1).failover_log == replica_log
            assert (copy.vbucket(1).high_seqno, copy.vbucket(1).consistent_seqno) == (4, 0)
            store = copy.store
        with opened(path.parent / name, clock) as copy:
            assert copy.store == store, "it keeps its new name"
            assert len(copy.vbucket(0).failover_log) == 2
    assert len(stores) == len(uuids) == 3
    with opened(path, clock) as bucket:
        assert bucket.store == original
        assert bucket.vbucket(0).failover_log == log


@pytest.mark.parametrize(
    ("quota", "given", "expected"),
    [
        (0, None, 256 * MIB),
        (64 * MIB, None, 8 * MIB),
        (1024 * MIB, None, 64 * MIB),
        (2**40, None, 256 * MIB),
        (64 * MIB, 1000, 1000),
        (64 * MIB, 0, 0),
    ],
)
def test_what_waits_for_the_disk_is_a_share_of_the_quota(
    clock: Clock, quota: int, given: int | None, expected: int
) -> None:
    with Bucket.open(None, vbuckets=1, quota_bytes=quota, queue_bytes_max=given, clock=clock, background=False) as one:
        assert one.ledger.queue_bytes_max == expected


def test_evicted_values_are_read_back(path: Path, clock: Clock) -> None:
    with opened(path, clock, quota_bytes=3_600_000) as bucket:
        bucket.create_vbuckets()
        # Memory that others gave back comes in pieces of up to 256 KiB, which count whole: the quota has room for it.
        for i in range(9000):
            bucket.vbucket(i % 4).set(b"key%d" % i, b"value %d " % i * 40)
            if i % 100 == 0:
                bucket.flusher.drain()
                bucket.maintenance.run_all()  # its time is not what is looked at here
        statistics = bucket.statistics()
        assert statistics.items == 9000
        assert statistics.resident_ratio < 0.9
        assert statistics.memory_bytes < 3_600_000
        for i in range(9000):
            assert bucket.vbucket(i % 4).get(b"key%d" % i).value == b"value %d " % i * 40
        vbucket = max(bucket, key=lambda one: one.table.evicted)
        for options in (Options(), Options(history=True), Options(keys_only=True)):
            found = [c for s in vbucket.changes(options=options) for c in s]
            assert [c.seqno for c in found] == list(range(1, 2251))
            if not options.keys_only:
                assert all(c.value.startswith(b"value %d " % int(c.key[3:])) for c in found)
        cursor = vbucket.open_cursor("frames")
        cursor.next_snapshot()
        assert cursor.from_disk
        frames = b""
        while cursor.snapshot is not None:
            frames += cursor.read(10_000)
        assert frames.count(b"value %d " % vbucket.number) == 40
        assert (cursor.seqno, cursor.changes_read) == (2250, 2250)
        bucket.flusher.request_checkpoint()
        bucket.flusher.drain()
        before = digest(bucket)
    with opened(path, clock, quota_bytes=2_400_000) as bucket:
        assert bucket.ledger.memory_bytes < 2_400_000, "a store larger than memory opens within its quota"
        assert digest(bucket) == before


def test_memory_runs_out_when_nothing_can_be_evicted(clock: Clock) -> None:
    with Bucket.open(None, vbuckets=1, clock=clock, quota_bytes=100_000, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)

        def fill() -> None:
            for i in range(10_000):
                vbucket.set(b"key%d" % i, b"v" * 100)

        with pytest.raises(OutOfMemory):
            fill()
        assert vbucket.get(b"key0").value == b"v" * 100


@pytest.mark.parametrize("on_disk", [False, True])
def test_deletions_make_room_where_nothing_can_be_evicted(path: Path, clock: Clock, on_disk: bool) -> None:
    with opened(path if on_disk else None, clock, vbuckets=1, quota_bytes=8 * MIB, queue_bytes_max=0) as bucket:
        vbucket = bucket.create_vbucket(0)
        value = b"" if on_disk else b"v" * 500  # what cannot be evicted

        def tried(write: Callable[[bytes], object], keys: range) -> int:
            """How many of the writes are taken, by somebody who tries again after a while."""
            for i in keys:
                for attempt in range(4):
                    try:
                        write(b"key%0200d" % i)
                        break
                    except (OutOfMemory, TemporaryFailure):
                        if attempt == 3:
                            return i - keys.start
                    bucket.flusher.drain()
                    bucket.maintain(0.1)
                if i % 100 == 0:
                    bucket.flusher.step()
            return len(keys)

        count = tried(lambda key: vbucket.set(key, value), range(200_000))
        assert 1000 < count < 200_000
        assert tried(vbucket.delete, range(count)) == count
        assert bucket.ledger.memory_bytes < 8 * MIB * 17 / 16 + 300_000  # chunks count whole
        if not on_disk:
            assert tried(lambda key: vbucket.set(key, value), range(count, count + 1000)) == 1000


def test_rollback_reaches_the_blocks(path: Path, clock: Clock) -> None:
    """What a checkpoint moved into blocks is cut, what was still in groups is moved."""
    bucket = opened(path, clock)
    vbucket = bucket.create_vbucket(0)
    for i in range(300):
        vbucket.set(b"key%d" % (i % 40), b"%d" % i * 20)
        if i in (99, 199):
            bucket.flusher.request_checkpoint()
        if i % 10 == 0:
            bucket.flusher.drain()
    vbucket.set_state(VbucketState.REPLICA)
    for seqno in (250, 150, 60):
        vbucket.roll_back(seqno)
        bucket.flusher.step()
        before = digest(bucket)
        bucket.abandon()
        bucket = opened(path, clock)
        vbucket = bucket.vbucket(0)
        assert vbucket.high_seqno == seqno
        assert digest(bucket) == before
    bucket.close()


def test_closing_twice_and_the_flushers_thread(path: Path) -> None:
    bucket = Bucket.open(path, vbuckets=2)
    bucket.create_vbuckets()
    bucket.vbucket(0).set(b"k", b"v")
    assert bucket.sync(10)
    assert bucket.vbucket(0).persisted_seqno == 1
    bucket.close()
    bucket.close()
    assert len(bucket) == 2


@pytest.mark.parametrize("cleanly", [True, False])
def test_a_closed_bucket_takes_no_writes_and_lets_its_directory_alone(
    path: Path, clock: Clock, tmp_path: Path, cleanly: bool
) -> None:
    bucket = opened(path, clock)
    bucket.create_vbuckets()
    bucket.vbucket(0).set(b"k", b"v")
    bucket.flusher.step()
    if cleanly:
        bucket.close()
    else:
        bucket.vbucket(0).set(b"k", b"lost")
        bucket.abandon()
    with pytest.raises(TemporaryFailure, match="the bucket is closed"):
        bucket.vbucket(0).set(b"k", b"lost")
    with opened(path, clock) as successor:
        if not cleanly:
            with pytest.raises(StorageError, match="is closed"):
                bucket.sync()
        with pytest.raises(StorageError, match="is closed"):
            bucket.storage.backup(str(tmp_path / "backup"))
        bucket.abandon()
        with pytest.raises(DataInUse):
            opened(path, clock)
        assert successor.vbucket(0).get(b"k").value == b"v"
        assert successor.numbers() == [0, 1, 2, 3]


@pytest.mark.parametrize("cleanly", [True, False])
@pytest.mark.parametrize("on_disk", [True, False])
def test_nothing_happens_to_the_vbuckets_of_a_closed_bucket(
    path: Path, clock: Clock, on_disk: bool, cleanly: bool
) -> None:
    bucket = opened(path if on_disk else None, clock)
    vbucket, copy = bucket.create_vbucket(0), bucket.create_vbucket(1, VbucketState.REPLICA)
    vbucket.set(b"k", b"v")
    copy.begin_snapshot(0, 1)
    copy.apply(Change(vbucket=1, event=Event.MUTATION, seqno=1, key=b"k"))
    bucket.flusher.drain()
    before = digest(bucket)
    bucket.close() if cleanly else bucket.abandon()
    for refused in (
        bucket.flush,
        vbucket.flush,
        lambda: bucket.create_vbucket(2),
        bucket.create_vbuckets,
        lambda: bucket.delete_vbucket(0),
        lambda: vbucket.set_state(VbucketState.REPLICA),
        lambda: copy.set_state(VbucketState.ACTIVE),
        lambda: copy.replace_failover_log(vbucket.failover_log),
        lambda: copy.roll_back(0),
        copy.clear,
        copy.start_over,
        lambda: copy.begin_snapshot(1, 2),
        lambda: copy.receive(Event.MUTATION, b"k"),
    ):
        with pytest.raises(TemporaryFailure, match="the bucket is closed"):
            refused()
    assert bucket.numbers() == [0, 1]
    assert digest(bucket) == before


def test_history_beyond_the_limits_is_dropped_from_disk_too(path: Path, clock: Clock) -> None:
    retention = Retention(history_s=10, history_bytes=100_000)
    with opened(path, clock, retention=retention) as bucket:
        vbucket = bucket.create_vbucket(0)
        for i in range(20_000):
            vbucket.set(b"key%d" % (i % 50), b"v" * 100)
            if i % 1000 == 0:
                clock.pass_by(5)
                bucket.flusher.request_checkpoint()
                bucket.flusher.drain()
                bucket.maintain(10)
        bucket.flusher.request_checkpoint()
        bucket.flusher.drain()
        clock.pass_by(60)
        bucket.maintain(10)
        bucket.flusher.drain()
        assert bucket.ledger.history_bytes < 200_000
        assert sum(len(block.records) for block in bucket.storage.blocks(0)) < 1_500_000
        before = digest(bucket)[0]["contents"]
        uuid = vbucket.failover_log.newest
    with opened(path, clock) as bucket:
        assert digest(bucket)[0]["contents"] == before
        assert bucket.vbucket(0).failover_log.newest == uuid


def test_one_thread_works_while_the_flusher_writes(path: Path) -> None:
    """Everything at once: writes, reads, streams, rollbacks, eviction and compaction over a busy flusher."""
    retention = Retention(history_s=0, history_bytes=200_000, tombstone_s=0.2)
    bucket = Bucket.open(
        path, vbuckets=4, quota_bytes=3_000_000, retention=retention, interval_s=0.001, queue_bytes_max=1_000_000
    )
    bucket.flusher.checkpoint_bytes = 200_000
    bucket.create_vbuckets()
    rng, deadline, written, refused = random.Random(1), time.monotonic() + 2.5, 0, 0
    expected: dict[bytes, bytes] = {}
    while time.monotonic() < deadline:
        vbucket = bucket.vbucket(rng.randrange(3))
        key = b"%d-%d" % (vbucket.number, rng.randrange(2000))
        try:
            if rng.random() < 0.8:
                expected[key] = b"%d " % written * rng.randrange(60)
                vbucket.set(key, expected[key])
                written += 1
            elif key in expected:
                vbucket.delete(key)
                del expected[key]
        except (TemporaryFailure, OutOfMemory):
            refused += 1
            expected.pop(key, None)
            bucket.sync(30)
            if key in vbucket.table.live_keys():
                expected[key] = vbucket.get(key).value
        if written % 97 == 0:
            bucket.maintain(0.002)
            scratch = bucket.vbucket(3)
            with suppress(TemporaryFailure, OutOfMemory):
                scratch.set(b"k%d" % written, b"v")
            if rng.random() < 0.2:
                scratch.set_state(VbucketState.REPLICA)
                scratch.roll_back(rng.randrange(scratch.high_seqno + 1))
                scratch.set_state(VbucketState.ACTIVE)
        if written % 499 == 0:
            keys = [c.key for s in vbucket.changes() for c in s if c.event is Event.MUTATION]
            assert sorted(keys) == sorted(k for k in expected if k.startswith(b"%d-" % vbucket.number))
    assert written > 1000
    for key, value in expected.items():
        assert bucket.vbucket(int(key[:1])).get(key).value == value
    before = {number: contents["contents"] for number, contents in digest(bucket).items()}
    bucket.close()
    with Bucket.open(path, vbuckets=4, background=False) as reopened:
        after = {number: contents["contents"] for number, contents in digest(reopened).items()}
        living = {n: {k: v for k, v in part.items() if v[0] == Event.MUTATION} for n, part in after.items()}
        assert living == {n: {k: v for k, v in part.items() if v[0] == Event.MUTATION} for n, part in before.items()}


def test_listeners_hear_of_roles_and_of_what_can_be_streamed(tmp_path: Path) -> None:
    heard: list[int] = []
    with Bucket.open(tmp_path / "b", vbuckets=4, background=False) as bucket:
        bucket.role_listeners.append(heard.append)
        bucket.create_vbucket(1)
        replica = bucket.create_vbucket(2, VbucketState.REPLICA)
        assert heard == [1, 2]
        replica.begin_snapshot(0, 5)
        replica.begin_snapshot(0, 6)
        other = bucket.create_vbucket(3, VbucketState.REPLICA)
        other.receive(Event.MUTATION, b"key", b"value")
        other.receive(Event.MUTATION, b"key", b"value")
        assert heard == [1, 2, 2, 3, 3]
        replica.set_state(VbucketState.REPLICA)  # as before
        bucket.vbucket(1).set_state(VbucketState.DEAD)
        assert heard == [1, 2, 2, 3, 3, 1]


@pytest.mark.parametrize("checkpointed", [True, False])
def test_opening_a_large_vbucket_stays_below_the_quota(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, checkpointed: bool
) -> None:
    """Evicting only after a complete vbucket took as much memory as the vbucket."""
    with opened(path, clock, vbuckets=1, queue_bytes_max=0) as bucket:
        vbucket = bucket.create_vbucket(0)
        for i in range(2000):
            vbucket.set(b"key%d" % i, b"%d" % i * 2500)
            if i % 50 == 0:
                bucket.flusher.step()
        bucket.flusher.request_checkpoint()
        bucket.flusher.drain()
        for i in range(0 if checkpointed else 300):  # these are in groups
            vbucket.set(b"key%d" % i, b"%d" % i * 2500)
            bucket.flusher.step()
    ledgers, peaks = list[Ledger](), list[int]()

    def ledger(*arguments: Any) -> Ledger:
        ledgers.append(Ledger(*arguments))
        return ledgers[0]

    class Watched(LmdbStorage):
        def all_blocks(self) -> Iterator[tuple[int, memoryview]]:
            for block in super().all_blocks():
                yield block
                peaks.append(ledgers[0].memory_bytes)

        def groups(self) -> Iterator[tuple[int, memoryview]]:
            for group in super().groups():
                yield group
                peaks.append(ledgers[0].memory_bytes)

    monkeypatch.setattr("upriver.engine.bucket.Ledger", ledger)
    with Bucket(Watched(path), vbuckets=1, quota_bytes=4 * MIB, clock=clock) as bucket:
        assert bucket.vbucket(0).table.items == 2000
        assert 2 * MIB < max(peaks) < 4 * MIB
        for i in (0, 299, 1999):
            assert bucket.vbucket(0).get(b"key%d" % i).value == b"%d" % i * 2500
