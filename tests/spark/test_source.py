"""The data source inside a real Spark."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode
from upriver.spark.rows import SCHEMA

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


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
    assert [progress["numInputRows"] for progress in query.recentProgress] == [400, 400, 200]
    assert spark.read.parquet(str(tmp_path / "table")).select("key").distinct().count() == 1000


def test_the_schema_is_what_is_declared(spark: SparkSession, upriver_node: EmbeddedNode) -> None:
    frame = spark.read.format("upriver").option("address", upriver_node.address).load()
    declared = [tuple(column.split()) for column in SCHEMA.split(", ")]
    kinds = {"int": "int", "long": "bigint", "string": "string", "binary": "binary"}
    assert frame.dtypes == [(name, kinds[kind]) for name, kind in declared]
    assert frame.collect() == []


def test_an_option_that_makes_no_sense_is_one_clear_error(spark: SparkSession, upriver_node: EmbeddedNode) -> None:
    with pytest.raises(Exception, match=r"option onRollback = 'ignore': it must be one of fail, rewind, emit"):
        spark.read.format("upriver").option("onRollback", "ignore").load()
    with pytest.raises(Exception, match="did you mean startingOffsets"):
        spark.read.format("upriver").option("startingOffset", "latest").load()


def test_what_is_written_is_read(spark: SparkSession, upriver_node: EmbeddedNode) -> None:
    frame = spark.range(1000).selectExpr("concat('k', id) AS key", "concat('v', id) AS value")
    frame.write.format("upriver").option("address", upriver_node.address).mode("append").save()
    read = spark.read.format("upriver").option("address", upriver_node.address).option("valueFormat", "string").load()
    assert {(bytes(row.key).decode(), row.value) for row in read.select("key", "value").collect()} == {
        (f"k{n}", f"v{n}") for n in range(1000)
    }
