"""Pipelines on a real Spark, run to the end of what is there; and a node that dies."""

import os
import signal
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tests.support.node_process import Client, Served
from upriver.pipelines import Pipeline
from upriver.wire.dialects.memcached import StopPersistence

PATIENCE_S = 240


def run_once(spark: SparkSession, pipeline: Pipeline, directory: Path, attempts: int = 3) -> None:
    """Bring everything that there is to the target, as the runner does; what fails is raised as it was.

    A Spark that fails for its own reasons, with which a machine under load abounds, is started again.
    """
    pipeline.open(directory / "own")
    changes = spark.readStream.format("upriver").options(**pipeline.reader_options()).load()
    query = pipeline.start(changes, directory / "checkpoint", once=True)
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


class Mortal:
    """A node in a process of its own that is killed, and comes back with what is on its disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._arguments = ("--data", str(directory), "--vbuckets", "8")
        self.served = Served("--port", "0", *self._arguments)
        self.address = f"127.0.0.1:{self.served.port}"

    def kill(self) -> None:
        """``kill -9``."""
        os.kill(self.served.pid, signal.SIGKILL)
        self.served.process.communicate()

    def start(self) -> None:
        """Start again at the same address."""
        self.served = Served("--port", self.address.rpartition(":")[2], *self._arguments)

    def stop_persistence(self) -> None:
        """Whatever is written from now on is lost when it is killed."""
        with Client(self.served.port) as client:
            assert client.ask(StopPersistence()).status == 0
