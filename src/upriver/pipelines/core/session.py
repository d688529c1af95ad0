"""A local Spark: quick to start, and quiet. Its messages go to a file."""

import os
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"
_STARTING: Final = threading.Lock()
#: For small batches on a small machine: few partitions, no web pages, short pauses.
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.streaming.noDataProgressEventInterval": "1000",
    "spark.sql.streaming.minBatchesToRetain": "10",
    "spark.sql.streaming.numRecentProgressUpdates": "20",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.log.level": "WARN",
}


def spark_session(log: Path, master: str | None = None) -> "SparkSession":
    """The running Spark of this process, or a new one whose messages go to ``log``.

    There is one per process; pipelines in several threads share it.
    """
    with _STARTING:
        return _session(log, master)


def _session(log: Path, master: str | None) -> "SparkSession":
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:  # of whichever thread
        return SparkSession.builder.getOrCreate()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = SETTINGS if master is None else {}
    conf = SparkConf().setMaster(master or LOCAL).setAppName("upriver").setAll(list(settings.items()))
    with open(log, "ab") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The JVM and its workers print to these two streams.
        gateway = launch_gateway(conf, {"stdout": file, "stderr": file})  # type: ignore[no-untyped-call]
        return SparkSession(SparkContext(conf=conf, gateway=gateway))
