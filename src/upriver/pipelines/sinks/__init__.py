"""Pipelines as Spark sinks, and inside Spark's declarative pipelines."""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.pipelines.sinks.sink import PipelineSink

__all__ = ["PipelineSink"]

__getattr__ = late_imports(__name__, sink="PipelineSink")
