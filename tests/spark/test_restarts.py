"""Queries that fail, come back and are killed at every stage: in the end the table equals the node."""

from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tests.support.spark_driver import Query
from tests.support.spark_tables import (
    PausedTasks,
    Table,
    catch_up,
    contents_at,
    fill,
    kill_workers,
    lose_commit,
    start_query,
    stream_of,
)
from upriver.client import SyncKvClient
from upriver.node import EmbeddedNode
from upriver.spark import describe_offset

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


class Interrupted(Exception):
    """What a test throws into a batch."""


def write(node: EmbeddedNode, turn: int) -> None:
    """Some new keys, some changed, some deleted."""
    with SyncKvClient(node.address) as kv:
        kv.set_many({f"k{n}": b"%d:%d" % (turn, n) for n in range(turn * 50, turn * 50 + 200)})
        for n in range(turn * 50, turn * 50 + 10):
            kv.delete(f"k{n}")


@pytest.mark.parametrize(
    ("stage", "dialect"),
    [("after", "dcp"), ("before", "upr"), pytest.param("before", "dcp", marks=pytest.mark.slow)],
)
def test_a_batch_that_failed_is_run_again(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path, stage: str, dialect: str
) -> None:
    """Its keys change again before it is: they move beyond the end of the range that was logged."""
    table = Table(upriver_node.address)
    write(upriver_node, 0)
    catch_up(spark, table, tmp_path / "c", dialect=dialect)
    write(upriver_node, 1)

    def interrupt(number: int) -> None:
        raise Interrupted(f"in batch {number}")

    setattr(table, stage, interrupt)
    with pytest.raises(StreamingQueryException, match="in batch 2"):
        catch_up(spark, table, tmp_path / "c", dialect=dialect)
    write(upriver_node, 1)
    setattr(table, stage, lambda number: None)
    catch_up(spark, table, tmp_path / "c", dialect=dialect)
    assert table.contents == contents_at(upriver_node.address)
    assert table.events == []


def test_a_commit_that_was_lost(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    """Spark was gone after the sink and before its own note: it runs the batch again, with the same offsets."""
    table, checkpoint = Table(upriver_node.address), tmp_path / "c"
    write(upriver_node, 0)
    catch_up(spark, table, checkpoint)
    rows = table.rows
    logged = (checkpoint / "offsets" / "0").read_text().splitlines()[-1]
    assert sum(place["seqno"] for place in describe_offset(logged).values()) >= rows
    lose_commit(checkpoint)
    catch_up(spark, table, checkpoint)
    assert table.rows == 2 * rows
    assert table.contents == contents_at(upriver_node.address)


@pytest.mark.parametrize("options", [{"startingOffsets": "latest"}, {"vbuckets": "0-2"}])
def test_the_first_start_is_fixed_once_it_is_logged(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path, options: dict[str, str]
) -> None:
    """Spark asks for the initial offset again if the first batch is not committed, but keeps the batch's logged end."""
    table, checkpoint = Table(upriver_node.address), tmp_path / "c"
    write(upriver_node, 0)

    def interrupt(number: int) -> None:
        raise Interrupted(f"in batch {number}")

    table.before = interrupt
    with pytest.raises(StreamingQueryException, match="in batch 0"):
        catch_up(spark, table, checkpoint)
    table.before = lambda number: None
    catch_up(spark, table, checkpoint, **options)
    assert table.contents == contents_at(upriver_node.address)
    assert table.rows == 200


@pytest.mark.upriver(vbuckets=4)
def test_a_first_batch_without_rows_fixes_the_start_too(upriver_node: EmbeddedNode) -> None:
    with Query(address=upriver_node.address, startingOffsets="latest") as query:
        end = query.end  # Spark logs and runs a first batch even if there is nothing to read
        write(upriver_node, 0)
        query.restart(startingOffsets="earliest")
        query.offset = query.initial()
        query.end = end
        assert query.read() == []
        assert len(query.batch()) == 200


def test_killed_workers(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    """Workers are killed in the middle of a task; Spark runs it in new ones, which read the range from its start."""
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"x" * 2000 for n in range(20_000)})
    table, paused = Table(upriver_node.address), PausedTasks(tmp_path / "paused")
    query = fill(paused.pause(stream_of(spark, upriver_node.address, rowsPerBatch=500)), table, tmp_path / "c")
    paused.wait()
    assert kill_workers() >= 2
    paused.resume()
    query.processAllAvailable()
    write(upriver_node, 1)
    query.processAllAvailable()
    query.stop()
    assert table.contents == contents_at(upriver_node.address)
    assert table.events == []


def test_a_query_that_runs_on_while_everything_changes(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    table = Table(upriver_node.address)
    query = start_query(spark, table, tmp_path / "c", maxRowsPerTrigger=100)
    for turn in range(3):
        write(upriver_node, turn)
        query.processAllAvailable()
        kill_workers()
    query.processAllAvailable()
    query.stop()
    assert table.contents == contents_at(upriver_node.address)


def test_nothing_to_read(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    table = Table(upriver_node.address)
    catch_up(spark, table, tmp_path / "c")
    assert table.rows == 0
    query = start_query(spark, table, tmp_path / "c")
    query.processAllAvailable()
    assert table.rows == 0
    write(upriver_node, 0)
    query.processAllAvailable()
    query.stop()
    assert table.contents == contents_at(upriver_node.address)


@pytest.mark.upriver(vbuckets=1024)
def test_1024_vbuckets(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    table = Table(upriver_node.address)
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"k{n}": b"%d" % n for n in range(5000)})
    catch_up(spark, table, tmp_path / "c", maxRowsPerTrigger=3000)
    write(upriver_node, 1)
    catch_up(spark, table, tmp_path / "c")
    assert len(table.contents) == 5000 - 10
    assert table.contents == contents_at(upriver_node.address)


def test_values_of_nothing_and_of_20_mebibytes(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    largest = bytes(range(256)) * (20 * 4096)
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("empty", b"")
        kv.set("large", largest)
        kv.set_many({f"k{n}": b"" if n % 2 else b"x" for n in range(100)})
    table = Table(upriver_node.address)
    catch_up(spark, table, tmp_path / "c")
    assert table.contents[b"large"] == largest
    assert table.contents[b"empty"] == b""
    assert table.contents == contents_at(upriver_node.address)
