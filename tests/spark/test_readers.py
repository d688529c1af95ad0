"""Batches and streams read by a real Spark: limits, offsets, columns and dialects."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, StringType, StructType

from tests.support.node_clusters import two_nodes
from tests.support.spark_driver import Query, read_batch, source_of
from tests.support.spark_tables import PATIENCE_S, contents_at
from upriver.client import SyncKvClient
from upriver.client.consumer.settings import DIALECTS
from upriver.errors import NotSupported, OptionError, QueryRolledBack
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.spark import describe_offset
from upriver.spark.readers import ROWS_WORTH_A_TASK

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


def fill(node: EmbeddedNode, count: int, value: bytes = b"v") -> None:
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": value for n in range(count)})


def test_a_batch_read_has_every_change_once(spark: SparkSession, upriver_node: EmbeddedNode) -> None:
    fill(upriver_node, 1000)
    frame = spark.read.format("upriver").option("address", upriver_node.address).load()
    rows = frame.select("key", "event", "value").collect()
    assert {bytes(row.key) for row in rows} == {b"k%d" % n for n in range(1000)}
    assert len(rows) == 1000
    assert {(row.event, bytes(row.value)) for row in rows} == {("mutation", b"v")}


def test_a_stream_read_with_a_limit_reads_what_is_there(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    fill(upriver_node, 1000)
    query = (
        spark.readStream.format("upriver")
        .option("address", upriver_node.address)
        .option("maxRowsPerTrigger", "400")
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "table"))
    )
    assert query.awaitTermination(240)
    assert [progress["numInputRows"] for progress in query.recentProgress] == [400, 400, 200, 0]
    assert spark.read.parquet(str(tmp_path / "table")).select("key").distinct().count() == 1000


@pytest.mark.upriver(vbuckets=4)
def test_a_batch_between_two_offsets(upriver_node: EmbeddedNode) -> None:
    """The offsets are those of a stream's checkpoint, packed as in the checkpoint or as people read them."""
    address, logged = upriver_node.address, []
    with Query(address=address) as query:
        for turn in range(3):
            fill(upriver_node, 50 * (turn + 1), b"%d" % turn)
            assert len(query.batch()) == 50 * (turn + 1)
            logged.append(json.dumps(query.offset))
    described = json.dumps(describe_offset(logged[1]))
    rows = read_batch(address=address, startingOffsets=logged[0], endingOffsets=described)
    assert {row["value"] for row in rows} == {b"1"}
    assert len({row["key"] for row in rows}) == len(rows) == 100
    rest = read_batch(address=address, startingOffsets=described)
    assert {row["value"] for row in rest} == {b"2"}
    assert len(rest) == 150
    assert read_batch(address=address, startingOffsets="latest") == []


@pytest.mark.upriver(vbuckets=4)
def test_offsets_of_vbuckets_that_do_not_exist_are_refused(upriver_node: EmbeddedNode) -> None:
    address, complaint = upriver_node.address, "= '4': the cluster has only the vbuckets 0 to 3"
    place = {"uuid": "0x1", "seqno": 0}
    given = json.dumps({"3": place, "4": place})
    source = source_of(address=address, startingOffsets=given)
    reader: Any = source.streamReader(source.schema())
    with pytest.raises(OptionError, match=f"startingOffsets {complaint}"):
        reader.initialOffset()
    reader.stop()
    with pytest.raises(OptionError, match=f"startingOffsets {complaint}"):
        read_batch(address=address, startingOffsets=given)
    with pytest.raises(OptionError, match=f"endingOffsets {complaint}"):
        read_batch(address=address, endingOffsets=given)
    assert read_batch(address=address, vbuckets=0, startingOffsets=json.dumps({"3": place})) == []


@pytest.mark.upriver(vbuckets=1)
def test_a_batch_does_not_end_on_a_branch_that_was_lost(upriver_node: EmbeddedNode) -> None:
    fill(upriver_node, 10)
    with Query(address=upriver_node.address) as query:
        query.batch()
        logged = json.dumps(query.offset)
    vbucket = upriver_node.bucket.vbucket(0)

    def fail_over() -> None:
        vbucket.set_state(VbucketState.REPLICA)
        vbucket.roll_back(4)
        vbucket.set_state(VbucketState.ACTIVE)

    upriver_node.call(fail_over)
    fill(upriver_node, 30, b"other")
    with pytest.raises(QueryRolledBack, match="vbucket 0: endingOffsets is on a branch that the source left after 4"):
        read_batch(address=upriver_node.address, endingOffsets=logged)


