"""Spark with Delta, in a Python of its own: requests and replies are lines of JSON. ``delta_spark.py`` starts it.

Only the standard library, PySpark and PyArrow are imported, because that Python has nothing else.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.feather as feather
from pyspark.sql import SparkSession

#: A commit of Delta fails when another writer was faster. Users try again, and so do we.
ATTEMPTS_MAX = 20


def session() -> SparkSession:
    settings = {
        "spark.jars": ",".join(str(path) for path in Path(sys.prefix, "jars").glob("*.jar")),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.retentionDurationCheck.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.shuffle.partitions": "1",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",  # VACUUM would start 10,000 tasks
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master("local[2]").appName("delta")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def reply(spark: SparkSession, request: dict[str, Any]) -> dict[str, Any]:
    attempts = request.get("attempts", ATTEMPTS_MAX)
    for attempt in range(attempts):
        try:
            frame = spark.sql(request["sql"])
            if "to" in request:
                feather.write_feather(frame.toArrow(), request["to"], compression="uncompressed")
                return {"rows": []}
            return {"rows": [list(row) for row in frame.collect()]}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if "CONCURRENT" not in text.upper() or attempt == attempts - 1:
                return {"error": text}
            time.sleep(0.1)
    raise AssertionError


def main() -> None:
    # Statements such as VACUUM print to standard output, from the JVM too.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spark = session()
    print(json.dumps({"ready": spark.version}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(reply(spark, json.loads(line)), default=str), file=replies, flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
