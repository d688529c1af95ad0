"""Checkpoints: ids for tools, ends for streams."""

from collections.abc import Iterator

import pytest

from upriver.engine import Bucket, Vbucket
from upriver.engine.checkpoint_ids import AGE_S_MAX, CHANGES_MAX, FIRST_ID


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with Bucket.open(None, vbuckets=4, background=False) as opened:
        yield opened


@pytest.fixture
def vbucket(bucket: Bucket) -> Vbucket:
    return bucket.create_vbucket(0)


def write(vbucket: Vbucket, count: int) -> None:
    for number in range(count):
        vbucket.set(b"%d" % number, b"v")


def test_the_first_is_open_and_none_is_closed(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    assert checkpoints.open_id == FIRST_ID
    assert checkpoints.last_closed_id == FIRST_ID - 1
    assert checkpoints.end_after(0) is None
    assert [checkpoints.around(seqno) for seqno in (0, 1)] == [(True, None), (False, None)]


def test_a_checkpoint_ends_where_it_was_closed(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    for count in (3, 2, 0):
        write(vbucket, count)
        checkpoints.create()
    assert checkpoints.open_id == FIRST_ID + 3
    assert [checkpoints.end_after(seqno) for seqno in (0, 2, 3, 4, 5)] == [3, 3, 5, 5, None]
    around = [checkpoints.around(seqno) for seqno in (0, 1, 3, 4, 5, 6)]
    assert around == [(True, 3), (False, 3), (True, 5), (False, 5), (True, None), (False, None)]


def test_another_vbucket_under_the_same_number_starts_at_the_first_id(bucket: Bucket, vbucket: Vbucket) -> None:
    write(vbucket, 3)
    vbucket.checkpoints.create()
    bucket.delete_vbucket(0)
    other = bucket.create_vbucket(0)
    write(other, 5)
    assert other.checkpoints.open_id == FIRST_ID
    assert other.checkpoints.end_after(0) is None


def test_a_flush_starts_at_the_first_id_again(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    write(vbucket, 3)
    checkpoints.create()
    vbucket.flush()
    assert checkpoints.open_id == FIRST_ID
    assert checkpoints.end_after(0) is None


def test_a_large_checkpoint_is_closed(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    write(vbucket, CHANGES_MAX - 1)
    checkpoints.close_if_due(0.0)
    assert checkpoints.open_id == FIRST_ID
    write(vbucket, 1)
    checkpoints.close_if_due(0.0)
    assert checkpoints.end_after(0) == CHANGES_MAX


def test_an_old_checkpoint_is_closed_unless_it_is_empty(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    checkpoints.close_if_due(0.0)
    write(vbucket, 1)
    checkpoints.close_if_due(AGE_S_MAX * 2)
    checkpoints.close_if_due(AGE_S_MAX * 3 - 1)
    assert checkpoints.open_id == FIRST_ID
    checkpoints.close_if_due(AGE_S_MAX * 3)
    assert checkpoints.end_after(0) == 1
    checkpoints.close_if_due(AGE_S_MAX * 9)
    assert checkpoints.open_id == FIRST_ID + 1


def test_it_is_persisted_when_all_its_changes_are(bucket: Bucket, vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    write(vbucket, 2)
    checkpoints.create()
    assert checkpoints.persisted_id == FIRST_ID - 1
    bucket.sync()
    assert checkpoints.persisted_id == FIRST_ID


def test_every_change_belongs_to_one_checkpoint(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    assert checkpoints.id_after(0) == 1
    for _ in range(2):
        vbucket.set(b"k", b"v")
        checkpoints.create()
        checkpoints.create()  # an empty one has no changes
    vbucket.set(b"k", b"v")
    assert [checkpoints.id_after(seqno) for seqno in range(4)] == [1, 3, 5, 5]
