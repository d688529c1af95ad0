"""Whatever fails, a consumer ends with exactly the source's contents: nothing missing, nothing extra."""

import asyncio
import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.consumer_mirror import Mirror, contents_of, follow
from tests.support.consumer_runs import DIALECTS, DRAFT1, fill, run, wait_until_persisted
from tests.support.depth import by_depth, slow_except
from tests.support.faulty_proxy import Proxy
from tests.support.node_clusters import push_map, two_nodes
from tests.support.node_process import Client
from tests.support.restartable_node import RestartableNode, free_port
from upriver.client import Cluster, Consumer, FileCheckpoint, KvClient, Mover, SyncKvClient
from upriver.client.consumer import DialectName, Policy
from upriver.errors import StreamRefused, StreamRolledBack
from upriver.model import StreamPosition, vbucket_of
from upriver.node import EmbeddedNode, start
from upriver.protocol.move.mover import Phase
from upriver.wire.dialects.memcached import SetVbucket, VbucketState

POLICIES = ("rewind", "emit")


def of_dialect(node: EmbeddedNode, dialect: DialectName) -> tuple[int, dict[str, Any]]:
    """Where a node gives the streams of a dialect, and what a consumer must be told for it."""
    return (node.node.listen_addresses[1].port if dialect == "upr_draft1" else node.port), {"dialect": dialect}


