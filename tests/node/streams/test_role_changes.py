"""Roles that vbuckets took on, told together."""

from tests.support.in_memory_node import InMemoryNode
from upriver.model import VbucketState
from upriver.node.streams.role_changes import RoleChanges


def test_what_happens_in_a_turn_is_told_once_in_the_next() -> None:
    node, told = InMemoryNode(vbuckets=4), list[set[int]]()
    RoleChanges(node.state, told.append)
    node.bucket.create_vbucket(1)
    node.bucket.create_vbucket(2)
    node.bucket.vbucket(1).set_state(VbucketState.REPLICA)
    assert told == []
    node.settle()
    assert told == [{1, 2}]
    node.bucket.vbucket(2).set_state(VbucketState.DEAD)
    node.settle()
    assert told == [{1, 2}, {2}]
