"""Functions for DataFrames of changes: parsed documents, the latest state, the time of a change."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn
from pyspark.sql.types import StructType

from upriver.spark.rows import DOCUMENTS

#: Events of whole vbuckets.
_OF_VBUCKETS = ("flush", "rollback", "reset")
#: Spark's parser for variants gives up on a longer text inside of a document.
_VARIANT_TEXT_MAX = 20_000_000
#: By default Spark makes a longer text null.
_LONG_TEXTS = {"maxStringLen": str(2**31 - 1)}


def changes(frame: DataFrame, value_schema: str | StructType | None = None) -> DataFrame:
    """Only the changes of keys, with keys as text and parsed values.

    The schema is ``value_schema``, else the source's option ``valueSchema``. Without either, documents of
    ``valueFormat`` = ``json`` become variants, and other values stay as they are. Invalid JSON becomes null, and so
    does a document with a text that is too long for Spark's variants, unless there is a schema.
    """
    rows = frame.where(~fn.col("event").isin(*_OF_VBUCKETS)).withColumn("key", fn.col("key").cast("string"))
    if value_schema is None and "value" in frame.columns:
        value_schema = _declared_schema(frame)
    if value_schema is None:
        return rows
    text = fn.col("value").cast("string")
    variant = fn.try_parse_json(text)
    # from_json gives a struct of nulls for invalid JSON, which looks like an empty document.
    too_long = (fn.octet_length(text) > _VARIANT_TEXT_MAX) & fn.json_object_keys(text).isNotNull()
    is_json = variant.isNotNull() | too_long
    parsed = fn.when(is_json, fn.from_json(text, value_schema, _LONG_TEXTS)) if value_schema else variant
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
    restore versions that are not in the batch. The source is read once. The columns ``vbucket``, ``branch``,
    ``seqno``, ``snapshot_end``, ``event`` and ``key`` are needed.
    """
    # A window gives each row the marks of its vbucket, because a join would read the source twice. All steps leave the
    # source unresolved: a declarative pipeline finds its dependencies by that, and does not know the columns yet. So a
    # struct has the row, and no helper column is added or dropped.
    is_mark = fn.col("event").isin(*_OF_VBUCKETS)
    mark = fn.when(is_mark, fn.struct("branch", "seqno", "snapshot_end"))
    marks = fn.collect_list(mark).over(Window.partitionBy("vbucket")).alias("_marks")
    rows = frame.select(fn.struct("*").alias("_row"), marks)

    def undoes(mark: Column) -> Column:
        # A reset during the read of a range lies in the middle of a branch. No snapshot has a key twice, so a key whose
        # deletion was purged before the reset was read in a snapshot that ends before those after the reset.
        within = (fn.col("_row.branch") == mark.branch) & (fn.col("_row.snapshot_end") < mark.snapshot_end)
        return (fn.col("_row.seqno") > mark.seqno) & ((fn.col("_row.branch") < mark.branch) | within)

    held = rows.where(~fn.col("_row.event").isin(*_OF_VBUCKETS) & ~fn.exists("_marks", undoes))
    newest = fn.max_by("_row", fn.struct("_row.branch", "_row.seqno")).alias("_newest")
    found = held.groupBy("_row.vbucket", "_row.key").agg(newest).select("_newest.*")
    return found.where(fn.col("event") == "mutation")


def with_event_time(frame: DataFrame, column: str = "event_time") -> DataFrame:
    """Add the time of each change, from its CAS: nanoseconds of the epoch, with a counter in the last 16 bits.

    A CAS that a client has set may not be a time; for such rows the column is meaningless or null.
    """
    microseconds = fn.expr("cas div 1000")
    return frame.withColumn(column, fn.when(fn.col("cas") > 0, fn.timestamp_micros(microseconds)))
