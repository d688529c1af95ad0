"""Against servers that are not ours a consumer does what those expect, and ends with exactly their contents."""

import asyncio
from typing import Any

import pytest

from tests.support.consumer_mirror import Mirror, follow
from tests.support.consumer_runs import run
from tests.support.deployed_server import UUID, DeployedServer
from upriver.client import Consumer
from upriver.errors import NotSupported, WireError
from upriver.model import Snapshot, StreamPosition
from upriver.wire.dialects.memcached import Feature


def fill(server: DeployedServer, turn: int = 0) -> None:
    """Write, overwrite and delete."""
    for n in range(40):
        server.write(n % server.vbuckets, b"key%d" % n, b"value %d of turn %d " % (n, turn) * 20)
    for n in range(0, 40, 9):
        server.write(n % server.vbuckets, b"key%d" % n, None)


async def read(server: DeployedServer, **settings: Any) -> tuple[Mirror, Consumer]:
    mirror = Mirror()
    async with Consumer(server.address, **settings) as consumer:
        async for batch in consumer:
            assert len(batch) == sum(each.rows for each in batch.runs) > 0
            await mirror.apply(batch)
    return mirror, consumer


@pytest.mark.parametrize("cut_after", [None, 1, 3, 7])
def test_what_it_holds_is_what_comes(cut_after: int | None) -> None:
    async def work() -> None:
        async with DeployedServer(cut_after=cut_after) as server:
            fill(server)
            mirror, _ = await read(server, end="latest")
            assert mirror.contents == server.contents()
            assert mirror.events == []
            assert server.logins
            assert bool(server.cuts) == (cut_after is not None)
            assert server.strange == []  # the consumer did not ask for what only our nodes have
            assert server.not_granted == {Feature.UPRIVER, Feature.MUTATION_SEQNO}

    run(work())


@pytest.mark.parametrize("end", [1, 5, 19, 20, 22])
@pytest.mark.parametrize("columns", [None, ("key", "value")])
def test_a_range_ends_where_it_should_and_goes_on_from_there(end: int, columns: tuple[str, ...] | None) -> None:
    """It is sent whole snapshots; what lies beyond is left out, and nothing of the rest comes twice or not at all."""

    async def work() -> None:
        async with DeployedServer() as server:
            fill(server)
            settings: dict[str, Any] = {"vbuckets": [0]} if columns is None else {"vbuckets": [0], "columns": columns}
            high, held = server.high[0], server.written[0]
            rows: list[tuple[bytes, bytes]] = []
            async with Consumer(server.address, end={0: end}, **settings) as consumer:
                async for batch in consumer:
                    assert all(each.position.seqno <= end for each in batch.runs)
                    assert columns is None or batch.records.schema.names == list(columns)
                    rows += zip(*(batch.records.column(name).to_pylist() for name in ("key", "value")), strict=True)
            assert rows == [(key, value or b"") for key, (seqno, value) in held.items() if seqno <= end]
            progress = consumer.progress[0]
            assert progress.position == StreamPosition(UUID, end, Snapshot(0, high))
            rest, _ = await read(server, vbuckets=[0], end="latest", start={0: progress})
            seen = rest.held.get(0, {})
            assert sorted(each.seqno for each in seen.values()) == [seqno for seqno, _ in held.values() if seqno > end]

    run(work())


def test_what_only_our_nodes_have_is_refused() -> None:
    async def work() -> None:
        async with DeployedServer() as server:
            with pytest.raises(NotSupported, match="is not an Upriver node and does not support key_filter"):
                await read(server, key_filter="a", end="latest")

    run(work())


def test_a_refusal_of_a_stream_says_where_to_go_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with DeployedServer() as first, DeployedServer() as second:
            fill(first)
            fill(second, 1)
            mirror = Mirror()
            consumer = Consumer(first.address)
            await consumer.cluster.open()
            first.elsewhere[1] = second.port

            async def refuse(*_: object) -> None:
                raise AssertionError("the map was asked for")

            monkeypatch.setattr(consumer.cluster, "refresh", refuse)
            expected = {
                key: value
                for server, number in ((first, 0), (second, 1))
                for key, (_, value) in server.written[number].items()
                if value is not None
            }
            async with consumer:
                await follow(consumer, mirror, lambda: mirror.contents == expected)

    run(work())


def test_a_source_that_is_ahead_and_a_stream_that_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with DeployedServer(mute=True) as server:
            fill(server)
            mirror = Mirror()
            async with Consumer(server.address, stall_s=0.2) as consumer:
                await follow(consumer, mirror, lambda: set(consumer.stalled) == {0, 1})
                assert consumer.stalled[0] == f"its position is 0, the high seqno of its source {server.high[0]}"
                server.mute = False
                # A stream that is silent is requested again.
                await follow(consumer, mirror, lambda: mirror.contents == server.contents())
                await follow(consumer, mirror, lambda: not consumer.stalled)
        assert "vbucket 0 does not advance" in caplog.text

    run(work())


def test_a_value_that_cannot_be_inflated_ends_it_and_nothing_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with DeployedServer(damaged={b"key12"}) as server:
            fill(server)
            consumer, mirror = Consumer(server.address, end="latest", window_bytes=1), Mirror()
            with pytest.raises(WireError, match="without a length"):
                await follow(consumer, mirror, lambda: False)
            await consumer.close()
            seen = {key for held in mirror.held.values() for key in held}
            told = {number: each.position.seqno for number, each in consumer.progress.items()}
            skipped = [
                key
                for number, held in server.written.items()
                for key, (seqno, _) in held.items()
                if seqno <= told.get(number, 0) and key not in seen
            ]
            assert skipped == []
        assert caplog.text == ""

    run(work())


def test_nothing_is_asked_for_after_the_end() -> None:
    async def work() -> None:
        async with DeployedServer() as server:
            mirror, consumer = await read(server, end="latest")
            assert mirror.batches == 0
            assert consumer.progress == {}
            await asyncio.sleep(0)

    run(work())
