import gc

from tests.node.peer import Rig
from upriver.model import VbucketState
from upriver.node.checkpoints import Checkpoints


def test_ids_start_at_1_and_grow_by_one(rig: Rig) -> None:
    checkpoints, vbucket = Checkpoints(), rig.bucket.vbucket(0)
    assert (checkpoints.open_id(vbucket), checkpoints.last_closed_id(vbucket)) == (1, 0)
    assert [checkpoints.create(vbucket) for _ in range(3)] == [2, 3, 4]
    assert (checkpoints.open_id(vbucket), checkpoints.last_closed_id(vbucket)) == (4, 3)
    assert checkpoints.open_id(rig.bucket.vbucket(1)) == 1


def test_a_checkpoint_is_persisted_with_its_last_change(rig: Rig) -> None:
    checkpoints, vbucket = Checkpoints(), rig.bucket.vbucket(0)
    vbucket.set(b"a", b"")
    checkpoints.create(vbucket)
    vbucket.set(b"b", b"")
    assert checkpoints.persisted_id(vbucket) == 0
    rig.commit()
    assert checkpoints.persisted_id(vbucket) == 1
    checkpoints.create(vbucket)
    assert checkpoints.persisted_id(vbucket) == 2
    vbucket.set(b"c", b"")
    checkpoints.create(vbucket)
    assert checkpoints.persisted_id(vbucket) == 2


def test_a_history_that_starts_over_has_new_ids(rig: Rig) -> None:
    checkpoints, vbucket = Checkpoints(), rig.bucket.vbucket(0)
    vbucket.set(b"a", b"")
    checkpoints.create(vbucket)
    vbucket.flush()
    assert (checkpoints.open_id(vbucket), checkpoints.persisted_id(vbucket)) == (1, 0)


def test_a_vbucket_that_is_gone_is_forgotten(rig: Rig) -> None:
    checkpoints = Checkpoints()
    checkpoints.create(rig.bucket.vbucket(4))
    rig.bucket.delete_vbucket(4)
    gc.collect()
    assert checkpoints.open_id(rig.bucket.create_vbucket(4, VbucketState.ACTIVE)) == 1
