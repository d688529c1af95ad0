"""The groups of statistics that a node answers with."""

from tests.support.in_memory_node import InMemoryNode
from upriver.wire import memcached


def stat_group(node: InMemoryNode, name: bytes) -> dict[str, str]:
    """The statistics of a group, by name."""
    answers = node.connect().send(memcached.Stat(key=name))
    assert all(isinstance(answer, memcached.StatResponse) for answer in answers)
    return {answer.key.decode(): answer.value.decode() for answer in answers[:-1]}  # type: ignore[attr-defined]
