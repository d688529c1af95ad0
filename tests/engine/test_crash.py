"""A stop at every instant: the store opens in exactly the state of the last commit."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.watched_disk import run_watched
from tests.support.bucket_digest import digest
from tests.support.manual_clock import Clock
from upriver.engine import Bucket, Retention
from upriver.engine.storage.interface import WriteBatch
from upriver.engine.storage.lmdb import DATA_FILE, LOCK_FILE, LmdbStorage
from upriver.model import Change, Event, FailoverEntry, FailoverLog, VbucketState


class Stop(BaseException):
    """The world ends here."""


class CountedTransaction:
    """An LMDB transaction whose n-th write never happens."""

    def __init__(self, transaction: Any, storage: "StoppingStorage") -> None:
        self._transaction, self._storage = transaction, storage

    def put(self, *arguments: Any, **options: Any) -> Any:
        self._storage.count()
        return self._transaction.put(*arguments, **options)

    def delete(self, *arguments: Any, **options: Any) -> Any:
        self._storage.count()
        return self._transaction.delete(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)


class StoppingStorage(LmdbStorage):
    """Stops at the n-th write inside a transaction, or right after the n-th commit."""

    def __init__(self, path: Path, stop_at: int, after_commit: bool) -> None:
        super().__init__(path)
        self.stop_at, self.after_commit = stop_at, after_commit
        self.writes = self.commits = 0
        #: What the disk holds if everything until now is there.
        self.photograph: Callable[[], Any] | None = None
        self.committed: Any = None

    def count(self) -> None:
        self.writes += 1
        if not self.after_commit and self.writes == self.stop_at:
            raise Stop

    def _write(self, txn: Any, batch: WriteBatch) -> None:
        counted: Any = CountedTransaction(txn, self)
        super()._write(counted, batch)

    def commit(self, batch: WriteBatch) -> None:
        state = self.photograph() if self.photograph is not None else None
        super().commit(batch)
        self.committed = state
        self.commits += 1
        if self.after_commit and self.commits == self.stop_at:
            raise Stop


def change(seqno: int, key: bytes, value: bytes) -> Change:
    return Change(vbucket=2, event=Event.MUTATION, seqno=seqno, rev_seqno=1, cas=5, key=key, value=value)


def scripted_run(bucket: Bucket, clock: Clock) -> None:
    """Something of everything that reaches the disk."""
    step = bucket.flusher.step
    first, second = bucket.create_vbucket(0), bucket.create_vbucket(1)
    replica = bucket.create_vbucket(2, VbucketState.REPLICA)
    step()
    for i in range(12):
        first.set(b"key%d" % (i % 5), b"first %d" % i)
        second.set(b"key%d" % i, b"x" * 3000)
    step()
    first.delete(b"key1")
    replica.replace_failover_log(FailoverLog((FailoverEntry(77, 0),)))
    replica.begin_snapshot(0, 10)
    replica.apply(change(4, b"a", b"1"))
    step()
    replica.apply(change(10, b"b", b"2"))
    replica.begin_snapshot(10, 20)
    replica.apply(change(15, b"a", b"3"))
    step()
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    second.set(b"key3", b"again")
    replica.roll_back(12)
    replica.replace_failover_log(FailoverLog((FailoverEntry(78, 10), FailoverEntry(77, 0))))
    step()
    replica.begin_snapshot(10, 12)
    replica.apply(change(11, b"c", b"4"))
    step()
    replica.apply(change(12, b"d", b"5"))
    replica.begin_snapshot(12, 16)
    replica.apply(change(14, b"c", b"6"))
    step()
    replica.roll_back(13)  # while older groups hold both sides of the cut
    replica.begin_snapshot(12, 14)
    replica.apply(change(13, b"e", b"7"))
    step()
    replica.set_state(VbucketState.ACTIVE)
    replica.set(b"own", b"5")
    step()
    clock.pass_by(100)
    second.flush()
    second.set(b"after", b"flush")
    step()
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    for duty in (bucket.maintenance.purge, bucket.maintenance.compact):
        for _ in duty():
            pass
    for vbucket in bucket:
        bucket.flusher.request_compaction(vbucket)
    bucket.flusher.drain()
    bucket.delete_vbucket(1)
    bucket.create_vbucket(1).set(b"new", b"life")
    step()
    first.set_state(VbucketState.DEAD)
    step()


def open_stopping(path: Path, clock: Clock, stop_at: int, after_commit: bool) -> tuple[Bucket, StoppingStorage]:
    storage = StoppingStorage(path, 0, after_commit)
    retention = Retention(history_s=0, history_bytes=0, tombstone_s=0)
    bucket = Bucket(storage, vbuckets=4, clock=clock, retention=retention, slice_bytes=4000)
    storage.stop_at = stop_at
    storage.writes = storage.commits = 0
    storage.committed = digest(bucket)
    storage.photograph = lambda: digest(bucket)
    return bucket, storage


@pytest.mark.parametrize("after_commit", [False, True])
def test_stop_at_every_write(quick_disk: Path, after_commit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.engine.flusher.BLOCK_BYTES", 4000)  # the larger vbucket takes several slices
    stop_at = 0
    while True:
        stop_at += 1
        path, clock = quick_disk / str(stop_at), Clock()
        bucket, storage = open_stopping(path, clock, stop_at, after_commit)
        finished = False
        try:
            scripted_run(bucket, clock)
            finished = True
        except Stop:
            pass
        bucket.abandon()
        with Bucket.open(path, vbuckets=4, clock=clock, background=False) as reopened:
            assert digest(reopened, branched=True) == storage.committed, f"stopped at {stop_at}"
            for vbucket in reopened:
                if vbucket.state is VbucketState.ACTIVE:
                    vbucket.set(b"it", b"goes on")
            expected = digest(reopened)
        with Bucket.open(path, vbuckets=4, clock=clock, background=False) as again:
            assert digest(again) == expected
        shutil.rmtree(path)
        if finished:
            break
    assert stop_at > (15 if after_commit else 40)


#: The scripted run on a disk that is watched. After each commit what the disk holds then is put beside what it should
#: hold. LMDB may be told to sync less than it should.
SYNCED_RUN = """
import json, pickle, shutil, sys
from pathlib import Path
import lmdb
from tests.support.manual_clock import Clock
from tests.support.bucket_digest import digest
from tests.engine.test_crash import StoppingStorage, scripted_run
from upriver.engine import Bucket, Retention
path, image, less = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
opened, moments = lmdb.open, []
lmdb.open = lambda *arguments, **options: opened(*arguments, **options, **less)

