"""Delta's MERGE, for comparison: ``$UPRIVER_DELTA_PYTHON bench/delta_merge.py ROWS COUNT``.

Runs in the environment that ``python -m tools.delta_environment`` makes. A Delta table gets ROWS rows with the columns
of a mirror of ``bench.targets``; then MERGE updates COUNT random rows, several times. The last word that it prints is
the time of the fastest MERGE in seconds: with deletion vectors or without, whichever is faster.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

#: The first one warms up.
ROUNDS: Final = 4
COLUMNS: Final = (
    "format_string('document:%08d', id) AS _key",
    "CAST(NULL AS BINARY) AS _raw_key",
    "CAST(NULL AS BINARY) AS _raw",
    "CAST(pmod(hash(id), 64) AS INT) AS _vbucket",
    "id AS _seqno",
    "CAST({version} AS BIGINT) AS _rev_seqno",
    "id * 1000 + {version} AS _cas",
    "0L AS _flags",
    "0L AS _expiry",
    "1 AS _datatype",
    "concat('document ', id) AS name",
    "id % 1000 + 0.25D AS price",
    "id + {version} AS stock",
    "id % 2 = 0 AS open",
    "concat('[\"a\", \"b', id % 10, '\"]') AS tags",
    "repeat(concat(lower(hex(hash(id))), ' '), 8) AS text",
)


def session() -> SparkSession:
    """A local Spark with Delta on two cores."""
    jars = ",".join(str(path) for path in Path(sys.prefix, "jars").glob("*.jar"))
    settings = {
        "spark.jars": jars,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "2",  # for large logs: the default of 50 makes small ones slow
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master("local[2]").appName("delta-merge")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def documents(frame: DataFrame, version: int) -> DataFrame:
    """Rows for the numbers of a frame."""
    return frame.selectExpr(*(column.format(version=version) for column in COLUMNS))


def merge_s(spark: SparkSession, folder: Path, rows: int, count: int, *, vectors: bool) -> float:
    """The time of the fastest MERGE."""
    table = f"delta.`{folder / f'table-{vectors}'}`"
    documents(spark.range(rows), 0).createOrReplaceTempView("loaded")
    spark.sql(
        f"CREATE TABLE {table} USING delta TBLPROPERTIES ('delta.enableDeletionVectors' = '{str(vectors).lower()}') "
        "AS SELECT * FROM loaded"
    )
    spent = []
    for turn in range(ROUNDS):
        chosen = spark.range(rows).orderBy(fn.rand(turn)).limit(count)
        changes = folder / f"changes-{vectors}-{turn}"
        documents(chosen, turn + 1).write.parquet(str(changes))
        spark.read.parquet(str(changes)).createOrReplaceTempView("changes")
        started = time.perf_counter()
        spark.sql(
            f"MERGE INTO {table} AS t USING changes AS c ON t._vbucket = c._vbucket AND t._key = c._key "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        ).collect()
        spent.append(time.perf_counter() - started)
    (found,) = spark.sql(f"SELECT count(*), count_if(_rev_seqno > 0) FROM {table}").collect()
    assert found[0] == rows, found
    assert found[1] >= count // 2, found
    return min(spent[1:])


def main(rows: int, count: int) -> None:
    """Measure both ways."""
    folder = Path(tempfile.mkdtemp(prefix="delta-merge-"))
    spark = session()
    try:
        copies, vectors = (merge_s(spark, folder, rows, count, vectors=each) for each in (False, True))
        print(f"MERGE of {count:,} rows into {rows:,}: {copies:.2f} s, with deletion vectors {vectors:.2f} s; fastest")
        print(f"{min(copies, vectors):.3f}")
    finally:
        spark.stop()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
