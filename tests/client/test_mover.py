"""Vbuckets moved between real nodes, and a mover that is interrupted at every step."""

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.support.consumer_mirror import contents_of
from tests.support.faulty_proxy import Proxy
from tests.support.node_clusters import push_map
from upriver.client import Address, KvClient, SyncMover
from upriver.client.mover import Mover, Step
from upriver.errors import AuthenticationFailed, NotMyVbucket, TemporaryFailure, UpriverError
from upriver.model import FailoverLog, VbucketState
from upriver.model.vbucket import vbucket_of
from upriver.node import EmbeddedNode, start
from upriver.node.session import Session
from upriver.node.streams.engine_sink import EngineCopy, EngineSink
from upriver.protocol.move.mover import Goal, Link, Phase
from upriver.wire.dialects.memcached import GetAllVbucketSeqnos

DEADLINE_S = 60.0
VBUCKETS = 4
#: The steps of a takeover at which something may happen to the mover.
PHASES = [Phase.ASKING, Phase.PREPARING, Phase.STREAMING, Phase.ANNOUNCING, Phase.ENDING]


def states(nodes: tuple[EmbeddedNode, EmbeddedNode], vbucket: int) -> list[VbucketState | None]:
    found = [node.bucket.existing(vbucket) for node in nodes]
    return [None if each is None else each.state for each in found]


def owners(node: EmbeddedNode) -> list[int]:
    """The ports of the owners, by the map that the node has."""
    servers = json.loads(node.node.state.cluster.encoded())["vBucketServerMap"]
    return [int(servers["serverList"][row[0]].rpartition(":")[2]) for row in servers["vBucketMap"]]


@contextlib.contextmanager
def two(tmp_path: Path | None = None):  # type: ignore[no-untyped-def]
    """The first has everything, the second nothing."""

    def options(name: str) -> dict[str, object]:
        return {} if tmp_path is None else {"data": str(tmp_path / name), "ack": "disk"}

    with (
        start(vbuckets=VBUCKETS, **options("first")) as first,
        start(vbuckets=VBUCKETS, initial_vbuckets="none", **options("second")) as second,
    ):
        yield first, second


