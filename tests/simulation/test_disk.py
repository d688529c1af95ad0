"""The simulated disk does what the real one does, and keeps only what was committed."""

from pathlib import Path

import pytest

from tests.simulation.disk import Disk, PowerLost
from upriver.engine import Bucket
from upriver.engine.storage.interface import Storage
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.errors import StorageError
from upriver.model import Change, Event, VbucketState


def work_on(storage: Storage) -> Bucket:
    """A history with groups, blocks, a rollback that cuts a block, and compaction."""
    bucket = Bucket(storage, vbuckets=2, clock=lambda: 1_700_000_000.0, interval_s=0)
    bucket.create_vbucket(0, VbucketState.REPLICA)
    vbucket = bucket.vbucket(0)
    for end in (3, 6, 9):
        vbucket.begin_snapshot(end - 3, end)
        for seqno in range(end - 2, end + 1):
            change = Change(
                vbucket=0, event=Event.MUTATION, seqno=seqno, key=b"k%d" % (seqno % 4), cas=seqno, rev_seqno=1
            )
            vbucket.apply(change)
        bucket.flusher.step()
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    vbucket.roll_back(7)
    bucket.flusher.step()
    vbucket.begin_snapshot(6, 8)
    vbucket.apply(Change(vbucket=0, event=Event.DELETION, seqno=8, key=b"k1", cas=8, rev_seqno=2))
    bucket.flusher.step()
    return bucket


def test_it_holds_what_lmdb_holds(tmp_path: Path) -> None:
    real, simulated = LmdbStorage(tmp_path), Disk("simulated")
    for storage in (real, simulated):
        work_on(storage)
    assert simulated.blocks(0) == real.blocks(0)
    assert [(n, bytes(group)) for n, group in simulated.groups()] == [(n, bytes(group)) for n, group in real.groups()]
    theirs, ours = real.descriptions()[0], simulated.descriptions()[0]
    theirs.pop("log"), ours.pop("log")
    assert ours == theirs
    real.close()


def test_what_was_not_committed_is_gone() -> None:
    disk = Disk("simulated")
    bucket = work_on(disk)
    bucket.vbucket(0).set_state(VbucketState.ACTIVE)
    bucket.flusher.step()
    bucket.vbucket(0).set(b"lost", b"")
    bucket.abandon()
    again = Bucket(disk, vbuckets=2, clock=lambda: 1_700_000_000.0, interval_s=0)
    assert again.vbucket(0).high_seqno == 8
    assert again.vbucket(0).table.find(b"lost") is None


@pytest.mark.parametrize(("trouble", "error", "kept"), [(1, StorageError, 8), (2, PowerLost, 8), (3, PowerLost, 9)])
def test_a_commit_can_fail_in_three_ways(trouble: int, error: type[BaseException], kept: int) -> None:
    disk = Disk("simulated")
    bucket = work_on(disk)
    bucket.vbucket(0).set_state(VbucketState.ACTIVE)
    bucket.flusher.step()
    bucket.vbucket(0).set(b"key", b"")
    disk.trouble = trouble
    with pytest.raises(error):
        bucket.flusher.step()
    assert Bucket(disk, vbuckets=2, clock=lambda: 1_700_000_000.0, interval_s=0).vbucket(0).high_seqno == kept
