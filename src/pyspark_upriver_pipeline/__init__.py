"""Makes ``writeStream.format("upriver_pipeline")`` work without registration, as ``pyspark_upriver`` does."""

from upriver.pipelines.sinks import PipelineSink as DefaultSource

__all__ = ["DefaultSource"]
