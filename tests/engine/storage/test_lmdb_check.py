import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from upriver.engine.storage.interface import Block, WriteBatch
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.engine.storage.lmdb_check import Damaged, check_pages, meta_pages

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with branch and leaf pages, overflow pages and free ones."""
    with lmdb.open(str(tmp_path), max_dbs=4, map_size=2**26) as env:
        for name in (b"one", b"two"):
            table = env.open_db(name)
            with env.begin(write=True, db=table) as txn:
                for i in range(500):
                    txn.put(b"key%04d" % i, bytes(100 if i % 50 else 20_000))
            with env.begin(write=True, db=table) as txn:
                for i in range(0, 500, 3):
                    txn.delete(b"key%04d" % i)
    return tmp_path / "data.mdb"


def changed(file: Path, place: int, value: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[place : place + len(value)] = value
    file.write_bytes(data)


def pages_of(file: Path, kind: int) -> list[int]:
    """Where the pages of a kind begin that the last commit uses: those whose damage is noticed."""
    data, found = file.read_bytes(), []
    for start in range(2 * PAGE, len(data), PAGE):
        number, _, flags = struct.unpack_from("<QHH", data, start)
        if number * PAGE == start and flags == kind:
            changed(file, start, struct.pack("<Q", 2**40))
            try:
                check_pages(file)
            except Damaged:
                found.append(start)
            file.write_bytes(data)
    return found


def test_a_sound_file_passes(file: Path, tmp_path: Path) -> None:
    check_pages(file)
    empty = tmp_path / "empty"
    empty.touch()
    check_pages(empty)
    with lmdb.open(str(tmp_path / "new"), max_dbs=1):
        pass
    check_pages(tmp_path / "new" / "data.mdb")


#: Commits whenever it reads a line, each time other pages.
WRITER = """
import sys, lmdb
with lmdb.open(sys.argv[1], max_dbs=4, map_size=2**26) as env:
    table = env.open_db(b"one")
    for number, _ in enumerate(sys.stdin):
        with env.begin(write=True, db=table) as txn:
            for i in range(0, 500, 7):
                txn.put(b"key%04d" % i, b"%d" % number * 50)
        print(number, flush=True)
"""


@contextmanager
def writer(path: Path) -> Iterator[Callable[[], object]]:
    """Another process that commits on request, and confirms each commit."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def commit() -> None:
            stdin.write("\n")
            stdin.flush()
            assert stdout.readline()

        yield commit
        stdin.close()


def test_a_commit_without_readers_is_overwritten(file: Path) -> None:
    with writer(file.parent) as commit:
        commit()
        shown = meta_pages(file)[0]
        check_pages(file, shown)
        for _ in range(4):
            commit()
        with pytest.raises(Damaged):  # what it showed is no more, though nothing is damaged
            check_pages(file, shown)
        check_pages(file)


def test_a_commit_that_is_read_can_be_looked_at(file: Path) -> None:
    with writer(file.parent) as commit, lmdb.open(str(file.parent), max_dbs=4, map_size=2**26, readonly=True) as env:
        commit()
        with env.begin() as txn:
            shown = meta_pages(file)[0]
            assert shown.transaction == txn.id() == env.info()["last_txnid"]
            for _ in range(4):
                commit()
            check_pages(file, shown)
            assert env.info()["last_txnid"] == shown.transaction + 4


@pytest.mark.parametrize("place", [0, PAGE])
def test_a_head_with_impossible_pages(file: Path, place: int) -> None:
    changed(file, place + 16 + 24, bytes(4))  # LMDB divides by it
    with pytest.raises(Damaged, match="pages of 0 bytes"):
        check_pages(file)


@pytest.mark.parametrize("kind", [0x01, 0x02, 0x04])
@pytest.mark.parametrize(
    ("offset", "value"),
    [
        pytest.param(10, b"\x07\x00", id="kind"),
        pytest.param(0, b"\xff\xff", id="number"),
        pytest.param(12, b"\xff\xff\xff\xff", id="bounds"),
    ],
)
def test_a_damaged_head_of_a_page(file: Path, kind: int, offset: int, value: bytes) -> None:
    pages = pages_of(file, kind)
    assert pages
    for start in pages:
        data = file.read_bytes()
        changed(file, start + offset, value)
        with pytest.raises(Damaged):
            check_pages(file)
        file.write_bytes(data)


