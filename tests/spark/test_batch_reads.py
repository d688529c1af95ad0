"""DataFrames that are read again after the source has changed: nothing is missing, and no end is silently inexact."""

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.support.deployed_server import UUID, DeployedServer
from tests.support.node_process import wait_until
from tests.support.spark_driver import Query, read_batch, source_of
from tests.support.spark_tables import PATIENCE_S, stream_of
from upriver.client import SyncKvClient
from upriver.client.transport import Address
from upriver.errors import QueryRolledBack, StreamRefused
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.spark.batch_planner import Range, RangeEnd, Rules
from upriver.spark.offsets import VbucketOffset
from upriver.spark.options import ReadOptions
from upriver.spark.range_reader import RangeReader, Reading, close_readers
from upriver.spark.rows import FIELDS, RowMaker

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
#: A node that forgets superseded versions as soon as it can.
FORGETFUL = {"vbuckets": 4, "history_s": 0, "history_bytes": 0}


def write(address: str, what: str, keys: range = range(400)) -> None:
    with SyncKvClient(address) as kv:
        kv.set_many({f"k{n}": f"{what}:{n}".encode() for n in keys})


def forget(node: EmbeddedNode) -> None:
    """Wait until the node retains nothing but the current state."""

    def is_forgotten() -> bool:
        return all(vbucket.floor_seqno == vbucket.high_seqno for vbucket in node.bucket)

    wait_until(lambda: node.call(is_forgotten), "superseded versions are dropped")


def fail_over(node: EmbeddedNode, lost: int) -> None:
    """As if another copy had taken over that had not got the last changes of each vbucket."""

    def lose() -> None:
        for vbucket in node.bucket:
            vbucket.set_state(VbucketState.REPLICA)
            vbucket.roll_back(max(0, vbucket.high_seqno - lost))
            vbucket.set_state(VbucketState.ACTIVE)

    node.call(lose)


def read(address: str, ranges: list[Range]) -> list[dict[str, Any]]:
    """What a task gets."""
    rows = RowMaker(tuple(FIELDS))
    settings = ReadOptions().consumer_settings(rows.to_decode)
    reader = RangeReader(Reading(Address.parse(address), settings, Rules(), rows, 1000))
    try:
        return [row for batch in reader.read(ranges) for row in batch.to_pylist()]
    finally:
        reader.close()


class Planned:
    """A DataFrame's plan, which Spark keeps and reads once for each action."""

    def __init__(self, **options: Any) -> None:
        source = source_of(**options)
        self._reader = source.reader(source.schema())
        self._partitions = self._reader.partitions()

    def rows(self) -> list[dict[str, Any]]:
        try:
            reader, partitions = pickle.loads(pickle.dumps((self._reader, self._partitions)))
            return [row for part in partitions for batch in reader.read(part) for row in batch.to_pylist()]
        finally:
            close_readers()

    def values(self) -> dict[bytes, bytes]:
        rows = self.rows()
        assert len({row["key"] for row in rows}) == len(rows)
        return {row["key"]: row["value"] for row in rows}


# Open ends


@pytest.mark.parametrize("dialect", ["dcp", "upr", "upr_draft2", "upr_draft3"])
def test_a_planned_read_gives_the_current_state(dialect: str) -> None:
    with start(**FORGETFUL) as node:
        write(node.address, "first")
        planned = Planned(address=node.address, dialect=dialect)
        assert len(planned.values()) == 400
        for turn in range(2):
            write(node.address, f"turn {turn}")
        write(node.address, "new", range(400, 500))
        forget(node)
        assert planned.values() == {
            **{b"k%d" % n: b"turn 1:%d" % n for n in range(400)},
            **{b"k%d" % n: b"new:%d" % n for n in range(400, 500)},
        }


@pytest.mark.upriver(vbuckets=4)
def test_vbuckets_that_were_empty_are_read_too(upriver_node: EmbeddedNode) -> None:
    planned = Planned(address=upriver_node.address)
    assert planned.rows() == []
    write(upriver_node.address, "later")
    assert len(planned.values()) == 400


@pytest.mark.upriver(vbuckets=4)
def test_a_failover_between_the_plan_and_the_read(upriver_node: EmbeddedNode) -> None:
    write(upriver_node.address, "first")
    planned = Planned(address=upriver_node.address)
    write(upriver_node.address, "lost")
    fail_over(upriver_node, 20)
    write(upriver_node.address, "other", range(10))
    values = planned.values()
    assert len(values) == 400
    assert values[b"k3"] == b"other:3"


@pytest.mark.upriver(vbuckets=4)
def test_a_start_that_was_lost_after_the_plan(upriver_node: EmbeddedNode) -> None:
    """The rollback is a row, or an error; what follows is read up to the current state."""
    address = upriver_node.address
    write(address, "first")
    with Query(address=address) as query:
        query.batch()
        start_at = json.dumps(query.offset)
    write(address, "second")
    plans = {
        policy: Planned(address=address, startingOffsets=start_at, onRollback=policy) for policy in ("fail", "rewind")
    }
    fail_over(upriver_node, 150)
    write(address, "other", range(10))
    with pytest.raises(QueryRolledBack, match="planned before the source was rolled back"):
        plans["fail"].rows()
    rows = plans["rewind"].rows()
    assert [row["event"] for row in rows].count("reset") == 4
    values = {row["key"]: row["value"] for row in rows if row["event"] == "mutation"}
    assert len(values) >= 200
    assert values[b"k3"] == b"other:3"


