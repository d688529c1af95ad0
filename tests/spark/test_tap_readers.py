"""TAP under Spark: a dump, and what comes."""

from typing import Any

import pytest

from tests.support.spark_driver import Query, read_batch
from tests.support.spark_tables import contents_at
from upriver.client import SyncKvClient
from upriver.errors import OptionError
from upriver.model import VbucketState
from upriver.node import EmbeddedNode

pytestmark = [pytest.mark.timeout(300), pytest.mark.upriver(vbuckets=4)]


def write(node: EmbeddedNode, value: str, keys: range) -> None:
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": value.encode() for n in keys})


class Seen:
    """The last that was said of each key, in the order in which it came."""

    def __init__(self) -> None:
        self.contents: dict[bytes, bytes] = {}
        self.resets: list[int] = []
        self._vbuckets: dict[bytes, int] = {}

    def take(self, rows: list[dict[str, Any]]) -> int:
        for row in rows:
            if row["event"] == "reset":
                self.resets.append(row["vbucket"])
                for key in [key for key, number in self._vbuckets.items() if number == row["vbucket"]]:
                    self.contents.pop(key, None)
            elif row["event"] == "mutation":
                self.contents[row["key"]] = row["value"]
                self._vbuckets[row["key"]] = row["vbucket"]
            else:
                self.contents.pop(row["key"], None)
        return len(rows)


def test_a_dump(upriver_node: EmbeddedNode) -> None:
    write(upriver_node, "a", range(200))
    write(upriver_node, "b", range(50, 100))
    rows = read_batch(address=upriver_node.address, dialect="tap")
    assert {row["key"]: row["value"] for row in rows} == contents_at(upriver_node.address)
    assert len(rows) == 200
    unknown = {(row["seqno"], row["vbucket_uuid"], row["snapshot_end"], row["branch"]) for row in rows}
    assert unknown == {(None, None, None, 0)}
    assert {row["rev_seqno"] for row in rows} == {1, 2}


def test_a_dump_of_keys_and_of_some_vbuckets(upriver_node: EmbeddedNode) -> None:
    write(upriver_node, "a", range(200))
    rows = read_batch(address=upriver_node.address, dialect="tap", vbuckets="1-2", keysOnly=True)
    assert {row["vbucket"] for row in rows} == {1, 2}
    assert {row["value"] for row in rows} == {None}
    assert len(rows) == sum(upriver_node.bucket.vbucket(number).high_seqno for number in (1, 2))


def test_an_observation(upriver_node: EmbeddedNode) -> None:
    seen = Seen()
    write(upriver_node, "before", range(100))
    with Query(address=upriver_node.address, dialect="tap", name="test") as query:
        assert seen.take(query.batch()) == 100
        assert seen.contents == contents_at(upriver_node.address)
        assert query.batch() == []
        write(upriver_node, "later", range(50, 150))
        with SyncKvClient(upriver_node.address) as kv:
            kv.delete("k3")
        assert seen.take(query.batch()) == 101
        assert seen.contents == contents_at(upriver_node.address)
        write(upriver_node, "at last", range(20))
        query.restart()
        assert seen.take(query.batch()) == 20  # the node remembers what was acknowledged
        assert seen.contents == contents_at(upriver_node.address)
    assert seen.resets == []


def test_a_source_that_went_back_starts_over(upriver_node: EmbeddedNode) -> None:
    seen = Seen()
    write(upriver_node, "before", range(100))
    with Query(address=upriver_node.address, dialect="tap", name="test", onRollback="rewind") as query:
        seen.take(query.batch())
        write(upriver_node, "lost", range(90, 120))
        seen.take(query.batch())

        def fail_over() -> None:
            for vbucket in upriver_node.bucket:
                vbucket.set_state(VbucketState.REPLICA)
                vbucket.roll_back(vbucket.high_seqno - 5)
                vbucket.set_state(VbucketState.ACTIVE)

        upriver_node.call(fail_over)
        write(upriver_node, "other", range(5))
        seen.take(query.batch())
    assert seen.contents == contents_at(upriver_node.address)
    assert set(seen.resets) == {0, 1, 2, 3}


def test_a_stream_keeps_its_vbuckets(upriver_node: EmbeddedNode) -> None:
    with Query(address=upriver_node.address, dialect="tap", name="observer", vbuckets="0-1") as query:
        query.restart(vbuckets="0-2")
        with pytest.raises(OptionError, match=r"option vbuckets = '0,1,2': .*use another name"):
            query.plan()


def test_a_stream_needs_a_name(upriver_node: EmbeddedNode) -> None:
    with pytest.raises(OptionError, match="a tap stream needs a name"):
        Query(address=upriver_node.address, dialect="tap")
