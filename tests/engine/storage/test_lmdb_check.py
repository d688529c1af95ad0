import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.support.bucket_digest import digest
from tests.support.depth import by_depth
from tests.support.manual_clock import Clock
from upriver.engine import Bucket
from upriver.engine.storage.interface import Block, WriteBatch
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.engine.storage.lmdb_check import Damaged, Unfinished, check_commit, check_file, meta_pages
from upriver.errors import StorageError

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
                check_file(file)
            except Damaged:
                found.append(start)
            file.write_bytes(data)
    return found


def test_a_sound_file_passes(file: Path, tmp_path: Path) -> None:
    check_file(file)
    empty = tmp_path / "empty"
    empty.touch()
    check_file(empty)
    with lmdb.open(str(tmp_path / "new"), max_dbs=1):
        pass
    check_file(tmp_path / "new" / "data.mdb")


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
        check_commit(file, shown)
        for _ in range(4):
            commit()
        with pytest.raises(Damaged):  # what it showed is no more, though nothing is damaged
            check_commit(file, shown)
        check_file(file)


def test_a_commit_that_is_read_can_be_looked_at(file: Path) -> None:
    with writer(file.parent) as commit, lmdb.open(str(file.parent), max_dbs=4, map_size=2**26, readonly=True) as env:
        commit()
        with env.begin() as txn:
            shown = meta_pages(file)[0]
            assert shown.transaction == txn.id() == env.info()["last_txnid"]
            for _ in range(4):
                commit()
            check_commit(file, shown)
            assert env.info()["last_txnid"] == shown.transaction + 4


@pytest.mark.parametrize("place", [0, PAGE])
def test_a_head_with_impossible_pages(file: Path, place: int) -> None:
    changed(file, place + 16 + 24, bytes(4))  # LMDB divides by it
    with pytest.raises(Damaged, match="pages of 0 bytes"):
        check_file(file)


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
            check_file(file)
        file.write_bytes(data)


def test_entries_that_lie_elsewhere(file: Path) -> None:
    for kind in (0x01, 0x02):
        start = pages_of(file, kind)[0]
        data = file.read_bytes()
        (place,) = struct.unpack_from("<H", data, start + 16)
        for offset, value in ((16, b"\x01\x00"), (16, b"\xff\xff"), (place + 6, b"\xff\x7f")):
            changed(file, start + offset, value)
            with pytest.raises(Damaged):
                check_file(file)
            file.write_bytes(data)


def test_a_page_used_twice_and_one_left_out(file: Path) -> None:
    start = pages_of(file, 0x01)[0]
    data = file.read_bytes()
    first, second = struct.unpack_from("<HH", data, start + 16)
    changed(file, start + second, data[start + first : start + first + 6])
    with pytest.raises(Damaged, match="twice"):
        check_file(file)
    file.write_bytes(data)
    (lower,) = struct.unpack_from("<H", data, start + 12)
    changed(file, start + 12, struct.pack("<H", lower - 2))
    with pytest.raises(Damaged, match="ends outside of its place"):
        check_file(file)


def test_a_tree_deeper_than_any(file: Path) -> None:
    data = file.read_bytes()
    for head in (0, PAGE):
        changed(file, head + 16 + 24 + 48 + 6, b"\xff\xff")
    with pytest.raises(Damaged, match="levels"):
        check_file(file)
    file.write_bytes(data)
    for head in (0, PAGE):
        changed(file, head + 16, b"invalid!")
    with pytest.raises(Damaged, match="meta page"):
        check_file(file)


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
    storage.commit(WriteBatch(facts={"clean": True}))
    for number in range(1, 151):
        storage.commit(random_batch(rng, number, blocks))
        check_file(quick_disk / "data" / "data.mdb")
    storage.close()
    LmdbStorage(quick_disk / "data").close()


def test_a_head_that_counts_more_pages_than_there_is_room_for(file: Path) -> None:
    for head in (0, PAGE):
        changed(file, head + 16 + 24 + 2 * 48, struct.pack("<Q", 2**50))
    with pytest.raises(Damaged, match="reserved"):
        check_file(file)


def test_a_value_that_the_file_ends_in(tmp_path: Path) -> None:
    """The first page of the value is there, those behind it are not."""
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        txn.put(b"key", bytes(20_000))
    file = tmp_path / "data.mdb"
    check_file(file)
    os.truncate(file, pages_of(file, 0x04)[0] + PAGE)
    with pytest.raises(Damaged, match="the file ends before"):
        check_file(file)


