"""The Spark that a pipeline uses: the one that exists, or a local one, quick to start and quiet.

A session that exists (a notebook, ``spark-submit``, a program's own) is used with its master and its settings, and so
is a server of Spark Connect, if the session is a client of one or the master is its address (``sc://``). Without any a
local Spark starts, with one task per core. Its messages go to a file.
"""

import os
import re
import shutil
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from upriver.errors import SparkUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: One task per core. A failed task ends the batch, which the runner repeats.
LOCAL: Final = "local[*]"
_STARTING: Final = threading.Lock()
#: How long to wait for a cluster's executors, and how long no other one must have come.
_EXECUTORS_S: Final = 15.0
_QUIET_S: Final = 1.0
_LOOK_S: Final = 0.05
#: For every Spark that we start: quiet, and few files in the checkpoint.
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.streaming.noDataProgressEventInterval": "1000",
    "spark.sql.streaming.minBatchesToRetain": "10",
    "spark.sql.streaming.numRecentProgressUpdates": "20",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.log.level": "WARN",
}
#: For a local one: no other machine connects to it, and small batches need few partitions.
LOCAL_SETTINGS: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
}
#: Writes a checkpoint on a local disk without starting a dozen processes (``readlink``, ``chmod``) for each file, as
#: Spark's default does there. It takes 10 ms instead of 40. Only the default refuses to replace the file of a second
#: query in the same place, for which a run's directory has a lock.
FILE_MANAGER_SETTING: Final = "spark.sql.streaming.checkpointFileManagerClass"
FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def spark_session(log: Path, master: str | None = None) -> "SparkSession":
    """The running Spark of this process, or a new one whose messages go to ``log``.

    There is one per process; pipelines in several threads share it.
    """
    with _STARTING:
        return _session(log, master)


def _session(log: Path, master: str | None) -> "SparkSession":
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if (server := _server(master)) is not None:
        return server
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Of whichever thread, or of spark-submit, whose JVM runs already and knows the master.
    if SparkContext._active_spark_context is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        return SparkSession.builder.getOrCreate()
    check_java()
    settings = dict(SETTINGS)
    if master is None or master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= LOCAL_SETTINGS
    elif (address := address_towards(master)) is not None:
        os.environ.setdefault("SPARK_LOCAL_IP", address)  # weaker than the user's spark.driver.host
    from pyspark.java_gateway import launch_gateway

    conf = SparkConf().setMaster(master or LOCAL).setAppName("upriver").setAll(list(settings.items()))
    with open(log, "ab") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The JVM and its workers print to these two streams.
        gateway = launch_gateway(conf, {"stdout": file, "stderr": file})  # type: ignore[no-untyped-call]
        if settings.items() >= LOCAL_SETTINGS.items() and _has_class(gateway, FILE_MANAGER):
            conf.set(FILE_MANAGER_SETTING, FILE_MANAGER)
        return SparkSession(SparkContext(conf=conf, gateway=gateway))


def _has_class(gateway: Any, name: str) -> bool:
    """Whether this version of Spark has a class."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

    try:
        return gateway.jvm.java.lang.Class.forName(name) is not None
    except Py4JJavaError:
        return False


def _server(master: str | None) -> "SparkSession | None":
    """A client of Spark Connect, if that is what the user has or wants."""
    client = sys.modules.get("pyspark.sql.connect.session")
    found = None if client is None else client.SparkSession.getActiveSession()
    if found is not None and master is None:
        return cast("SparkSession", found)
    if master is None:
        master = os.environ.get("SPARK_REMOTE")
    if master is None or not master.startswith("sc://"):
        return None
    from pyspark.sql import SparkSession

    try:
        return SparkSession.builder.remote(master).getOrCreate()
    except ImportError as error:
        raise SparkUnavailable(f'Spark Connect needs more packages: pip install "pyspark[connect]" ({error})') from None


def is_remote(spark: "SparkSession") -> bool:
    """Whether this process is a client of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def task_cores(spark: "SparkSession") -> int:
    """The cores that tasks can use. The executors of a cluster come one after the other, so they are waited for."""
    context: Any = spark.sparkContext
    if context.master.startswith("local"):
        return int(context.defaultParallelism)
    started = changed = time.monotonic()
    count = 1  # the driver is one of them
    while (now := time.monotonic()) - started < _EXECUTORS_S and (count == 1 or now - changed < _QUIET_S):
        if (found := context._jsc.sc().getExecutorMemoryStatus().size()) != count:
            count, changed = found, now
        time.sleep(_LOOK_S)
    return int(context.defaultParallelism)


def address_towards(master: str) -> str | None:
    """The address of this machine on the way to a standalone cluster, by which its workers can reach the driver.

    By default Spark advertises what the host name stands for, which may be an address of another network.
    """
    found = re.match(r"spark://\[?([^/,]+?)\]?:(\d+)", master)
    if found is None:
        return None
    try:
        kind, *_, place = socket.getaddrinfo(found[1], int(found[2]), type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as towards:
            towards.connect(place)  # sends nothing
            return str(towards.getsockname()[0])
    except OSError:
        return None  # Spark will say what is wrong with the master


def check_java() -> None:
    """Raise ``SparkUnavailable`` if there is no Java."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"in JAVA_HOME, {home}" if home else "on this machine"
        raise SparkUnavailable(f"Spark needs Java, which is not {where}: install Java 17 or newer, and set JAVA_HOME")