@pytest.mark.parametrize("dialect", [*DIALECTS, "upr_draft1"])
@pytest.mark.upriver(vbuckets=8, listen=DRAFT1)
def test_connections_that_are_cut_again_and_again(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    """Nothing is lost and nothing comes twice: the position is right at whatever byte the cut was.

    (In `tap`, where the source alone knows it, what was not acknowledged comes again.)
    """

    async def follow_through() -> None:
        mirror, rounds = Mirror(), by_depth(quick=12, deep=40)
        fill(upriver_node, 0, 2000)
        stream_port, chosen = of_dialect(upriver_node, dialect)
        async with Proxy(stream_port, seed=7) as proxy, KvClient(upriver_node.address) as kv:
            if stream_port == upriver_node.port:
                push_map([upriver_node], [0] * 8, rev=2, ports=[proxy.port])
            else:
                chosen["stream_port"] = proxy.port
            # In `tap` nothing counts that was not acknowledged: a cut that always comes before that is for ever.
            grain = 200 if dialect == "tap" else 1
            proxy.cut_after_bytes = 2000 * grain
            settings: dict[str, Any] = {**chosen, "on_rollback": "fail", "window_bytes": 100_000}
            async with Consumer(f"127.0.0.1:{upriver_node.port}", **settings) as consumer:
                for turn in range(rounds):
                    proxy.cut_after_bytes = (1500 + 37 * turn) * grain
                    await kv.set(f"turn{turn % 7}", str(turn))
                    if turn % 5 == 0:
                        proxy.cut()
                    seen = b"turn%d" % (turn % 7)
                    wanted = b"%d" % turn
                    await follow(consumer, mirror, lambda: mirror.contents.get(seen) == wanted)  # noqa: B023
                proxy.cut_after_bytes = None
                proxy.cut()
                source = contents_of(upriver_node)
                await follow(consumer, mirror, lambda: mirror.contents == source)
                assert consumer.reconnects > rounds // 8
                assert dialect == "tap" or consumer.changes_received <= 2000 + 286 + rounds
        assert proxy.cuts > 2
        assert set(mirror.events) <= ({"Reset"} if dialect == "tap" else set())

    run(follow_through())


@pytest.mark.parametrize("dialect", [*DIALECTS, "upr_draft1"])
@pytest.mark.upriver(vbuckets=8, listen=DRAFT1)
def test_a_partition_that_heals(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    async def through_the_dark() -> None:
        mirror = Mirror()
        stream_port, settings = of_dialect(upriver_node, dialect)
        async with Proxy(stream_port, seed=3) as proxy, KvClient(upriver_node.address) as kv:
            if stream_port == upriver_node.port:
                push_map([upriver_node], [0] * 8, rev=2, ports=[proxy.port])
            else:
                settings["stream_port"] = proxy.port
            async with Consumer(upriver_node.address, **settings) as consumer:
                await kv.set("a", "1")
                await follow(consumer, mirror, lambda: mirror.contents == {b"a": b"1"})
                proxy.refusing = True
                proxy.cut()
                await kv.set("a", "2")
                await kv.set("b", "3")
                await kv.delete("a")
                before = consumer.reconnects
                await follow(consumer, mirror, lambda: consumer.reconnects > before or proxy.cuts > 6)
                proxy.refusing = False
                await follow(consumer, mirror, lambda: mirror.contents == {b"b": b"3"})

    run(through_the_dark())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_vbucket_that_gets_no_stream_is_given_up(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    async def wait_for_nothing() -> None:
        async with Proxy(upriver_node.port, seed=1) as proxy:
            proxy.refusing = True
            settings: dict[str, Any] = {"dialect": dialect, "stream_port": proxy.port, "patience_s": 0.3}
            async with Consumer(upriver_node.address, end="latest", **settings) as consumer:
                with pytest.raises(StreamRefused, match=r"vbucket \d+: no stream for 0\.3 s: 127\.0\.0\.1:"):
                    await anext(consumer)
        assert proxy.cuts > 1

    run(wait_for_nothing())


@pytest.mark.parametrize("dialect", ["dcp", "upr_draft3", "tap"])
def test_each_outage_has_its_own_patience(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    async def through_two() -> None:
        mirror, now = Mirror(), asyncio.get_running_loop().time
        async with Proxy(upriver_node.port, seed=1) as proxy, KvClient(upriver_node.address) as kv:
            settings: dict[str, Any] = {"dialect": dialect, "stream_port": proxy.port, "patience_s": 0.3}
            async with Consumer(upriver_node.address, **settings) as consumer:
                for turn in range(3):
                    # In every vbucket, so that all of them have a stream again.
                    await kv.set_many({f"key{n}": str(turn) for n in range(1000)})
                    wanted, earliest = {b"%d" % turn}, now() + 0.4
                    await follow(
                        consumer,
                        mirror,
                        lambda: set(mirror.contents.values()) == wanted and now() > earliest,  # noqa: B023
                    )
                    proxy.cut()

    run(through_two())


@pytest.mark.parametrize("dialect", ["dcp", "upr", "tap"])
@pytest.mark.upriver(vbuckets=8)
def test_connections_that_fall_silent(
    upriver_node: EmbeddedNode, dialect: DialectName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the connections for requests: no side closes them, and new ones would work."""
    monkeypatch.setattr("upriver.client.transport.connection.SILENCE_S", 0.2)

    async def through_the_silence() -> None:
        mirror = Mirror()
        async with Proxy(upriver_node.port, seed=5) as proxy:
            push_map([upriver_node], [0] * 8, rev=2, ports=[proxy.port])
            address = f"127.0.0.1:{proxy.port}"
            consumer = Consumer(address, dialect=dialect, noop_interval_s=0.3)
            consumer.cluster = Cluster(address, connect_timeout_s=0.5)
            async with consumer:
                for value in (b"1", b"2"):
                    async with KvClient(address) as kv:
                        await kv.set("a", value)
                    await follow(consumer, mirror, lambda: mirror.contents == {b"a": value})  # noqa: B023
                    proxy.fall_silent()

    run(through_the_silence())


@pytest.mark.shows(
    "upr_draft1:rollback-meaning",
    "upr_draft2:rollback-meaning",
    "upr_draft3:rollback-meaning",
    "open_issues:rollback-debate",
    "open_issues:lost-after-sending",
)
@pytest.mark.parametrize(
    ("dialect", "policy"),
    slow_except(
        [("dcp", "rewind"), ("dcp", "emit"), ("upr_draft3", "rewind"), ("tap", "emit")],
        itertools.product([*DIALECTS, "upr_draft1"], POLICIES),
    ),
)
def test_a_source_that_forgets_what_it_told(tmp_path: Path, dialect: DialectName, policy: Policy) -> None:
    """Killed before its changes were on disk, it comes back without them and writes others in their place."""
    node = RestartableNode(tmp_path / "data", dialect=dialect)

    async def through_the_crash() -> None:
        mirror = Mirror()
        async with (
            KvClient(node.address, timeout_s=60) as kv,
            Consumer(node.address, **node.settings, on_rollback=policy) as consumer,
        ):
            await kv.set_many({b"k%d" % n: b"old" for n in range(100)})
            await follow(consumer, mirror, lambda: len(mirror.contents) == 100)
            await wait_until_persisted(kv)
            await kv.set("last before", "the stop")
            await wait_until_persisted(kv)
            await asyncio.to_thread(node.stop_persistence)
            # These are told and then lost: overwritten, deleted and new keys.
            await kv.set_many({b"k%d" % n: b"lost" for n in range(50)})
            for n in range(50, 60):
                await kv.delete(f"k{n}")
            await kv.set_many({b"new%d" % n: b"lost" for n in range(20)})
            await follow(consumer, mirror, lambda: len(mirror.contents) == 111)
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            await kv.set_many({b"k%d" % n: b"right" for n in range(90, 100)})
            expected = {b"k%d" % n: b"old" for n in range(90)} | {b"k%d" % n: b"right" for n in range(90, 100)}
            expected[b"last before"] = b"the stop"
            await follow(consumer, mirror, lambda: mirror.contents == expected, kv)
        assert mirror.events
        assert set(mirror.events) <= ({"Reset"} if policy == "rewind" else {"Rollback", "Reset"})

    try:
        run(through_the_crash())
    finally:
        node.kill()


@pytest.mark.parametrize("dialect", slow_except(["dcp", "tap"], [*DIALECTS, "upr_draft1"]))
def test_fail_stops_with_the_position(tmp_path: Path, dialect: DialectName) -> None:
    node = RestartableNode(tmp_path / "data", dialect=dialect)

    async def through_the_crash() -> None:
        mirror = Mirror()
        async with KvClient(node.address, timeout_s=60) as kv, Consumer(node.address, **node.settings) as consumer:
            await kv.set_many({b"k%d" % n: b"old" for n in range(100)})
            await wait_until_persisted(kv)
            await asyncio.to_thread(node.stop_persistence)
            await kv.set_many({b"k%d" % n: b"lost" for n in range(100)})
            await follow(
                consumer, mirror, lambda: set(mirror.contents.values()) == {b"lost"} and len(mirror.contents) == 100
            )
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            with pytest.raises(StreamRolledBack) as caught:
                await follow(consumer, mirror, lambda: False)
            # In `tap` there is no position to tell.
            assert dialect == "tap" or caught.value.seqno < caught.value.position.seqno  # type: ignore[attr-defined]

    try:
        run(through_the_crash())
    finally:
        node.kill()


@pytest.mark.upriver(vbuckets=64)
def test_what_streams_beside_a_rollback_that_fails_is_not_blamed(
    upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is in the middle of what other vbuckets send; the rest of it is not read any more."""

    async def work() -> None:
        async with KvClient(upriver_node.address) as kv:
            await kv.set_many({b"k%d" % n: bytes(200) for n in range(20_000)})
        with pytest.raises(StreamRolledBack):
            async with Consumer(upriver_node.address, start={63: StreamPosition.at(0xBAD, 5)}) as consumer:
                await follow(consumer, Mirror(), lambda: False)
        assert consumer.reconnects == 0

    run(work())
    assert caplog.text == ""


@pytest.mark.parametrize("dialect", slow_except(["dcp", "upr_draft2"], [*DIALECTS, "upr_draft1"]))
def test_a_consumer_and_a_source_that_are_both_killed(tmp_path: Path, dialect: DialectName) -> None:
    """From its checkpoint a consumer repeats at most what it had not acknowledged."""
    node = RestartableNode(tmp_path / "data", ack="disk", dialect=dialect)
    mirror = Mirror()
    rng = random.Random(5)

    async def some_of_it(turn: int) -> None:
        checkpoint = FileCheckpoint(tmp_path / "progress", "me")
        # On `upr` a source that was killed is a new branch, on which no consumer may resume inside a snapshot.
        policy = "fail" if dialect == "dcp" else "rewind"
        settings: dict[str, Any] = {**node.settings, "checkpoint": checkpoint, "on_rollback": policy}
        async with KvClient(node.address, timeout_s=60) as kv:
            await kv.set_many({b"k%d" % rng.randrange(300): b"%d" % turn for n in range(100)})
        seen = 0
        async with Consumer(node.address, checkpoint_interval_s=0.01, **settings) as consumer:
            async for batch in consumer:
                await mirror.apply(batch)
                seen += 1
                if seen > turn % 3:
                    break

    async def the_rest() -> None:
        checkpoint = FileCheckpoint(tmp_path / "progress", "me")
        settings: dict[str, Any] = {**node.settings, "end": "latest", "on_rollback": "rewind"}
        async with Consumer(node.address, checkpoint=checkpoint, **settings) as consumer:
            async for batch in consumer:
                await mirror.apply(batch)
        fresh = Mirror()
        async with Consumer(node.address, **node.settings, end="latest") as consumer:
            async for batch in consumer:
                await fresh.apply(batch)
        assert mirror.contents == fresh.contents

    try:
        for turn in range(6):
            run(some_of_it(turn))
            if turn % 2:
                node.kill()
                node.start()
        run(the_rest())
    finally:
        node.kill()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_vbucket_that_moves_is_followed(dialect: DialectName, policy: Policy) -> None:
    async def follow_it() -> None:
        mirror = Mirror()
        key = next(b"key%d" % n for n in range(100) if vbucket_of(b"key%d" % n, 8) == 0)
        with two_nodes() as (first, second):
            async with (
                KvClient(first.address) as kv,
                Consumer(first.address, dialect=dialect, on_rollback=policy) as consumer,
            ):
                await kv.set(key, "at the first")
                await follow(consumer, mirror, lambda: mirror.contents.get(key) == b"at the first")
                _set_state(first, VbucketState.DEAD)
                _set_state(second, VbucketState.ACTIVE)
                push_map([first, second], [1, 0, 0, 0, 1, 1, 1, 1], rev=2)
                await kv.set(key, "at the second")
                await follow(consumer, mirror, lambda: mirror.contents.get(key) == b"at the second", kv)

    run(follow_it())


@pytest.mark.parametrize(
    ("dialect", "policy"),
    slow_except(
        [(dialect, "emit") for dialect in [*DIALECTS, "upr_draft1"]]
        + [("dcp", "fail"), ("dcp", "rewind"), ("upr", "fail")],
        itertools.product([*DIALECTS, "upr_draft1"], ["fail", *POLICIES]),
    ),
)
def test_a_vbucket_that_is_taken_over_is_followed(dialect: DialectName, policy: Policy) -> None:
    """To and fro. Nothing is lost in a takeover, so who knows that it is whole has nothing to roll back.

    A new owner is a new branch. `upr` does not tell where a snapshot ends, so its consumer knows only up to the last
    marker that it was whole, and goes back to there; `tap` tells nothing at all, and starts over.
    """
    draft1 = free_port()
    listen = {"listen": f"{{}}:{draft1},dialect=upr_draft1,anonymous"} if dialect == "upr_draft1" else {}
    settings: dict[str, Any] = {"dialect": dialect, "on_rollback": policy}
    if listen:
        settings["stream_port"] = draft1
    if policy == "emit":
        settings["name"] = "me"  # `tap` remembers by it, and both nodes do

    def node(host: str, vbuckets: str) -> EmbeddedNode:
        own = {name: text.format(host) for name, text in listen.items()}
        return start(vbuckets=4, host=host, initial_vbuckets=vbuckets, **own)

    async def follow_it(first: EmbeddedNode, second: EmbeddedNode) -> None:
        mirror = Mirror()
        expected: dict[bytes, bytes] = {}
        async with KvClient(first.address) as kv, Consumer(first.address, **settings) as consumer:
            for turn, (here, there) in enumerate([(first, second), (second, first), (first, second)]):
                changed = {b"k%d" % n: b"%d" % turn for n in range(turn * 10, turn * 10 + 50)}
                assert await kv.set_many(changed) == {}
                expected.update(changed)
                await follow(consumer, mirror, lambda: mirror.contents == expected, kv)
                steps = await Mover(here.address, there.address, range(4)).carry_out()
                assert {step.phase for step in steps} == {Phase.MOVED}
            await kv.set("last", "there")
            await follow(consumer, mirror, lambda: mirror.contents == expected | {b"last": b"there"}, kv)
        allowed = {"Reset", "Rollback"} if policy == "emit" and dialect != "tap" else {"Reset"}
        assert set(mirror.events) <= (allowed if dialect in ("upr", "tap") else set())

    # Two addresses of this machine: the port of a pinned listener is the same on all nodes.
    with node("127.0.0.1", "all") as first, node("127.0.0.2", "none") as second:
        if policy == "fail" and dialect in ("upr", "tap"):
            with pytest.raises(StreamRolledBack):
                run(follow_it(first, second))
        else:
            run(follow_it(first, second))


def _set_state(node: EmbeddedNode, state: VbucketState) -> None:
    with Client(node.port) as client:
        assert client.ask(SetVbucket(vbucket=0, state=state)).status == 0


@pytest.mark.upriver(vbuckets=2)
def test_memory_is_bounded_by_the_window(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        for turn in range(20):
            kv.set_many({b"%d-%d" % (turn, n): bytes(1000) for n in range(1000)})

    async def read_slowly() -> None:
        async with Consumer(upriver_node.address, window_bytes=200_000, end="latest") as consumer:
            rows = 0
            async for batch in consumer:
                rows += len(batch)
                await asyncio.sleep(0.001)
                # The last packet may exceed the window, and one read was under way.
                assert consumer.queued_bytes <= 200_000 + 600_000
            assert rows == 20_000

    run(read_slowly())


_SLOW = """
import asyncio, sys
from upriver.client import Consumer

def peak_bytes():  # ru_maxrss would include the process that started this one
    with open("/proc/self/status") as status:
        return int(status.read().split("VmHWM:")[1].split()[0]) * 1024

async def main(address, dialect):
    async with Consumer(address, dialect=dialect, window_bytes=1 << 20, end="latest") as consumer:
        first = await anext(consumer)
        before = peak_bytes()
        rows = len(first)
        await asyncio.sleep(1)  # a slow one: all this time the source could send
        async for batch in consumer:
            rows += len(batch)
            await asyncio.sleep(0.001)
        print(rows, peak_bytes() - before)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("dialect", slow_except(["dcp", "tap"], DIALECTS))
@pytest.mark.upriver(vbuckets=4)
def test_a_slow_consumer_takes_no_memory_for_the_backlog(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    """The whole process is looked at: the backlog is 80 MB, the window 1 MiB (8 MiB, which TAP's source sets)."""
    with SyncKvClient(upriver_node.address) as kv:
        for turn in range(20):
            kv.set_many({b"%d-%d" % (turn, n): bytes(4000) for n in range(1000)})
    command = [sys.executable, "-c", _SLOW, upriver_node.address, dialect]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    rows, more_bytes = map(int, done.stdout.split())
    assert rows == 20_000
    assert more_bytes < 40_000_000
