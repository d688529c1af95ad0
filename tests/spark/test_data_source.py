"""The data source inside a real Spark."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BooleanType, DoubleType, IntegerType, StringType, StructField, StructType, TimestampType

from tests.support.node_contents import copies, put
from tests.support.spark_driver import source_of
from tests.support.spark_tables import PATIENCE_S, contents_at, lose_commit, stream_of
from upriver.client import SyncKvClient
from upriver.errors import OptionError, UpriverError
from upriver.node import EmbeddedNode, start
from upriver.spark.data_source import check_writable, row_schema
from upriver.spark.rows import SCHEMA

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


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


@pytest.mark.parametrize(
    ("columns", "mode", "complaint"),
    [
        ({"name": "string", "value": "string"}, "upsert", "the column key is missing"),
        ({"key": "string", "value": "string"}, "meta", "the column cas, rev_seqno is missing"),
        ({"key": "integer", "value": "string"}, "upsert", "schema = 'key int': must be string or binary"),
        ({"key": "string", "value": StructType()}, "upsert", r"schema = 'value struct<>': .*to_json"),
    ],
)
def test_rows_that_cannot_be_written_are_refused_before_a_task_starts(
    columns: dict[str, str | StructType], mode: str, complaint: str
) -> None:
    schema = StructType()
    for name, kind in columns.items():
        schema.add(name, kind)
    with pytest.raises(OptionError, match=complaint):
        source_of(mode=mode).writer(schema, overwrite=False)


@pytest.mark.parametrize("dialect", ["dcp", "tap"])
@pytest.mark.parametrize(
    ("column", "kind", "more", "complaint"),
    [
        ("key", "string", {}, "schema = 'key string': the column is binary"),
        ("seqno", "integer", {}, "schema = 'seqno int': the column is bigint"),
        ("value", "binary", {"valueFormat": "json"}, "schema = 'value binary': the column is string"),
        ("keys", "binary", {}, "unknown column keys"),
    ],
)
def test_columns_that_cannot_be_read_are_refused_before_a_task_starts(
    column: str, kind: str, more: dict[str, str], complaint: str, dialect: str
) -> None:
    source, schema = source_of(dialect=dialect, name="me", **more), StructType().add(column, kind)
    with pytest.raises(OptionError, match=complaint):
        source.reader(schema)
    with pytest.raises(UpriverError, match=complaint):  # Spark shows what this raises, and not what streamReader does
        source.streamReader(schema).initialOffset()


def test_what_is_written_is_read(spark: SparkSession, upriver_node: EmbeddedNode) -> None:
    frame = spark.range(1000).selectExpr("concat('k', id) AS key", "concat('v', id) AS value")
    frame.write.format("upriver").option("address", upriver_node.address).mode("append").save()
    read = spark.read.format("upriver").option("address", upriver_node.address).option("valueFormat", "string").load()
    assert {(bytes(row.key).decode(), row.value) for row in read.select("key", "value").collect()} == {
        (f"k{n}", f"v{n}") for n in range(1000)
    }


@pytest.mark.parametrize(("way", "mode"), [("stream", "meta"), ("foreachBatch", "upsert")])
def test_a_batch_that_is_written_again_changes_nothing(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path, way: str, mode: str
) -> None:
    """Spark has lost its note of the last batch, so it is read and written once more."""
    with SyncKvClient(upriver_node.address) as kv, start(vbuckets=8) as other:
        kv.set_many({f"k{n}": b"v%d" % n for n in range(500)})

        def write(frame: DataFrame, number: int) -> None:
            options = {"address": other.address, "mode": mode, "sourceVbuckets": "64"}
            frame.write.format("upriver").options(**options).mode("append").save()

        def replicate() -> None:
            writer = stream_of(spark, upriver_node.address, maxRowsPerTrigger=300).writeStream
            if way == "stream":
                writer = writer.format("upriver").option("address", other.address).option("mode", mode)
                writer = writer.option("sourceVbuckets", "64")
            else:
                writer = writer.foreachBatch(write)
            writer = writer.queryName("copying").option("checkpointLocation", str(tmp_path / "c"))
            query = writer.trigger(availableNow=True).start()
            assert query.awaitTermination(PATIENCE_S)

        replicate()
        kv.set_many({f"k{n}": b"again" for n in range(100, 200)})
        for n in range(50):
            kv.delete(f"k{n}")
        replicate()
        assert contents_at(other.address) == contents_at(upriver_node.address)
        before = {vbucket.number: vbucket.high_seqno for vbucket in other.bucket}
        lose_commit(tmp_path / "c")
        replicate()
        assert contents_at(other.address) == contents_at(upriver_node.address)
        if mode == "meta":
            assert {vbucket.number: vbucket.high_seqno for vbucket in other.bucket} == before


@pytest.mark.parametrize("column", ["flags string", "expiry timestamp", "cas double", "event int", "datatype boolean"])
def test_the_types_of_rows_are_checked_before_the_job_starts(column: str) -> None:
    name, kind = column.split()
    schema = row_schema("binary", None)
    types = {
        "string": StringType(),
        "timestamp": TimestampType(),
        "double": DoubleType(),
        "int": IntegerType(),
        "boolean": BooleanType(),
    }
    wrong = StructType([StructField(each.name, types[kind]) if each.name == name else each for each in schema])
    with pytest.raises(OptionError, match=f"{name} {kind}"):
        check_writable(wrong, with_meta=False)
    check_writable(schema, with_meta=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"endingOffsets": '{"0": {"uuid": "0x5", "seqno": 3}}'}, "option endingOffsets = .*a stream has no end"),
        ({"dialect": "tap"}, "a tap stream needs a name"),
    ],
)
def test_a_stream_with_options_that_it_cannot_have_fails_when_it_starts(options: dict[str, str], told: str) -> None:
    """Not when its reader is made, where Spark would hide the error."""
    source = source_of(**options)
    reader: Any = pickle.loads(pickle.dumps(source.streamReader(source.schema())))
    for call in (reader.initialOffset, reader.prepareForTriggerAvailableNow, lambda: reader.latestOffset({}, None)):
        with pytest.raises(OptionError, match=told):
            call()
    reader.stop()


@pytest.mark.parametrize("way", ["batch", pytest.param("stream", marks=pytest.mark.slow)])
@pytest.mark.upriver(vbuckets=4)
def test_a_key_in_two_vbuckets_is_copied_twice(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path, way: str
) -> None:
    values = {number: b"v%d" % number for number in range(4)}
    put(upriver_node, b"twin", values)
    with start(vbuckets=4) as other:
        options = {"address": other.address, "mode": "meta", "sourceVbuckets": "4"}
        if way == "batch":
            frame = spark.read.format("upriver").option("address", upriver_node.address).load()
            frame.write.format("upriver").options(**options).mode("append").save()
        else:
            writer = stream_of(spark, upriver_node.address).writeStream.format("upriver").options(**options)
            query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
            assert query.awaitTermination(PATIENCE_S)
        assert copies(other, b"twin") == values
