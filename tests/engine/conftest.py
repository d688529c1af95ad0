"""What the engine's tests share: a clock that stands still, a quick disk, both tables."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from upriver.engine import Bucket
from upriver.engine.storage.interface import WriteBatch
from upriver.engine.storage.lmdb import LmdbStorage


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class InterruptedStorage(LmdbStorage):
    """Something happens while a batch is on its way: what it holds was gathered, and is not on disk yet."""

    before_commit: Callable[[], object] | None = None
    after_commit: Callable[[], object] | None = None

    def commit(self, batch: WriteBatch) -> None:
        before, after = self.before_commit, self.after_commit
        self.before_commit = self.after_commit = None
        if before is not None:
            before()
        super().commit(batch)
        if after is not None:
            after()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quick_disk() -> Iterator[Path]:
    """A directory whose fsync costs nothing where the machine has such: semantics, not speed, are tested."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="upriver-test-", dir=root))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few changes take several."""
    monkeypatch.setattr("upriver.engine.flusher.BLOCK_BYTES", 400)


@pytest.fixture
def bucket(clock: Clock) -> Iterator[Bucket]:
    """A bucket in memory with one active vbucket, 0, and one replica, 1."""
    with Bucket.open(None, vbuckets=4, clock=clock, background=False) as opened:
        opened.create_vbucket(0)
        yield opened


Reopen = Callable[..., Bucket]