def test_fewer_columns_and_keys_only(upriver_node: EmbeddedNode) -> None:
    fill(upriver_node, 100)
    fewer = StructType().add("key", BinaryType()).add("event", StringType())
    rows = read_batch(fewer, address=upriver_node.address)
    assert {tuple(row) for row in rows} == {("key", "event")}
    assert len(rows) == 100
    source = source_of(address=upriver_node.address, minPartitions=5)
    assert len(source.reader(source.schema()).partitions()) == 5
    assert {row["value"] for row in read_batch(address=upriver_node.address, keysOnly=True)} == {None}
    with pytest.raises(OptionError, match="unknown column colour"):
        read_batch(StructType().add("colour", StringType()), address=upriver_node.address)


@pytest.mark.parametrize(("wanted", "tasks"), [(1, 2), (2, 2), (5, 5), (7, 7), (50, 8)])
def test_there_are_as_many_tasks_as_were_wanted(wanted: int, tasks: int) -> None:
    """At least one for each node, and for no vbucket more than one."""
    with two_nodes(vbuckets=8) as (one, other), SyncKvClient(f"{one.address},{other.address}") as kv:
        kv.set_many({f"k{n}": b"v" for n in range(200)})
        source = source_of(address=one.address, minPartitions=wanted)
        partitions: Any = source.reader(source.schema()).partitions()
        assert len(partitions) == tasks
        numbers = [asked.start.vbucket for partition in partitions for asked in partition.ranges]
        assert sorted(numbers) == list(range(8))


