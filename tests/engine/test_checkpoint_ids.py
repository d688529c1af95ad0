"""Checkpoints: ids for tools, ends for streams."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from upriver.engine import Bucket, Vbucket, checkpoint_ids
from upriver.engine.checkpoint_ids import AGE_S_MAX, CHANGES_MAX, Checkpoints
from upriver.model import VbucketState


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
    assert checkpoints.open_id > 0
    assert (checkpoints.last_closed_id, checkpoints.persisted_id) == (0, 0)
    assert checkpoints.end_after(0) is None
    assert [checkpoints.around(seqno) for seqno in (0, 1)] == [(True, None), (False, None)]


def test_a_checkpoint_ends_where_it_was_closed(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    first = checkpoints.open_id
    for count in (3, 2, 0):
        write(vbucket, count)
        checkpoints.create()
    assert (checkpoints.open_id, checkpoints.last_closed_id) == (first + 3, first + 2)
    assert [checkpoints.end_after(seqno) for seqno in (0, 2, 3, 4, 5)] == [3, 3, 5, 5, None]
    around = [checkpoints.around(seqno) for seqno in (0, 1, 3, 4, 5, 6)]
    assert around == [(True, 3), (False, 3), (True, 5), (False, 5), (True, None), (False, None)]


def test_a_checkpoint_begins_where_the_one_before_it_ended(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    first = checkpoints.open_id
    for count in (3, 0, 2, 0):
        write(vbucket, count)
        checkpoints.create()
    write(vbucket, 1)
    assert [checkpoints.start_of(first + number) for number in range(-1, 6)] == [None, 0, 3, 3, 5, 5, None]


def test_the_oldest_checkpoints_are_forgotten(vbucket: Vbucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_ids, "_ENDS_MAX", 2)
    checkpoints = Checkpoints(vbucket.table)
    first = checkpoints.open_id
    for _ in range(4):
        vbucket.set(b"k", b"v")
        checkpoints.create()
    assert [checkpoints.start_of(first + number) for number in range(6)] == [None, None, 2, 3, 4, None]
    assert [checkpoints.id_after(seqno) - first for seqno in range(5)] == [1, 1, 2, 3, 4]


def test_the_ids_of_a_deleted_vbucket_are_not_used_again(bucket: Bucket, vbucket: Vbucket) -> None:
    write(vbucket, 3)
    given = [vbucket.checkpoints.open_id, vbucket.checkpoints.create()]
    bucket.delete_vbucket(0)
    other = bucket.create_vbucket(0)
    write(other, 5)
    assert [other.checkpoints.start_of(number) for number in given] == [None, None]
    assert other.checkpoints.start_of(other.checkpoints.open_id) == 0
    assert other.checkpoints.end_after(0) is None


def test_copies_of_one_moment_have_different_ids() -> None:
    """Other nodes may create theirs in the same millisecond; each id stands for the many that follow it."""
    with Bucket.open(None, vbuckets=128, clock=lambda: 1.7e9, background=False) as bucket:
        bucket.create_vbuckets()
        assert len({vbucket.checkpoints.open_id for vbucket in bucket}) > 120


def test_no_id_from_before_a_flush_or_a_rollback_is_known(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    first = checkpoints.open_id
    write(vbucket, 3)
    checkpoints.create()
    write(vbucket, 2)
    vbucket.set_state(VbucketState.REPLICA)
    vbucket.roll_back(4)
    assert (checkpoints.open_id, checkpoints.end_after(0)) == (first + 2, None)
    assert [checkpoints.start_of(first + number) for number in range(3)] == [None, None, 4]
    assert [checkpoints.id_after(seqno) - first for seqno in (0, 3, 4)] == [
        1,
        1,
        2,
    ]  # of the second it is not told where it began
    vbucket.set_state(VbucketState.ACTIVE)
    vbucket.flush()
    assert [checkpoints.start_of(first + number) for number in (2, 3)] == [None, 0]


def test_no_id_from_before_a_restart_is_known(tmp_path: Path) -> None:
    with Bucket.open(tmp_path, vbuckets=1) as bucket:
        vbucket = bucket.create_vbucket(0)
        write(vbucket, 3)
        given = [vbucket.checkpoints.open_id, vbucket.checkpoints.create()]
    for _ in range(2):
        with Bucket.open(tmp_path, vbuckets=1) as bucket:
            checkpoints = bucket.vbucket(0).checkpoints
            assert [checkpoints.start_of(number) for number in given] == [None] * len(given)
            assert checkpoints.start_of(checkpoints.open_id) == 3
            given.append(checkpoints.open_id)


def test_a_large_checkpoint_is_closed(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    write(vbucket, CHANGES_MAX - 1)
    checkpoints.close_if_due(0.0)
    assert checkpoints.last_closed_id == 0
    write(vbucket, 1)
    checkpoints.close_if_due(0.0)
    assert checkpoints.end_after(0) == CHANGES_MAX


def test_an_old_checkpoint_is_closed_unless_it_is_empty(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    first = checkpoints.open_id
    checkpoints.close_if_due(0.0)
    write(vbucket, 1)
    checkpoints.close_if_due(AGE_S_MAX * 2)
    checkpoints.close_if_due(AGE_S_MAX * 3 - 1)
    assert checkpoints.last_closed_id == 0
    checkpoints.close_if_due(AGE_S_MAX * 3)
    assert checkpoints.end_after(0) == 1
    checkpoints.close_if_due(AGE_S_MAX * 9)
    assert checkpoints.open_id == first + 1


def test_it_is_persisted_when_all_its_changes_are(bucket: Bucket, vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    write(vbucket, 2)
    checkpoints.create()
    assert checkpoints.persisted_id == 0
    bucket.sync()
    assert checkpoints.persisted_id == checkpoints.last_closed_id > 0


def test_every_change_belongs_to_one_checkpoint(vbucket: Vbucket) -> None:
    checkpoints = vbucket.checkpoints
    first = checkpoints.open_id
    assert checkpoints.id_after(0) == first
    for _ in range(2):
        vbucket.set(b"k", b"v")
        checkpoints.create()
        checkpoints.create()  # an empty one has no changes
    vbucket.set(b"k", b"v")
    assert [checkpoints.id_after(seqno) - first for seqno in range(4)] == [0, 2, 4, 4]