class Writer:
    """Writes through the cluster map without end, and remembers what was answered."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.acknowledged: dict[bytes, bytes] = {}
        self._halt = asyncio.Event()
        self._number = 0

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator["Writer"]:
        task = asyncio.create_task(self._write())
        try:
            yield self
        finally:
            self._halt.set()
            await task

    async def more(self, count: int = 20) -> None:
        """Wait until this many more writes were answered."""
        goal = self._number + count
        async with asyncio.timeout(DEADLINE_S):
            while self._number < goal:
                await asyncio.sleep(0.005)

    async def _write(self) -> None:
        async with KvClient(self.address) as kv:
            while not self._halt.is_set():
                key, value = b"k%d" % (self._number % 50), b"%d" % self._number
                await kv.set(key, value)
                self.acknowledged[key] = value
                self._number += 1


async def check(writer: Writer, nodes: tuple[EmbeddedNode, EmbeddedNode]) -> None:
    """Nothing that was answered is lost, and a client finds it."""
    async with KvClient(nodes[0].address) as kv:
        found = await kv.get_many(writer.acknowledged)
    assert {key: item.value for key, item in found.items()} == writer.acknowledged


class Watch:
    """Whether two nodes were ever active at the same time, at any step."""

    def __init__(self, nodes: tuple[EmbeddedNode, EmbeddedNode], then: Callable[[Step], object] | None = None) -> None:
        self.nodes = nodes
        self.then = then
        self.steps: list[Step] = []

    def __call__(self, step: Step) -> None:
        self.steps.append(step)
        assert states(self.nodes, step.vbucket).count(VbucketState.ACTIVE) <= 1
        if self.then is not None:
            self.then(step)


def test_everything_moves_under_load_and_clients_follow(tmp_path: Path) -> None:
    async def move(nodes: tuple[EmbeddedNode, EmbeddedNode]) -> list[Step]:
        watch = Watch(nodes)
        async with Writer(nodes[0].address).working() as writer:
            await writer.more()
            mover = Mover(nodes[0].address, nodes[1].address, range(VBUCKETS), parallel=2, on_step=watch)
            async with asyncio.timeout(DEADLINE_S):
                found = await mover.carry_out()
            await writer.more()
        await check(writer, nodes)
        running = most = 0
        for step in watch.steps:
            running += (step.phase is Phase.PREPARING) - (step.phase is Phase.MOVED)
            most = max(most, running)
        assert 1 <= most <= 2
        return found

    with two(tmp_path) as nodes:
        found = asyncio.run(move(nodes))
        assert [step.phase for step in found] == [Phase.MOVED] * VBUCKETS, found
        for number in range(VBUCKETS):
            assert states(nodes, number) == [VbucketState.DEAD, VbucketState.ACTIVE]
        assert [owners(node) for node in nodes] == [[nodes[1].port] * VBUCKETS] * 2


@pytest.mark.parametrize("how", ["killed", "source cut", "destination cut"])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_interrupted_at_every_step(phase: Phase, how: str) -> None:
    """Killed, another mover goes on; cut, the same one does. Nothing is lost, at most one is active, clients follow."""
    number = vbucket_of(b"k0", VBUCKETS)

    async def move(nodes: tuple[EmbeddedNode, EmbeddedNode]) -> None:
        async with (
            Proxy(nodes[0].port, 1) as near,
            Proxy(nodes[1].port, 2) as far,
            Writer(nodes[0].address).working() as writer,
        ):
            await writer.more()
            # The map names the nodes themselves: only the mover goes through the proxies.
            push_map(nodes, [0] * VBUCKETS, rev=1)
            happened = asyncio.Event()

            def strike(step: Step) -> None:
                if step.phase is not phase or happened.is_set():
                    return
                happened.set()
                if how == "killed":
                    running.cancel()
                else:
                    asyncio.get_running_loop().call_soon((near if how == "source cut" else far).cut)

            addresses = f"127.0.0.1:{near.port}", f"127.0.0.1:{far.port}"
            mover = Mover(*addresses, [number], on_step=Watch(nodes, strike))
            running = asyncio.create_task(mover.carry_out())
            async with asyncio.timeout(DEADLINE_S):
                try:
                    (step,) = await running
                except asyncio.CancelledError:
                    assert how == "killed"
                    (step,) = await Mover(*addresses, [number], on_step=Watch(nodes)).carry_out()
            assert happened.is_set()
            assert step.phase is Phase.MOVED, step
            push_map(nodes, [1 if n == number else 0 for n in range(VBUCKETS)], rev=2**40)  # away from the proxies
            await writer.more()
        await check(writer, nodes)
        assert states(nodes, number) == [VbucketState.DEAD, VbucketState.ACTIVE]

    with two() as nodes:
        asyncio.run(move(nodes))


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_undone_after_it_was_killed(phase: Phase) -> None:
    async def move(nodes: tuple[EmbeddedNode, EmbeddedNode]) -> None:
        async with KvClient(nodes[0].address) as kv:
            assert await kv.set_many({f"k{n}": b"v" for n in range(100)}) == {}
        before = [nodes[0].bucket.vbucket(n).high_seqno for n in range(VBUCKETS)]

        def strike(step: Step) -> None:
            if step.phase is phase:
                running.cancel()

        running = asyncio.create_task(
            Mover(nodes[0].address, nodes[1].address, [1], on_step=Watch(nodes, strike)).carry_out()
        )
        with contextlib.suppress(asyncio.CancelledError):
            await running
        async with asyncio.timeout(DEADLINE_S):
            (step,) = await Mover(nodes[0].address, nodes[1].address, [1], Goal.UNDO, on_step=Watch(nodes)).carry_out()
        active = [state is VbucketState.ACTIVE for state in states(nodes, 1)]
        assert active == ([True, False] if step.phase is Phase.UNDONE else [False, True]), step
        holder = nodes[0] if active[0] else nodes[1]
        assert holder.bucket.vbucket(1).high_seqno == before[1]

    with two() as nodes:
        asyncio.run(move(nodes))


def test_writes_without_a_pause_end_where_the_source_becomes_dead() -> None:
    """Whatever was answered before is there: the writer is as fast as the node lets it be."""
    with two() as (source, destination):
        written: list[bytes] = []
        halt = threading.Event()

        def write() -> None:
            number = 0
            while not halt.is_set():
                key = b"key%d" % (number % 5000)
                try:
                    source.call(source.bucket.vbucket(1).set, key, b"%d" % number)
                except NotMyVbucket:
                    return
                written.append(key)
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            with SyncMover(source.address, destination.address, [1]) as mover:
                (step,) = mover.carry_out()
        finally:
            halt.set()
            writer.join()
        assert step.phase is Phase.MOVED
        assert states((source, destination), 1) == [VbucketState.DEAD, VbucketState.ACTIVE]
        assert written
        assert contents_of(destination) == contents_of(source)
        assert set(written) == set(contents_of(destination))


def test_a_dead_source_stays_dead_while_the_destination_cannot_be_asked() -> None:
    with two() as (first, second):
        first.call(first.bucket.vbucket(1).set_state, VbucketState.DEAD)
        address = second.address
        second.close()
        mover = Mover(first.address, address, [1], Goal.UNDO, patience_s=0.5)
        (step,) = asyncio.run(mover.carry_out())
        assert not step.phase.over
        assert "cannot reach the destination" in step.reason
        assert first.bucket.vbucket(1).state is VbucketState.DEAD


@pytest.mark.parametrize("goal", [Goal.UNDO, Goal.TAKE_OVER])
@pytest.mark.parametrize("left", ["dead", "replica", "pending", "deleted"])
def test_what_was_moved_on_is_neither_undone_nor_moved_again(left: str, goal: Goal) -> None:
    """To a third node: undoing or continuing the first move would make the vbucket active twice.

    The second node may have deleted what is left, or have begun to take it back.
    """
    with two() as (first, second), start(vbuckets=VBUCKETS, initial_vbuckets="none") as third:
        push_map([first, second, third], [0] * VBUCKETS, rev=1)
        for source, destination in ((first, second), (second, third)):
            (step,) = asyncio.run(Mover(source.address, destination.address, [1]).carry_out())
            assert step.phase is Phase.MOVED
        if left == "deleted":
            second.call(second.bucket.delete_vbucket, 1)
        else:
            second.call(second.bucket.vbucket(1).set_state, VbucketState[left.upper()])
        (step,) = asyncio.run(Mover(first.address, second.address, [1], goal).carry_out())
        assert step.phase is Phase.FAILED
        assert "since" in step.reason or "handed it on" in step.reason or "may be active" in step.reason
        assert first.bucket.vbucket(1).state is VbucketState.DEAD
        assert third.bucket.vbucket(1).state is VbucketState.ACTIVE


def test_other_nodes_are_told_before_the_stream_ends() -> None:
    with two() as nodes, start(vbuckets=VBUCKETS, initial_vbuckets="none") as third:
        push_map([*nodes, third], [0] * VBUCKETS, rev=1)
        told: dict[Phase, list[int]] = {}
        mover = Mover(
            nodes[0].address, nodes[1].address, [2], on_step=lambda step: told.update({step.phase: owners(third)})
        )
        (step,) = asyncio.run(mover.carry_out())
        assert step.phase is Phase.MOVED
        old, new = nodes[0].port, nodes[1].port
        assert told[Phase.ANNOUNCING] == [old, old, old, old]
        assert told[Phase.ENDING] == [old, old, new, old]
        assert owners(nodes[0]) == owners(nodes[1]) == owners(third) == [old, old, new, old]


def test_replication_until_it_is_stopped() -> None:
    async def replicate(nodes: tuple[EmbeddedNode, EmbeddedNode]) -> None:
        mover = Mover(nodes[0].address, nodes[1].address, range(VBUCKETS), Goal.REPLICATE)
        running = asyncio.create_task(mover.carry_out())
        async with asyncio.timeout(DEADLINE_S), KvClient(nodes[0].address) as kv:
            await kv.set_many({f"k{n}": b"v" * 1000 for n in range(5000)})
            while sum(copy.high_seqno for copy in nodes[1].bucket) < 5000:
                await asyncio.sleep(0.01)
            mover.stop()
            found = await running
        assert {step.phase for step in found} == {Phase.STREAMING}
        assert mover.bytes_passed_on > 5_000_000
        assert all(copy.state is VbucketState.REPLICA for copy in nodes[1].bucket)

    with two() as nodes:
        asyncio.run(replicate(nodes))


def test_replication_goes_on_when_the_destination_is_elsewhere() -> None:
    async def replicate(source: EmbeddedNode, destination: EmbeddedNode) -> None:
        mover = Mover(source.address, destination.address, [0], Goal.REPLICATE)
        running = asyncio.create_task(mover.carry_out())
        async with asyncio.timeout(DEADLINE_S):
            await there(destination, 100)
            await asyncio.to_thread(destination.close)
            with start(vbuckets=VBUCKETS, initial_vbuckets="none") as other:
                mover.addresses[Link.DESTINATION] = Address.parse(other.address)
                source.call(source.bucket.vbucket(0).set, b"later", b"v")
                await there(other, 101)
                mover.stop()
                await running
                assert contents_of(other) == contents_of(source)

    async def there(node: EmbeddedNode, seqno: int) -> None:
        while (copy := node.bucket.existing(0)) is None or copy.high_seqno < seqno:
            await asyncio.sleep(0.01)

    with two() as (source, destination):
        for number in range(100):
            source.call(source.bucket.vbucket(0).set, b"k%d" % number, b"v")
        asyncio.run(replicate(source, destination))


def test_replication_goes_on_behind_a_flush() -> None:
    async def replicate(source: EmbeddedNode, destination: EmbeddedNode) -> None:
        mover = Mover(source.address, destination.address, range(VBUCKETS), Goal.REPLICATE)
        running = asyncio.create_task(mover.carry_out())
        async with asyncio.timeout(DEADLINE_S):
            for number in range(3):
                source.call(source.bucket.flush)
                for vbucket in range(VBUCKETS):
                    source.call(source.bucket.vbucket(vbucket).set, b"k%d" % number, b"v")
                while places(destination) != places(source):
                    await asyncio.sleep(0.01)
                assert contents_of(destination) == contents_of(source)
            mover.stop()
            assert {step.phase for step in await running} == {Phase.STREAMING}

    def places(node: EmbeddedNode) -> list[tuple[FailoverLog, int]]:
        return [(copy.failover_log, copy.high_seqno) for copy in node.bucket]

    with two() as nodes:
        asyncio.run(replicate(*nodes))


def test_one_source_is_replicated_to_two_at_once() -> None:
    """Connections of one name end each other; these have names of their own."""

    async def replicate(source: EmbeddedNode, others: list[EmbeddedNode]) -> None:
        movers = [Mover(source.address, other.address, range(VBUCKETS), Goal.REPLICATE) for other in others]
        running = [asyncio.create_task(mover.carry_out()) for mover in movers]
        async with asyncio.timeout(DEADLINE_S), KvClient(source.address) as kv:
            for number in range(3):
                await kv.set_many({f"k{n}": b"%d" % number for n in range(500)})
                high = sum(each.high_seqno for each in source.bucket)
                while any(sum(copy.high_seqno for copy in other.bucket) < high for other in others):
                    await asyncio.sleep(0.01)
            for mover in movers:
                mover.stop()
            await asyncio.gather(*running)

    with two() as (source, second), start(vbuckets=VBUCKETS, initial_vbuckets="none") as third:
        asyncio.run(replicate(source, [second, third]))


def test_what_cannot_be_moved(guarded_node: EmbeddedNode) -> None:
    with two() as nodes:
        first, second = nodes
        second.call(second.bucket.create_vbucket, 1, VbucketState.ACTIVE)
        found = asyncio.run(Mover(first.address, second.address, [1, 2]).carry_out())
        assert [step.phase for step in found] == [Phase.FAILED, Phase.MOVED]
        assert "both nodes are active" in found[0].reason
        with pytest.raises(UpriverError, match="cannot connect"):
            asyncio.run(Mover(first.address, "127.0.0.1:1", [3]).carry_out())
        wrong = Address.parse(guarded_node.address).with_login("me", "wrong")
        with pytest.raises(AuthenticationFailed):
            asyncio.run(Mover(first.address, wrong, [3]).carry_out())
        assert first.bucket.vbucket(3).state is VbucketState.ACTIVE


@pytest.mark.parametrize("refusals", [3, 1_000_000])
def test_a_stream_that_is_refused_for_now(refusals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for again, and given up when nothing else has happened for too long."""
    with two() as nodes:
        sink: EngineSink = nodes[1].node.state.streams.sink
        opened, asked = sink.open, itertools.count(1)

        def open_later(number: int) -> EngineCopy:
            if next(asked) <= refusals:
                raise TemporaryFailure("not yet", vbucket=number)
            return opened(number)

        monkeypatch.setattr(sink, "open", open_later)
        patience_s = DEADLINE_S if refusals == 3 else 0.5
        moving = Mover(nodes[0].address, nodes[1].address, [1], patience_s=patience_s).carry_out()
        (step,) = asyncio.run(asyncio.wait_for(moving, DEADLINE_S))
        if refusals == 3:
            assert step.phase is Phase.MOVED
        else:
            assert not step.phase.over
            assert step.reason.startswith("no progress for 0.5 s: the stream was refused: ")
            assert step.reason.endswith("not yet")
            assert states(nodes, 1) == [VbucketState.ACTIVE, VbucketState.REPLICA]


def test_a_node_that_hangs_up_at_a_question_is_given_up_and_not_asked_without_a_pause() -> None:
    with two() as nodes:
        state, asked = nodes[1].node.state, []

        def hang_up(session: Session, request: GetAllVbucketSeqnos) -> None:
            asked.append(request)
            session.closing = True

        state.commands = {**state.commands, GetAllVbucketSeqnos: (hang_up, None)}
        nodes[1].call(nodes[1].bucket.create_vbucket, 1, VbucketState.DEAD)
        moving = Mover(nodes[0].address, nodes[1].address, [1], patience_s=1).carry_out()
        (step,) = asyncio.run(asyncio.wait_for(moving, DEADLINE_S))
        assert not step.phase.over
        assert 1 <= len(asked) < 50
        assert states(nodes, 1) == [VbucketState.ACTIVE, VbucketState.DEAD]