@pytest.mark.upriver(vbuckets=16)
def test_a_large_batch_uses_all_cores(upriver_node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def tasks(**options: int) -> int:
        source = source_of(address=upriver_node.address, **options)
        return len(source.reader(source.schema()).partitions())

    fill(upriver_node, 100)
    assert tasks(cores=7) == 2
    fill(upriver_node, 5 * ROWS_WORTH_A_TASK)
    assert [tasks(cores=cores) for cores in (1, 3, 5, 64)] == [2, 3, 5, 6]
    assert tasks(cores=3, minPartitions=8) == 8
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert tasks() == 4
    with Query(address=upriver_node.address, output="ranges") as query:
        assert len(query.batch()) == 4


@pytest.mark.upriver(vbuckets=4)
def test_a_query_goes_on_with_other_vbuckets(upriver_node: EmbeddedNode) -> None:
    """Those that come are read from their beginning; those that go are where they were when they come back."""
    fill(upriver_node, 100)
    keys = [vbucket.high_seqno for vbucket in upriver_node.bucket]
    seen: list[tuple[set[int], int]] = []
    with Query(address=upriver_node.address, vbuckets="0-1") as query:
        for vbuckets in ("0-1", "0-2", "2", "all"):
            query.restart(vbuckets=vbuckets)
            rows = query.batch()
            seen.append(({row["vbucket"] for row in rows}, len(rows)))
            assert query.batch() == []
            assert not query.plan()
            fill(upriver_node, 100, vbuckets.encode())
    assert seen == [({0, 1}, sum(keys[:2])), ({0, 1, 2}, sum(keys[:3])), ({2}, keys[2]), ({0, 1, 2, 3}, 100)]


def test_a_stream_waits_for_enough_but_not_for_ever(upriver_node: EmbeddedNode) -> None:
    with Query(address=upriver_node.address, minRowsPerTrigger=1000, maxTriggerDelay="500ms") as query:
        fill(upriver_node, 10)
        started = time.monotonic()
        assert query.batch() == []
        while not (rows := query.batch()):
            assert time.monotonic() < started + PATIENCE_S
            time.sleep(0.02)
        assert len(rows) == 10
        assert time.monotonic() - started >= 0.5
        fill(upriver_node, 1000, b"w")
        assert len(query.batch()) == 1000
        lag = {n: place["seqno"] for n, place in describe_offset(query.latest()).items()}
        assert sum(lag.values()) == 1010


def test_a_stream_with_a_limit_of_bytes(upriver_node: EmbeddedNode) -> None:
    fill(upriver_node, 2000, b"x" * 1000)
    sizes: list[int] = []
    with Query(address=upriver_node.address, maxBytesPerTrigger="1m") as query:
        while rows := query.batch():
            sizes.append(len(rows))
    assert sum(sizes) == 2000
    assert 2 <= len(sizes) <= 20


def sizes_of(query: Query) -> list[int]:
    sizes = [len(rows) for rows in query.rest()]
    assert sizes.pop() == 0  # the proof
    return sizes


@pytest.mark.upriver(vbuckets=1)
def test_limits_count_changes_and_not_seqnos(upriver_node: EmbeddedNode) -> None:
    vbucket = upriver_node.bucket.vbucket(0)

    def write(hot: int, keys: range) -> None:
        for n in keys:
            vbucket.set(b"k%d" % n, b"v")
        for _ in range(hot):
            vbucket.set(b"hot", b"v")

    upriver_node.call(write, 2000, range(10))
    with Query(address=upriver_node.address, maxRowsPerTrigger=100) as query:
        assert sizes_of(query) == [11]
        upriver_node.call(write, 2000, range(10, 160))
        upriver_node.call(write, 2000, range(160, 250))
        assert sum(sizes_of(query)) in (241, 242)  # the hot key may come in two batches
    with Query(address=upriver_node.address, maxRowsPerTrigger=100) as query:
        sizes = sizes_of(query)
        assert (len(sizes), max(sizes)) == (3, 100)
    with Query(address=upriver_node.address, maxRowsPerTrigger=3000, history="true") as query:
        sizes = sizes_of(query)  # every version is a change
        assert (len(sizes), max(sizes), sum(sizes)) == (3, 3000, 6250)


@pytest.mark.upriver(vbuckets=1)
def test_changes_of_one_key_are_not_many_that_wait(upriver_node: EmbeddedNode) -> None:
    vbucket = upriver_node.bucket.vbucket(0)

    def write() -> None:
        for n in range(50):
            vbucket.set(b"k%d" % n, b"v")

    def heat() -> None:
        for _ in range(300):
            vbucket.set(b"hot", b"v")

    upriver_node.call(write)
    with Query(address=upriver_node.address, minRowsPerTrigger=40, maxTriggerDelay="1h") as query:
        assert len(query.batch()) == 50
        upriver_node.call(heat)
        assert query.batch() == []
        upriver_node.call(heat)
        assert not query.plan()
        upriver_node.call(write)
        assert len(query.batch()) == 51


def test_a_query_that_runs_once_has_no_limits(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    """As Spark's documentation says; limits of rows and of bytes are treated alike."""
    fill(upriver_node, 1000, b"x" * 100)
    for limit in ({"maxRowsPerTrigger": "10"}, {"maxBytesPerTrigger": "10k"}, {"minRowsPerTrigger": "5000"}):
        (name,) = limit
        query = (
            spark.readStream.format("upriver")
            .option("address", upriver_node.address)
            .options(**limit)
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / name))
            .trigger(once=True)
            .start()
        )
        assert query.awaitTermination(240)
        assert [progress["numInputRows"] for progress in query.recentProgress] == [1000]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_without_a_listener_of_its_own(dialect: str) -> None:
    with start(vbuckets=4) as node:
        with SyncKvClient(node.address) as kv:
            kv.set("fruit", "apple")
            kv.delete("fruit")
        if dialect == "upr_draft1":
            with pytest.raises(NotSupported, match=r"--listen HOST:PORT,dialect=upr_draft1 .*stream_port"):
                read_batch(address=node.address, dialect=dialect)
        else:
            assert [row["key"] for row in read_batch(address=node.address, dialect=dialect)] == [b"fruit"]


@pytest.mark.parametrize("dialect", ["upr", "upr_draft1", "upr_draft2", "upr_draft3"])
def test_other_dialects(dialect: str) -> None:
    with start(vbuckets=4, listen="127.0.0.1:0,dialect=upr_draft1,anonymous") as node:
        more: dict[str, Any] = {"dialect": dialect}
        if dialect == "upr_draft1":  # it looks like the second draft, so it has a port of its own
            more["streamPort"] = node.node.listen_addresses[1].port
        fill(node, 300)
        with Query(address=node.address, maxRowsPerTrigger=200, **more) as query:
            rows = query.batch()
            assert len(rows) == 200
            rows += query.batch()
            assert len(rows) == 300
            fill(node, 100, b"later")
            with SyncKvClient(node.address) as kv:
                kv.delete("k5")
            query.restart()
            rows += query.batch()
        held: dict[bytes, tuple[int, bytes | None]] = {}
        for row in rows:
            held[row["key"]] = max(held.get(row["key"], (0, None)), (row["seqno"], row["value"]), key=lambda it: it[0])
        assert {key: value for key, (_, value) in held.items() if value is not None} == contents_at(node.address)
        if dialect != "upr":
            assert len(read_batch(address=node.address, **more)) == 300
