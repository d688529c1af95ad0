"""What a pipeline is."""

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import DataFrame

from upriver.pipelines import Pipeline
from upriver.pipelines.options import PipelineOptions


class Collecting(Pipeline):
    """Keeps the keys that come, and fails when it is told to."""

    name = "collecting"
    options_type = PipelineOptions

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self.keys: list[bytes] = []
        self.trouble: Exception | None = None

    def apply(self, frame: DataFrame, batch_number: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.keys += [bytes(row.key) for row in frame.select("key").collect()]


def test_a_pipeline_is_made_from_texts() -> None:
    pipeline = Collecting.of({"from": "a:1"}, key_prefix="user:")
    assert pipeline.options.key_prefix == "user:"
    assert (pipeline.target, pipeline.counts(), pipeline.legs()) == ("", {}, [pipeline])
    pipeline.close()
