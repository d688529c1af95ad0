"""Comfort for DataFrames of changes."""

import datetime as dt
import time

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.support.spark_driver import Query
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode, start
from upriver.spark import changes, latest, with_event_time
from upriver.spark.rows import SCHEMA

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
COLUMNS = "vbucket int, branch int, seqno long, snapshot_end long, event string, key binary, value binary"


def frame_of(spark: SparkSession, *rows: tuple[int, int, int, int, str, bytes | None, bytes | None]) -> DataFrame:
    return spark.createDataFrame([list(row) for row in rows], COLUMNS)


def test_the_latest_state_of_each_key(spark: SparkSession) -> None:
    frame = frame_of(
        spark,
        (0, 0, 1, 4, "mutation", b"a", b"1"),
        (0, 0, 2, 4, "mutation", b"b", b"2"),
        (0, 0, 3, 4, "mutation", b"a", b"3"),
        (0, 0, 4, 4, "deletion", b"b", None),
        (1, 0, 9, 9, "mutation", b"c", b"lost"),
        (1, 0, 5, 9, "mutation", b"d", b"kept"),
        (1, 1, 6, 6, "rollback", None, b"{}"),
        (1, 1, 7, 7, "mutation", b"e", b"new"),
        (2, 0, 8, 8, "mutation", b"f", b"gone"),
        (2, 1, 0, 0, "reset", None, b"{}"),
        (2, 1, 3, 3, "mutation", b"g", b"back"),
    )
    found = {(row.vbucket, bytes(row.key)): bytes(row.value) for row in latest(frame).collect()}
    assert found == {(0, b"a"): b"3", (1, b"d"): b"kept", (1, b"e"): b"new", (2, b"g"): b"back"}


def test_the_latest_state_reads_its_source_once(spark: SparkSession, upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({"a": b"1", "b": b"2"})
        kv.delete("b")
    frame = spark.read.format("upriver").option("address", upriver_node.address).load()
    found = latest(frame)
    assert found._jdf.queryExecution().executedPlan().toString().count("BatchScan") == 1
    assert [bytes(row.key) for row in found.collect()] == [b"a"]


def test_a_deletion_that_was_forgotten_before_it_was_read(spark: SparkSession) -> None:
    with start(vbuckets=1) as node, SyncKvClient(node.address) as kv:
        kv.set_many(dict.fromkeys("abc", b"1"))
        with Query(address=node.address, onRollback="rewind") as query:
            rows = query.batch()
            deleted_seqno = len(rows) + 1
            kv.delete("b")
            kv.set("d", b"2")
            assert query.plan()
            node.call(setattr, node.bucket.vbucket(0).table, "purge_seqno", deleted_seqno)
            rows += [row for row in query.read() if row["seqno"] != deleted_seqno]
            kv.set("a", b"3")
            rows += query.batch()
    assert {row["branch"] for row in rows if row["event"] == "reset"} == {0}
    found = latest(spark.createDataFrame(rows[::-1], SCHEMA)).collect()
    assert {bytes(row.key): bytes(row.value) for row in found} == {b"a": b"3", b"c": b"1", b"d": b"2"}


def test_documents_out_of_values(spark: SparkSession) -> None:
    frame = frame_of(
        spark,
        (0, 0, 1, 4, "mutation", b"a", b'{"name": "Ann", "age": 7}'),
        (0, 0, 2, 4, "deletion", b"b", None),
        (0, 1, 0, 0, "reset", None, b"{}"),
    )
    rows = changes(frame, "name string, age int").orderBy("seqno").collect()
    assert [(row.key, row.value) for row in rows] == [("a", ("Ann", 7)), ("b", None)]
    assert changes(frame).count() == 2


@pytest.mark.parametrize("schema", ["name string, age int", None])
def test_documents_from_the_source(spark: SparkSession, upriver_node: EmbeddedNode, schema: str | None) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({"a": b'{"name": "Ann", "age": 7}', "b": b"no document", "c": b""})
        kv.delete("c")
    reader = spark.read.format("upriver").option("address", upriver_node.address).option("valueFormat", "json")
    frame = (reader if schema is None else reader.option("valueSchema", schema)).load()
    documents = changes(frame)
    assert latest(frame).schema["value"].metadata == frame.schema["value"].metadata
    assert latest(frame).columns == frame.columns
    name = "value.name" if schema else "variant_get(value, '$.name', 'string') AS name"
    rows = documents.selectExpr("key", "event", name).collect()
    assert sorted((row.key, row.event, row.name) for row in rows) == [
        ("a", "mutation", "Ann"),
        ("b", "mutation", None),
        ("c", "deletion", None),
    ]


def test_the_time_of_a_change(spark: SparkSession, upriver_node: EmbeddedNode) -> None:
    before = time.time()
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("a", "1")
    frame = spark.read.format("upriver").option("address", upriver_node.address).load()
    (row,) = with_event_time(frame).selectExpr("unix_micros(event_time) AS at").collect()
    assert before - 1 <= row["at"] / 1e6 <= time.time() + 1
    assert dt.datetime.fromtimestamp(row["at"] / 1e6, dt.UTC).year >= 2026


def test_invalid_documents_are_null_with_a_schema_too(spark: SparkSession, upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({"good": b'{"a": 1}', "empty": b"{}", "bad": b'{"a": ', "other": b"text"})
    reader = spark.read.format("upriver").options(address=upriver_node.address, valueFormat="json", valueSchema="a int")
    for frame in (reader.load(), reader.schema("key binary, event string, value string").load()):
        found = {row.key: row.value for row in changes(frame).select("key", "value").collect()}
        assert {key: value and value.a for key, value in found.items()} == {
            "good": 1,
            "empty": None,
            "bad": None,
            "other": None,
        }
        assert found["empty"] is not None
        assert found["bad"] is found["other"] is None
