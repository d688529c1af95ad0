"""What the engine's tests share: a clock that stands still, a quick disk, both tables."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.manual_clock import Clock
from upriver.engine import Bucket


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