# Every class of page, at every word.

META_BYTES = 16 + 136
BRANCH, LEAF, OVERFLOW = 0x01, 0x02, 0x04


@pytest.fixture
def store(quick_disk: Path, clock: Clock) -> Path:
    """A store in which each table has branch pages, and the lists of free pages overflow."""
    path = quick_disk / "data"
    with Bucket.open(path, vbuckets=64, clock=clock, background=False) as bucket:
        bucket.create_vbuckets()
        for turn in range(6):
            for i in range(64 * 8):
                bucket.vbucket(i % 64).set(b"key%d" % i, b"value %d" % turn * 60)
            bucket.flusher.request_checkpoint()
            bucket.flusher.drain()
        for i in range(300):
            bucket.vbucket(i % 64).set(b"late%d" % i, b"value" * (900 if i % 20 == 0 else 20))
            bucket.flusher.step()
        for vbucket in bucket:
            bucket.flusher.request_compaction(vbucket)
        bucket.flusher.drain()
    return path


def pages_by_class(data: bytes | bytearray) -> dict[tuple[str, int], list[int]]:
    """Where the pages of each tree and kind are, for the last commit; and the meta pages."""
    found: dict[tuple[str, int], list[int]] = {("meta", 0): [0], ("meta", 1): [PAGE]}
    newest = max((0, PAGE), key=lambda meta: struct.unpack_from("<Q", data, meta + META_BYTES - 8)[0])
    trees = [("free", data[newest + 40 : newest + 88]), ("main", data[newest + 88 : newest + 136])]
    while trees:
        name, tree = trees.pop()
        todo = [struct.unpack("<IHHQQQQQ", tree)[-1]]
        while todo:
            start = todo.pop() * PAGE
            kind, lower = struct.unpack_from("<HH", data, start + 10)
            found.setdefault((name, kind), []).append(start)
            if kind == OVERFLOW:
                continue
            for pointer in struct.unpack_from(f"<{(lower - 16) // 2}H", data, start + 16):
                low, high, flags, size = struct.unpack_from("<HHHH", data, start + pointer)
                value = start + pointer + 8 + size
                if kind == BRANCH:
                    todo.append(low | high << 16 | flags << 32)
                elif flags & 1:
                    todo += struct.unpack_from("<Q", data, value)
                elif flags & 2:
                    trees.append((data[value - size : value].decode(), data[value : value + 48]))
    return found


def outcome(path: Path, clock: Clock, expected: dict[int, Any]) -> str:
    """Open a store, compare it, write to it so that free pages are used, and compare it once more."""
    try:
        bucket = Bucket.open(path, vbuckets=64, clock=clock, background=False)
    except StorageError as error:
        return str(error)
    assert digest(bucket) == expected
    for i in range(0, 64 * 8, 5):
        bucket.vbucket(i % 64).set(b"key%d" % i, b"new value" * 50)
        if i % 40 == 0:
            bucket.flusher.step()
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    bucket.storage.commit(WriteBatch(facts={"clean": True}))
    written = digest(bucket)
    bucket.abandon()
    with Bucket.open(path, vbuckets=64, clock=clock, background=False) as again:
        assert digest(again) == written
    return "unaffected"


@pytest.mark.parametrize("number", [0, 2**40])
def test_a_free_list_of_a_commit_that_did_not_happen(store: Path, clock: Clock, number: int) -> None:
    """The order of the keys does not show it: the first may become 0, and the last may grow."""
    file = store / "data.mdb"
    data = file.read_bytes()
    (page, *_) = pages_by_class(data)["free", LEAF]
    lower = struct.unpack_from("<H", data, page + 12)[0]
    pointers = struct.unpack_from(f"<{(lower - 16) // 2}H", data, page + 16)
    changed(file, page + (pointers[-1] if number else pointers[0]) + 8, number.to_bytes(8, "little"))
    with pytest.raises(StorageError, match="restore the directory from a backup"):
        Bucket.open(store, vbuckets=64, clock=clock, background=False)


