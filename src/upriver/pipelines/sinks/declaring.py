"""Pipelines inside Spark's declarative pipelines: a sink and the flow that feeds it, in one line.

::

    from upriver.pipelines import declare

    declare("mirror", {"from": "127.0.0.1:11210", "to": "/data/mirror"})
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from upriver.pipelines.core.options import as_typed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def declare(pipeline: str, options: Mapping[str, Any] | None = None, /, *, name: str | None = None) -> None:
    """Add a pipeline to the declarative pipeline that is being defined, under its own name or another."""
    from pyspark import pipelines as dp
    from pyspark.sql import SparkSession

    from upriver.pipelines.sinks.sink import FORMAT, pipeline_of

    name = name or pipeline
    texts = {"pipeline": pipeline, **{key: as_typed(value) for key, value in (options or {}).items()}}
    reader_options = pipeline_of(texts).reader_options()
    dp.create_sink(name, FORMAT, texts)

    @dp.append_flow(target=name, name=f"{name}_changes")
    def changes() -> "DataFrame":
        spark = SparkSession.active()
        return spark.readStream.format("upriver").options(**reader_options).load()