class ImagedStorage(StoppingStorage):
    def commit(self, batch):
        super().commit(batch)
        moments.append(self.committed)
        if image.exists():
            shutil.copyfile(image, image.with_name(f"{len(moments)}.image"))

storage, clock = ImagedStorage(path, 0, True), Clock()
retention = Retention(history_s=0, history_bytes=0, tombstone_s=0)
bucket = Bucket(storage, vbuckets=4, clock=clock, retention=retention, slice_bytes=4000)
moments[:] = [None]
storage.photograph = lambda: digest(bucket)
scripted_run(bucket, clock)
bucket.abandon()
image.with_name("moments").write_bytes(pickle.dumps(moments))
"""


def synced_run(work: Path, **less: bool) -> list[tuple[bytes, Any]]:
    """What the disk held after each commit, and what it should."""
    image = work / "image"
    run_watched(work, SYNCED_RUN, str(work / "data"), str(image), json.dumps(less), image=image)
    moments = pickle.loads((work / "moments").read_bytes())
    images = {number: work / f"{number}.image" for number in range(2, len(moments) + 1)}
    found = [(file.read_bytes() if file.exists() else b"", moments[n - 1]) for n, file in images.items()]
    assert len(found) > 15
    return found


def open_image(work: Path, image: bytes | bytearray) -> Any:
    restored = work / "restored"
    restored.mkdir()
    (restored / DATA_FILE).write_bytes(image)
    (restored / LOCK_FILE).touch()
    try:
        with Bucket.open(restored, vbuckets=4, clock=Clock(), background=False) as bucket:
            return digest(bucket, branched=True)
    finally:
        shutil.rmtree(restored)


def test_files_as_of_the_last_fsync(quick_disk: Path) -> None:
    """A kill leaves the page cache alive; a power cut leaves what was synced, and any of the pages after it."""
    rng = random.Random(1)
    for (before, expected), (after, _) in pairwise(synced_run(quick_disk)):
        for torn in (0.0, 0.5, 1.0):
            image = bytearray(max(before, after, key=len) if torn else before)
            for page in range(0, len(image), 4096):
                # The first two pages say which commit is the last; LMDB writes them after all others.
                newer = page >= 2 * 4096 and rng.random() < torn
                source = after if newer else before
                image[page : page + 4096] = source[page : page + 4096].ljust(4096, b"\0")
            assert open_image(quick_disk, image) == expected


@pytest.mark.parametrize("less", ["sync", "metasync"])
def test_with_less_than_an_fsync_the_files_lack_commits(quick_disk: Path, less: str) -> None:
    """The test above can fail: it sees what was synced and nothing else."""
    lacking = [
        not image or open_image(quick_disk, image) != expected
        for image, expected in synced_run(quick_disk, **{less: False})
    ]
    assert sum(lacking) > len(lacking) // 2


WRITER = """
import os, sys, threading
from upriver.engine import Bucket
bucket = Bucket.open(sys.argv[1], vbuckets=4, ack="disk", interval_s=0.002, quota_bytes=int(sys.argv[3]))
for number in range(4):
    if bucket.existing(number) is None:
        bucket.create_vbucket(number)
