"""Ranges read by a task's reader, from real nodes."""

import asyncio
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.deployed_server import UUID, DeployedServer
from tests.support.node_clusters import push_map, two_nodes
from tests.support.node_process import wait_until
from upriver.client import Mover, SyncKvClient
from upriver.client.consumer.feed_factory import FeedFactory
from upriver.client.consumer.settings import ConsumerSettings, DialectName
from upriver.client.transport.address import Address
from upriver.client.transport.backoff import Backoff
from upriver.errors import DataLoss, QueryRolledBack, WireError
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.protocol.move.mover import Goal
from upriver.spark import range_policy, range_reader
from upriver.spark.batch_planner import Policy, Range, RangeRollback, Rules
from upriver.spark.cluster_view import ClusterView
from upriver.spark.offsets import VbucketOffset
from upriver.spark.options import ReadOptions
from upriver.spark.range_reader import READERS_MAX, RangeReader, Reading, reader_for
from upriver.spark.rows import FIELDS, RowMaker


def reader_of(
    address: str,
    policy: Policy = "emit",
    columns: tuple[str, ...] = tuple(FIELDS),
    dialect: DialectName = "dcp",
    *,
    fail_on_data_loss: bool = True,
) -> RangeReader:
    rows, rules = RowMaker(columns), Rules(policy, fail_on_data_loss)
    settings = ReadOptions(dialect=dialect).consumer_settings(rows.to_decode)
    return RangeReader(Reading(Address.parse(address), settings, rules, rows, 1000))


