"""Roles that vbuckets took on, told together."""

from tests.support.in_memory_node import Laboratory
from upriver.model import VbucketState
from upriver.node.role_changes import RoleChanges


def test_what_happens_in_a_turn_is_told_once_in_the_next() -> None:
    laboratory, told = Laboratory(vbuckets=4), list[set[int]]()
    RoleChanges(laboratory.node, told.append)
    laboratory.bucket.create_vbucket(1)
    laboratory.bucket.create_vbucket(2)
    laboratory.bucket.vbucket(1).set_state(VbucketState.REPLICA)
    assert told == []
    laboratory.settle()
    assert told == [{1, 2}]
    laboratory.bucket.vbucket(2).set_state(VbucketState.DEAD)
    laboratory.settle()
    assert told == [{1, 2}, {2}]
