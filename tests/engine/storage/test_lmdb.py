import errno
import os
import random
import resource
import shutil
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from tests.engine.watched_disk import run_watched
from tests.support.bucket_digest import digest
from tests.support.manual_clock import Clock
from upriver.engine import Bucket
from upriver.engine.storage.interface import Block, WriteBatch
from upriver.engine.storage.lmdb import DATA_FILE, FORMAT, LOCK_FILE, LmdbStorage, cut
from upriver.engine.storage.lmdb_check import COMMIT_KEY, COMMIT_NUMBER
from upriver.engine.table import Ledger, Table
from upriver.errors import CorruptData, DataInUse, ForeignData, NewerFormat, StorageError, TemporaryFailure
from upriver.model import VbucketState

SAMPLES = Path(__file__).parents[2] / "data" / "engine"


@pytest.fixture
def path(quick_disk: Path) -> Path:
    return quick_disk / "data"


def fill(path: Path, clock: Clock) -> None:
    with Bucket.open(path, vbuckets=2, clock=clock, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)
        for i in range(500):
            vbucket.set(b"key%d" % i, b"value%d" % i * 10)
        bucket.flusher.request_checkpoint()
        bucket.flusher.drain()
        vbucket.set(b"late", b"in a group")


@contextmanager
def changing(path: Path, table: str) -> Iterator[lmdb.Transaction]:
    """Write to a closed store as a commit of ours would, with its number."""
    with lmdb.open(str(path), max_dbs=9) as env, env.begin(write=True, db=env.open_db(table.encode())) as txn:
        yield txn
        txn.put(COMMIT_KEY, COMMIT_NUMBER.pack(txn.id()), db=env.open_db(None, txn=txn))


def records(count: int) -> bytes:
    table = Table(1, Ledger(lambda: 1.0))
    table.active = True
    for i in range(count):
        table.set(b"key%02d" % i, b"value")
    return table.records(0, count, 10**9)[0]


def test_a_batch_is_read_back(path: Path) -> None:
    storage = LmdbStorage(path)
    storage.commit(
        WriteBatch(
            blocks=[Block(1, 5, b"a" * 80), Block(1, 9, b"b" * 80), Block(2, 3, b"c" * 80)],
            group=(1, b"group"),
            descriptions={1: {"state": "active"}},
            facts={"clean": True},
        )
    )
    assert [block.upto for block in storage.blocks(1)] == [5, 9]
    assert [block.upto for block in storage.blocks(1, 5)] == [9]
    assert [block.upto for block in storage.blocks(1, 0, 1)] == [5]
    assert [(vbucket, bytes(data)[:1]) for vbucket, data in storage.all_blocks()] == [(1, b"a"), (1, b"b"), (2, b"c")]
    assert [(number, bytes(data)) for number, data in storage.groups()] == [(1, b"group")]
    assert storage.descriptions() == {1: {"state": "active"}}
    assert storage.size_bytes() > 0
    storage.close()
    storage = LmdbStorage(path)
    assert storage.facts() == {"clean": True, "format": FORMAT}
    storage.commit(WriteBatch(removed=[(1, 5)], drop_groups_to=1, descriptions={1: None}))
    assert [block.upto for block in storage.blocks(1)] == [9]
    assert list(storage.groups()) == []
    assert storage.descriptions() == {}
    storage.close()


