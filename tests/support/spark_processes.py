"""Spark in processes of its own: a standalone cluster, a Connect server, jobs that are submitted.

Everything that is started is the head of a session of its own, so that what it starts itself ends with it.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyspark
import pytest

from tests.support.class_archive import java_options
from tests.support.spark_session import PYTHONS
from tests.support.spark_tables import wait_until

RUN_PATIENCE_S = 600
HOME = Path(pyspark.__file__).parent
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    # No task before all are there that are expected.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}


def settings(**more: str) -> list[str]:
    """The arguments that keep a Spark small and quick; in names of more settings ``_`` stands for a dot."""
    chosen = _SETTINGS | {name.replace("_", "."): value for name, value in more.items()}
    return [part for name, value in chosen.items() for part in ("--conf", f"{name}={value}")]


def settings_variable(**more: str) -> dict[str, str]:
    """The same as a variable of the environment, for programs that start Spark by themselves.

    A folder with Spark's defaults would come first on the class path, and Java would not use the archive of classes.
    """
    return {"PYSPARK_SUBMIT_ARGS": shlex.join([*settings(**more), "pyspark-shell"])}


@contextmanager
def _started(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    given = {
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "JDK_JAVA_OPTIONS": java_options(),  # also of programs and executors that have no variable of their own
        **PYTHONS,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env={**os.environ, **given, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command: list[str], log: Path, **environment: str) -> str:
    """Run something to its end, which must be a good one; what it said."""
    with _started(command, log, **environment) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(RUN_PATIENCE_S)
        said = log.read_text()
        assert process.returncode == 0, f"{command[0]} ended with {process.returncode}:\n{said[-6000:]}"
        return said


def script(name: str) -> str:
    """One of Spark's own scripts."""
    return str(HOME / "bin" / name)


@contextmanager
def service(command: list[str], log: Path, says: str, **environment: str) -> Iterator[str]:
    """Something that serves until we are done with it; what its log says when it is ready."""
    with _started(command, log, **environment) as process:
        found: list[Any] = []

        def is_ready() -> bool:
            found[:] = re.findall(says, log.read_text())
            return bool(found) or process.poll() is not None

        wait_until(is_ready, f"the log of {command[1]} says {says}")
        assert found, log.read_text()[-6000:]
        yield str(found[0])


class SparkCluster:
    """A master and its workers. Each worker has a directory for temporary files of its own, as another machine has."""

    def __init__(self, directory: Path, master: str) -> None:
        self.master = master
        self.workers: list[subprocess.Popen[bytes]] = []
        self._directory = directory

    def executors(self, worker: int) -> int:
        """The number of executors that a worker has started."""
        return len(list((self._directory / f"work{worker}").glob("app-*/*/stderr")))

    def kill(self, worker: int) -> None:
        """``kill -9`` of a worker and its executor, as if its machine was gone."""
        os.killpg(self.workers[worker].pid, signal.SIGKILL)
        self.workers[worker].wait()


@contextmanager
def cluster(directory: Path, workers: int, *, cores: int = 1, **environment: str) -> Iterator[SparkCluster]:
    """A master and a number of workers with some cores each, which may still be on their way."""
    place = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    master = [script("spark-class"), "org.apache.spark.deploy.master.Master", *place]
    with ExitStack() as stack:
        log, says = directory / "master.log", r"Starting Spark master at (spark://127\.0\.0\.1:\d+)"
        found = SparkCluster(directory, stack.enter_context(service(master, log, says, **environment)))
        for number in range(workers):
            worker = [script("spark-class"), "org.apache.spark.deploy.worker.Worker", *place]
            more = ["--cores", str(cores), "--memory", "512m", "--work-dir", str(directory / f"work{number}")]
            temporary = directory / f"temporary{number}"
            temporary.mkdir()
            log, given = directory / f"worker{number}.log", {"TMPDIR": str(temporary), **environment}
            found.workers.append(stack.enter_context(_started([*worker, *more, found.master], log, **given)))
        yield found


class ConnectServer(NamedTuple):
    """A server of Spark Connect."""

    address: str
    #: Where it has its tables.
    warehouse: Path


@pytest.fixture(scope="session")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """One server for all tests of a process."""
    directory = tmp_path_factory.mktemp("connect")
    warehouse = directory / "warehouse"
    command = [script("spark-submit"), "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    command += ["--master", "local[2]", *settings(spark_sql_warehouse_dir=str(warehouse))]
    command += ["--conf", "spark.connect.grpc.binding.address=127.0.0.1", "--conf", "spark.connect.grpc.binding.port=0"]
    says = r"Spark Connect server started at: \S*?:(\d+)"
    with service([*command, "spark-internal"], directory / "connect.log", says, SPARK_DAEMON_MEMORY="1g") as port:
        yield ConnectServer(f"sc://127.0.0.1:{port}", warehouse)
