"""Comfort for DataFrames of changes: documents instead of bytes, the latest state, the time of a change."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as fn
from pyspark.sql.types import StructType

from upriver.spark.rows import DOCUMENTS

#: Rows that concern a whole vbucket.
_OF_VBUCKETS = ("flush", "rollback", "reset")


def changes(frame: DataFrame, value_schema: str | StructType | None = None) -> DataFrame:
    """Only the changes of keys, with keys as text and values as documents, which Spark parses.

    The schema is the one given here, else the source's option ``valueSchema``. Without either, documents of
    ``valueFormat`` = ``json`` become variants, and other values stay as they are. What is no JSON is null.
    """
    rows = frame.where(~fn.col("event").isin(*_OF_VBUCKETS)).withColumn("key", fn.col("key").cast("string"))
    told = frame.schema["value"].metadata.get(DOCUMENTS) if "value" in frame.columns else None
    if value_schema is None and told is None:
        return rows
    text = fn.col("value").cast("string")
    schema = value_schema or told
    return rows.withColumn("value", fn.from_json(text, schema) if schema else fn.try_parse_json(text))


def latest(frame: DataFrame) -> DataFrame:
    """The last state of each key in a batch of changes: mutations only, what was undone left out.

    Rollbacks, resets and flushes in the batch are applied: what came before them, and lies above the seqno that they
    name, does not count. What the batch itself does not hold, they cannot bring back. The columns ``vbucket``,
    ``branch``, ``seqno``, ``snapshot_end``, ``event`` and ``key`` are needed.
    """
    marks = frame.where(fn.col("event").isin(*_OF_VBUCKETS)).select(
        *(fn.col(name).alias(f"_{name}") for name in ("vbucket", "branch", "seqno", "snapshot_end"))
    )
    of_the_same = fn.col("vbucket") == fn.col("_vbucket")
    # A reset that came while a range was read stands in the middle of a branch. No snapshot has a key twice, so a key
    # whose deletion was forgotten before it came was read in a snapshot that ends before those after the reset.
    within = (fn.col("branch") == fn.col("_branch")) & (fn.col("snapshot_end") < fn.col("_snapshot_end"))
    undone = (fn.col("seqno") > fn.col("_seqno")) & ((fn.col("branch") < fn.col("_branch")) | within)
    held = frame.where(~fn.col("event").isin(*_OF_VBUCKETS)).join(
        fn.broadcast(marks), of_the_same & undone, "left_anti"
    )
    # Written without a column of its own to be dropped: in a declarative pipeline no column is known yet.
    newest = fn.max_by(fn.struct("*"), fn.struct("branch", "seqno")).alias("_newest")
    return held.groupBy("vbucket", "key").agg(newest).select("_newest.*").where(fn.col("event") == "mutation")


def with_event_time(frame: DataFrame, column: str = "event_time") -> DataFrame:
    """The time of each change, which its CAS tells: nanoseconds of the epoch, the last 16 bits of which are a counter.

    A CAS that was given from outside may tell no time; of such rows the column says something else, or nothing.
    """
    microseconds = fn.expr("cas div 1000")
    return frame.withColumn(column, fn.when(fn.col("cas") > 0, fn.timestamp_micros(microseconds)))