def test_trimming_cuts_the_block_that_straddles(path: Path) -> None:
    whole, storage = records(30), LmdbStorage(path)
    size = len(whole) // 30
    storage.commit(WriteBatch(blocks=[Block(1, 10 * n, whole[size * 10 * (n - 1) : size * 10 * n]) for n in (1, 2, 3)]))
    storage.commit(WriteBatch(blocks=[Block(2, 7, b"x")], trims={1: 14}))
    assert [(block.upto, len(block.records) // size) for block in storage.blocks(1)] == [(10, 10), (14, 4)]
    assert cut(whole, 14) == whole[: 14 * size]
    storage.commit(WriteBatch(trims={1: 0}))
    assert storage.blocks(1) == []
    assert [block.upto for block in storage.blocks(2)] == [7]
    storage.close()


def test_only_one_process_holds_a_directory(path: Path) -> None:
    storage = LmdbStorage(path)
    with pytest.raises(DataInUse, match="another process"):
        LmdbStorage(path)
    storage.close()
    LmdbStorage(path).close()


def test_files_of_somebody_else_are_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "letters.txt").write_text("dear")
    with pytest.raises(ForeignData):
        LmdbStorage(path)
    assert [entry.name for entry in path.iterdir()] == ["letters.txt"]
    with pytest.raises(StorageError):
        LmdbStorage(path / "letters.txt")


def test_a_file_system_of_its_own_is_an_empty_directory(path: Path, clock: Clock) -> None:
    copy = path.parent / "copy"
    for root in (path, copy):
        (root / "lost+found").mkdir(parents=True)
    with Bucket.open(path, vbuckets=2, clock=clock, background=False) as bucket:
        bucket.create_vbucket(0).set(b"k", b"v")
        bucket.backup(copy)
    with Bucket.open(copy, vbuckets=2, clock=clock, background=False) as bucket:
        assert bucket.vbucket(0).get(b"k").value == b"v"


def test_an_lmdb_file_of_somebody_else(path: Path) -> None:
    path.mkdir()
    (path / LOCK_FILE).touch()
    with lmdb.open(str(path), max_dbs=9) as env:
        env.open_db(b"theirs")
    with pytest.raises(ForeignData):
        LmdbStorage(path)


def test_a_newer_format_is_refused(path: Path) -> None:
    storage = LmdbStorage(path)
    storage.commit(WriteBatch(facts={"clean": True}))
    storage.close()
    with changing(path, "facts") as txn:
        facts = b'{"format": %d}' % (FORMAT + 1)
        txn.put(b"bucket", struct.pack("<II", zlib.crc32(facts), 0) + facts)
    with pytest.raises(NewerFormat, match=f"format {FORMAT + 1}.*use the version that wrote it"):
        LmdbStorage(path)


@pytest.mark.parametrize("size", [0, 100, 4096, 5000])
def test_a_file_that_was_cut_off(path: Path, clock: Clock, size: int) -> None:
    fill(path, clock)
    os.truncate(path / DATA_FILE, size)
    with pytest.raises(CorruptData):
        LmdbStorage(path)


def lose(path: Path, how: str) -> None:
    (path / DATA_FILE).unlink()
    if how == "empty":
        (path / DATA_FILE).touch()
    if how == "another":
        with lmdb.open(str(path), max_dbs=9) as env:
            env.open_db(b"facts")


@pytest.mark.parametrize("how", ["missing", "empty", "another"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_store_that_is_gone_is_not_taken_for_a_new_one(path: Path, clock: Clock, how: str, copied: bool) -> None:
    fill(path, clock)
    if copied:
        with Bucket.open(path, vbuckets=2, clock=clock, background=False) as bucket:
            bucket.backup(path.parent / "copy")
        path = path.parent / "copy"
    signature = (path / LOCK_FILE).read_text()
    lose(path, how)
    for _ in range(2):  # nor the second time
        with pytest.raises(CorruptData) as caught:
            Bucket.open(path, vbuckets=2, clock=clock, background=False)
        assert signature.split()[-1] in str(caught.value)
        assert "restore the directory from a backup, or empty it" in str(caught.value)
    assert (path / DATA_FILE).exists() == (how != "missing")
    shutil.rmtree(path)
    Bucket.open(path, vbuckets=2, clock=clock, background=False).close()


@pytest.mark.parametrize("step", ["lock", "data", "tables", "facts"])
def test_a_stop_during_the_very_first_start_leaves_nothing_that_is_refused(
    path: Path, clock: Clock, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    with monkeypatch.context() as patched:
        if step in ("lock", "data"):
            patched.setattr(LmdbStorage, "_open_environment", stop)
        else:
            patched.setattr(LmdbStorage, "_write" if step == "tables" else "_sign", stop)
        with pytest.raises(Stopped):
            Bucket.open(path, vbuckets=2, initial=[0], clock=clock, background=False)
    if step == "data":
        (path / DATA_FILE).touch()
    assert (path / LOCK_FILE).read_bytes() == b"", "signed only when the store is on disk"
    with Bucket.open(path, vbuckets=2, initial=[0], clock=clock, background=False) as bucket:
        assert bucket.numbers() == [0]
        assert (path / LOCK_FILE).read_text() == f"upriver store {bucket.store}\n"


def test_a_lock_file_of_an_older_version_is_signed(path: Path, clock: Clock) -> None:
    fill(path, clock)
    os.truncate(path / LOCK_FILE, 0)
    with Bucket.open(path, vbuckets=2, clock=clock, background=False) as bucket:
        assert bucket.vbucket(0).get(b"late").value == b"in a group"
        assert bucket.store in (path / LOCK_FILE).read_text()


def test_a_lock_file_that_cannot_be_signed_is_signed_later(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        bucket = Bucket.open(path, vbuckets=2, initial=[0], clock=clock, background=False)
    assert (path / LOCK_FILE).read_bytes() == b""
    bucket.vbucket(0).set(b"k", b"v")
    bucket.flusher.step()
    assert bucket.store in (path / LOCK_FILE).read_text()
    bucket.close()


def test_a_restored_copy_signs_with_its_own_name(path: Path, clock: Clock) -> None:
    with Bucket.open(path, vbuckets=2, clock=clock, background=False) as bucket:
        bucket.backup(path.parent / "copy")
    with Bucket.open(path.parent / "copy", vbuckets=2, clock=clock, background=False) as copy:
        assert copy.store != bucket.store
        assert (path.parent / "copy" / LOCK_FILE).read_text() == f"upriver store {copy.store}\n"


def test_groups_and_blocks_of_all_sizes_one_behind_the_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sealed in the same memory, but for those that are too large for it."""
    monkeypatch.setattr("upriver.engine.storage.lmdb.SEAL_BYTES_MAX", 50_000)
    rng = random.Random(5)
    sizes = [30_000, 60_000, 100, 49_992, 49_993, 1, 0, 50_000, 5000]
    groups = [(number, rng.randbytes(size)) for number, size in enumerate(sizes, start=1)]
    blocks = [Block(number, 7, rng.randbytes(size)) for number, size in enumerate(reversed(sizes))]
    storage = LmdbStorage(path)
    storage.commit(WriteBatch(facts={"clean": True}))
    for group, block in zip(groups, blocks, strict=True):
        storage.commit(WriteBatch(group=group, blocks=[block, Block(20, block.vbucket + 1, block.records[:9])]))
    storage.close()
    storage = LmdbStorage(path)
    assert [(number, bytes(group)) for number, group in storage.groups()] == groups
    assert [storage.blocks(block.vbucket) for block in blocks] == [[block] for block in blocks]
    assert [block.records for block in storage.blocks(20)] == [block.records[:9] for block in blocks]
    storage.close()


def test_what_is_sealed_takes_no_new_memory_each_time(path: Path) -> None:
    storage = LmdbStorage(path)
    group = bytes(4 * 2**20)
    storage.commit(WriteBatch(group=(1, group)))
    tracemalloc.start()
    try:
        storage.commit(WriteBatch(group=(2, group)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(group) / 2
    storage.close()


def test_a_group_of_a_number_that_is_there_replaces_it(path: Path) -> None:
    storage = LmdbStorage(path)
    for number, group in ((1, b"first"), (3, b"third"), (3, b"third and more"), (2, b"late")):
        storage.commit(WriteBatch(group=(number, group)))
    assert [(number, bytes(group)) for number, group in storage.groups()] == [
        (1, b"first"),
        (2, b"late"),
        (3, b"third and more"),
    ]
    storage.close()


def test_a_file_that_lost_its_end(path: Path, clock: Clock) -> None:
    """It is refused, unless nothing that counts was there."""
    fill(path, clock)
    good, refused = (path / DATA_FILE).read_bytes(), list[str]()
    with Bucket.open(path, vbuckets=2, clock=clock, background=False) as bucket:
        expected = digest(bucket)
    for size in range(len(good) - 4096, 2 * 4096, -4096):
        (path / DATA_FILE).write_bytes(good[:size])
        try:
            bucket = Bucket.open(path, vbuckets=2, clock=clock, background=False)
        except CorruptData as error:
            refused.append(str(error))
        else:
            assert digest(bucket) == expected
            bucket.abandon()
    assert len(refused) > len(good) // 4096 // 2
    assert all("the file ends before" in error or "truncated" in error for error in refused)


def test_noise_instead_of_a_store(path: Path) -> None:
    path.mkdir()
    (path / LOCK_FILE).touch()
    (path / DATA_FILE).write_bytes(os.urandom(20_000))
    with pytest.raises(CorruptData):
        LmdbStorage(path)


@pytest.mark.parametrize("what", [b"value77value77", b"in a group", b'"whole"'])
def test_damaged_contents_are_noticed(path: Path, clock: Clock, what: bytes) -> None:
    fill(path, clock)
    data = bytearray((path / DATA_FILE).read_bytes())
    place = data.index(what)
    while place >= 0:
        data[place + 2] ^= 0x40
        place = data.find(what)
    (path / DATA_FILE).write_bytes(data)
    with pytest.raises(CorruptData) as caught:
        Bucket.open(path, vbuckets=2, background=False)
    assert str(path) in str(caught.value)
    assert "restore the directory from a backup" in str(caught.value)
    LmdbStorage(path).close()  # the failed opening let go of the lock


@pytest.mark.parametrize(("table", "key"), [("descriptions", bytes(2)), ("facts", b"bucket")])
def test_a_digit_that_changed_is_noticed(path: Path, clock: Clock, table: str, key: bytes) -> None:
    """What is still good JSON but says something else: only a checksum notices."""
    fill(path, clock)
    with changing(path, table) as txn:
        value = bytes(txn.get(key) or b"")
        place = next(place for place in range(10, len(value)) if value[place : place + 1].isdigit())
        txn.put(key, value[:place] + (b"1" if value[place : place + 1] != b"1" else b"2") + value[place + 1 :])
    with pytest.raises(CorruptData, match="is damaged"):
        Bucket.open(path, vbuckets=2, background=False)


def test_a_block_under_another_key_is_noticed(path: Path, clock: Clock) -> None:
    """In another order its predecessors would count as known already, and be left out."""
    fill(path, clock)
    with changing(path, "blocks") as txn:
        key = struct.pack(">HQ", 0, 500)
        txn.put(struct.pack(">HQ", 0, 499), bytes(txn.get(key) or b""))
        txn.delete(key)
    with pytest.raises(CorruptData, match="vbucket 0 up to 499 is damaged"):
        Bucket.open(path, vbuckets=2, background=False)


def test_a_garbled_page_is_a_storage_error_or_does_not_matter(path: Path, clock: Clock) -> None:
    """Any one page of a store full of noise, zeroes or a few wrong bytes."""
    rng = random.Random(5)
    with Bucket.open(path, vbuckets=4, clock=clock, background=False) as bucket:
        bucket.create_vbuckets()
        for i in range(400):
            bucket.vbucket(i % 4).set(b"key%d" % i, b"value %d" % i * 40)
        bucket.flusher.request_checkpoint()
        bucket.flusher.drain()
        for i in range(60):
            bucket.vbucket(i % 4).set(b"late%d" % i, b"value")
            bucket.flusher.step()
        expected = digest(bucket)
    good, errors = (path / DATA_FILE).read_bytes(), list[str]()
    for page in range(0, len(good), 4096):
        for garbled in (rng.randbytes(4096), bytes(4096), None):
            data = bytearray(good)
            if garbled is not None:
                data[page : page + 4096] = garbled
            else:
                for _ in range(8):
                    data[page + rng.choice((rng.randrange(40), rng.randrange(4096)))] = rng.randrange(256)
            (path / DATA_FILE).write_bytes(data)
            try:
                bucket = Bucket.open(path, vbuckets=4, clock=clock, background=False)
            except StorageError as error:
                errors.append(str(error))
            else:
                # Unused pages, or one of the two meta pages: the commit before only lacks the clean stop.
                assert digest(bucket, branched=len(bucket.vbucket(0).failover_log) > 1) == expected
                bucket.abandon()
    assert len(errors) > len(good) // 4096
    assert all(str(path) in error and "restore the directory from a backup" in error for error in errors)


def test_a_block_damaged_while_open_is_noticed_by_every_reader(path: Path, clock: Clock) -> None:
    bucket = Bucket.open(path, vbuckets=2, clock=clock, background=False)
    vbucket = bucket.create_vbucket(0)
    vbucket.set(b"key", b"A" * 3000)
    vbucket.set(b"other", b"C" * 3000)
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    vbucket.table.sweep(0, 0, 0, 0, vbucket.table.checkpointed_seqno)
    with (path / DATA_FILE).open("r+b") as file:
        data = file.read()
        place = data.find(b"A" * 3000)
        while place >= 0:
            file.seek(place + 10)
            file.write(b"B")
            place = data.find(b"A" * 3000, place + 3000)
    with pytest.raises(CorruptData, match="vbucket 0 up to 2 is damaged"):
        vbucket.get(b"key")
    with pytest.raises(CorruptData):
        bucket.storage.blocks(0)
    with pytest.raises(CorruptData):
        list(bucket.storage.all_blocks())
    bucket.storage.commit(WriteBatch(trims={0: 1}))
    with pytest.raises(CorruptData, match="vbucket 0 up to 1 is damaged"):
        bucket.storage.blocks(0)
    bucket.storage.commit(WriteBatch(trims={0: 0}))  # what is dropped entirely need not be whole
    assert bucket.storage.blocks(0) == []
    bucket.abandon()


@pytest.mark.parametrize(
    ("error", "becomes"), [(lmdb.CorruptedError, CorruptData), (lmdb.ReadersFullError, StorageError)]
)
def test_what_lmdb_says_about_a_read_is_a_storage_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], becomes: type[Exception]
) -> None:
    class Failing:
        def begin(self, **_: object) -> None:
            raise error("no")

    storage = LmdbStorage(path)
    monkeypatch.setattr(storage, "_env", Failing())
    for read in (
        lambda: storage.blocks(1),
        lambda: list(storage.all_blocks()),
        lambda: list(storage.groups()),
        storage.descriptions,
    ):
        with pytest.raises(StorageError) as caught:
            read()
        assert type(caught.value) is becomes
    monkeypatch.undo()
    storage.close()


def test_format_1_is_upgraded_in_place(path: Path, clock: Clock) -> None:
    path.mkdir()
    with tarfile.open(SAMPLES / "format-1.tar.xz") as archive:
        archive.extractall(path, filter="data")
    for _ in range(2):
        with Bucket.open(path, vbuckets=4, clock=clock, background=False) as bucket:
            active, replica = bucket.vbucket(0), bucket.vbucket(1)
            assert (active.high_seqno, active.table.items, active.table.tombstones) == (32, 10, 1)
            assert active.get(b"key9").value == b"value 29"
            assert active.get(b"late").value == b"in a group"
            assert len(active.failover_log) == 1
            assert replica.state is VbucketState.REPLICA
            assert (replica.position.seqno, replica.consistent_seqno) == (7, 5)
            assert len(bucket.store) == 16
            store = bucket.store
    storage = LmdbStorage(path)
    assert (storage.facts()["format"], storage.facts()["store"]) == (FORMAT, store)
    storage.close()


def test_format_2_is_upgraded_in_place(path: Path, clock: Clock) -> None:
    path.mkdir()
    with tarfile.open(SAMPLES / "format-2.tar.xz") as archive:
        archive.extractall(path, filter="data")
    for _ in range(2):
        with Bucket.open(path, vbuckets=4, clock=clock, background=False) as bucket:
            active, replica = bucket.vbucket(0), bucket.vbucket(1)
            assert (active.high_seqno, active.table.items, active.table.tombstones) == (33, 11, 1)
            assert active.get(b"key9").value == b"value 29"
            assert active.get(b"late").value == b"in a group"
            assert len(active.failover_log) == 1
            assert (replica.position.seqno, replica.consistent_seqno, replica.table.items) == (7, 5, 3)
            assert [entry.vbucket_uuid for entry in replica.failover_log] == [78, 77]
            assert bucket.store == "b945b2013598f6cc"
    with lmdb.open(str(path), max_dbs=9) as env, env.begin(db=env.open_db(b"descriptions")) as txn:
        for _, value in txn.cursor():
            assert struct.unpack_from("<I", value)[0] == zlib.crc32(value[8:])


def test_format_3_is_upgraded_in_place(path: Path, clock: Clock) -> None:
    """Its commits have no numbers. Afterwards the number of either commit is checked."""
    path.mkdir()
    with tarfile.open(SAMPLES / "format-3.tar.xz") as archive:
        archive.extractall(path, filter="data")
    for _ in range(2):
        with Bucket.open(path, vbuckets=4, clock=clock, background=False) as bucket:
            active, replica = bucket.vbucket(0), bucket.vbucket(1)
            assert (active.high_seqno, active.table.items, active.table.tombstones) == (33, 11, 1)
            assert active.get(b"late").value == b"in a group"
            assert len(active.failover_log) == 1
            assert replica.state is VbucketState.REPLICA
    data = path / DATA_FILE
    good = data.read_bytes()
    for meta in range(2):
        damaged = bytearray(good)
        damaged[meta * 4096 + 16 + 24 + 2 * 48 + 8] ^= 0x40
        data.write_bytes(damaged)
        with pytest.raises(CorruptData, match="commit"):
            LmdbStorage(path)


def test_a_table_under_another_name_is_not_taken_for_an_empty_one(path: Path, clock: Clock) -> None:
    fill(path, clock)
    data = (path / DATA_FILE).read_bytes()
    (path / DATA_FILE).write_bytes(data.replace(b"blocks", b"blockt"))
    with pytest.raises(CorruptData, match="unknown table 'blockt'"):
        Bucket.open(path, vbuckets=2, background=False)


def test_facts_that_are_gone_do_not_make_a_new_store(path: Path, clock: Clock) -> None:
    fill(path, clock)
    os.truncate(path / LOCK_FILE, 0)
    with changing(path, "facts") as txn:
        txn.delete(b"bucket")
    with pytest.raises(CorruptData, match="the facts about the bucket"):
        Bucket.open(path, vbuckets=2, background=False)


def test_a_commit_that_lacks_only_its_meta_page_is_completed(path: Path, clock: Clock) -> None:
    """LMDB puts the old number over the new trees when it cannot write a meta page."""
    fill(path, clock)
    data = path / DATA_FILE
    good = bytearray(data.read_bytes())
    place = {struct.unpack_from("<Q", good, meta * 4096 + 144)[0]: meta * 4096 + 136 for meta in range(2)}
    last = max(place)
    struct.pack_into("<QQ", good, place[last], struct.unpack_from("<Q", good, place[last - 1])[0], last - 2)
    data.write_bytes(good)
    with Bucket.open(path, vbuckets=2, clock=clock, background=False) as bucket:
        assert len(bucket.vbucket(0).failover_log) == 1, "the last commit is the mark of a clean stop"
        assert bucket.vbucket(0).get(b"late").value == b"in a group"


def test_a_backup_goes_to_an_empty_directory(path: Path, clock: Clock) -> None:
    storage = LmdbStorage(path)
    storage.backup(str(path.parent / "copy"))
    with pytest.raises(StorageError):
        storage.backup(str(path.parent / "copy"))
    storage.close()
    shutil.rmtree(path)
    LmdbStorage(path.parent / "copy").close()


def test_a_backup_that_the_system_refuses(path: Path, clock: Clock) -> None:
    with Bucket.open(path, vbuckets=2, clock=clock, background=False) as bucket:
        bucket.create_vbucket(0).set(b"large", bytes(2**20))
        bucket.flusher.step()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, hard))
        try:
            with pytest.raises(StorageError, match="copy: cannot write the backup"):
                bucket.backup(path.parent / "copy")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        bucket.vbucket(0).set(b"more", b"v")
        bucket.flusher.step()


def test_a_write_that_the_system_refuses(path: Path, clock: Clock) -> None:
    """The limit on file sizes stands for a full disk: LMDB's own write fails in the middle of a commit."""
    bucket = Bucket.open(path, vbuckets=2, clock=clock, background=False)
    vbucket = bucket.create_vbucket(0)
    vbucket.set(b"small", b"v")
    bucket.flusher.step()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = os.stat(path / DATA_FILE).st_size + 8192
    vbucket.set(b"large", bytes(2**20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        for _ in range(3):
            with pytest.raises(StorageError, match="cannot write"):
                bucket.flusher.step()
        with pytest.raises(TemporaryFailure):
            vbucket.set(b"more", b"v")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    bucket.flusher.step()
    vbucket.set(b"more", b"v")
    bucket.flusher.step()
    bucket.abandon()
    with Bucket.open(path, vbuckets=2, clock=clock, background=False) as reopened:
        assert sorted(reopened.vbucket(0).scan()) == [b"large", b"more", b"small"]


def test_a_full_map_is_an_error_that_loses_nothing(path: Path) -> None:
    storage = LmdbStorage(path, map_bytes=2**20)
    storage.commit(WriteBatch(blocks=[Block(1, 1, b"a" * 1000)]))
    with pytest.raises(StorageError, match="cannot write"):
        storage.commit(WriteBatch(blocks=[Block(1, 2, bytes(2**21))]))
    assert [block.upto for block in storage.blocks(1)] == [1]
    storage.commit(WriteBatch(blocks=[Block(1, 3, b"b")]))
    assert [block.upto for block in storage.blocks(1)] == [1, 3]
    storage.close()


#: Writes until the head of a commit cannot be written, reads what is on disk only, and writes on when it can be again.
HEAD_FAILS = """
import os, sys, threading, logging
from pathlib import Path
from upriver.engine import Bucket
from upriver.errors import StorageError, TemporaryFailure
logging.disable(logging.CRITICAL)
path, full = sys.argv[1], Path(sys.argv[2])
bucket = Bucket.open(path, vbuckets=1, background=False)
vbucket = bucket.create_vbucket(0)
vbucket.set(b"old", b"on disk only")
bucket.flusher.request_checkpoint()
bucket.flusher.drain()
while vbucket.table.sweep(0, 0, 0, 0, vbucket.table.checkpointed_seqno)[0] or not vbucket.table.evicted_items:
    pass
full.touch()
for key in (b"new", b"newer"):
    try:
        vbucket.set(key, b"1")
    except TemporaryFailure:
        print("refused")
    for _ in range(3):
        try:
            bucket.flusher.step()
        except StorageError as error:
            print("No space" in str(error))
bucket.flusher.blocks.forget([0])
print(vbucket.get(b"old").value)
full.unlink()
bucket.flusher.step()
vbucket.set(b"newest", b"1")
print(bucket.sync())
bucket.abandon()
"""


def test_a_head_that_cannot_be_written_is_forgiven(path: Path, clock: Clock) -> None:
    """LMDB declares its environment dead then; that must not last longer than the reason."""
    full = path.parent / "full"
    printed = run_watched(path.parent, HEAD_FAILS, str(path), str(full), full=full)
    assert printed.split("\n") == ["True"] * 3 + ["refused"] + ["True"] * 3 + ["b'on disk only'", "True", ""]
    with Bucket.open(path, vbuckets=1, clock=clock, background=False) as bucket:
        assert set(bucket.vbucket(0).table.live_keys()) == {b"old", b"new", b"newest"}


def test_a_dead_environment_is_not_taken_from_those_who_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LmdbStorage(path)
    storage.commit(WriteBatch(group=(1, b"group")))
    monkeypatch.setattr(storage, "_disabled", True)
    reading = storage.groups()
    number, group = next(reading)
    with pytest.raises(StorageError, match="while it is read"):
        storage.commit(WriteBatch(group=(2, b"group")))
    assert (number, bytes(group)) == (1, b"group")
    assert list(reading) == []
    storage.commit(WriteBatch(group=(2, b"group")))
    assert [number for number, _ in storage.groups()] == [1, 2]
    storage.close()


OPEN_NEW = """
import sys
from upriver.engine import Bucket
try:
    Bucket.open(sys.argv[1])
except Exception as error:
    print(repr(error))
"""


def test_a_new_store_on_a_full_disk_is_not_called_damaged(path: Path) -> None:
    full = path.parent / "full"
    full.touch()
    printed = run_watched(path.parent, OPEN_NEW, str(path), full=full)
    assert printed.startswith("StorageError")
    assert "No space left" in printed
