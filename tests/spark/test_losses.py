"""Sources that crash, fall over and move while a query follows them, under each policy: the table ends as the node."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tests.support.depth import slow_except
from tests.support.node_clusters import two_nodes
from tests.support.node_process import Client, NodeProcess
from tests.support.spark_driver import Query
from tests.support.spark_tables import (
    PausedTasks,
    Table,
    catch_up,
    contents_at,
    fill,
    start_query,
    stream_of,
    wait_until,
)
from upriver.client import SyncKvClient, SyncMover
from upriver.errors import StreamRolledBack
from upriver.model import VbucketState, vbucket_of
from upriver.node import EmbeddedNode
from upriver.wire.dialects.memcached import Flush, SetQ, StopPersistence

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
EXPECTED = {"emit": {"rollback", "reset"}, "rewind": {"reset"}}


def write(address: str, what: str, keys: range) -> None:
    with SyncKvClient(address) as kv:
        kv.set_many({f"k{n}": f"{what}:{n}".encode() for n in keys})


def fail_over(node: EmbeddedNode, lost: int) -> None:
    """As if another copy had taken over that had not got the last changes of each vbucket."""

    def lose() -> None:
        for vbucket in node.bucket:
            vbucket.set_state(VbucketState.REPLICA)
            vbucket.roll_back(max(0, vbucket.high_seqno - lost))
            vbucket.set_state(VbucketState.ACTIVE)

    node.call(lose)


# A failover


@pytest.mark.upriver(vbuckets=8)
@pytest.mark.parametrize("policy", slow_except(["rewind"], ["emit", "rewind"]))
def test_between_batches(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path, policy: str) -> None:
    address = upriver_node.address
    table = Table(address)
    query = start_query(spark, table, tmp_path / "c", onRollback=policy)
    for turn in range(2):
        write(address, f"first{turn}", range(300))
        query.processAllAvailable()
        write(address, f"lost{turn}", range(100, 400))
        query.processAllAvailable()
        fail_over(upriver_node, 20)
        write(address, f"other{turn}", range(350, 360))
        query.processAllAvailable()
        assert table.contents == contents_at(address)
    query.stop()
    assert set(table.events) == EXPECTED[policy] - ({"reset"} if policy == "emit" else set())


@pytest.mark.upriver(vbuckets=8)
@pytest.mark.parametrize("policy", slow_except(["emit"], ["emit", "rewind"]))
def test_between_the_plan_and_the_read(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path, policy: str
) -> None:
    """Spark comes back with a range that it has logged, and the source has lost the branch on which it lies."""
    address = upriver_node.address
    table = Table(address)
    write(address, "first", range(300))
    catch_up(spark, table, tmp_path / "c", onRollback=policy)
    write(address, "lost", range(100, 400))

    def interrupt(number: int) -> None:
        raise RuntimeError(f"in batch {number}")

    table.before = interrupt
    with pytest.raises(StreamingQueryException, match="in batch 2"):
        catch_up(spark, table, tmp_path / "c", onRollback=policy)
    fail_over(upriver_node, 30)
    write(address, "other", range(350, 450))
    table.before = lambda number: None
    catch_up(spark, table, tmp_path / "c", onRollback=policy)
    catch_up(spark, table, tmp_path / "c", onRollback=policy)
    assert table.contents == contents_at(address)


@pytest.mark.upriver(vbuckets=2)
@pytest.mark.parametrize("policy", slow_except(["rewind"], ["emit", "rewind"]))
def test_in_the_middle_of_a_read(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path, policy: str) -> None:
    address = upriver_node.address
    with SyncKvClient(address) as kv:
        kv.set_many({f"k{n}": b"x" * 2000 for n in range(20_000)})
    table, paused = Table(address), PausedTasks(tmp_path / "paused")
    frame = stream_of(spark, address, rowsPerBatch=500, onRollback=policy)
    query = fill(paused.pause(frame), table, tmp_path / "c")
    paused.wait()
    fail_over(upriver_node, 300)
    write(address, "other", range(50))
    paused.resume()
    query.processAllAvailable()
    query.stop()
    assert table.contents == contents_at(address)


@pytest.mark.upriver(vbuckets=8)
def test_with_fail_nothing_goes_on_before_somebody_decides(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    address = upriver_node.address
    table = Table(address)
    write(address, "first", range(300))
    catch_up(spark, table, tmp_path / "c")
    fail_over(upriver_node, 20)
    write(address, "other", range(10))
    held = table.contents
    for _ in range(2):  # it stays so
        with pytest.raises(
            StreamingQueryException, match=r"vbucket \d: .* must roll back from .* to seqno \d+ of uuid 0x"
        ):
            catch_up(spark, table, tmp_path / "c")
    assert table.contents == held
    catch_up(spark, table, tmp_path / "c", onRollback="rewind")
    assert table.contents == contents_at(address)


@pytest.mark.upriver(vbuckets=4)
def test_a_history_that_was_replaced(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    address = upriver_node.address
    table = Table(address)
    write(address, "first", range(100))
    catch_up(spark, table, tmp_path / "c", onRollback="emit")
    with Client(upriver_node.port) as client:
        client.ask(Flush())
    write(address, "other", range(50, 60))
    with pytest.raises(StreamingQueryException, match=r"vbucket \d.*its history was replaced.*failOnDataLoss"):
        catch_up(spark, table, tmp_path / "c", onRollback="emit")
    catch_up(spark, table, tmp_path / "c", onRollback="emit", failOnDataLoss=False)
    assert table.contents == contents_at(address)
    assert set(table.events) == {"reset"}


# A crash


@contextmanager
def crashing(directory: Path) -> Iterator[tuple[NodeProcess, list[str]]]:
    """A node with a disk, which loses all later writes when it is killed."""
    arguments = ["--vbuckets", "4", "--data", str(directory), "--ack", "disk"]
    with NodeProcess("--port", "0", *arguments) as served:
        yield served, ["--port", str(served.port), *arguments]


def test_a_kill_between_batches(spark: SparkSession, tmp_path: Path) -> None:
    with crashing(tmp_path / "data") as (served, arguments):
        address = f"127.0.0.1:{served.port}"
        table = Table(address)
        write(address, "first", range(3000))
        query = start_query(spark, table, tmp_path / "c", onRollback="emit")
        query.processAllAvailable()
        _lose(address)
        wait_until(lambda: table.contents.get(b"k3") == b"lost:3", "the query follows what will be lost")
        served.process.kill()
        served.process.wait()
        with NodeProcess(*arguments):
            write(address, "other", range(2000, 3500))
            query.processAllAvailable()
            query.stop()
            assert table.contents == contents_at(address)


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("policy", ["emit", "rewind", "fail"])
def test_a_kill(tmp_path: Path, policy: str, is_planned: bool) -> None:
    """Between two micro-batches, or between the plan of one and its read."""
    with crashing(tmp_path / "data") as (served, arguments):
        address = f"127.0.0.1:{served.port}"
        table = Table(address)
        write(address, "first", range(500))
        with Query(address=address, onRollback=policy) as query:
            table.take(query.batch())
            _lose(address)
            if is_planned:
                assert query.plan()
            else:
                table.take(query.batch())
            served.process.kill()
            served.process.wait()
            with NodeProcess(*arguments):
                write(address, "other", range(400, 600))
                if policy == "fail":
                    with pytest.raises(StreamRolledBack, match=r"vbucket \d: .*(must roll|rolled) back"):
                        _go_on(query, table, is_planned=is_planned)
                    query.restart(onRollback="emit")
                elif is_planned:
                    table.take(query.read())
                for rows in query.rest():
                    table.take(rows)
                assert table.contents == contents_at(address)
                assert table.contents[b"k450"] == b"other:450"
                assert b"lost:3" not in table.contents.values()


def _go_on(query: Query, table: Table, *, is_planned: bool) -> None:
    if is_planned:
        table.take(query.read())
    table.take(query.batch())


def _lose(address: str) -> None:
    """Write changes that will be lost. They are not answered, because they do not reach the disk."""
    port = int(address.rpartition(":")[2])
    with Client(port) as client:
        client.ask(StopPersistence())
    keys = [b"k%d" % n for n in range(1000)]
    packets = [SetQ(key=key, value=b"lost:" + key[1:], vbucket=vbucket_of(key, 4)).encode() for key in keys]
    with Client(port) as client:
        client.socket.sendall(b"".join(packets))
        wait_until(lambda: contents_at(address).get(keys[-1]) == b"lost:999", "the node has taken them")


# A move


def move(source: EmbeddedNode, destination: EmbeddedNode, numbers: Iterable[int]) -> None:
    with SyncMover(source.address, destination.address, numbers) as mover:
        assert {step.phase.name for step in mover.carry_out()} == {"MOVED"}


def test_vbuckets_that_move() -> None:
    """Between micro-batches, and between the plan of one and its read."""
    with two_nodes(vbuckets=8) as (one, other):
        address = f"{one.address},{other.address}"
        table = Table(address)
        with Query(address=address, onRollback="emit") as query:
            write(address, "first", range(500))
            table.take(query.batch())
            move(one, other, range(4))
            write(address, "second", range(200, 600))
            table.take(query.batch())
            assert table.contents == contents_at(address)
            write(address, "third", range(300, 700))
            assert query.plan()
            move(other, one, [1, 5])
            write(address, "fourth", range(650, 800))
            table.take(query.read())
            for rows in query.rest():
                table.take(rows)
        assert table.contents == contents_at(address)
        assert len(table.contents) == 800


@contextmanager
def writing(address: str) -> Iterator[list[int]]:
    """Somebody writes, changes and deletes without pause; the list grows with every turn."""
    stop, turns, failures = threading.Event(), [0], list[BaseException]()

    def go_on() -> None:
        try:
            with SyncKvClient(address, timeout_s=120) as kv:
                while not stop.wait(0.02):  # a pace that leaves the others something of the interpreter
                    turn = len(turns)
                    kv.set_many({f"k{n % 500}": b"%d:%d" % (turn, n) for n in range(turn * 20, turn * 20 + 60)})
                    kv.delete(f"k{turn * 20 % 500}")
                    turns.append(turn)
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=go_on)
    writer.start()
    try:
        yield turns
    finally:
        stop.set()
        writer.join()
    assert not failures, failures


@pytest.mark.parametrize(("policy", "dialect"), slow_except([("rewind", "upr")], [("emit", "dcp"), ("rewind", "upr")]))
def test_vbuckets_that_move_while_a_query_runs(spark: SparkSession, tmp_path: Path, policy: str, dialect: str) -> None:
    """To the other node and back, under a writer, in the middle of whatever the query is doing."""
    with two_nodes(vbuckets=8) as (one, other):
        address = f"{one.address},{other.address}"
        table = Table(address)
        query = start_query(spark, table, tmp_path / "c", onRollback=policy, dialect=dialect)
        with writing(address) as turns:

            def follow() -> None:
                turn, rows = len(turns), table.rows
                wait_until(lambda: len(turns) > turn + 5 and table.rows > rows, "the query follows the writer")

            for source, destination, numbers in ((one, other, [0, 1]), (other, one, [0, 6, 7]), (one, other, [6])):
                follow()
                move(source, destination, numbers)
            follow()
        query.processAllAvailable()
        query.stop()
        assert [
            sorted(each.number for each in node.bucket if each.state is VbucketState.ACTIVE) for node in (one, other)
        ] == [
            [0, 2, 3, 7],
            [1, 4, 5, 6],
        ]
        assert table.contents == contents_at(address)
        assert set(table.events) <= EXPECTED[policy]


@pytest.mark.parametrize("mode", ["upsert", "meta"])
def test_vbuckets_of_a_sink_that_move_while_it_writes(spark: SparkSession, mode: str) -> None:
    """Each row is there once with its last value, wherever its vbucket was when it came."""
    with two_nodes(vbuckets=8) as (one, other):
        address = f"{one.address},{other.address}"
        write(address, "old", range(1000))
        numbered = spark.range(60_000).selectExpr(
            "concat('k', id) AS key", "concat('new:', id) AS value", "2L AS rev_seqno", "id + 1 AS cas"
        )
        sink = numbered.write.format("upriver").option("address", address).option("mode", mode).option("batchRows", 500)
        done = threading.Event()

        def move_to_and_fro() -> int:
            for moves, (source, destination) in enumerate(itertools.cycle([(one, other), (other, one)])):
                if done.is_set() and moves > 1:
                    return moves
                move(source, destination, [0, 1, 2, 3])
            raise AssertionError

        with ThreadPoolExecutor(1) as pool:
            moving = pool.submit(move_to_and_fro)
            try:
                sink.mode("append").save()
            finally:
                done.set()
            assert moving.result() >= 2
        assert contents_at(address) == {b"k%d" % n: b"new:%d" % n for n in range(60_000)}
