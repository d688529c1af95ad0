import os
import random
from pathlib import Path

import pytest

from tests.support.depth import by_depth
from tests.support.manual_clock import Clock
from upriver.engine import Bucket, Retention
from upriver.engine.storage import disk_space
from upriver.engine.storage.disk_space import DiskSpace
from upriver.engine.storage.memory import MemoryStorage
from upriver.engine.table import Ledger
from upriver.errors import TemporaryFailure

MIB = 2**20


class Blocks(MemoryStorage):
    """A storage whose blocks take some space."""

    keeps_records = True

    def __init__(self, size: int) -> None:
        self.size = size

    def blocks_bytes(self) -> int:
        return self.size


def test_the_queue_gets_shorter_as_the_backlog_grows() -> None:
    ledger = Ledger(lambda: 1.0, queue_bytes_max=256 * MIB)
    space = DiskSpace(Blocks(0), ledger)
    found = []
    for group_bytes in (0, 32 * MIB, 64 * MIB, 512 * MIB):
        space.pace(group_bytes)
        found.append(ledger.queue_bytes_max)
    assert found == [8 * MIB, 4 * MIB, 2 * MIB, 2 * MIB]
    space.pace(0)
    assert ledger.queue_bytes_max == 8 * MIB


def test_garbage_counts_until_it_is_reclaimed() -> None:
    ledger = Ledger(lambda: 1.0, queue_bytes_max=256 * MIB)
    space = DiskSpace(Blocks(100 * MIB), ledger)
    space.dropped(3, 60 * MIB)
    space.pace(0)
    assert (space.garbage_bytes, space.needed_bytes) == (60 * MIB, 40 * MIB)
    assert ledger.queue_bytes_max == 3 * MIB
    space.reclaimed(3, 50 * MIB)
    assert space.garbage_of(3) == 10 * MIB
    space.reclaimed(3, 50 * MIB)
    assert space.garbage_bytes == 0
    space.dropped(3, MIB)
    space.cleared(3)
    assert space.garbage_bytes == 0


@pytest.mark.parametrize("given", [0, MIB])
def test_a_shorter_queue_or_none_at_all_is_left_as_it_is(given: int) -> None:
    ledger = Ledger(lambda: 1.0, queue_bytes_max=given)
    DiskSpace(Blocks(0), ledger).pace(500 * MIB)
    assert ledger.queue_bytes_max == given


def test_the_file_stays_bounded_under_sustained_overwrites(
    quick_disk: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is scaled down: 1 MiB of live data, and limits of 1/16."""
    monkeypatch.setattr(disk_space, "BACKLOG_BYTES", 4 * MIB)
    monkeypatch.setattr(disk_space, "QUEUE_BYTES_LEAST", MIB // 8)
    rng, value, sizes = random.Random(1), os.urandom(1000), list[int]()
    retention = Retention(history_s=1, history_bytes=MIB // 8)
    with Bucket.open(quick_disk / "data", vbuckets=16, clock=clock, retention=retention, background=False) as bucket:
        bucket.create_vbuckets()
        bucket.flusher.checkpoint_bytes = 2 * MIB
        refused = 0
        for _ in range(by_depth(quick=150, deep=1500)):
            for _ in range(4000):  # as fast as possible, until a write is refused
                number = rng.randrange(1000)
                try:
                    bucket.vbucket(number % 16).set(b"key%d" % number, value)
                except TemporaryFailure:
                    refused += 1
                    break
            clock.now += 2
            bucket.flusher.step()
            bucket.maintain(1)
            sizes.append(bucket.storage.size_bytes())
        written = bucket.flusher.bytes_written
        assert refused > len(sizes) / 2, "writers are slowed down"
        assert written > 50 * MIB
        assert max(sizes) <= 3 * (MIB + bucket.ledger.history_bytes) + 16 * MIB
        assert len({*sizes[len(sizes) // 2 :]}) < len(sizes) / 4, "freed space is used again"