def test_entries_that_lie_elsewhere(file: Path) -> None:
    for kind in (0x01, 0x02):
        start = pages_of(file, kind)[0]
        data = file.read_bytes()
        (place,) = struct.unpack_from("<H", data, start + 16)
        for offset, value in ((16, b"\x01\x00"), (16, b"\xff\xff"), (place + 6, b"\xff\x7f")):
            changed(file, start + offset, value)
            with pytest.raises(Damaged):
                check_pages(file)
            file.write_bytes(data)


def test_a_page_used_twice_and_one_left_out(file: Path) -> None:
    start = pages_of(file, 0x01)[0]
    data = file.read_bytes()
    first, second = struct.unpack_from("<HH", data, start + 16)
    changed(file, start + second, data[start + first : start + first + 6])
    with pytest.raises(Damaged, match="twice"):
        check_pages(file)
    file.write_bytes(data)
    (lower,) = struct.unpack_from("<H", data, start + 12)
    changed(file, start + 12, struct.pack("<H", lower - 2))
    with pytest.raises(Damaged, match="entries instead of"):
        check_pages(file)


def test_a_tree_deeper_than_any(file: Path) -> None:
    data = file.read_bytes()
    for head in (0, PAGE):
        changed(file, head + 16 + 24 + 48 + 6, b"\xff\xff")
    with pytest.raises(Damaged, match="levels"):
        check_pages(file)
    file.write_bytes(data)
    for head in (0, PAGE):
        changed(file, head + 16, b"invalid!")
    with pytest.raises(Damaged, match="meta page"):
        check_pages(file)


def random_batch(rng: random.Random, number: int, blocks: set[tuple[int, int]]) -> WriteBatch:
    """Some of everything that a batch may hold; ``blocks`` are those that there are."""
    batch = WriteBatch()
    if rng.random() < 0.7:
        batch.group = (number, rng.randbytes(rng.choice((50, 300, 900, 3000, 20_000))))
    if rng.random() < 0.2:
        batch.drop_groups_to = rng.randrange(max(1, number - 20), number + 1)
    if rng.random() < 0.2 and blocks:
        batch.removed = rng.sample(sorted(blocks), rng.randrange(1, len(blocks) + 1))
        blocks.difference_update(batch.removed)
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 30)):
            place = (rng.randrange(64), rng.randrange(1, 10**6))
            blocks.add(place)
            batch.blocks.append(Block(*place, rng.randbytes(rng.choice((100, 1000, 3000, 9000)))))
    if rng.random() < 0.3:
        for vbucket in rng.sample(range(64), rng.randrange(1, 64)):
            batch.descriptions[vbucket] = {"x": "y" * rng.randrange(10, 1800)} if rng.random() < 0.5 else None
    return batch


@pytest.mark.parametrize("seed", range(10, 15))
def test_whatever_was_committed_passes(quick_disk: Path, seed: int) -> None:
    """Also where the file ends before the last page that the head counts."""
    rng, blocks = random.Random(seed), set[tuple[int, int]]()
    storage = LmdbStorage(quick_disk / "data")
    for number in range(1, 151):
        storage.commit(random_batch(rng, number, blocks))
        check_pages(quick_disk / "data" / "data.mdb")
    storage.close()
    LmdbStorage(quick_disk / "data").close()


def test_a_head_that_counts_more_pages_than_there_is_room_for(file: Path) -> None:
    for head in (0, PAGE):
        changed(file, head + 16 + 24 + 2 * 48, struct.pack("<Q", 2**50))
    with pytest.raises(Damaged, match="reserved"):
        check_pages(file)


def test_a_value_that_the_file_ends_in(tmp_path: Path) -> None:
    """The first page of the value is there, those behind it are not."""
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        txn.put(b"key", bytes(20_000))
    file = tmp_path / "data.mdb"
    check_pages(file)
    os.truncate(file, pages_of(file, 0x04)[0] + PAGE)
    with pytest.raises(Damaged, match="the file ends before"):
        check_pages(file)
