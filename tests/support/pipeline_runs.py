"""Pipelines on a real Spark, run to the end of what is there; and a node that is killed."""

from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from upriver.pipelines import Pipeline
from upriver.pipelines.core.directory import RunDirectory

PATIENCE_S = 240


def run_once(spark: SparkSession, pipeline: Pipeline, directory: Path, attempts: int = 3) -> None:
    """Bring everything that there is to the target, as the runner does; what fails is raised as it was.

    A Spark that fails for its own reasons, with which a machine under load abounds, is started again.
    """
    kept = RunDirectory(directory)
    pipeline.open(kept)
    changes = spark.readStream.format("upriver").options(**pipeline.reader_options()).load()
    query = pipeline.start(changes, kept.spark, once=True)
    try:
        query.awaitTermination(PATIENCE_S)
        assert not query.isActive
    except StreamingQueryException:
        if pipeline.failure is not None:
            raise pipeline.failure from None
        if attempts == 1:
            raise
        run_once(spark, pipeline, directory, attempts - 1)
        return
    finally:
        query.stop()
    pipeline.idle()
