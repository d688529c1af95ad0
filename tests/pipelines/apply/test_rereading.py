"""Whole vbuckets read from real nodes."""

from collections.abc import Iterator

import pytest

from upriver.client.transport.address import Address
from upriver.errors import DataLoss
from upriver.node import EmbeddedNode
from upriver.pipelines.apply import rereading
from upriver.pipelines.apply.rereading import NodeReader
from upriver.pipelines.targets.target import ReadAhead, ReadBasis
from upriver.spark.options import ReadOptions


@pytest.fixture
def reader(upriver_node: EmbeddedNode) -> Iterator[NodeReader]:
    reader = NodeReader(ReadOptions(address=Address.parse(upriver_node.address)))
    yield reader
    reader.close()


def write(node: EmbeddedNode, vbucket: int, *keys: bytes) -> int:
    """Store keys, each its own name; the uuid that they were written under."""

    def store() -> int:
        copy = node.bucket.vbucket(vbucket)
        for key in keys:
            copy.set(key, key)
        return copy.failover_log.newest.vbucket_uuid

    return node.call(store)


def test_a_vbucket_is_read_as_it_is_now(upriver_node: EmbeddedNode, reader: NodeReader) -> None:
    uuid = write(upriver_node, 3, b"a", b"b", b"a")
    write(upriver_node, 4, b"c")
    rows, ahead = reader.read([3, 5])
    assert [(each["key"], each["seqno"]) for each in rows.to_pylist()] == [(b"b", 2), (b"a", 3)]
    assert ahead[3] == ReadAhead(uuid, 3, 3)
    assert ahead[5].until_seqno == 0
    assert reader.grounds([3]) == {3: ReadBasis(uuid, 0)}
    write(upriver_node, 3, b"d")
    rows, ahead = reader.read([3])
    assert (rows.num_rows, ahead[3].until_seqno) == (3, 4)


def test_groups_are_small_enough_to_be_held(
    upriver_node: EmbeddedNode, reader: NodeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rereading, "CHANGES_MAX", 3)
    for number in range(4):
        write(upriver_node, number, b"a", b"b")
    write(upriver_node, 4, b"a")
    assert reader.groups([4, 3, 2, 1]) == [[1], [2], [3, 4]]
    assert reader.groups([]) == []
    assert reader.groups([60, 61]) == [[60, 61]]  # which are empty


def test_a_vbucket_without_an_owner_is_named(upriver_node: EmbeddedNode, reader: NodeReader) -> None:
    with pytest.raises(DataLoss, match="999"):
        reader.read([999])
