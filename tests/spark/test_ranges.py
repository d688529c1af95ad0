"""Ranges read by a task's reader, from real nodes."""

from typing import Any

import pyarrow as pa
import pytest

from tests.client.clusters import push_map, two_nodes
from upriver.client import SyncKvClient
from upriver.client.address import Address
from upriver.errors import StreamRolledBack
from upriver.model import VbucketState
from upriver.node import EmbeddedNode
from upriver.spark.offsets import Place
from upriver.spark.options import ReadOptions
from upriver.spark.plan import GoBack, Policy, Range
from upriver.spark.ranges import RangeReader, Reading
from upriver.spark.rows import FIELDS, RowMaker


def reader_of(address: str, policy: Policy = "emit", columns: tuple[str, ...] = tuple(FIELDS)) -> RangeReader:
    rows = RowMaker(columns)
    settings = ReadOptions().consumer_settings(rows.to_decode)
    return RangeReader(Reading(Address.parse(address), settings, policy, rows, 1000))


def read(reader: RangeReader, ranges: list[Range]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.Table.from_batches(reader.read(ranges), reader._reading.rows.schema).to_pylist()
    return rows


@pytest.fixture
def written(upriver_node: EmbeddedNode) -> tuple[EmbeddedNode, int]:
    """A vbucket with k0 to k9 in it, of which k0 was then changed and k1 deleted."""
    vbucket = upriver_node.bucket.vbucket(3)

    def write() -> None:
        for n in range(10):
            vbucket.set(b"k%d" % n, b"v%d" % n)
        vbucket.set(b"k0", b"again")
        vbucket.delete(b"k1")

    upriver_node.call(write)
    return upriver_node, vbucket.failover_log.newest.vbucket_uuid


def test_a_range_is_the_state_at_its_end(written: tuple[EmbeddedNode, int]) -> None:
    node, uuid = written
    reader = reader_of(node.address)
    rows = read(reader, [Range(Place(3, uuid), 10)])
    assert [row["seqno"] for row in rows] == list(range(1, 11))
    assert (rows[0]["key"], rows[0]["value"], rows[0]["vbucket_uuid"]) == (b"k0", b"v0", uuid)
    rows = read(reader, [Range(Place(3, uuid, 10, 10), 12)])
    assert [(row["event"], row["key"], row["value"]) for row in rows] == [
        ("mutation", b"k0", b"again"),
        ("deletion", b"k1", None),
    ]
    reader.close()


def test_nothing_to_read(written: tuple[EmbeddedNode, int]) -> None:
    reader = reader_of(written[0].address)
    assert read(reader, []) == []
    reader.close()


def test_going_back_is_told_first(written: tuple[EmbeddedNode, int]) -> None:
    node, uuid = written
    reader = reader_of(node.address)
    rows = read(reader, [Range(Place(3, uuid, 8, 8, 2), 10, GoBack(8, 1, uuid))])
    assert [(row["event"], row["seqno"], row["branch"]) for row in rows] == [
        ("rollback", 8, 2),
        ("mutation", 9, 2),
        ("mutation", 10, 2),
    ]
    reader.close()


def test_a_range_of_a_lost_branch_tells_that_it_is_lost(written: tuple[EmbeddedNode, int]) -> None:
    node, uuid = written
    vbucket = node.bucket.vbucket(3)

    def lose() -> None:
        vbucket.set_state(VbucketState.REPLICA)
        vbucket.roll_back(6)
        vbucket.set_state(VbucketState.ACTIVE)

    node.call(lose)
    reader = reader_of(node.address)
    rows = read(reader, [Range(Place(3, uuid, 8, 8, 0, 2), 12)])
    assert [(row["event"], row["seqno"]) for row in rows] == [("rollback", 6)]
    rows = read(reader, [Range(Place(3, uuid, 8, 8, 0, 7), 12)])
    assert [(row["event"], row["seqno"]) for row in rows] == [("reset", 0)]
    reader.close()
    with pytest.raises(StreamRolledBack):
        read(reader_of(node.address, "fail"), [Range(Place(3, uuid, 8, 8, 0, 2), 12)])


def test_only_what_was_asked_for_is_decoded(written: tuple[EmbeddedNode, int]) -> None:
    node, uuid = written
    reader = reader_of(node.address, columns=("key",))
    assert read(reader, [Range(Place(3, uuid), 2)]) == [{"key": b"k0"}, {"key": b"k1"}]
    reader.close()


def test_vbuckets_that_have_moved_are_followed() -> None:
    with two_nodes() as (one, other):
        with SyncKvClient(one.address) as kv:
            kv.set_many({f"k{n}": b"v" for n in range(1000)})
        places = {
            vbucket.number: (vbucket.failover_log.newest.vbucket_uuid, vbucket.high_seqno)
            for node in (one, other)
            for vbucket in node.bucket
            if vbucket.state is VbucketState.ACTIVE
        }
        reader = reader_of(one.address)
        todo = [Range(Place(number, uuid), high) for number, (uuid, high) in places.items()]
        assert len({row["key"] for row in read(reader, todo)}) == 1000
        # The map says otherwise than the nodes, until it is put right while the reader asks again and again.
        push_map([one, other], [1] * 4 + [0] * 4, rev=2)
        batches = reader.read(todo)
        push_map([one, other], [0] * 4 + [1] * 4, rev=3)
        assert sum(batch.num_rows for batch in batches) == 1000
        reader.close()
