"""A pipeline in a real Spark: batches come, failures are kept as they are, the checkpoint remembers."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode
from upriver.pipelines import Pipeline
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.options import PipelineOptions
from upriver.pipelines.core.row_pipeline import RowPipeline

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


class Collecting(RowPipeline):
    """Keeps the keys that come, and fails when the test asks for it."""

    name = "collecting"
    options_type = PipelineOptions

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self.keys: list[bytes] = []
        self.trouble: Exception | None = None

    def apply(self, found: pa.Table, batch_number: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.keys += found.column("key").to_pylist()


def started(spark: SparkSession, pipeline: Pipeline, checkpoint: Path) -> Any:
    reader = spark.readStream.format("upriver").options(**pipeline.reader_options())
    directory = RunDirectory(checkpoint)
    pipeline.open(directory)
    return pipeline.start(reader.load(), directory.spark, once=True)


@pytest.mark.heavy
def test_a_failed_batch_keeps_its_error_and_comes_again(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"v" for n in range(100)})
    pipeline = Collecting.of({"from": upriver_node.address})
    pipeline.trouble = RuntimeError("the target is full")
    with pytest.raises(StreamingQueryException):
        started(spark, pipeline, tmp_path).awaitTermination(120)
    assert pipeline.failure is pipeline.trouble
    pipeline.trouble = None
    assert started(spark, pipeline, tmp_path).awaitTermination(120)
    pipeline.settle()
    assert sorted(pipeline.keys) == sorted(b"k%d" % n for n in range(100))
    assert pipeline.failure is None
    assert started(spark, pipeline, tmp_path).awaitTermination(120)
    assert len(pipeline.keys) == 100


def test_a_pipeline_is_made_from_texts() -> None:
    pipeline = Collecting.of({"from": "a:1"}, key_prefix="user:")
    assert pipeline.options.key_prefix == "user:"
    assert (pipeline.target, pipeline.counts(), pipeline.legs()) == ("", {}, [pipeline])
    pipeline.close()
