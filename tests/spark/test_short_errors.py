"""What people see of an error: one line, in whatever Spark wraps around it."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession

from tests.support.spark_tables import Table, catch_up
from upriver.client import SyncKvClient
from upriver.errors import OptionError
from upriver.model import VbucketState
from upriver.node import EmbeddedNode
from upriver.spark.short_errors import short_errors

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
#: Nothing listens there.
NOWHERE = "127.0.0.1:9"


def first_line(action: Callable[[], object]) -> str:
    """The first line of the error, without a traceback in any other."""
    with pytest.raises(Exception) as raised:
        action()
    text = str(raised.value)
    assert "Traceback" not in text
    assert 'File "' not in text
    return text.removeprefix("An exception was thrown from the Python worker:\n").splitlines()[0]


def test_a_misspelt_option(spark: SparkSession) -> None:
    line = first_line(lambda: spark.read.format("upriver").option("addres", NOWHERE).load())
    assert line.endswith("OptionError: option addres = '127.0.0.1:9': unknown option; did you mean address?")


def test_a_node_that_is_not_there(spark: SparkSession, tmp_path: Path) -> None:
    expected = "127.0.0.1:9: cannot connect: Connection refused"
    frame = spark.read.format("upriver").option("address", NOWHERE).load()
    assert expected in first_line(frame.count)
    assert expected in first_line(lambda: catch_up(spark, Table(NOWHERE), tmp_path / "c"))
    rows = spark.range(1).selectExpr("'k' AS key", "'v' AS value").write.format("upriver").mode("append")
    assert expected in first_line(rows.option("address", NOWHERE).save)


def test_a_stream_that_cannot_be_read(spark: SparkSession, tmp_path: Path) -> None:
    """PySpark fails with an UnboundLocalError where the reader of a stream cannot be made."""

    def run() -> None:
        frame = spark.readStream.format("upriver").options(address=NOWHERE, dialect="tap").load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
        writer.trigger(availableNow=True).start().awaitTermination()

    assert "OptionError: option name = '': a tap stream needs a name" in first_line(run)


@pytest.mark.upriver(vbuckets=1)
def test_a_rollback(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"v" for n in range(10)})
    catch_up(spark, Table(upriver_node.address), tmp_path / "c")
    vbucket = upriver_node.bucket.vbucket(0)

    def lose() -> None:
        vbucket.set_state(VbucketState.REPLICA)
        vbucket.roll_back(6)
        vbucket.set_state(VbucketState.ACTIVE)

    before, _ = vbucket.failover_log.newest.vbucket_uuid, upriver_node.call(lose)
    after = vbucket.failover_log.newest.vbucket_uuid
    line = first_line(lambda: catch_up(spark, Table(upriver_node.address), tmp_path / "c"))
    assert line.endswith(
        "QueryRolledBack: vbucket 0: the source has another history after 6, so the query must roll back "
        f"from seqno 10 of uuid {before:#x} to seqno 6 of uuid {after:#x}. "
        "Set onRollback to rewind to read the vbucket again, or to emit to get a row"
    )


class Failing:
    def partitions(self) -> list[int]:
        raise OptionError("a", "b", "c")

    def read(self) -> Iterator[int]:
        yield 1
        raise OptionError("a", "b", "c")

    def write(self) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("is_worker", [False, True])
def test_only_our_errors_hide_a_traceback_and_only_in_a_worker(
    monkeypatch: pytest.MonkeyPatch, is_worker: bool
) -> None:
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")
    if is_worker:
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(name="pyspark.daemon")))
    failing = short_errors(Failing)()
    with pytest.raises(ZeroDivisionError):
        failing.write()
    assert not os.environ["SPARK_HIDE_TRACEBACK"]
    with pytest.raises(OptionError):
        list(failing.read())
    assert bool(os.environ["SPARK_HIDE_TRACEBACK"]) is is_worker
