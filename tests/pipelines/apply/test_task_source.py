"""The nodes, as a task sees them."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from upriver.client import Address, SyncKvClient
from upriver.node import EmbeddedNode
from upriver.pipelines.apply.task_source import NodeTaskSource
from upriver.spark import Range, ReadOptions, VbucketOffset
from upriver.spark.range_reader import close_readers

COLUMNS = ("vbucket", "seqno", "event", "key", "value")


@pytest.fixture
def source(upriver_node: EmbeddedNode) -> Iterator[NodeTaskSource]:
    with closing(NodeTaskSource(ReadOptions(address=Address.parse(upriver_node.address)), COLUMNS)) as source:
        yield source
    close_readers()


@pytest.mark.upriver(vbuckets=4)
def test_ranges_are_read_into_the_columns_that_are_needed(upriver_node: EmbeddedNode, source: NodeTaskSource) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"v%d" % n for n in range(20)})
        kv.delete("k7")
    states = source.states(range(4))
    asked = [Range(VbucketOffset(number, state.vbucket_uuid), state.high_seqno) for number, state in states.items()]
    rows = [row for batch in source.rows([each for each in asked if each.end_seqno]) for row in batch.to_pylist()]
    assert set(rows[0]) == set(COLUMNS)
    assert {row["key"] for row in rows if row["event"] == "mutation"} == {b"k%d" % n for n in range(20) if n != 7}
    assert [row["key"] for row in rows if row["event"] == "deletion"] == [b"k7"]
    assert list(source.rows([])) == []


@pytest.mark.upriver(vbuckets=4)
def test_states_and_identity(upriver_node: EmbeddedNode, source: NodeTaskSource) -> None:
    assert list(source.vbuckets()) == [0, 1, 2, 3]
    assert source.states([1, 3, 9]).keys() == {1, 3}
    assert source.bucket().is_in_memory