def test_a_commit_that_did_not_release_the_root_of_the_one_before(file: Path) -> None:
    """Both meta pages and all trees are intact, but the last two lists of released pages have each other's number."""
    newest, older = meta_pages(file)
    assert newest.transaction == older.transaction + 1
    check_file(file)
    data = bytearray(file.read_bytes())
    (page,) = pages_by_class(data)["free", LEAF]
    places = page + 16 + (struct.unpack_from("<H", data, page + 12)[0] - 16) - 4
    before, last = struct.unpack_from("<HH", data, places)
    keys = [slice(page + pointer + 8, page + pointer + 16) for pointer in (before, last)]
    assert [int.from_bytes(data[key], "little") for key in keys] == [older.transaction, newest.transaction]
    data[keys[0]], data[keys[1]] = data[keys[1]], data[keys[0]]
    struct.pack_into("<HH", data, places, last, before)
    file.write_bytes(data)
    with pytest.raises(Damaged, match=f"the commit {newest.transaction} does not follow"):
        check_file(file)


@pytest.mark.parametrize("every_word", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_each_word_of_each_class_of_page(store: Path, clock: Clock, every_word: bool) -> None:
    """Each damage is refused with one line, or changes nothing, neither now nor when free pages are used."""
    rng, file = random.Random(3), store / "data.mdb"
    with Bucket.open(store, vbuckets=64, clock=clock, background=False) as bucket:
        expected = digest(bucket)
    good = file.read_bytes()
    classes = pages_by_class(good)
    assert {name for name, _ in classes} == {"meta", "main", "free", "facts", "descriptions", "groups", "blocks"}
    for name, kind in (("descriptions", BRANCH), ("groups", BRANCH), ("groups", OVERFLOW), ("free", OVERFLOW)):
        assert (name, kind) in classes
    refused = unaffected = 0
    for (name, _), pages in sorted(classes.items()):
        page = rng.choice(pages)
        words = range(0, META_BYTES if name == "meta" else PAGE, 8)
        some = [*words[:2], *rng.sample(words, 3)] if name != "meta" else words
        for word in words[:: by_depth(quick=8, deep=1)] if every_word else some:
            for damage in rng.sample(DAMAGES, by_depth(quick=1, deep=2)):
                old = good[page + word : page + word + 8]
                new = damage(rng, old)
                changed(file, page + word, new)
                said = outcome(store, clock, expected)
                if said == "unaffected":
                    unaffected += 1
                else:
                    assert "restore the directory from a backup" in said, (name, page, word, old, new)
                    assert "\n" not in said
                    refused += 1
                file.write_bytes(good)
    assert refused > 30
    assert unaffected


def _flipped(rng: random.Random, word: bytes) -> bytes:
    return (int.from_bytes(word, "little") ^ 1 << rng.randrange(64)).to_bytes(8, "little")


#: Ways to damage a word: one bit, a neighbouring number, another page number, zeroes, ones, noise.
DAMAGES: list[Callable[[random.Random, bytes], bytes]] = [
    _flipped,
    lambda _, word: ((int.from_bytes(word, "little") + 1) % 2**64).to_bytes(8, "little"),
    lambda rng, _: rng.randrange(400).to_bytes(8, "little"),
    lambda _, __: bytes(8),
    lambda _, __: b"\xff" * 8,
    lambda rng, _: rng.randbytes(8),
]


def test_each_bit_of_both_transaction_numbers(store: Path) -> None:
    """LMDB would take the older commit for the newer one; a number that is too low hides the last commit."""
    file = store / "data.mdb"
    good = file.read_bytes()
    last = meta_pages(file)[0].transaction
    for meta in (0, PAGE):
        for bit in range(64):
            data = bytearray(good)
            place = meta + META_BYTES - 8 + bit // 8
            data[place] ^= 1 << bit % 8
            file.write_bytes(data)
            with pytest.raises(Damaged) as caught:
                check_file(file)
            assert not isinstance(caught.value, Unfinished) or caught.value.commit.transaction == last


def test_each_listed_page_that_becomes_another(store: Path) -> None:
    """Of 210 such damages 60 destroyed data, when nothing compared free pages with used ones."""
    rng, file = random.Random(4), store / "data.mdb"
    good = file.read_bytes()
    pages = len(good) // PAGE
    for page in pages_by_class(good)["free", OVERFLOW]:
        (count,) = struct.unpack_from("<Q", good, page + 16)
        for place in rng.sample(range(count), 30):
            where = page + 24 + 8 * place
            other = rng.choice([n for n in range(pages) if n != struct.unpack_from("<Q", good, where)[0]])
            changed(file, where, struct.pack("<Q", other))
            with pytest.raises(Damaged, match="the free pages"):
                check_file(file)
            file.write_bytes(good)
