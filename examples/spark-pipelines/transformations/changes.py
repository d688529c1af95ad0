"""Every change as it comes, and the latest state of each key."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from upriver.spark import latest, with_event_time

ADDRESS = os.environ.get("UPRIVER_ADDRESS", "127.0.0.1:11210")
spark = SparkSession.active()


@dp.table
def changes() -> DataFrame:
    """All changes, in a table that grows."""
    stream = spark.readStream.format("upriver").option("address", ADDRESS).option("onRollback", "rewind").load()
    return with_event_time(stream)


@dp.materialized_view
def items() -> DataFrame:
    """What each key holds now."""
    return latest(spark.read.table("changes")).selectExpr("CAST(key AS STRING) AS key", "value", "event_time")
