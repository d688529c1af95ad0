"""Sources that crash, fail over or move and lose nothing: a query that had caught up continues without a row."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.support.depth import slow_except
from tests.support.node_process import Client, NodeProcess
from tests.support.spark_driver import Query
from tests.support.spark_tables import Table, catch_up, contents_at, start_query, wait_until
from upriver.client import Mover, SyncKvClient
from upriver.model.failover import ENTRIES_MAX
from upriver.node import EmbeddedNode
from upriver.protocol.move import Goal
from upriver.spark import describe_offset
from upriver.wire.dialects.memcached import GetAllVbucketSeqnos, SetVbucket, VbucketState

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
POLICIES = ["fail", "rewind", "emit"]
VBUCKETS = 4


def write(address: str, what: str, keys: range = range(300)) -> None:
    with SyncKvClient(address) as kv:
        kv.set_many({f"k{n}": f"{what}:{n}".encode() for n in keys})


class CrashingNode:
    """A node with everything on disk, which can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self._arguments = ["--vbuckets", str(VBUCKETS), "--data", str(directory), "--ack", "disk"]
        self._process = NodeProcess("--port", "0", *self._arguments)
        self.address = f"127.0.0.1:{self._process.port}"

    def crash(self) -> None:
        port = str(self._process.port)
        self._process.process.kill()
        self._process.__exit__()
        self._process = NodeProcess("--port", port, *self._arguments)

    def stop(self) -> None:
        self._process.__exit__()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CrashingNode]:
    started = CrashingNode(tmp_path / "data")
    yield started
    started.stop()


def uuids(query: Query) -> set[str]:
    return {place["uuid"] for place in describe_offset(query.offset).values()}


# Proofs without rows


def batches_of(checkpoint: Path) -> int:
    return len(list((checkpoint / "offsets").glob("[0-9]*")))


