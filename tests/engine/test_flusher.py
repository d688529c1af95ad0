import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from tests.engine.reference_table import stored_record
from tests.support.manual_clock import Clock
from upriver.engine import Bucket, CursorEnd, Vbucket, flusher
from upriver.engine.storage.interface import Block, WriteBatch
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.errors import CorruptData, DurabilityAmbiguous, KeyExists, StorageError, TemporaryFailure
from upriver.model import Change, Event, VbucketState


class FullDisk(LmdbStorage):
    """Refuses writes while told so, in the middle of the transaction as a real disk does."""

    full = False

    def _write(self, txn: lmdb.Transaction, batch: WriteBatch) -> None:
        super()._write(txn, batch)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(quick_disk: Path) -> FullDisk:
    return FullDisk(quick_disk / "data")


def test_a_step_writes_everything_once(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=4, clock=clock)
    bucket.create_vbuckets()
    assert bucket.flusher.step()
    assert not bucket.flusher.step()
    for i in range(100):
        bucket.vbucket(i % 4).set(b"key%d" % i, b"v")
    assert bucket.flusher.step()
    assert bucket.ledger.pending_bytes == 0
    assert [vbucket.persisted_seqno for vbucket in bucket] == [25] * 4
    assert len(list(disk.groups())) == 1
    bucket.close()


def test_nothing_is_written_while_it_pauses(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=4, clock=clock)
    vbucket = bucket.create_vbucket(0)
    bucket.flusher.pause()
    vbucket.set(b"k", b"v")
    reached: list[str] = []
    bucket.flusher.barrier(lambda: reached.append("disk"))
    assert not bucket.flusher.step()
    assert (vbucket.persisted_seqno, reached) == (0, [])
    bucket.flusher.resume()
    assert bucket.flusher.step()
    assert (vbucket.persisted_seqno, reached) == (1, ["disk"])
    bucket.close()


