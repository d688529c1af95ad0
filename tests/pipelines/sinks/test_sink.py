"""Pipelines as sinks of a real Spark: applied at least once, known by their numbers, complete after a new start."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

import pyarrow as pa
from pyspark.sql import SparkSession

from tests.support.mirror_comparison import mirror_differences
from tests.support.node_contents import changes, held
from tests.support.pipeline_model import row, table
from tests.support.pipeline_runs import PATIENCE_S
from tests.support.restartable_node import RestartableNode
from tests.support.spark_driver import Query
from tests.support.spark_tables import lose_commit
from upriver.client import SyncKvClient
from upriver.errors import CheckpointError, OptionError
from upriver.node import EmbeddedNode, start
from upriver.pipelines.sinks.sink import FORMAT, PipelineSink, PipelineWriter, pipeline_of
from upriver.spark.data_source import row_schema
from upriver.spark.range_rows import RANGE_ROWS
from upriver.tables import Table, TableStorage, read

SCHEMA = row_schema("binary", None)


def version_of(path: Path) -> int:
    return Table.open(TableStorage.of(path)).snapshot.version


def write(spark: SparkSession, checkpoint: Path, options: dict[str, str]) -> None:
    """Bring everything that is there now to the target."""
    reader = spark.readStream.format("upriver").options(**pipeline_of(options).reader_options())
    writer = reader.load().writeStream.format(FORMAT).options(**options).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        assert query.awaitTermination(PATIENCE_S)
    finally:
        query.stop()


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.heavy
def test_a_table_follows_over_replays_rollbacks_and_a_new_beginning(spark: SparkSession, tmp_path: Path) -> None:
    node, to, checkpoint = RestartableNode(tmp_path / "node", vbuckets=8), tmp_path / "table", tmp_path / "checkpoint"
    options = {"pipeline": "mirror", "from": node.address, "to": str(to)}
    try:
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(100)})
        write(spark, checkpoint, options)
        version = version_of(to)
        # As if it had been killed after the target's commit and before Spark knew: the batch comes again.
        lose_commit(checkpoint)
        write(spark, checkpoint, options)
        assert version_of(to) == version
        node.stop_persistence()
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b'{"n": -1}' for n in range(50)})
            kv.set("lost", b'{"n": 1}')
        write(spark, checkpoint, options)
        assert read(to).num_rows == 101
        node.kill()
        node.start()
        with SyncKvClient(node.address) as kv:
            kv.delete("k99")
        write(spark, checkpoint, options)
        assert mirror_differences(to, node.address) == []
        # Batches count from 0 again: none of them is taken for one that is known.
        shutil.rmtree(checkpoint)
        write(spark, checkpoint, options | {"adopt": "true"})
        assert mirror_differences(to, node.address) == []
    finally:
        node.kill()


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.upriver(vbuckets=4)
def test_what_the_tasks_do_is_done_there(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    with SyncKvClient(upriver_node.address) as kv, start(vbuckets=4) as other:
        kv.set_many({f"user:{n}": b"v%d" % n for n in range(50)})
        copy = {"pipeline": "replicate", "from": upriver_node.address, "to": other.address, "rename": "user:=u:"}
        write(spark, tmp_path / "copy", copy)
        seen = {"pipeline": "observe", "from": upriver_node.address, "to": str(tmp_path / "seen"), "late": "0s"}
        write(spark, tmp_path / "count", seen | {"window": "1s"})
        there = changes(other.address)
        assert held(other.address, [f"u:{n}" for n in range(50)]) == {f"u:{n}": b"v%d" % n for n in range(50)}
        kv.delete("user:7")
        for name in ("copy", "count"):
            write(spark, tmp_path / name, copy if name == "copy" else seen | {"window": "1s"})
        assert held(other.address, ["u:7", "u:8"]) == {"u:8": b"v8"}
        assert changes(other.address) == there + 1
        assert list((tmp_path / "seen").glob("window-*.parquet"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "it must be one of index, invalidate, mirror"),
        ({"pipeline": "mirrow"}, "it must be one of index"),
        ({"pipeline": "transition", "to": "a:1", "vbuckets": "0"}, "use upriver run"),
        ({"pipeline": "replicate", "from": "a:1", "to": "b:1", "both": "true"}, "a sink has one direction"),
        ({"pipeline": "observe"}, "give a file or a directory"),
        ({"pipeline": "mirror", "histry": "x"}, "histry"),
        ({"pipeline": "index"}, "checkpointLocation"),
        ({"pipeline": "index", "checkpointLocation": "s3://bucket/x"}, "the driver's machine"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(options: dict[str, str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        PipelineSink(options).streamWriter(SCHEMA, overwrite=False)


def test_rows_must_have_the_columns_of_the_pipeline() -> None:
    some = type(SCHEMA)([SCHEMA["key"], SCHEMA["value"]])
    for name, column in (("mirror", "ranges"), ("index", "vbucket, seqno, ")):
        with pytest.raises(OptionError, match=f"the column {column}"):
            PipelineSink({"pipeline": name, "checkpointLocation": "/x"}).streamWriter(some, overwrite=False)


def log_batch(checkpoint: Path, number: int) -> None:
    """What Spark writes before a batch runs."""
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    (checkpoint / "offsets" / str(number)).write_text("v1\n{}")


def test_messages_travel_and_a_checkpoint_belongs_to_one_pipeline(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    rows = table([row(0, 1, "mutation", b"k", b"v")])
    options = {"pipeline": "index", "from": upriver_node.address, "to": str(tmp_path / "a.db")}
    checkpoint = tmp_path / "checkpoint"
    writer = PipelineWriter(options, checkpoint / "upriver")
    parts = [writer.write(iter(rows.to_batches())), writer.write(iter([])), None]
    log_batch(checkpoint, 0)
    writer.commit(parts, 0)
    writer.abort(parts, 1)
    log_batch(checkpoint, 1)
    writer.commit([], 1)
    with pytest.raises(CheckpointError, match="belongs to another pipeline"):
        PipelineWriter({**options, "to": str(tmp_path / "b.db")}, checkpoint / "upriver").commit(parts, 1)


def test_the_tasks_of_a_sink_plan_for_themselves(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b'{"n": %d}' % n for n in range(100)})
    options = {"pipeline": "mirror", "from": upriver_node.address, "to": str(tmp_path / "a")}
    with Query(address=upriver_node.address, output="ranges", onRollback="emit") as query:
        query.plan()
        rows = query.read()
    writer = PipelineWriter(options, tmp_path / "checkpoint" / "upriver")
    log_batch(tmp_path / "checkpoint", 0)
    parts = [writer.write(iter([pa.RecordBatch.from_pylist([each], RANGE_ROWS)])) for each in rows]
    writer.commit(parts, 0)
    assert mirror_differences(tmp_path / "a", upriver_node.address) == []
    assert "n" in read(tmp_path / "a").column_names  # a column that the tasks did not know
    version = version_of(tmp_path / "a")
    writer.commit(parts, 0)
    assert version_of(tmp_path / "a") == version
