"""Spark reads and writes a change stream: ``spark.read.format("upriver")`` and what belongs to it."""

from upriver.spark.offsets import describe_offset

__all__ = ["describe_offset"]