def test_a_pause_does_not_wait_for_the_disk(disk: FullDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(disk, vbuckets=4)
    vbucket = bucket.create_vbucket(0)
    begun, goes_on, commit = threading.Event(), threading.Event(), disk.commit

    def slow(batch: WriteBatch) -> None:
        begun.set()
        assert goes_on.wait(30)
        commit(batch)

    monkeypatch.setattr(disk, "commit", slow)
    vbucket.set(b"before", b"v")
    step = threading.Thread(target=bucket.flusher.step)
    step.start()
    assert begun.wait(30)
    bucket.flusher.pause()
    vbucket.set(b"after", b"v")
    goes_on.set()
    step.join(30)
    assert not bucket.flusher.step()
    assert vbucket.persisted_seqno == 1
    bucket.flusher.resume()
    assert bucket.flusher.step()
    assert vbucket.persisted_seqno == 2
    bucket.close()


def test_work_in_slices_waits_for_the_end_of_a_pause(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=4, clock=clock)
    vbucket = bucket.create_vbucket(0)
    vbucket.set(b"k", b"v")
    bucket.flusher.step()
    bucket.flusher.pause()
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()  # there is no end of it to wait for
    assert bucket.flusher.checkpointing
    bucket.flusher.resume()
    bucket.flusher.drain()
    assert not bucket.flusher.checkpointing
    bucket.close()


def test_the_thread_rests_during_a_pause(disk: FullDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(disk, vbuckets=4, interval_s=0.001)
    bucket.create_vbucket(0).set(b"k", b"v")
    bucket.flusher.step()
    turns, step = list[bool](), bucket.flusher.step

    def counted() -> bool:
        turns.append(bucket.flusher.paused)
        return step()

    monkeypatch.setattr(bucket.flusher, "step", counted)
    bucket.flusher.pause()
    bucket.flusher.request_checkpoint()
    bucket.flusher.start()
    assert not bucket.sync(timeout_s=0.2)
    assert turns.count(True) < 3
    bucket.flusher.resume()
    assert bucket.sync(timeout_s=30)
    deadline = time.monotonic() + 30
    while bucket.flusher.checkpointing and time.monotonic() < deadline:
        bucket.sync(timeout_s=30)
    assert not bucket.flusher.checkpointing
    bucket.close()


def test_sync_and_backup_do_not_pretend_during_a_pause(disk: FullDisk, clock: Clock, tmp_path: Path) -> None:
    bucket = Bucket(disk, vbuckets=4, clock=clock)
    vbucket = bucket.create_vbucket(0)
    bucket.flusher.pause()
    vbucket.set(b"k", b"v")
    assert not bucket.sync()
    with pytest.raises(StorageError, match="resume it"):
        bucket.backup(tmp_path / "without a thread")
    bucket.flusher.start()
    with pytest.raises(StorageError, match="resume it"):
        bucket.backup(tmp_path / "with a thread")
    bucket.flusher.resume()
    assert bucket.sync(timeout_s=30)
    assert vbucket.persisted_seqno == 1
    bucket.backup(tmp_path / "copy")
    bucket.close()


def test_waiters_for_a_vbucket_that_is_gone_are_told(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=1, clock=clock)
    vbucket, reached = bucket.create_vbucket(0), list[str]()
    _, seqno = vbucket.set(b"k", b"v")
    bucket.delete_vbucket(0)
    assert bucket.flusher.step()
    bucket.flusher.when_persisted(vbucket, seqno, lambda: reached.append("told"))
    assert not bucket.flusher.step()
    assert reached == ["told"]
    bucket.close()


def test_full_disk_refuses_writes_and_recovers(disk: FullDisk, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket(disk, vbuckets=1, clock=clock)
    vbucket = bucket.create_vbucket(0)
    vbucket.set(b"k", b"1")
    bucket.flusher.step()
    vbucket.set(b"k", b"2")
    vbucket.set_state(VbucketState.REPLICA)
    vbucket.roll_back(1)
    vbucket.set_state(VbucketState.ACTIVE)
    vbucket.set(b"k", b"3")
    acknowledged: list[int] = []
    bucket.flusher.when_persisted(vbucket, 2, lambda: acknowledged.append(2))
    bucket.flusher.barrier(lambda: acknowledged.append(0))
    disk.full = True
    for _ in range(2):
        with pytest.raises(StorageError, match="No space left"):
            bucket.flusher.step()
    assert len(caplog.records) == 1
    with pytest.raises(TemporaryFailure, match="does not take writes"):
        vbucket.set(b"k", b"4")
    assert vbucket.get(b"k").value == b"3"
    assert acknowledged == []
    assert bucket.statistics().refusal
    disk.full = False
    bucket.flusher.step()
    assert sorted(acknowledged) == [0, 2]
    vbucket.set(b"k", b"5")
    bucket.flusher.step()
    bucket.abandon()
    with Bucket.open(disk.path, vbuckets=1, clock=clock, background=False) as reopened:
        assert reopened.vbucket(0).get(b"k").value == b"5"
        assert reopened.vbucket(0).high_seqno == 3


def test_the_number_of_a_group_that_was_not_written_is_not_used_after_a_restart(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=2, clock=clock)
    bucket.create_vbuckets()
    bucket.vbucket(0).set(b"k", b"1")
    bucket.flusher.step()
    bucket.vbucket(1).set(b"k", b"2")
    disk.full = True
    with pytest.raises(StorageError):
        bucket.flusher.step()
    disk.full = False
    # What waited is gone: so no group is written, while the new vbucket counts only groups above the one that failed.
    bucket.delete_vbucket(1)
    bucket.create_vbucket(1)
    bucket.close()
    with Bucket.open(disk.path, vbuckets=2, clock=clock, background=False) as reopened:
        reopened.vbucket(1).set(b"k", b"3")
    with Bucket.open(disk.path, vbuckets=2, clock=clock, background=False) as again:
        assert again.vbucket(1).get(b"k").value == b"3"
        assert again.vbucket(0).get(b"k").value == b"1"


def test_checkpoints_survive_a_full_disk(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=4, clock=clock, slice_bytes=1)
    bucket.create_vbuckets()
    for i in range(400):
        bucket.vbucket(i % 4).set(b"key%d" % i, b"v" * 100)
    bucket.flusher.step()
    bucket.flusher.request_checkpoint()
    bucket.flusher.step()
    disk.full = True
    with pytest.raises(StorageError):
        bucket.flusher.step()
    disk.full = False
    bucket.flusher.drain()
    assert list(disk.groups()) == []
    assert [vbucket.table.checkpointed_seqno for vbucket in bucket] == [100] * 4
    bucket.abandon()
    with Bucket.open(disk.path, vbuckets=4, clock=clock, background=False) as reopened:
        assert [vbucket.table.items for vbucket in reopened] == [100] * 4


def test_a_checkpoint_starts_by_itself(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=2, clock=clock, checkpoint_bytes=10_000)
    bucket.create_vbuckets()
    for i in range(200):
        bucket.vbucket(i % 2).set(b"key%d" % i, b"v" * 100)
    bucket.flusher.step()
    assert bucket.flusher.checkpointing
    bucket.vbucket(0).set(b"meanwhile", b"v")
    bucket.flusher.drain()
    assert not bucket.flusher.checkpointing
    assert bucket.flusher.group_bytes == sum(len(group) for _, group in disk.groups()) < 1000
    assert sum(len(block.records) for block in disk.blocks(0)) > 10_000
    bucket.close()


def test_a_checkpoint_starts_where_groups_are_small_and_many(
    disk: FullDisk, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``ack=disk`` a single writer makes a group of each write, and opening the store reads them all."""
    monkeypatch.setattr("upriver.engine.flusher.CHECKPOINT_GROUPS", 20)
    bucket = Bucket(disk, vbuckets=2, clock=clock)
    bucket.create_vbuckets()
    most = 0
    for i in range(100):
        bucket.vbucket(i % 2).set(b"key%d" % i, b"v")
        bucket.flusher.step()
        most = max(most, len(list(disk.groups())))
    assert 20 < most < 25
    bucket.abandon()
    with Bucket.open(disk.path, vbuckets=2, clock=clock, background=False) as reopened:
        assert reopened.statistics().items == 100


def test_cut_back_while_a_group_is_on_its_way(disk: FullDisk, clock: Clock) -> None:
    """What a rollback undid must not count as persisted when the group that held it arrives."""
    bucket = Bucket(disk, vbuckets=1, clock=clock)
    vbucket = bucket.create_vbucket(0)
    for i in range(10):
        vbucket.set(b"k%d" % i, b"v")
    bucket.flusher.step()
    for i in range(10):
        vbucket.set(b"k%d" % i, b"w")
    commit = disk.commit

    def commit_late(batch: WriteBatch) -> None:
        vbucket.set_state(VbucketState.REPLICA)
        assert vbucket.roll_back(12) == 12
        commit(batch)

    disk.commit = commit_late  # type: ignore[method-assign]
    bucket.flusher.step()
    assert vbucket.persisted_seqno == 10
    disk.commit = commit  # type: ignore[method-assign]
    bucket.flusher.step()
    assert vbucket.persisted_seqno == 12
    assert bucket.ledger.pending_bytes == 0
    bucket.abandon()
    with Bucket.open(disk.path, vbuckets=1, clock=clock, background=False) as reopened:
        assert (reopened.vbucket(0).high_seqno, reopened.vbucket(0).table.items) == (12, 10)


def test_ack_disk_is_called_from_the_thread(quick_disk: Path) -> None:
    with Bucket.open(quick_disk / "data", vbuckets=1, ack="disk", interval_s=30) as bucket:
        vbucket = bucket.create_vbucket(0)
        done, who = threading.Event(), []

        def acknowledged() -> None:
            who.append(threading.current_thread().name)
            done.set()

        _, seqno = vbucket.set(b"k", b"v")
        bucket.acknowledge(vbucket, seqno, acknowledged)
        assert done.wait(10), "somebody waits, so the interval does not count"
        assert who == ["upriver-flusher"]
        assert vbucket.persisted_seqno == 1
        bucket.acknowledge(vbucket, seqno, acknowledged)
        assert who[1] == threading.current_thread().name
        assert bucket.sync(10)


def test_ack_memory_does_not_wait(quick_disk: Path) -> None:
    with Bucket.open(quick_disk / "data", vbuckets=1, background=False) as bucket:
        vbucket, told = bucket.create_vbucket(0), []
        bucket.acknowledge(vbucket, vbucket.set(b"k", b"v")[1], lambda: told.append(1))
        assert told == [1]


def test_the_thread_goes_on_after_a_full_disk(
    disk: FullDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("upriver.engine.flusher.RETRY_S", 0.01)
    bucket = Bucket(disk, vbuckets=1, interval_s=0.001)
    vbucket = bucket.create_vbucket(0)
    bucket.flusher.step()
    disk.full = True
    bucket.flusher.start()
    done = threading.Event()
    bucket.flusher.when_persisted(vbucket, vbucket.set(b"k", b"v")[1], done.set)
    assert not done.wait(0.1)
    disk.full = False
    assert done.wait(10)
    vbucket.set(b"k", b"w")
    bucket.close()


def test_waiting_on_something_that_is_flushed_away(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=1, clock=clock)
    vbucket, told = bucket.create_vbucket(0), []
    _, seqno = vbucket.set(b"k", b"v")
    bucket.flusher.when_persisted(vbucket, seqno, lambda: told.append(1))
    vbucket.flush()
    bucket.flusher.step()
    assert told == [1]
    bucket.close()


def test_compaction_takes_garbage_out_of_the_blocks(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=1, clock=clock, slice_bytes=20_000)
    vbucket = bucket.create_vbucket(0)
    for i in range(2000):
        vbucket.set(b"key%d" % (i % 100), b"v" * 100)
        if i % 500 == 499:
            bucket.flusher.request_checkpoint()
            bucket.flusher.drain()
    before = sum(len(block.records) for block in disk.blocks(0))
    vbucket.floor_seqno = 2000
    position = 0
    while True:
        position, _ = vbucket.table.sweep(position, 2000, 0, 0, 0)
        if not position:
            break
    bucket.flusher.request_compaction(vbucket)
    bucket.flusher.drain()
    after = sum(len(block.records) for block in disk.blocks(0))
    assert after < before / 15
    bucket.abandon()
    with Bucket.open(disk.path, vbuckets=1, clock=clock, background=False) as reopened:
        assert (reopened.vbucket(0).table.items, reopened.vbucket(0).high_seqno) == (100, 2000)


def test_small_vbuckets_are_compacted_in_one_commit_and_again_if_it_fails(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=32, clock=clock)
    bucket.create_vbuckets()
    for vbucket in bucket:
        for number in range(10):
            vbucket.set(b"key", b"%d" % number)
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    for vbucket in bucket:
        vbucket.floor_seqno = 10
        vbucket.table.sweep(0, 10, 0, 0, 0)
        bucket.flusher.request_compaction(vbucket)
    disk.full = True
    with pytest.raises(StorageError):
        bucket.flusher.step()
    disk.full = False
    commits = bucket.flusher.commits
    bucket.flusher.drain()
    assert bucket.flusher.commits == commits + 1
    stored = [stored_record(block.records, 0) for vbucket in bucket for block in disk.blocks(vbucket.number)]
    assert [record.change.seqno for record, _ in stored] == [10] * 32
    bucket.close()


# Waiters, failures and callbacks.


def test_a_waiter_that_comes_while_a_cut_is_being_committed_waits_for_its_own_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bucket.open(tmp_path / "data", vbuckets=2, ack="disk", background=False) as bucket:
        vbucket, acked = bucket.create_vbucket(0), []
        commit = bucket.storage.commit

        def commit_while_somebody_writes(batch: WriteBatch) -> None:
            monkeypatch.setattr(bucket.storage, "commit", commit)
            _, seqno = vbucket.set(b"key", b"value")
            bucket.acknowledge(vbucket, seqno, lambda: acked.append(vbucket.persisted_seqno))
            commit(batch)

        monkeypatch.setattr(bucket.storage, "commit", commit_while_somebody_writes)
        bucket.flusher.step()
        assert acked == []
        bucket.flusher.step()
        assert acked == [1]


def test_waiters_on_a_history_that_was_cut_are_released_with_the_cut(tmp_path: Path) -> None:
    with Bucket.open(tmp_path / "data", vbuckets=2, ack="disk", background=False) as bucket:
        vbucket, acked = bucket.create_vbucket(0), []
        bucket.flusher.step()
        _, seqno = vbucket.set(b"key", b"value")
        bucket.acknowledge(vbucket, seqno, lambda: acked.append("cut"))
        vbucket.flush()
        bucket.flusher.step()
        assert acked == ["cut"]


def roll_back(vbucket: Vbucket) -> None:
    vbucket.roll_back(1)


@pytest.mark.parametrize("go_back", [roll_back, Vbucket.clear, Vbucket.start_over])
def test_waiters_for_a_change_that_is_undone_are_not_told_that_it_is_on_disk(
    tmp_path: Path, go_back: Callable[[Vbucket], None]
) -> None:
    with Bucket.open(tmp_path / "data", vbuckets=1, ack="disk", background=False) as bucket:
        vbucket, heard = bucket.create_vbucket(0), list[object]()
        vbucket.set(b"kept", b"value")
        bucket.flusher.step()
        _, seqno = vbucket.set(b"undone", b"value")
        bucket.acknowledge(vbucket, seqno, lambda: heard.append("stored"), heard.append)
        vbucket.set_state(VbucketState.REPLICA)
        go_back(vbucket)
        vbucket.set_state(VbucketState.ACTIVE)
        _, seqno = vbucket.set(b"later", b"value")
        bucket.acknowledge(vbucket, seqno, lambda: heard.append("later"), heard.append)
        bucket.flusher.step()
        assert isinstance(heard[0], DurabilityAmbiguous), "the copy that replaces this one may have it"
        assert "undone" in str(heard[0])
        assert heard[1:] == ["later"]


def test_any_failure_of_a_commit_keeps_what_was_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket.open(tmp_path / "data", vbuckets=1, background=False)
    vbucket = bucket.create_vbucket(0)
    bucket.flusher.step()
    vbucket.set(b"key", b"value")
    commit, called = bucket.storage.commit, []

    def fails(_: WriteBatch) -> None:
        raise MemoryError

    monkeypatch.setattr(bucket.storage, "commit", fails)
    bucket.flusher.barrier(lambda: called.append("barrier"))
    with pytest.raises(MemoryError):
        bucket.flusher.step()
    with pytest.raises(TemporaryFailure):
        vbucket.set(b"other", b"value")
    assert called == []
    monkeypatch.setattr(bucket.storage, "commit", commit)
    bucket.close()
    assert called == ["barrier"]
    with Bucket.open(tmp_path / "data", vbuckets=1) as again:
        assert again.vbucket(0).get(b"key").value == b"value"


def after_the_commit(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """A step that is interrupted when its commit has taken effect already."""
    commit = bucket.storage.commit

    def interrupted(batch: WriteBatch) -> None:
        meanwhile()
        commit(batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bucket.storage, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bucket.flusher.step()


def test_an_interruption_behind_the_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket.open(tmp_path / "data", vbuckets=1, background=False)
    vbucket = bucket.create_vbucket(0)
    bucket.flusher.step()
    vbucket.set(b"a", b"1")
    after_the_commit(bucket, monkeypatch, lambda: vbucket.set(b"during", b"2"))
    bucket.flusher.step()
    assert vbucket.persisted_seqno == 2
    bucket.abandon()
    again = Bucket.open(tmp_path / "data", vbuckets=1, background=False)
    assert again.vbucket(0).scan() == [b"a", b"during"]
    again.abandon()


def test_an_interruption_behind_the_commit_brings_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is on disk, though the flusher does not know: it must not count for the vbucket's successor."""
    bucket = Bucket.open(tmp_path / "data", vbuckets=2, background=False)
    vbucket = bucket.create_vbucket(0)
    bucket.flusher.step()
    vbucket.set(b"a", b"1")
    after_the_commit(bucket, monkeypatch, lambda: None)
    bucket.delete_vbucket(0)
    bucket.create_vbucket(0)
    bucket.flusher.step()
    bucket.abandon()
    again = Bucket.open(tmp_path / "data", vbuckets=2, background=False)
    assert again.vbucket(0).scan() == []
    again.abandon()


def test_compaction_leaves_alone_what_a_checkpoint_writes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks beyond the last known checkpoint stand where a commit took effect though it failed."""
    monkeypatch.setattr("upriver.engine.flusher.BLOCK_BYTES", 1000)
    bucket = Bucket.open(tmp_path / "data", vbuckets=1, background=False)
    vbucket = bucket.create_vbucket(0)
    vbucket.set(b"a", b"")
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    for key in (b"b", b"c"):  # each in a block of its own, while both would be merged with the one before
        vbucket.set(key, b"v" * 600)
    bucket.flusher.request_checkpoint()
    after_the_commit(bucket, monkeypatch, lambda: None)
    bucket.flusher.request_compaction(vbucket)
    bucket.flusher.drain()
    bucket.close()
    with Bucket.open(tmp_path / "data", vbuckets=1, background=False) as again:
        assert again.vbucket(0).scan() == [b"a", b"b", b"c"]


def damage_the_block(disk: FullDisk) -> None:
    """Change one byte of the only block of vbucket 0, while the store is open."""
    (block,) = disk.blocks(0)
    file = Path(disk.path, "data.mdb")
    data = file.read_bytes()
    with file.open("r+b") as opened:  # the copies in dropped groups as well
        place = data.find(block.records)
        while place >= 0:
            opened.seek(place + 1000)
            opened.write(b"B")
            place = data.find(block.records, place + 1)
    with pytest.raises(CorruptData):
        disk.blocks(0)


def test_a_damaged_block_stops_only_its_own_compaction(
    disk: FullDisk, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket(disk, vbuckets=2, clock=clock)
    bucket.create_vbuckets()
    for vbucket in bucket:
        vbucket.set(b"key", b"A" * 3000)
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    damage_the_block(disk)
    for vbucket in bucket:
        bucket.flusher.request_compaction(vbucket)
    bucket.vbucket(1).set(b"other", b"value")
    bucket.flusher.drain()
    assert bucket.vbucket(1).persisted_seqno == 2
    bucket.vbucket(0).set(b"other", b"value")  # nor are writers refused
    assert not bucket.flusher.compacting
    assert [record.getMessage() for record in caplog.records if "vbucket 0 is not compacted" in record.getMessage()]
    with pytest.raises(CorruptData):
        disk.blocks(0)  # damage gets no fresh checksum
    bucket.abandon()


def test_a_damaged_block_that_is_cut_back_stops_no_start(
    disk: FullDisk, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket(disk, vbuckets=2, clock=clock)
    bucket.create_vbuckets()
    vbucket, other = bucket
    for number in range(3):
        vbucket.set(b"key%d" % number, b"A" * 3000)
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    damage_the_block(disk)
    vbucket.set_state(VbucketState.REPLICA)
    assert vbucket.roll_back(2) == 2
    other.set(b"key", b"value")
    bucket.flusher.drain()
    assert other.persisted_seqno == 1
    assert "the block of vbucket 0 up to 3 is damaged" in caplog.text
    vbucket.begin_snapshot(2, 3)
    vbucket.apply(
        Change(vbucket=0, event=Event.MUTATION, seqno=3, key=b"new", value=b"C" * 3000)
    )  # under the key that the block had
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    with pytest.raises(CorruptData, match="up to 2 is damaged"):
        disk.blocks(0)  # it gets no new checksum and is not put where no check finds it
    bucket.abandon()
    storage = LmdbStorage(disk.path)
    with pytest.raises(CorruptData, match="up to 2 is damaged"):
        Bucket(storage, vbuckets=2, clock=clock)
    storage.close()


def test_a_damaged_block_is_no_hindrance_where_nothing_of_it_counts(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=2, clock=clock)
    bucket.create_vbuckets()
    bucket.vbucket(0).set(b"key", b"A" * 3000)
    bucket.flusher.step()
    bucket.flusher.request_checkpoint()  # of everything: no group is left
    bucket.flusher.drain()
    damage_the_block(disk)
    bucket.vbucket(0).flush()
    bucket.flusher.drain()
    assert disk.blocks(0) == []
    bucket.abandon()
    with Bucket.open(disk.path, vbuckets=2, background=False) as again:
        assert again.vbucket(0).scan() == []


def test_a_failure_while_gathering_keeps_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket.open(tmp_path / "data", vbuckets=1, background=False)
    vbucket = bucket.create_vbucket(0)
    vbucket.set(b"old", b"value")
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    vbucket.flush()
    vbucket.set(b"new", b"value")
    blocks = bucket.storage.blocks

    def fails(*_: object) -> list[Block]:
        raise OSError("unreadable")

    monkeypatch.setattr(bucket.storage, "blocks", fails)
    for key in (b"again", b"once more"):
        bucket.flusher.request_compaction(vbucket)
        with pytest.raises(OSError, match="unreadable"):
            bucket.flusher.step()
        vbucket.table.ledger.refusal = ""
        vbucket.set(key, b"value")
    monkeypatch.setattr(bucket.storage, "blocks", blocks)
    bucket.close()
    with Bucket.open(tmp_path / "data", vbuckets=1) as again:
        assert sorted(again.vbucket(0).scan()) == [b"again", b"new", b"once more"]


def test_a_callback_that_fails_harms_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Bucket.open(tmp_path / "data", vbuckets=1, ack="disk") as bucket:
        vbucket, done = bucket.create_vbucket(0), threading.Event()

        def fails() -> None:
            raise RuntimeError("the event loop is closed")

        vbucket.when_changed(fails)
        _, seqno = vbucket.set(b"key", b"value")
        bucket.acknowledge(vbucket, seqno, fails)
        bucket.acknowledge(vbucket, seqno, done.set)
        assert done.wait(30)
        assert bucket.sync(30)
        assert bucket.flusher.running
    assert "the event loop is closed" in caplog.text


def test_a_cursor_that_has_ended_does_not_take_its_successor_along(tmp_path: Path) -> None:
    with Bucket.open(None, vbuckets=1, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)
        first = vbucket.open_cursor("name")
        vbucket.flush()
        second = vbucket.open_cursor("name")
        first.close()
        assert vbucket.cursors == {"name": second}
        vbucket.flush()
        assert second.ended is CursorEnd.FLUSHED


def test_an_active_vbucket_is_not_cleared() -> None:
    with Bucket.open(None, vbuckets=1, background=False) as bucket, pytest.raises(KeyExists):
        bucket.create_vbucket(0).clear()


# A failing disk, and those who wait.


def test_a_flush_is_a_write_that_a_full_disk_refuses(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=2, clock=clock)
    bucket.create_vbuckets()
    bucket.vbucket(0).set(b"k", b"v")
    log = bucket.vbucket(0).failover_log
    disk.full = True
    with pytest.raises(StorageError):
        bucket.flusher.step()
    for flush in (bucket.flush, bucket.vbucket(0).flush):
        with pytest.raises(TemporaryFailure, match="No space left") as caught:
            flush()
        assert caught.value.vbucket == 0
    assert bucket.vbucket(0).get(b"k").value == b"v"
    assert bucket.vbucket(0).failover_log == log
    disk.full = False
    bucket.flusher.step()
    bucket.flush()
    assert bucket.statistics().items == 0
    bucket.close()


def test_waiters_hear_of_a_full_disk(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=1, clock=clock, ack="disk")
    vbucket = bucket.create_vbucket(0)
    bucket.flusher.step()
    heard: list[object] = []
    _, seqno = vbucket.set(b"k", b"v")
    bucket.acknowledge(vbucket, seqno, lambda: heard.append("stored"), heard.append)
    bucket.flusher.barrier(lambda: heard.append("all stored"), heard.append)
    disk.full = True
    with pytest.raises(StorageError):
        bucket.flusher.step()
    refused, failed = heard
    assert isinstance(refused, DurabilityAmbiguous)
    assert refused.vbucket == 0
    assert "No space left" in str(refused)
    assert "stored when the disk takes writes again" in str(refused)
    assert isinstance(failed, StorageError)
    assert len(bucket.flusher.waiting) == 0
    disk.full = False
    bucket.flusher.step()
    assert heard == [refused, failed], "each is told once"
    assert vbucket.persisted_seqno == seqno, "stored later all the same"
    bucket.acknowledge(vbucket, vbucket.set(b"k", b"w")[1], lambda: heard.append("stored"), heard.append)
    bucket.flusher.step()
    assert heard[2:] == ["stored"]
    bucket.close()


@pytest.mark.parametrize("background", [False, True])
def test_sync_and_backup_raise_what_the_disk_says(
    disk: FullDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    monkeypatch.setattr("upriver.engine.flusher.RETRY_S", 0.01)
    bucket = Bucket(disk, vbuckets=1, interval_s=0.001)
    vbucket = bucket.create_vbucket(0)
    bucket.flusher.step()
    vbucket.set(b"k", b"v")
    disk.full = True
    if background:
        bucket.flusher.start()
    copy = Path(disk.path).parent / "copy"
    with pytest.raises(StorageError, match="No space left"):
        bucket.sync()
    with pytest.raises(StorageError, match="No space left"):
        bucket.sync(30)
    with pytest.raises(StorageError, match="No space left"):
        bucket.backup(copy)
    assert not copy.exists()
    disk.full = False
    bucket.flusher.stop()
    assert bucket.sync(30)
    bucket.backup(copy)
    vbucket.set(b"k", b"w")
    bucket.close()


def test_sync_gives_up_after_its_time_and_leaves_nothing_behind(
    disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(disk, vbuckets=1)
    vbucket = bucket.create_vbucket(0)
    bucket.flusher.step()
    commit, stuck = disk.commit, threading.Event()

    def hangs(batch: WriteBatch) -> None:
        assert stuck.wait(60)
        commit(batch)

    monkeypatch.setattr(disk, "commit", hangs)
    vbucket.set(b"k", b"v")
    bucket.flusher.start()
    assert not bucket.sync(0.05)
    assert len(bucket.flusher.waiting) == 0
    stuck.set()
    assert bucket.sync(60)
    bucket.close()


def test_a_wait_can_be_given_up(disk: FullDisk, clock: Clock) -> None:
    bucket = Bucket(disk, vbuckets=1, clock=clock, ack="disk")
    vbucket = bucket.create_vbucket(0)
    heard: list[str] = []
    _, seqno = vbucket.set(b"k", b"v")
    waits = [
        bucket.acknowledge(vbucket, seqno, lambda: heard.append("change")),
        bucket.flusher.barrier(lambda: heard.append("everything")),
    ]
    for wait in waits:
        assert wait is not None
        wait.cancel()
    assert len(bucket.flusher.waiting) == 0
    bucket.flusher.step()
    assert heard == []
    assert not bucket.flusher.when_persisted(vbucket, seqno, lambda: heard.append("at once")).waiting
    assert heard == ["at once"]
    bucket.close()


# Checkpoints in slices.


def sizes(batch: WriteBatch) -> int:
    return sum(len(block.records) for block in batch.blocks)


def watched(disk: FullDisk, monkeypatch: pytest.MonkeyPatch) -> list[WriteBatch]:
    """The batches that reach the disk."""
    batches: list[WriteBatch] = []
    commit = disk.commit

    def commit_and_note(batch: WriteBatch) -> None:
        commit(batch)
        batches.append(batch)

    monkeypatch.setattr(disk, "commit", commit_and_note)
    return batches


def test_one_large_vbucket_is_moved_in_slices(disk: FullDisk, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.engine.flusher.BLOCK_BYTES", 10_000)
    monkeypatch.setattr("upriver.engine.flusher.SLICE_S", 60.0)
    bucket = Bucket(disk, vbuckets=1, clock=clock, slice_bytes=50_000)
    vbucket = bucket.create_vbucket(0)
    for i in range(5000):
        vbucket.set(b"key%d" % i, b"v" * 100)
    bucket.flusher.step()
    batches = watched(disk, monkeypatch)
    bucket.flusher.request_checkpoint()
    steps = 0
    while bucket.flusher.checkpointing:
        vbucket.set(b"meanwhile%d" % steps, b"w" * 100)  # what comes in does not keep it from ending
        bucket.flusher.step()
        steps += 1
    assert 15 < steps < 40
    assert all(sizes(batch) < 60_000 for batch in batches)
    assert vbucket.table.checkpointed_seqno >= 5000
    assert len(list(disk.groups())) >= steps - 2, "those that came later are not part of it"
    bucket.abandon()
    with Bucket.open(disk.path, vbuckets=1, clock=clock, background=False) as reopened:
        assert reopened.vbucket(0).table.items == 5000 + steps


def test_slices_are_smaller_where_the_disk_is_slow(
    disk: FullDisk, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.engine.flusher.BLOCK_BYTES", 2000)
    monkeypatch.setattr("upriver.engine.flusher.SLICE_S", 0.0)
    bucket = Bucket(disk, vbuckets=1, clock=clock, slice_bytes=32_000)
    vbucket = bucket.create_vbucket(0)
    for i in range(1000):
        vbucket.set(b"key%d" % i, b"v" * 100)
    bucket.flusher.step()
    batches = watched(disk, monkeypatch)
    bucket.flusher.request_checkpoint()
    bucket.flusher.step()
    for _ in range(8):
        bucket.flusher.step()
    assert sizes(batches[0]) > 30_000
    assert sizes(batches[-1]) < 5000
    monkeypatch.setattr("upriver.engine.flusher.SLICE_S", 60.0)
    for _ in range(6):
        bucket.flusher.step()
    assert sizes(batches[-1]) > 30_000
    bucket.flusher.drain()
    assert vbucket.table.checkpointed_seqno == 1000
    bucket.close()


def test_slices_keep_up_with_what_comes_in(disk: FullDisk, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.engine.flusher.BLOCK_BYTES", 2000)
    bucket = Bucket(disk, vbuckets=1, clock=clock, slice_bytes=3000, checkpoint_bytes=100_000)
    vbucket = bucket.create_vbucket(0)
    most = 0
    for i in range(300):
        for j in range(50):
            vbucket.set(b"key%d-%d" % (i, j), b"v" * 100)
        bucket.flusher.step()
        most = max(most, sum(len(group) for _, group in disk.groups()))
        assert bucket.flusher.group_bytes <= most
    assert most < 400_000
    bucket.close()


def test_many_small_groups_are_dropped_in_slices(disk: FullDisk, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.engine.flusher.DROPPED_GROUPS_MAX", 10)
    bucket = Bucket(disk, vbuckets=1, clock=clock)
    vbucket = bucket.create_vbucket(0)
    for i in range(35):
        vbucket.set(b"key%d" % i, b"v")
        bucket.flusher.step()
    bucket.flusher.request_checkpoint()
    left = []
    while bucket.flusher.checkpointing:
        bucket.flusher.step()
        left.append(len(list(disk.groups())))
        if len(left) == 2:  # a restart in between finds the rest
            bucket.abandon()
            bucket = Bucket(LmdbStorage(disk.path), vbuckets=1, clock=clock)
            disk = bucket.storage  # type: ignore[assignment]
            assert bucket.vbucket(0).table.items == 35
            bucket.flusher.request_checkpoint()
    assert left == [25, 15, 5, 0]
    bucket.close()


@pytest.mark.parametrize("slices", range(6))
def test_a_history_cut_back_during_a_checkpoint(
    disk: FullDisk, clock: Clock, monkeypatch: pytest.MonkeyPatch, slices: int
) -> None:
    """Blocks hold a part of it, groups all of it, and neither what was cut may come back."""
    monkeypatch.setattr("upriver.engine.flusher.BLOCK_BYTES", 500)
    bucket = Bucket(disk, vbuckets=1, clock=clock, slice_bytes=1000)
    vbucket = bucket.create_vbucket(0)
    for i in range(30):
        vbucket.set(b"key%d" % i, b"old" * 30)
        if i % 4 == 3:
            bucket.flusher.step()
    bucket.flusher.request_checkpoint()
    for _ in range(slices):
        bucket.flusher.step()
    batches = watched(disk, monkeypatch)
    for cut_at in (20, 9, 12):
        vbucket.set_state(VbucketState.REPLICA)
        assert vbucket.roll_back(cut_at) == cut_at
        vbucket.set_state(VbucketState.ACTIVE)
        for i in range(5):
            vbucket.set(b"%d-%d" % (cut_at, i), b"new" * 30)
        bucket.flusher.step()
    assert all(sizes(batch) < 2000 for batch in batches), "a cut rewrites nothing but the block that it divides"
    expected = sorted(
        [*(b"key%d" % i for i in range(9)), *(b"9-%d" % i for i in range(3)), *(b"12-%d" % i for i in range(5))]
    )
    for drained in (False, True):
        assert sorted(vbucket.scan()) == expected
        if drained:
            bucket.flusher.request_checkpoint()
            bucket.flusher.drain()
            assert bucket.flusher.cuts[0] == []
        bucket.abandon()
        bucket = Bucket(LmdbStorage(disk.path), vbuckets=1, clock=clock, slice_bytes=1000)
        vbucket = bucket.vbucket(0)
        assert vbucket.high_seqno == 17
    assert sorted(vbucket.scan()) == expected
    assert [c.seqno for s in vbucket.changes() for c in s] == list(range(1, 18))
    bucket.close()


def test_many_cuts_end_in_a_checkpoint(disk: FullDisk, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.engine.flusher.CUTS_MAX", 5)
    bucket = Bucket(disk, vbuckets=1, clock=clock)
    vbucket = bucket.create_vbucket(0)
    most = 0
    for i in range(40):
        vbucket.set(b"key%d" % i, b"v")
        vbucket.set(b"lost", b"v")
        bucket.flusher.step()
        vbucket.set_state(VbucketState.REPLICA)
        assert vbucket.roll_back(i + 1) == i + 1
        vbucket.set_state(VbucketState.ACTIVE)
        bucket.flusher.step()
        most = max(most, len(bucket.flusher.cuts[0]))
    assert most <= 7
    bucket.abandon()
    with Bucket.open(disk.path, vbuckets=1, clock=clock, background=False) as reopened:
        assert sorted(reopened.vbucket(0).scan()) == sorted(b"key%d" % i for i in range(40))


def test_a_goal_does_not_outlive_a_failed_commit(disk: FullDisk, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group that a slice counted on was not written; its number comes again with more in it."""
    monkeypatch.setattr("upriver.engine.flusher.BLOCK_BYTES", 500)
    bucket = Bucket(disk, vbuckets=1, clock=clock, slice_bytes=1000)
    vbucket = bucket.create_vbucket(0)
    for i in range(50):
        vbucket.set(b"key%d" % i, b"v" * 50)
    bucket.flusher.step()
    bucket.flusher.request_checkpoint()
    vbucket.set(b"more", b"v")
    commit = disk.commit

    def fails(_: WriteBatch) -> None:
        vbucket.set(b"in between", b"v")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "commit", fails)
    with pytest.raises(OSError, match="Input/output"):
        bucket.flusher.step()
    monkeypatch.setattr(disk, "commit", commit)
    bucket.flusher.drain()
    bucket.abandon()
    with Bucket.open(disk.path, vbuckets=1, clock=clock, background=False) as reopened:
        assert reopened.vbucket(0).table.items == 52


def test_a_group_takes_no_new_memory_each_time(disk: FullDisk, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is larger than what is kept: that goes at once."""
    monkeypatch.setattr(flusher, "ROOM_BYTES_MAX", 50_000)
    rooms: list[object] = []
    bucket = Bucket(disk, vbuckets=4, clock=clock)
    vbucket, commit = bucket.create_vbucket(0), disk.commit

    def watched(batch: WriteBatch) -> None:
        if batch.group is not None:
            assert isinstance(batch.group[1], memoryview)
            rooms.append(batch.group[1].obj)
        commit(batch)

    monkeypatch.setattr(disk, "commit", watched)
    for size in (5000, 4000, 90_000, 3000):
        vbucket.set(b"k", bytes(size))
        bucket.flusher.step()
    assert rooms[0] is rooms[1]
    assert rooms[2] is not rooms[0]
    assert rooms[3] is not rooms[2]
    bucket.abandon()
    bucket = Bucket(FullDisk(disk.path), vbuckets=4, clock=clock)
    found = bucket.vbucket(0).get(b"k")
    assert found is not None
    assert found.value == bytes(3000)
    bucket.close()
