import pytest

from upriver.engine import Bucket
from upriver.engine.storage.interface import WriteBatch
from upriver.engine.storage.memory import MemoryStorage
from upriver.errors import StorageError


def test_nothing_is_kept() -> None:
    storage = MemoryStorage()
    storage.commit(WriteBatch(facts={"clean": True}))
    assert storage.facts() == {}
    assert storage.descriptions() == {}
    assert not storage.blocks(0)
    assert not list(storage.all_blocks())
    assert not list(storage.groups())
    assert storage.size_bytes() == 0
    storage.close()


def test_a_bucket_in_memory_cannot_be_backed_up() -> None:
    with Bucket.open(None, vbuckets=1, background=False) as bucket, pytest.raises(StorageError):
        bucket.backup("/nowhere")


def test_changes_count_as_persisted_when_the_flusher_has_seen_them() -> None:
    with Bucket.open(None, vbuckets=1, background=False) as bucket:
        vbucket = bucket.create_vbucket(0)
        vbucket.set(b"k", b"v")
        assert vbucket.persisted_seqno == 0
        bucket.flusher.step()
        assert vbucket.persisted_seqno == vbucket.table.checkpointed_seqno == 1
        assert bucket.ledger.pending_bytes == 0
