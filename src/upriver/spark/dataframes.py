"""Functions for DataFrames of changes: parsed documents, the latest state, the time of a change."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as fn
from pyspark.sql.types import StructType

from upriver.spark.rows import DOCUMENTS

#: Events of whole vbuckets.
_OF_VBUCKETS = ("flush", "rollback", "reset")


def changes(frame: DataFrame, value_schema: str | StructType | None = None) -> DataFrame:
    """Only the changes of keys, with keys as text and parsed values.

    The schema is ``value_schema``, else the source's option ``valueSchema``. Without either, documents of
    ``valueFormat`` = ``json`` become variants, and other values stay as they are. Invalid JSON becomes null.
    """
    rows = frame.where(~fn.col("event").isin(*_OF_VBUCKETS)).withColumn("key", fn.col("key").cast("string"))
    if value_schema is None and "value" in frame.columns:
        value_schema = _declared_schema(frame)
    if value_schema is None:
        return rows
    text = fn.col("value").cast("string")
    variant = fn.try_parse_json(text)
    # from_json gives a struct of nulls for invalid JSON, which looks like an empty document.
    parsed = fn.when(variant.isNotNull(), fn.from_json(text, value_schema)) if value_schema else variant
    return rows.withColumn("value", parsed)


def _declared_schema(frame: DataFrame) -> str | None:
    """The schema of documents that the source was told; empty without one, None if values are not documents.

    The source says so in the metadata of its column. A schema of the user's own has no such metadata; then the options
    of the source are in the plan.
    """
    metadata = frame.schema["value"].metadata
    if DOCUMENTS in metadata:
        return str(metadata[DOCUMENTS])
    plan = getattr(getattr(frame, "_jdf", None), "queryExecution", None)  # a client of Spark Connect has no plan
    if plan is None:
        return None
    leaves = plan().analyzed().collectLeaves()
    for number in range(leaves.size()):
        leaf = leaves.apply(number)
        name = leaf.getClass().getSimpleName()
        if name in ("DataSourceV2Relation", "StreamingRelationV2"):
            options = leaf.options() if name == "DataSourceV2Relation" else leaf.extraOptions()
            if (options.get("valueFormat") or "").lower() == "json":
                return options.get("valueSchema") or ""
    return None


def latest(frame: DataFrame) -> DataFrame:
    """The last mutation of each key in a batch of changes.

    Rollbacks, resets and flushes in the batch are applied: they undo earlier rows above their seqno. They cannot
    restore versions that are not in the batch. The columns ``vbucket``, ``branch``, ``seqno``, ``snapshot_end``,
    ``event`` and ``key`` are needed.
    """
    marks = frame.where(fn.col("event").isin(*_OF_VBUCKETS)).select(
        *(fn.col(name).alias(f"_{name}") for name in ("vbucket", "branch", "seqno", "snapshot_end"))
    )
    of_the_same = fn.col("vbucket") == fn.col("_vbucket")
    # A reset during the read of a range lies in the middle of a branch. No snapshot has a key twice, so a key whose
    # deletion was purged before the reset was read in a snapshot that ends before those after the reset.
    within = (fn.col("branch") == fn.col("_branch")) & (fn.col("snapshot_end") < fn.col("_snapshot_end"))
    undone = (fn.col("seqno") > fn.col("_seqno")) & ((fn.col("branch") < fn.col("_branch")) | within)
    held = frame.where(~fn.col("event").isin(*_OF_VBUCKETS)).join(
        fn.broadcast(marks), of_the_same & undone, "left_anti"
    )
    # Without a helper column to drop, because a declarative pipeline does not know the columns yet.
    newest = fn.max_by(fn.struct("*"), fn.struct("branch", "seqno")).alias("_newest")
    return held.groupBy("vbucket", "key").agg(newest).select("_newest.*").where(fn.col("event") == "mutation")


def with_event_time(frame: DataFrame, column: str = "event_time") -> DataFrame:
    """Add the time of each change, from its CAS: nanoseconds of the epoch, with a counter in the last 16 bits.

    A CAS that a client has set may not be a time; for such rows the column is meaningless or null.
    """
    microseconds = fn.expr("cas div 1000")
    return frame.withColumn(column, fn.when(fn.col("cas") > 0, fn.timestamp_micros(microseconds)))
