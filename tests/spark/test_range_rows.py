"""Planned ranges as rows: how ranges are dealt to tasks, and that Spark repeats them."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from tests.support.spark_driver import Query
from upriver.client import SyncKvClient
from upriver.errors import OptionError
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.spark import ReadOptions, packed_ranges, unpacked_ranges
from upriver.spark.batch_planner import Range, RangeEnd, RangeRollback
from upriver.spark.data_source import UpriverDataSource
from upriver.spark.offsets import VbucketOffset
from upriver.spark.range_rows import tasks_for
from upriver.spark.readers import ROWS_WORTH_A_TASK

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

NUMBERS = st.integers(0, 2**64 - 1)
RANGES = st.builds(
    Range,
    st.builds(VbucketOffset, st.integers(0, 1023), *[NUMBERS] * (len(VbucketOffset._fields) - 1)),
    NUMBERS,
    st.none() | st.builds(RangeRollback, NUMBERS, NUMBERS, NUMBERS),
    st.just(RangeEnd.PLANNED),
)


@given(st.lists(RANGES, max_size=5))
def test_ranges_survive_packing(ranges: list[Range]) -> None:
    assert unpacked_ranges(packed_ranges(ranges)) == ranges


@pytest.mark.parametrize(
    ("sizes", "wanted", "rows_max", "tasks"),
    [
        ([], 4, 100, 0),
        ([1] * 64, 4, 10**6, 1),
        ([ROWS_WORTH_A_TASK] * 64, 4, 10**6, 4),
        ([10**6] * 8, 2, 10**6, 8),
        ([10**7], 2, 10**6, 1),
        ([0, 0], 2, 10**6, 1),
    ],
)
def test_tasks_follow_the_changes(sizes: list[int], wanted: int, rows_max: int, tasks: int) -> None:
    assert tasks_for(sizes, wanted=wanted, rows_max=rows_max) == tasks


def test_only_a_stream_plans_ranges() -> None:
    source = UpriverDataSource({"output": "ranges"})
    with pytest.raises(OptionError, match="use readStream"):
        source.reader(source.schema())
    with pytest.raises(OptionError, match="output"):
        ReadOptions.read({"output": "ranges", "dialect": "tap"})


@pytest.mark.upriver(vbuckets=8)
def test_shards_are_the_same_in_every_batch(upriver_node: EmbeddedNode) -> None:
    shards: list[dict[int, set[int]]] = []
    with (
        Query(address=upriver_node.address, output="ranges", shards="3") as query,
        SyncKvClient(upriver_node.address) as kv,
    ):
        for turn in range(2):
            kv.set_many({f"k{turn}-{n}": b"v" for n in range(100)})
            rows = query.batch()
            shards.append({row["task"]: {r.start.vbucket for r in unpacked_ranges(row["ranges"])} for row in rows})
    assert shards[0] == shards[1] == {task: {v for v in range(8) if v % 3 == task} for task in range(3)}


@pytest.mark.upriver(vbuckets=8)
def test_vbuckets_that_are_read_again_count_with_all_their_documents(upriver_node: EmbeddedNode) -> None:
    """The range after a rollback is short, but a task reads the vbucket from the beginning."""

    def lose() -> None:
        for vbucket in upriver_node.bucket:
            vbucket.set_state(VbucketState.REPLICA)
            vbucket.roll_back(vbucket.high_seqno - 1)
            vbucket.set_state(VbucketState.ACTIVE)

    options = {"address": upriver_node.address, "output": "ranges", "onRollback": "emit", "cores": "2"}
    with Query(**options) as query, SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"v" for n in range(2 * ROWS_WORTH_A_TASK)})
        assert len(query.batch()) == 2
        assert query.batch() == []  # which stores the proof
        kv.set_many({f"more{n}": b"v" for n in range(100)})
        assert len(query.batch()) == 1
        upriver_node.call(lose)
        rows = query.batch()
        assert sum(row["changes"] for row in rows) < 100
        assert [row["vbuckets"] for row in rows] == [4, 4]
        kv.set("new", b"v")
        assert len(query.batch()) == 1


def test_a_node_that_is_down_does_not_fail_the_plan_of_tasks() -> None:
    with start(vbuckets=4) as node, Query(address=node.address, output="ranges") as query:
        with SyncKvClient(node.address) as kv:
            kv.set("k", b"v")
        assert query.plan()
        node.close()
        assert [row["changes"] for row in query.read()] == [1]


@pytest.mark.upriver(vbuckets=8)
def test_a_stream_of_ranges_honours_limits_and_repeats_them(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"v" for n in range(1000)})
    seen: list[tuple[int, list[dict[str, Any]]]] = []

    def take(frame: DataFrame, number: int) -> None:
        seen.append((number, [row.asDict() for row in frame.collect()]))
        if len(seen) == 2:
            raise RuntimeError("stop here")

    def run() -> None:
        query = (
            spark.readStream.format("upriver")
            .options(address=upriver_node.address, output="ranges", maxRowsPerTrigger="400", rowsPerTask="150")
            .load()
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(240)

    with pytest.raises(Exception, match="stop here"):
        run()
    run()
    repeated = [rows for number, rows in seen if number == 1]
    assert [bytes(row["ranges"]) for row in repeated[0]] == [bytes(row["ranges"]) for row in repeated[1]]
    by_number = {number: rows for number, rows in seen if rows}
    assert [sum(row["changes"] for row in rows) for rows in by_number.values()] == [400, 400, 200]
    assert all(row["changes"] <= 250 for rows in by_number.values() for row in rows)
