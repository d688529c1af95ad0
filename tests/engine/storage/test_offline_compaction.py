import shutil
from pathlib import Path

import pytest

from tests.support.bucket_digest import digest
from tests.support.manual_clock import Clock
from upriver.engine import Bucket
from upriver.engine.storage import compact
from upriver.engine.storage.lmdb import COMPACTING, LmdbStorage
from upriver.engine.storage.lmdb_check import check_file
from upriver.errors import DataInUse, ForeignData, StorageError


def filled(path: Path, clock: Clock) -> Bucket:
    bucket = Bucket.open(path, vbuckets=4, clock=clock, background=False)
    bucket.create_vbuckets()
    for i in range(400):
        bucket.vbucket(i % 4).set(b"key%d" % (i % 40), bytes(20_000))
        bucket.flusher.step()
    bucket.vbucket(0).flush()
    bucket.flusher.request_checkpoint()
    bucket.flusher.drain()
    return bucket


def test_the_store_is_the_same_and_smaller(quick_disk: Path, clock: Clock) -> None:
    path = quick_disk / "data"
    with filled(path, clock) as bucket:
        expected, store = digest(bucket), bucket.store
        with pytest.raises(DataInUse):
            compact(path)
    before, after = compact(path)
    assert after < 0.8 * before
    assert after == (path / "data.mdb").stat().st_size
    assert check_file(path / "data.mdb").number is not None
    for _ in range(2):
        with Bucket.open(path, vbuckets=4, clock=clock, background=False) as bucket:
            assert digest(bucket) == expected
            assert bucket.store == store, "it is the same store"


def test_an_interrupted_copy_is_removed(quick_disk: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    path = quick_disk / "data"
    with filled(path, clock) as bucket:
        expected = digest(bucket)

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("upriver.engine.storage.offline_compaction.number_commits", kill)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            compact(path)
    assert (path / COMPACTING).exists()
    with Bucket.open(path, vbuckets=4, clock=clock, background=False) as bucket:
        assert digest(bucket) == expected
        assert not (path / COMPACTING).exists()


def test_a_copy_that_does_not_fit_leaves_the_file(quick_disk: Path, clock: Clock) -> None:
    path = quick_disk / "data"
    filled(path, clock).close()
    (path / COMPACTING).write_text("no folder")
    before = (path / "data.mdb").read_bytes()
    with pytest.raises(StorageError, match="cannot be compacted"):
        compact(path)
    assert (path / "data.mdb").read_bytes() == before
    LmdbStorage(path).close()


def test_what_is_no_data_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        compact(tmp_path / "absent")
    with pytest.raises(ForeignData):
        compact(tmp_path)
