"""Pipelines as sinks of a real Spark: at least once, known by their numbers, and anew when the checkpoint is."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.mirror_comparison import mirror_differences
from tests.support.node_contents import changes, held
from tests.support.pipeline_model import row, table
from tests.support.pipeline_runs import PATIENCE_S
from tests.support.restartable_node import RestartableNode
from upriver.client import SyncKvClient
from upriver.errors import CheckpointError, OptionError
from upriver.node import EmbeddedNode, start
from upriver.pipelines.core.sink import FORMAT, Part, PipelineSink, PipelineWriter, pipeline_of
from upriver.pipelines.jobs.mirror import open_table
from upriver.pipelines.targets.tables.delta import Delta
from upriver.spark.data_source import row_schema

SCHEMA = row_schema("binary", None)


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
        version = Delta(to).version
        # As if it had died after the target's commit and before Spark knew: the batch comes again.
        for name in ("0", ".0.crc"):
            (checkpoint / "commits" / name).unlink()
        write(spark, checkpoint, options)
        assert Delta(to).version == version
        node.stop_persistence()
        with SyncKvClient(node.address) as kv:
            kv.set_many({f"k{n}": b'{"n": -1}' for n in range(50)})
            kv.set("lost", b'{"n": 1}')
        write(spark, checkpoint, options)
        assert Delta(to).read().num_rows == 101
        node.kill()
        node.start()
        with SyncKvClient(node.address) as kv:
            kv.delete("k99")
        write(spark, checkpoint, options)
        assert mirror_differences(to, node.address) == []
        # Batches count from 0 again: none of them is taken for one that is known.
        shutil.rmtree(checkpoint)
        write(spark, checkpoint, options)
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
        ({"pipeline": "mirror", "formt": "delta"}, "formt"),
        ({"pipeline": "mirror"}, "checkpointLocation"),
        ({"pipeline": "mirror", "checkpointLocation": "s3://bucket/x"}, "the driver's machine"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(options: dict[str, str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        PipelineSink(options).streamWriter(SCHEMA, overwrite=False)


def test_rows_must_be_changes() -> None:
    some = type(SCHEMA)([SCHEMA["key"], SCHEMA["value"]])
    with pytest.raises(OptionError, match="the column vbucket, seqno, "):
        PipelineSink({"pipeline": "mirror", "checkpointLocation": "/x"}).streamWriter(some, overwrite=False)


def test_parts_travel_and_a_checkpoint_belongs_to_one_pipeline(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    rows = table([row(0, 1, "mutation", b"k", b"v")])
    assert Part(rows).found.equals(rows)
    options = {"pipeline": "mirror", "from": upriver_node.address, "format": "parquet", "to": str(tmp_path / "a")}
    writer = PipelineWriter(options, tmp_path / "checkpoint")
    parts = [writer.write(iter(rows.to_batches())), writer.write(iter([])), None]
    assert sum(part.found.num_rows for part in parts if part is not None) == 1
    writer.commit(parts, 0)
    writer.abort(parts, 1)
    writer.commit([], 1)
    assert open_table(tmp_path / "a").read().num_rows == 1
    assert open_table(tmp_path / "a").progress().number == 1
    with pytest.raises(CheckpointError, match="belongs to another pipeline"):
        PipelineWriter({**options, "to": str(tmp_path / "b")}, tmp_path / "checkpoint").commit(parts, 1)
