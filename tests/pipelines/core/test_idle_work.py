"""Work between batches: it delays no progress, and ends when it should."""

import threading
import time
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.node_process import wait_until
from upriver.pipelines.core.idle_work import IdleWork
from upriver.pipelines.core.workers import SparkWorkers


def test_one_work_at_a_time_and_its_error_comes_with_the_next() -> None:
    idle, let, runs = IdleWork(MagicMock()), threading.Event(), list[int]()

    def work() -> None:
        runs.append(1)
        assert let.wait(30)
        raise ValueError("broken")

    idle.start(work)
    idle.start(work)
    let.set()
    wait_until(lambda: not idle.is_running)
    with pytest.raises(ValueError, match="broken"):
        idle.start(work)
    assert runs == [1]
    idle.start(lambda: runs.append(2))
    wait_until(lambda: runs == [1, 2])
    idle.cancel()
    assert idle.last_error() is None


def slow(_: bytes) -> bytes:
    time.sleep(100)  # what is cancelled
    return b""


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_its_jobs_are_cancelled(spark: SparkSession) -> None:
    other: Any = spark.newSession()  # a batch has a session of its own
    idle = IdleWork(spark)
    idle.start(lambda: SparkWorkers(other).map(slow, [b"a", b"b"]))
    status = spark.sparkContext.statusTracker()
    wait_until(lambda: status.getActiveJobsIds())
    began = time.monotonic()
    idle.cancel()
    assert not idle.is_running
    assert time.monotonic() - began < 50
    wait_until(lambda: not status.getActiveJobsIds())