bucket.flusher.checkpoint_bytes = 300_000
start = int(sys.argv[2])
for i in range(start, start + 1_000_000):
    vbucket = bucket.vbucket(i % 4)
    cas, seqno = vbucket.set(b"key%d" % (i % 1000), b"%d " % i * 20)
    line = b"%d %d %d\\n" % (i, i % 4, seqno)
    if i % 7:
        bucket.acknowledge(vbucket, seqno, lambda line=line: os.write(1, line))
    else:
        done = threading.Event()
        bucket.acknowledge(vbucket, seqno, done.set)
        assert done.wait(30)
        os.write(1, line)
    bucket.maintain(0.0005)
"""


def kill_and_check(path: Path, rounds: int, rng: random.Random, quota_bytes: int) -> None:
    """The quota is small enough for eviction, and large enough for the metadata of all versions."""
    start, logs = 0, [1, 1, 1, 1]
    for round_ in range(rounds):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(start), str(quota_bytes)],
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )
        assert writer.stdout is not None
        acknowledged: dict[int, tuple[int, int]] = {}
        wanted = rng.randrange(20, 3000)
        for line in writer.stdout:
            i, vbucket, seqno = map(int, line.split())
            acknowledged[i] = (vbucket, seqno)
            if len(acknowledged) >= wanted:
                break
        os.kill(writer.pid, signal.SIGKILL)
        for line in writer.stdout.read().splitlines(keepends=True):
            if line.endswith(b"\n"):
                i, vbucket, seqno = map(int, line.split())
                acknowledged[i] = (vbucket, seqno)
        writer.stdout.close()
        writer.wait()
        assert len(acknowledged) >= wanted
        newest: dict[bytes, int] = {}
        for i in sorted(acknowledged):
            newest[b"key%d" % (i % 1000)] = i
        with Bucket.open(path, vbuckets=4, background=False) as bucket:
            for number in range(4):
                vbucket_ = bucket.vbucket(number)
                seqnos = vbucket_.table.read_columns(0, 2**63, 2**63, 10**8, every=True, keys_only=True)[0]
                # Nothing is half there: the history has no holes.
                assert seqnos["seqno"].to_pylist() == list(range(1, vbucket_.high_seqno + 1))
                assert len(vbucket_.failover_log) == min(25, logs[number] + 1)
                logs[number] = len(vbucket_.failover_log)
            for key, i in newest.items():
                vbucket, seqno = acknowledged[i]
                item = bucket.vbucket(vbucket).get(key)
                found = int(item.value.split()[0])
                assert found == i or (found > i and item.seqno > seqno), f"round {round_}: {key!r}"
        start += 1_000_000


def test_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    kill_and_check(tmp_path / "data", 5, random.Random(3), 5_000_000)


@pytest.mark.slow
def test_many_kills(tmp_path: Path) -> None:
    kill_and_check(tmp_path / "data", 60, random.Random(4), 60_000_000)