@pytest.mark.upriver(vbuckets=8)
def test_an_idle_query_stores_its_proof_in_one_batch(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    address, checkpoint = upriver_node.address, tmp_path / "c"
    table, sizes = Table(address), list[int]()
    table.after = lambda number: sizes.append(table.rows)
    write(address, "first")
    query = start_query(spark, table, checkpoint)

    def settle() -> None:
        for _ in range(3):  # more than one batch without rows would show
            query.processAllAvailable()

    settle()
    assert batches_of(checkpoint) == 2
    write(address, "second")
    settle()
    # A slow machine may divide the changes among several batches; only the last one has no rows.
    assert sizes[0] == sizes[1] == 300
    assert sizes[-2] == sizes[-1] == 600
    assert sizes.count(600) == 2
    query.stop()
    last = (checkpoint / "offsets" / str(batches_of(checkpoint) - 1)).read_text().splitlines()[-1]
    assert all(place["seqno"] == place["whole"] for place in describe_offset(last).values())


@pytest.mark.upriver(vbuckets=8)
def test_available_now_stores_the_proof_too(spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    address, checkpoint = upriver_node.address, tmp_path / "c"
    table = Table(address)
    write(address, "first")
    catch_up(spark, table, checkpoint)
    assert batches_of(checkpoint) == 2
    catch_up(spark, table, checkpoint)
    assert batches_of(checkpoint) == 2
    last = (checkpoint / "offsets" / "1").read_text().splitlines()[-1]
    assert all(place["seqno"] == place["whole"] for place in describe_offset(last).values())


@pytest.mark.upriver(vbuckets=1)
def test_an_end_is_proven_although_the_source_goes_on(upriver_node: EmbeddedNode) -> None:
    """The node retains every version since, so the range was exact."""
    address = upriver_node.address
    with Query(address=address) as query:
        for turn in range(3):
            write(address, f"{turn}", range(100))
            assert query.plan()
            before = describe_offset(query.offset)["0"]
            assert describe_offset(query.end)["0"]["whole"] == before["seqno"]
            write(address, f"{turn}, later", range(50))
            query.read()


@pytest.mark.upriver(vbuckets=1)
def test_a_query_that_waits_for_more_stores_its_proof(upriver_node: EmbeddedNode) -> None:
    address = upriver_node.address
    with Query(address=address, minRowsPerTrigger=100) as query:
        write(address, "first", range(100))
        assert len(query.batch()) == 100
        write(address, "second", range(10))
        assert query.plan()
        assert describe_offset(query.end)["0"]["whole"] == 100
        assert query.read() == []
        assert not query.plan()


# A crash


@pytest.mark.parametrize("policy", POLICIES)
def test_a_crash_that_lost_nothing(node: CrashingNode, policy: str) -> None:
    """One crash, a second one, and more than a failover log has entries: nothing comes again."""
    write(node.address, "first")
    with Query(address=node.address, onRollback=policy) as query:
        assert len(query.batch()) == 300
        assert query.batch() == []
        for _ in range(2):
            known = uuids(query)
            node.crash()
            assert query.batch() == []
            assert uuids(query).isdisjoint(known)
            assert not query.plan()
        node.crash()
        query.restart()
        write(node.address, "second", range(10))
        assert {(row["event"], row["value"][:6]) for row in query.batch()} == {("mutation", b"second")}


@pytest.mark.slow
def test_more_crashes_than_a_failover_log_has_entries(node: CrashingNode) -> None:
    write(node.address, "first")
    with Query(address=node.address) as query:
        assert len(query.batch()) == 300
        for _ in range(ENTRIES_MAX + 2):
            assert query.batch() == []
            node.crash()
        assert query.batch() == []


@pytest.mark.parametrize("policy", slow_except(["fail"], POLICIES))
def test_a_crash_under_a_running_query(spark: SparkSession, node: CrashingNode, tmp_path: Path, policy: str) -> None:
    table, checkpoint = Table(node.address), tmp_path / "c"
    write(node.address, "first")
    query = start_query(spark, table, checkpoint, onRollback=policy)
    query.processAllAvailable()
    for turn in range(2):
        stored = batches_of(checkpoint) + 1
        node.crash()
        _wait_for_batch(query, checkpoint, stored)
        query.processAllAvailable()
        assert (table.rows, table.events) == (300 + 10 * turn, [])
        write(node.address, "later", range(10))
        query.processAllAvailable()
        assert (table.rows, table.events) == (310 + 10 * turn, [])
    query.stop()
    assert table.contents == contents_at(node.address)


def _wait_for_batch(query: StreamingQuery, checkpoint: Path, count: int) -> None:
    """Wait until the query has stored the new branch in a batch without rows."""

    def is_stored() -> bool:
        error = query.exception()
        if error is not None:
            raise error
        return batches_of(checkpoint) >= count

    wait_until(is_stored, "the query stores the new branch")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_crash_before_an_end_was_proven(node: CrashingNode, policy: str) -> None:
    """Nothing that was read is lost, so only the last range is read again, and there is no rollback."""
    write(node.address, "first")
    table = Table(node.address)
    with Query(address=node.address, onRollback=policy) as query:
        table.take(query.batch())
        write(node.address, "second", range(20))
        table.take(query.batch())
        node.crash()
        rows = query.batch()
        assert len(rows) == 20
        table.take(rows)
        assert query.batch() == []
        assert not query.plan()
    assert table.events == []
    assert table.contents == contents_at(node.address)


# A failover


@contextmanager
def replicated(directory: Path) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """A node, and a complete replica of it."""
    shared = ["--port", "0", "--vbuckets", str(VBUCKETS)]
    with (
        NodeProcess(*shared, "--data", str(directory / "one")) as one,
        NodeProcess(*shared, "--data", str(directory / "other"), "--initial-vbuckets", "none") as other,
    ):
        yield one, other


def replicate(source: NodeProcess, destination: NodeProcess, is_done: Callable[[], bool]) -> None:
    """Replicate all vbuckets until ``is_done``."""

    async def run() -> None:
        mover = Mover(_address(source), _address(destination), range(VBUCKETS), Goal.REPLICATE)
        running = asyncio.create_task(mover.carry_out())
        while not await asyncio.to_thread(is_done):
            assert not running.done(), running.result()
            await asyncio.sleep(0.01)
        mover.stop()
        await running
        await mover.close()

    asyncio.run(run())


def _address(node: NodeProcess) -> str:
    return f"127.0.0.1:{node.port}"


def _high_seqnos(node: NodeProcess) -> bytes:
    with Client(node.port) as client:
        return client.ask(GetAllVbucketSeqnos()).body


def promote(node: NodeProcess) -> None:
    with Client(node.port) as client:
        for number in range(VBUCKETS):
            reply = client.ask(SetVbucket(vbucket=number, state=VbucketState.ACTIVE))
            assert reply.status == 0, reply


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failover_to_a_complete_replica(tmp_path: Path, policy: str) -> None:
    with replicated(tmp_path) as (one, other):
        write(_address(one), "first")
        options: dict[str, Any] = {"address": f"{_address(one)},{_address(other)}", "onRollback": policy}
        with Query(**options) as query:
            assert len(query.batch()) == 300
            assert query.batch() == []
            known = uuids(query)
            replicate(one, other, lambda: _high_seqnos(one) == _high_seqnos(other))
            one.process.kill()
            one.process.wait()
            promote(other)
            assert query.batch() == []
            assert uuids(query).isdisjoint(known)
            assert not query.plan()
            write(_address(other), "second", range(10))
            assert {(row["event"], row["value"][:6]) for row in query.batch()} == {("mutation", b"second")}