@pytest.mark.heavy
def test_a_view_and_a_join_see_the_current_state(spark: SparkSession, tmp_path: Path) -> None:
    with start(**FORGETFUL) as node, start(vbuckets=4) as stream:
        write(node.address, "first")
        frame = spark.read.format("upriver").option("address", node.address).load()
        frame.createOrReplaceTempView("documents")
        counting = "SELECT count(*) AS found FROM documents WHERE startswith(CAST(value AS string), '{}')"
        assert [row.found for row in spark.sql(counting.format("first")).collect()] == [400]
        joined: dict[str, str] = {}

        def collect(batch: DataFrame, number: int) -> None:
            joined.update({row.key: row.value for row in batch.collect()})

        changes = stream_of(spark, stream.address).selectExpr("CAST(key AS string) AS key")
        static = frame.selectExpr("CAST(key AS string) AS key", "CAST(value AS string) AS value")
        query = (
            changes.join(static, "key")
            .writeStream.foreachBatch(collect)
            .option("checkpointLocation", str(tmp_path / "c"))
            .start()
        )
        for turn in range(2):
            write(node.address, f"turn {turn}")
            forget(node)
            write(stream.address, "changed", range(turn * 10, turn * 10 + 10))
            query.processAllAvailable()
            assert joined == {f"k{n}": f"turn {n // 10}:{n}" for n in range(turn * 10 + 10)}
        query.stop()
        assert query.awaitTermination(PATIENCE_S)
        assert [row.found for row in spark.sql(counting.format("turn 1")).collect()] == [frame.count()] == [400]


def test_another_server_is_read_to_the_end_of_its_snapshot() -> None:
    async def main() -> list[dict[str, Any]]:
        async with DeployedServer() as server:
            for n in range(10):
                server.write(1, b"k%d" % n, b"v%d" % n)
            return await asyncio.to_thread(read, server.address, [Range(VbucketOffset(1), 5, end=RangeEnd.OPEN)])

    assert {row["key"]: row["value"] for row in asyncio.run(main())} == {b"k%d" % n: b"v%d" % n for n in range(10)}


# Explicit ends


@pytest.mark.parametrize("dialect", ["dcp", "upr"])
def test_an_end_that_is_not_retained_any_more_is_an_error(dialect: str) -> None:
    with start(**FORGETFUL) as node:
        write(node.address, "first")
        with Query(address=node.address, dialect=dialect) as query:
            query.batch()
            end = json.dumps(query.offset)
        planned = Planned(address=node.address, dialect=dialect, endingOffsets=end)
        assert len(planned.values()) == 400
        write(node.address, "second")
        forget(node)
        for read in (planned.rows, lambda: read_batch(address=node.address, dialect=dialect, endingOffsets=end)):
            with pytest.raises(StreamRefused, match=r"vbucket \d: .*the state at \d+.*: leave out endingOffsets"):
                read()


@pytest.mark.upriver(vbuckets=4)
def test_an_end_that_is_retained_is_exact(upriver_node: EmbeddedNode) -> None:
    address = upriver_node.address
    write(address, "first")
    with Query(address=address) as query:
        query.batch()
        end = json.dumps(query.offset)
    planned = Planned(address=address, endingOffsets=end)
    write(address, "second")
    fail_over(upriver_node, 0)
    write(address, "third")
    assert planned.values() == {b"k%d" % n: b"first:%d" % n for n in range(400)}


@pytest.mark.upriver(vbuckets=4)
def test_an_end_that_was_lost_after_the_plan_is_an_error(upriver_node: EmbeddedNode) -> None:
    address = upriver_node.address
    write(address, "first")
    with Query(address=address) as query:
        query.batch()
        planned = Planned(address=address, endingOffsets=json.dumps(query.offset), onRollback="rewind")
    fail_over(upriver_node, 5)
    write(address, "other")
    with pytest.raises(StreamRefused, match=r"vbucket \d: the source has another history before \d+ now: leave out"):
        planned.rows()


def test_an_end_that_another_server_has_passed_is_an_error() -> None:
    async def main() -> None:
        async with DeployedServer() as server:
            for n in range(10):
                server.write(1, b"k%d" % n, b"v")
            ranges = [Range(VbucketOffset(1, UUID), 10, end=RangeEnd.EXACT)]
            assert len(await asyncio.to_thread(read, server.address, ranges)) == 10
            server.write(1, b"k3", b"again")
            with pytest.raises(StreamRefused, match="vbucket 1: the source has changed, and cannot give"):
                await asyncio.to_thread(read, server.address, ranges)

    asyncio.run(main())


# In the middle of a read


@pytest.mark.upriver(vbuckets=1)
@pytest.mark.parametrize("is_flush", [False, True])
def test_a_rollback_in_the_middle_of_a_read_fails_the_task(upriver_node: EmbeddedNode, is_flush: bool) -> None:
    """Spark has rows that are lost now, and no later batch takes them back."""
    with SyncKvClient(upriver_node.address) as kv:
        for first in range(0, 20_000, 2000):
            kv.set_many({f"k{n}": b"x" * 2000 for n in range(first, first + 2000)})
    source = source_of(address=upriver_node.address, rowsPerBatch=500)
    reader = source.reader(source.schema())
    (partition,) = reader.partitions()
    batches = reader.read(partition)
    next(batches)
    if is_flush:
        upriver_node.call(upriver_node.bucket.vbucket(0).flush)
    else:
        fail_over(upriver_node, 19_999)
    with pytest.raises(StreamRefused, match="flushed during the read" if is_flush else "rolled back during the read"):
        list(batches)
    close_readers()
    assert len(read_batch(address=upriver_node.address)) == (0 if is_flush else 1)
