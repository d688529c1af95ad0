import threading
from pathlib import Path

import pytest

from tests.support.manual_clock import Clock
from upriver.engine import Bucket
from upriver.engine.storage.block_cache import BlockCache
from upriver.engine.storage.interface import Block
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.errors import CorruptData
from upriver.model import Change, Event, VbucketState
from upriver.model.record import Record, pack


def block(vbucket: int, first: int, upto: int, value: bytes = b"v") -> Block:
    change = Change(
        vbucket=vbucket, event=Event.MUTATION, seqno=first, rev_seqno=1, cas=1, key=b"k", value=value, flags=0, expiry=0
    )
    return Block(vbucket, upto, pack(Record(change=change)))


class Disk(LmdbStorage):
    """Blocks from a list, and who asked for them."""

    def __init__(self, *blocks: Block) -> None:
        self.path = "here"
        self.stored = list(blocks)
        self.asked: list[tuple[int, int]] = []

    def blocks(self, vbucket: int, after: int = 0, max_bytes: int = 2**63) -> list[Block]:
        self.asked.append((vbucket, after + 1))
        return [b for b in self.stored if b.vbucket == vbucket and b.upto > after][:1]


def test_a_block_is_read_once() -> None:
    disk = Disk(block(0, 1, 10), block(0, 12, 20), block(1, 1, 20))
    cache = BlockCache(disk)
    assert [cache.block(0, seqno).upto for seqno in (5, 1, 10, 12, 20)] == [10, 10, 10, 20, 20]
    assert cache.block(1, 5).vbucket == 1
    assert disk.asked == [(0, 5), (0, 12), (1, 5)]
    assert (cache.hits, cache.misses) == (3, 3)


def test_what_is_not_there_is_an_error_every_time() -> None:
    cache = BlockCache(Disk(block(0, 1, 10)))
    for _ in range(2):
        with pytest.raises(CorruptData, match="change 11 of vbucket 0 is not on disk"):
            cache.block(0, 11)


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    blocks = [block(0, 10 * i + 1, 10 * i + 10, b"v" * 1000) for i in range(5)]
    disk = Disk(*blocks)
    cache = BlockCache(disk, bytes_max=3 * len(blocks[0].records))
    for seqno in (1, 11, 21, 1, 31, 1, 21, 11):
        cache.block(0, seqno)
        assert cache.bytes <= 3 * len(blocks[0].records)
    assert disk.asked == [(0, 1), (0, 11), (0, 21), (0, 31), (0, 11)]


def test_one_that_is_larger_than_all_memory_is_read_each_time() -> None:
    disk = Disk(block(0, 1, 10, b"v" * 1000))
    cache = BlockCache(disk, bytes_max=100)
    assert cache.block(0, 1) == cache.block(0, 1)
    assert (cache.bytes, len(disk.asked)) == (0, 2)


def test_what_a_commit_has_changed_is_read_again() -> None:
    disk = Disk(block(0, 1, 10), block(1, 1, 10))
    cache = BlockCache(disk)
    old, other = cache.block(0, 3), cache.block(1, 3)
    disk.stored[0] = block(0, 1, 5, b"new")
    assert cache.block(0, 3) is old
    cache.forget({0})
    assert cache.block(0, 3) is disk.stored[0]
    assert cache.block(1, 3) is other
    assert cache.bytes == len(disk.stored[0].records) + len(other.records)
    with pytest.raises(CorruptData):
        cache.block(0, 6)


def test_a_reader_that_a_commit_overtook_keeps_nothing() -> None:
    class Overtaken(Disk):
        def blocks(self, vbucket: int, after: int = 0, max_bytes: int = 2**63) -> list[Block]:
            found = super().blocks(vbucket, after, max_bytes)
            if len(self.asked) == 1:  # the flusher's thread commits between the read and its end
                thread = threading.Thread(target=cache.forget, args=({0},))
                thread.start()
                thread.join()
            return found

    disk = Overtaken(block(0, 1, 10))
    cache = BlockCache(disk)
    for _ in range(3):
        cache.block(0, 1)
    assert len(disk.asked) == 2
    assert cache.bytes == len(disk.stored[0].records)


def test_values_of_another_branch_are_never_shown(quick_disk: Path, clock: Clock) -> None:
    """The same seqnos with other contents: rolled back, written again, evicted again."""
    bucket = Bucket(LmdbStorage(quick_disk / "data"), vbuckets=1, clock=clock)
    vbucket = bucket.create_vbucket(0)

    def on_disk_only() -> None:
        bucket.flusher.request_checkpoint()
        bucket.flusher.drain()
        table, position = vbucket.table, 0
        for _ in range(2):  # what was read lately is spared once
            while True:
                position, _ = table.sweep(position, 0, 0, 0, table.checkpointed_seqno)
                if not position:
                    break
        assert table.evicted == 10

    for number in range(10):
        vbucket.set(b"key%d" % number, b"old")
    on_disk_only()
    assert {vbucket.get(b"key%d" % number).value for number in range(10)} == {b"old"}
    vbucket.set_state(VbucketState.REPLICA)
    assert vbucket.roll_back(5) == 5
    vbucket.set_state(VbucketState.ACTIVE)
    for number in range(5, 10):
        vbucket.set(b"key%d" % number, b"new")
    on_disk_only()
    assert [vbucket.get(b"key%d" % number).value for number in range(10)] == [b"old"] * 5 + [b"new"] * 5
    assert [change.value for snapshot in vbucket.changes() for change in snapshot] == [b"old"] * 5 + [b"new"] * 5
    vbucket.flush()
    for number in range(10):
        vbucket.set(b"key%d" % number, b"last")
    on_disk_only()
    assert {vbucket.get(b"key%d" % number).value for number in range(10)} == {b"last"}
    bucket.close()
