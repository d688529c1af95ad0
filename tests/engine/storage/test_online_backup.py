"""Copies of data directories that a node uses."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.terminal import piped
from upriver.engine import Bucket
from upriver.engine.storage.lmdb import DATA_FILE
from upriver.engine.storage.online_backup import online_backup
from upriver.errors import CorruptData, ForeignData, StorageError
from upriver.node import start


def filled(path: Path) -> None:
    with start(vbuckets=2, data=str(path)) as node:
        for number in range(200):
            node.bucket.vbucket(number % 2).set(b"k%d" % number, b"v" * 100)


def test_a_copy_of_a_directory_that_is_not_in_use(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    online_backup(tmp_path / "data", tmp_path / "copy", check=True)
    with start(vbuckets=2, data=str(tmp_path / "copy")) as node:
        assert node.bucket.vbucket(1).high_seqno == 100
        assert node.bucket.vbucket(0).get(b"k0").value == b"v" * 100


def test_the_node_goes_on_while_it_is_copied(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with start(vbuckets=2, data=str(data), ack="disk") as node:
        assert piped("load", "--sample", "1000", node.address).returncode == 0
        assert piped("backup", str(data), str(tmp_path / "copy")).returncode == 0  # LMDB: not twice in one process
        assert piped("load", "--sample", "2000", node.address).returncode == 0
        branches = node.bucket.vbucket(0).failover_log
    with start(vbuckets=2, data=str(tmp_path / "copy")) as copy:
        assert sum(copy.bucket.vbucket(number).high_seqno for number in range(2)) == 1000
        assert copy.bucket.vbucket(0).failover_log.entries[1:] == branches.entries


#: Commits as fast as it can, other pages each time, until the test stops it; the store stays small.
WRITER = """
import sys, threading
from upriver.engine.storage.lmdb import LmdbStorage
from upriver.engine.storage.interface import Block, WriteBatch
storage = LmdbStorage(sys.argv[1])
storage.commit(WriteBatch(facts={"clean": False}))
print("ready", flush=True)
stop = threading.Thread(target=sys.stdin.read)
stop.start()
number = 100
while stop.is_alive():
    number += 1
    blocks = [Block(vbucket, number, bytes(10_000)) for vbucket in range(4)]
    removed = [(vbucket, number - 50) for vbucket in range(4)]
    group = (number, bytes(20_000))
    storage.commit(WriteBatch(group=group, drop_groups_to=number - 20, blocks=blocks, removed=removed))
storage.close()
"""


def test_a_sound_store_is_never_taken_for_damaged_while_it_is_written(quick_disk: Path) -> None:
    """Commits come faster than a look at the pages takes: each time it must look at those of one and the same."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(quick_disk / "data")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            for number in range(60):
                online_backup(quick_disk / "data", quick_disk / "copy", check=number % 10 == 0)
                online_backup(quick_disk / "copy", quick_disk / "again", check=True)
                shutil.rmtree(quick_disk / "copy")
                shutil.rmtree(quick_disk / "again")
        finally:
            process.stdin.close()
    assert process.returncode == 0


#: Somebody in the middle of a copy.
READER = """
import sys, threading
from upriver.engine.storage.online_backup import _Reader
with _Reader(sys.argv[1])._env.begin():
    print("reading", flush=True)
    threading.Event().wait()
"""


def test_a_copy_that_was_killed_does_not_let_the_file_grow(quick_disk: Path) -> None:
    data = quick_disk / "data"
    with Bucket.open(data, vbuckets=1, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)

        def write(times: int) -> int:
            for _ in range(times):
                vbucket.set(b"k", bytes(100_000))
                bucket.flusher.step()
                vbucket.flush()
                bucket.flusher.step()
                bucket.flusher.request_checkpoint()
                bucket.flusher.drain()
            return bucket.storage.size_bytes()

        before = write(10)
        with subprocess.Popen([sys.executable, "-c", READER, str(data)], stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"reading\n"
            reader.kill()
        assert write(50) < 2 * before


def test_what_is_damaged_is_found(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    path = tmp_path / "data" / DATA_FILE
    path.write_bytes(path.read_bytes().replace(b"v" * 100, b"w" * 100))
    with pytest.raises(CorruptData):
        online_backup(tmp_path / "data", tmp_path / "copy", check=True)


def test_what_is_no_data_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        online_backup(tmp_path / "nothing", tmp_path / "copy")
    with pytest.raises(ForeignData):
        online_backup(tmp_path, tmp_path / "copy")
    filled(tmp_path / "data")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(StorageError, match="is not empty"):
        online_backup(tmp_path / "data", tmp_path / "full")
    (tmp_path / "data" / DATA_FILE).write_bytes(b"x" * 10_000)
    with pytest.raises(CorruptData):
        online_backup(tmp_path / "data", tmp_path / "copy")