def read(reader: RangeReader, ranges: list[Range]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.Table.from_batches(reader.read(ranges), reader._reading.rows.schema).to_pylist()
    return rows


@pytest.fixture
def written(upriver_node: EmbeddedNode) -> tuple[EmbeddedNode, int]:
    """A vbucket with k0 to k9 in it, of which k0 was then changed and k1 deleted."""
    vbucket = upriver_node.bucket.vbucket(3)

    def write() -> None:
        for n in range(10):
            vbucket.set(b"k%d" % n, b"v%d" % n)
        vbucket.set(b"k0", b"again")
        vbucket.delete(b"k1")

    upriver_node.call(write)
    return upriver_node, vbucket.failover_log.newest.vbucket_uuid


def test_a_range_is_the_state_at_its_end(written: tuple[EmbeddedNode, int]) -> None:
    node, uuid = written
    reader = reader_of(node.address)
    rows = read(reader, [Range(VbucketOffset(3, uuid), 10)])
    assert [row["seqno"] for row in rows] == list(range(1, 11))
    assert (rows[0]["key"], rows[0]["value"], rows[0]["vbucket_uuid"]) == (b"k0", b"v0", uuid)
    rows = read(reader, [Range(VbucketOffset(3, uuid, 10, 10), 12)])
    assert [(row["event"], row["key"], row["value"]) for row in rows] == [
        ("mutation", b"k0", b"again"),
        ("deletion", b"k1", None),
    ]
    reader.close()


def test_nothing_to_read(written: tuple[EmbeddedNode, int]) -> None:
    reader = reader_of(written[0].address)
    assert read(reader, []) == []
    reader.close()


def test_going_back_is_told_first(written: tuple[EmbeddedNode, int]) -> None:
    node, uuid = written
    reader = reader_of(node.address)
    rows = read(reader, [Range(VbucketOffset(3, uuid, 8, 8, 2), 10, RangeRollback(8, 1, uuid))])
    assert [(row["event"], row["seqno"], row["branch"]) for row in rows] == [
        ("rollback", 8, 2),
        ("mutation", 9, 2),
        ("mutation", 10, 2),
    ]
    reader.close()


def test_a_range_of_a_lost_branch_tells_that_it_is_lost(written: tuple[EmbeddedNode, int]) -> None:
    node, uuid = written
    vbucket = node.bucket.vbucket(3)

    def lose() -> None:
        vbucket.set_state(VbucketState.REPLICA)
        vbucket.roll_back(6)
        vbucket.set_state(VbucketState.ACTIVE)

    node.call(lose)
    reader = reader_of(node.address)
    rows = read(reader, [Range(VbucketOffset(3, uuid, 8, 8, 0, 2), 12)])
    assert [(row["event"], row["seqno"]) for row in rows] == [("rollback", 6)]
    rows = read(reader, [Range(VbucketOffset(3, uuid, 8, 8, 0, 7), 12)])
    assert [(row["event"], row["seqno"]) for row in rows] == [("reset", 0)]
    reader.close()
    with pytest.raises(QueryRolledBack, match="Set onRollback"):
        read(reader_of(node.address, "fail"), [Range(VbucketOffset(3, uuid, 8, 8, 0, 2), 12)])


@pytest.mark.parametrize("dialect", ["dcp", "upr", "upr_draft2"])
@pytest.mark.parametrize("policy", ["fail", "rewind", "emit"])
def test_a_range_of_a_replaced_history(written: tuple[EmbeddedNode, int], policy: Policy, dialect: DialectName) -> None:
    """A query that comes back with a logged range does what it would have done when it planned: fail, or start over."""
    node, uuid = written
    vbucket = node.bucket.vbucket(3)
    node.call(vbucket.flush)
    node.call(vbucket.set, b"k", b"v")
    asked = Range(VbucketOffset(3, uuid, 8, 8, 0, 2), 12)
    with pytest.raises(DataLoss, match=r"history was replaced.*failOnDataLoss"):
        read(reader_of(node.address, policy, dialect=dialect), [asked])
    reader = reader_of(node.address, policy, dialect=dialect, fail_on_data_loss=False)
    assert [(row["event"], row["seqno"]) for row in read(reader, [asked])] == [("reset", 0)]
    reader.close()


def test_a_range_of_a_vbucket_that_is_gone(
    written: tuple[EmbeddedNode, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A query that may lose data continues with what there is; otherwise it would come back to this range for ever."""
    monkeypatch.setattr(range_policy, "RETRY_S", 0.2)
    node, uuid = written
    other = node.bucket.vbucket(4)
    node.call(other.set, b"k", b"v")
    node.call(node.bucket.vbucket(3).set_state, VbucketState.DEAD)
    asked = [
        Range(VbucketOffset(3, uuid, 8, 8, 0, 2), 12),
        Range(VbucketOffset(4, other.failover_log.newest.vbucket_uuid), 1),
    ]
    with pytest.raises(DataLoss, match=r"changes 8 to 12.*failOnDataLoss"):
        read(reader_of(node.address), asked)
    reader = reader_of(node.address, fail_on_data_loss=False)
    assert [(row["vbucket"], row["seqno"]) for row in read(reader, asked)] == [(4, 1)]
    reader.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "upriver.spark"]
    assert "vbucket 3" in warning
    assert "changes 8 to 12" in warning


def test_batches_are_bounded_in_bytes_and_rows(upriver_node: EmbeddedNode) -> None:
    """However long a range is: what waits is a receive buffer's worth, and one value may exceed it."""
    vbucket = upriver_node.bucket.vbucket(3)

    def write(name: bytes, count: int, value: bytes) -> None:
        for n in range(count):
            vbucket.set(name % n, value)

    for documents in ((b"k%d", 1200, b"x" * 50_000), (b"large%d", 1, b"y" * 20 * 2**20), (b"s%d", 5000, b"z")):
        upriver_node.call(write, *documents)
        upriver_node.bucket.sync()  # the queue to disk has no room for all of it
    uuid = vbucket.failover_log.newest.vbucket_uuid
    reader = reader_of(upriver_node.address)
    sizes = [
        (batch.num_rows, batch.nbytes, b"large0" in batch.column("key").to_pylist())
        for batch in reader.read([Range(VbucketOffset(3, uuid), 6201)])
    ]
    reader.close()
    assert sum(rows for rows, _, _ in sizes) == 6201
    assert max(rows for rows, _, _ in sizes) <= 1000
    assert max(size for _, size, is_large in sizes if not is_large) <= 16 * 2**20
    assert max(size for _, size, _ in sizes) <= 36 * 2**20


def test_ranges_with_and_without_exact_ends_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Factory(FeedFactory):
        async def open(self, endpoint: Any, settings: ConsumerSettings, owner: Any) -> Any:
            opened.append(settings.name)
            return await super().open(endpoint, settings, owner)

    monkeypatch.setattr(range_reader, "FeedFactory", Factory)
    with start(vbuckets=2, history_s=0, history_bytes=0) as node:
        forgetful, large = (node.bucket.vbucket(number) for number in range(2))

        def write(round_: int) -> None:
            for n in range(10):
                forgetful.set(b"k%d" % n, b"v%d" % round_)

        for round_ in range(3):
            node.call(write, round_)
        for n in range(900):
            node.call(large.set, b"k%d" % n, b"x" * 50_000)  # more than the window: it is at work for a while
            node.bucket.sync()
        wait_until(lambda: node.call(forgetful.consistent_at_or_below, 15) != 15, "the past to be forgotten")
        uuids = [vbucket.failover_log.newest.vbucket_uuid for vbucket in (forgetful, large)]
        reader = reader_of(node.address, columns=("vbucket", "seqno"))
        rows = read(reader, [Range(VbucketOffset(0, uuids[0]), 15), Range(VbucketOffset(1, uuids[1]), 900)])
        reader.close()
    assert [row["seqno"] for row in rows if row["vbucket"] == 1] == list(range(1, 901))
    assert len(opened) == 2  # neither takes the other one's place


def test_a_server_of_others() -> None:
    """It sends whole snapshots, however early a range ends, and compresses values."""

    async def read_from_it() -> list[dict[str, Any]]:
        async with DeployedServer() as server:
            for n in range(10):
                server.write(1, b"k%d" % n, b"long and long and long" * (n + 1))
            server.write(1, b"k0", None)
            reader = reader_of(server.address, columns=("seqno", "event", "value"))
            todo = [Range(VbucketOffset(1, UUID), 5), Range(VbucketOffset(0, UUID), 0)]
            rows = await asyncio.to_thread(read, reader, todo)
            rest = await asyncio.to_thread(read, reader, [Range(VbucketOffset(1, UUID, 5, 5), 11)])
            await asyncio.to_thread(reader.close)
            return [*rows, *rest]

    rows = asyncio.run(read_from_it())
    assert [row["seqno"] for row in rows] == list(range(2, 12))
    assert [row["value"] for row in rows] == [b"long and long and long" * n for n in range(2, 11)] + [None]


def test_a_filter_may_look_for_long_at_what_does_not_pass(
    written: tuple[EmbeddedNode, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "STALL_S", 0.0)
    node, uuid = written
    settings = ReadOptions(key_filter="nothing like this").consumer_settings(("seqno",))
    rows = RowMaker(("seqno",))
    reader = RangeReader(Reading(Address.parse(node.address), settings, Rules("emit"), rows, 1000))
    assert read(reader, [Range(VbucketOffset(3, uuid), 12)]) == []
    assert not reader._supervisor._failing_since
    reader.close()


def test_a_node_that_falls_silent_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "STALL_S", 0.3)

    async def main() -> list[dict[str, Any]]:
        async with DeployedServer() as server:  # which sends what there is when it is asked, and then nothing
            for n in range(5):
                server.write(1, b"k%d" % n, b"v")
            reader = reader_of(server.address)
            reading = asyncio.create_task(asyncio.to_thread(read, reader, [Range(VbucketOffset(1, UUID), 8)]))
            while not server.streams:
                await asyncio.sleep(0.005)
            for n in range(5, 8):
                server.write(1, b"k%d" % n, b"v")
            rows = await reading
            await asyncio.to_thread(reader.close)
            return rows

    assert [row["key"] for row in asyncio.run(main())] == [b"k%d" % n for n in range(8)]


def test_a_node_that_is_down_is_asked_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    pause_s = Backoff.pause_s

    def counted(backoff: Backoff) -> float:
        pauses.append(pause_s(backoff))
        return pauses[-1] / 20  # so that the test is quicker than a task

    monkeypatch.setattr(Backoff, "pause_s", counted)
    with start(vbuckets=4, data=tmp_path) as node, SyncKvClient(node.address) as kv:
        port, number = node.port, kv.set("k", b"v").vbucket
        reader, view = reader_of(node.address), ClusterView(Address.parse(node.address), None)
        assert len(read(reader, [Range(VbucketOffset(number), 1)])) == 1
        assert len(view.states()) == 4
    with ThreadPoolExecutor() as pool:
        for wait in (lambda: read(reader, [Range(VbucketOffset(number), 1)]), view.states):
            pauses.clear()
            waiting = pool.submit(wait)
            wait_until(lambda: len(pauses) > 10)
            with start(vbuckets=4, data=tmp_path, port=port):
                assert len(waiting.result(60)) in (1, 4)
            assert max(pauses) <= range_policy.PAUSE_S
    reader.close()
    view.close()


def test_a_value_that_cannot_be_inflated_fails_the_task() -> None:
    async def read_from_it() -> None:
        async with DeployedServer(damaged={b"k4"}) as server:
            for n in range(10):
                server.write(1, b"k%d" % n, b"value")
            reader = reader_of(server.address)
            with pytest.raises(WireError, match="without a length"):
                await asyncio.to_thread(read, reader, [Range(VbucketOffset(1, UUID), 10)])
            await asyncio.to_thread(reader.close)

    asyncio.run(read_from_it())


def test_a_worker_need_not_wait_for_pandas(written: tuple[EmbeddedNode, int]) -> None:
    node, uuid = written
    script = f"""
import sys
import pyspark_upriver
from tests.spark.test_range_reader import reader_of
from upriver.spark.batch_planner import Range
from upriver.spark.offsets import VbucketOffset
reader = reader_of({node.address!r})
asked = [Range(VbucketOffset(3, {uuid}), 10), Range(VbucketOffset(4), 0)]
assert sum(batch.num_rows for batch in reader.read(asked)) == 10
reader.close()
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent.parent.parent, check=True)


def test_a_worker_keeps_few_readers(upriver_node: EmbeddedNode) -> None:
    made = [reader_for(("query", n), lambda: reader_of(upriver_node.address)) for n in range(READERS_MAX + 2)]
    assert [reader.is_open for reader in made] == [False] * 2 + [True] * READERS_MAX
    assert reader_for(("query", READERS_MAX + 1), lambda: reader_of("nowhere:1")) is made[-1]
    made[-1].close()
    again = reader_for(("query", READERS_MAX + 1), lambda: reader_of(upriver_node.address))
    assert again.is_open
    for reader in (*made, again):
        reader.close()


def test_only_what_was_asked_for_is_decoded(written: tuple[EmbeddedNode, int]) -> None:
    node, uuid = written
    reader = reader_of(node.address, columns=("key",))
    assert read(reader, [Range(VbucketOffset(3, uuid), 2)]) == [{"key": b"k0"}, {"key": b"k1"}]
    reader.close()


def test_vbuckets_that_have_moved_are_followed() -> None:
    with two_nodes() as (one, other):
        with SyncKvClient(one.address) as kv:
            kv.set_many({f"k{n}": b"v" for n in range(1000)})
        places = {
            vbucket.number: (vbucket.failover_log.newest.vbucket_uuid, vbucket.high_seqno)
            for node in (one, other)
            for vbucket in node.bucket
            if vbucket.state is VbucketState.ACTIVE
        }
        reader = reader_of(one.address)
        todo = [Range(VbucketOffset(number, uuid), high) for number, (uuid, high) in places.items()]
        assert len({row["key"] for row in read(reader, todo)}) == 1000
        # The map says otherwise than the nodes, until it is put right while the reader asks again and again.
        push_map([one, other], [1] * 4 + [0] * 4, rev=2)
        batches = reader.read(todo)
        push_map([one, other], [0] * 4 + [1] * 4, rev=3)
        assert sum(batch.num_rows for batch in batches) == 1000
        reader.close()


async def leave_a_replica(source: EmbeddedNode, destination: EmbeddedNode, number: int) -> None:
    """Replicate a vbucket for a while, and no longer."""
    mover = Mover(source.address, destination.address, [number], Goal.REPLICATE)
    running = asyncio.create_task(mover.carry_out())
    high = source.bucket.vbucket(number).high_seqno

    def has_come() -> bool:
        return any(each.number == number and each.high_seqno == high for each in destination.bucket)

    async with asyncio.timeout(60):
        while not destination.call(has_come):
            await asyncio.sleep(0.01)
    mover.stop()
    await running
    await mover.close()


@pytest.mark.parametrize("dialect", ["dcp", "upr", "upr_draft3"])
@pytest.mark.parametrize("state", [VbucketState.REPLICA, VbucketState.DEAD])
def test_a_copy_that_was_left_behind_is_not_read(dialect: DialectName, state: VbucketState) -> None:
    """It knows the branch and does not move on: its reader would wait for ever."""
    with two_nodes() as (one, other):
        vbucket = one.bucket.vbucket(0)

        def write(keys: range) -> None:
            for n in keys:
                vbucket.set(b"k%d" % n, b"v")

        one.call(write, range(10))
        asyncio.run(leave_a_replica(one, other, 0))
        other.call(other.bucket.vbucket(0).set_state, state)
        push_map([one, other], [1] * 8, rev=2)
        reader = reader_of(one.address, dialect=dialect)
        uuid = other.bucket.vbucket(4).failover_log.newest.vbucket_uuid
        other.call(other.bucket.vbucket(4).set, b"k", b"v")
        assert len(read(reader, [Range(VbucketOffset(4, uuid), 1)])) == 1  # the reader has the map now
        push_map([one, other], [0] * 4 + [1] * 4, rev=3)
        one.call(write, range(10, 20))
        uuid = vbucket.failover_log.newest.vbucket_uuid
        assert {row["key"] for row in read(reader, [Range(VbucketOffset(0, uuid), 20)])} == {
            b"k%d" % n for n in range(20)
        }
        reader.close()


@pytest.mark.parametrize("dialect", ["dcp", "upr", "upr_draft2", "upr_draft3"])
def test_a_branch_that_did_not_begin_at_0_is_gone_on_with(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    """`upr` and the drafts must name the seqno at which a branch began, and an offset has only its uuid."""
    vbucket = upriver_node.bucket.vbucket(3)

    def write() -> None:
        for n in range(10):
            vbucket.set(b"k%d" % n, b"v")
        vbucket.set_state(VbucketState.REPLICA)
        vbucket.set_state(VbucketState.ACTIVE)
        for n in range(10):
            vbucket.set(b"l%d" % n, b"v")

    upriver_node.call(write)
    uuid = vbucket.failover_log.newest.vbucket_uuid
    reader = reader_of(upriver_node.address, dialect=dialect)
    rows = read(reader, [Range(VbucketOffset(3, uuid, 15, 15, 0, 10), 20)])
    assert [(row["event"], row["seqno"]) for row in rows] == [("mutation", seqno) for seqno in range(16, 21)]
    reader.close()


def test_a_cut_between_tasks_leads_to_no_node_that_has_nothing() -> None:
    """A node that waits for vbuckets makes up a map too, and may be asked for it."""
    with start(vbuckets=2) as owner, start(vbuckets=2, initial_vbuckets="none") as waiting:
        vbucket = owner.bucket.vbucket(0)
        uuid = vbucket.failover_log.newest.vbucket_uuid
        reader = reader_of(f"{owner.address},{waiting.address}", columns=("seqno",))
        for seqno in range(1, 4):
            owner.call(vbucket.set, b"k%d" % seqno, b"v")
            rows = read(reader, [Range(VbucketOffset(0, uuid, seqno - 1, seqno - 1), seqno)])
            assert [row["seqno"] for row in rows] == [seqno]
            for connection in reader._supervisor.connections:  # noticed only in the next task
                connection._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        reader.close()
