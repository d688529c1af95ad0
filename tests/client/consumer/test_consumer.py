"""A consumer ends with what its source holds."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.consumer_mirror import Mirror, contents_of, follow
from tests.support.consumer_runs import DIALECTS, DRAFT1, fill, first_batch, read, run
from upriver.client import Consumer, FileCheckpoint, Flush, KvClient, SyncKvClient
from upriver.client.consumer import ColumnName, DialectName
from upriver.errors import (
    AuthenticationFailed,
    ClusterMapError,
    InvalidArguments,
    NoActiveCopy,
    StreamRolledBack,
    Unreachable,
)
from upriver.model import CHANGES, Change, Event, Snapshot, StreamPosition, VbucketState
from upriver.model.compression import SNAPPY
from upriver.node import EmbeddedNode, start

#: Those in which a connection can be told settings.
TOLD = ("dcp", "upr")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_was_stored_compressed_elsewhere_is_inflated(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    vbucket = upriver_node.bucket.vbucket(0)
    upriver_node.call(vbucket.set, b"k", bytes(pa.Codec("snappy").compress(b"plain")), 0, 0, 0, SNAPPY | 1)
    values: list[tuple[bytes, int]] = []

    async def read_values() -> None:
        async with Consumer(upriver_node.address, end="latest", dialect=dialect, name="reader") as consumer:
            async for batch in consumer:
                values.extend((change.value, change.datatype) for change in batch.changes())

    run(read_values())
    assert [(value, datatype & SNAPPY) for value, datatype in values] == [(b"plain", 0)]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_range_gives_what_is_there(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    settings: dict[str, Any] = {"dialect": dialect, "name": "reader"}
    fill(upriver_node, 0)
    fill(upriver_node, 1)
    mirror, consumer = run(read(upriver_node.address, **settings))
    assert mirror.contents == contents_of(upriver_node)
    assert len(mirror.contents) > 400
    # From there only what is new; but a range of `tap` is a dump, which has everything each time.
    fill(upriver_node, 2)
    more, _ = run(read(upriver_node.address, **settings, start=consumer.progress))
    if dialect == "tap":
        assert more.contents == contents_of(upriver_node)
        return
    assert set(more.contents) == {b"key%d" % n for n in range(200, 700) if (n - 200) % 7}
    nothing, _ = run(read(upriver_node.address, **settings, start=run(positions(upriver_node, settings))))
    assert nothing.batches == 0


async def positions(node: EmbeddedNode, settings: dict[str, Any]) -> Any:
    _, consumer = await read(node.address, **settings)
    return consumer.progress


@pytest.mark.parametrize("dialect", DIALECTS)
def test_changes_come_as_they_happen(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    async def follow_live() -> None:
        mirror = Mirror()
        async with KvClient(upriver_node.address) as kv, Consumer(upriver_node.address, dialect=dialect) as consumer:
            for n in range(20):
                await kv.set(f"k{n % 5}", str(n))
                await follow(consumer, mirror, lambda n=n: mirror.contents.get(b"k%d" % (n % 5)) == b"%d" % n)  # type: ignore[misc]
            await kv.delete("k0")
            await follow(consumer, mirror, lambda: b"k0" not in mirror.contents)

    run(follow_live())


def test_from_now_on(upriver_node: EmbeddedNode) -> None:
    async def from_now() -> list[Change]:
        async with KvClient(upriver_node.address) as kv:
            await kv.set("old", "1")
            async with Consumer(upriver_node.address, start="latest") as consumer:
                await kv.set("new", "2")
                async for batch in consumer:
                    return list(batch.changes())
        return []

    (change,) = run(from_now())
    assert (change.key, change.value) == (b"new", b"2")


def test_batches_carry_their_snapshots_and_single_changes_are_there_too(upriver_node: EmbeddedNode) -> None:
    async def look() -> None:
        async with KvClient(upriver_node.address) as kv:
            written = [await kv.set("a", str(n)) for n in range(3)]
            vbucket = written[0].vbucket
            async with Consumer(upriver_node.address, vbuckets=[vbucket], end="latest") as consumer:
                batch = await anext(consumer)
                assert batch.runs[0].position == StreamPosition(written[0].vbucket_uuid or 0, 3, Snapshot(0, 3))
                assert batch.with_bounds().column("snapshot_end").to_pylist() == [3]
            async with Consumer(upriver_node.address, vbuckets=[vbucket], end="latest") as again:
                assert [change.value async for change in again.changes() if isinstance(change, Change)] == [b"2"]

    run(look())


@pytest.mark.parametrize("dialect", TOLD)
def test_options(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({b"a%d" % n: b'{"n": %d}' % (n % 2) for n in range(50)})
        kv.set_many({b"b%d" % n: b"x" for n in range(50)})
        kv.set_many({b"a%d" % n: b'{"n": %d}' % (n % 2) for n in range(50)})
    address = upriver_node.address
    filtered, _ = run(read(address, dialect=dialect, key_filter="^a"))
    assert set(filtered.contents) == {b"a%d" % n for n in range(50)}
    by_value, _ = run(read(address, dialect=dialect, value_filter='{"field": "n", "equals": 1}'))
    assert set(by_value.contents) == {b"a%d" % n for n in range(1, 50, 2)}
    keys, _ = run(read(address, dialect=dialect, keys_only=True))
    assert set(keys.contents.values()) == {None}
    assert len(keys.contents) == 100

    async def rows(**settings: Any) -> int:
        async with Consumer(address, dialect=dialect, end="latest", **settings) as consumer:
            return sum([len(batch) async for batch in consumer])

    assert run(rows()) == 100
    assert run(rows(history=True)) == 150
    assert run(rows(persisted_only=True)) <= 100
    narrow = run(first_batch(address, dialect=dialect, columns=("key", "seqno")))
    assert narrow.records.schema.names == ["key", "seqno"]


def test_one_clear_error_each(upriver_node: EmbeddedNode, guarded_node: EmbeddedNode) -> None:
    address = upriver_node.address
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with pytest.raises(Unreachable, match=rf"^127\.0\.0\.1:{free}: cannot connect"):
        run(first_batch(f"127.0.0.1:{free}"))
    with pytest.raises(AuthenticationFailed, match="rejects the user 'me' or the password"):
        run(first_batch(f"upriver://me:wrong@{guarded_node.address}"))
    with pytest.raises(AuthenticationFailed, match="requires a login"):
        run(first_batch(guarded_node.address))
    with pytest.raises(ClusterMapError, match="vbucket 64 does not exist; the bucket has vbuckets 0 to 63"):
        run(first_batch(address, vbuckets=[64]))
    with pytest.raises(InvalidArguments, match="unknown dialect 'tup'"):
        Consumer(address, dialect="tup")  # type: ignore[arg-type]
    with pytest.raises(InvalidArguments, match="upr_draft3 has no settings"):
        Consumer(address, dialect="upr_draft3", keys_only=True)
    with pytest.raises(InvalidArguments, match="key_filter = '\\('"):
        run(first_batch(address, key_filter="("))
    with pytest.raises(InvalidArguments, match="end names no seqno for vbucket 0"):
        run(first_batch(address, end={}))
    with (
        start(vbuckets=4, initial_vbuckets="0") as small,
        pytest.raises(NoActiveCopy, match="copy of vbucket 2;"),
    ):
        run(first_batch(small.address, vbuckets=[2]))


def test_with_a_login(guarded_node: EmbeddedNode) -> None:
    async def store_and_read() -> dict[bytes, bytes]:
        address = f"upriver://me:secret@{guarded_node.address}"
        async with KvClient(address) as kv:
            await kv.set("a", "b")
        return (await read(address))[0].contents

    assert run(store_and_read()) == {b"a": b"b"}


def test_progress_goes_on_in_another_process(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    async def some(count: int | None) -> list[bytes]:
        keys: list[bytes] = []
        checkpoint = FileCheckpoint(tmp_path / "progress", "test")
        async with Consumer(upriver_node.address, end="latest", checkpoint=checkpoint) as consumer:
            async for batch in consumer:
                keys += [change.key for change in batch.changes()]
                if count is not None and len(keys) >= count:
                    break
        return keys

    fill(upriver_node, 0)
    first = run(some(100))
    rest = run(some(None))
    assert len(set(first) | set(rest)) == 500
    assert len(rest) < 500  # what was done does not come again
    assert run(some(None)) == []


def test_a_batch_that_is_not_done_comes_again(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    fill(upriver_node, 0)

    async def take_all(done: bool) -> int:
        checkpoint = FileCheckpoint(tmp_path / "progress", "test")
        rows = 0
        async with Consumer(
            upriver_node.address, end="latest", checkpoint=checkpoint, auto_acknowledge=False
        ) as consumer:
            async for batch in consumer:
                rows += len(batch)
                if done:
                    consumer.acknowledge(batch)
        return rows

    assert run(take_all(done=False)) == 500
    assert run(take_all(done=True)) == 500
    assert run(take_all(done=True)) == 0


@pytest.mark.parametrize("dialect", ["upr_draft2", "upr_draft3"])
@pytest.mark.parametrize("columns", [tuple(CHANGES.names), ("expiry", "event")])
def test_deletions_of_a_draft_keep_what_its_text_has(
    upriver_node: EmbeddedNode, dialect: DialectName, columns: tuple[ColumnName, ...]
) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("plain", "1")
        kv.delete_with_meta("gone", rev_seqno=5, cas=9, expiry=77)
        kv.delete("plain")

    async def rows() -> list[tuple[int, int]]:
        out: list[tuple[int, int]] = []
        async with Consumer(upriver_node.address, dialect=dialect, columns=columns, end="latest") as consumer:
            async for batch in consumer:
                assert batch.records.schema.names == list(columns)
                out += zip(*(batch.records.column(name).to_pylist() for name in ("event", "expiry")), strict=True)
        return out

    assert sorted(run(rows()))[0] == (Event.DELETION, 77)


@pytest.mark.parametrize("dialect", ["upr_draft2", "upr_draft3"])
def test_a_consumer_of_a_draft_knows_where_a_snapshot_ends(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    """So a failover after a live stream, when nothing more comes, rolls no consumer back that had everything."""

    async def caught_up() -> tuple[Mirror, Consumer]:
        mirror = Mirror()
        async with KvClient(upriver_node.address) as kv, Consumer(upriver_node.address, dialect=dialect) as consumer:
            for number in range(50):
                await kv.set(f"key{number}", "v")
            await follow(consumer, mirror, lambda: _consistent(consumer, 50))
        return mirror, consumer

    def fail_over() -> None:
        for state in (VbucketState.REPLICA, VbucketState.ACTIVE):
            for vbucket in upriver_node.bucket:
                vbucket.set_state(state)

    mirror, consumer = run(caught_up())
    upriver_node.call(fail_over)
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("after", "v")
    # Under *fail* a rollback would raise.
    later, _ = run(read(upriver_node.address, dialect=dialect, start=consumer.progress, on_rollback="fail"))
    assert later.contents == {b"after": b"v"}
    assert mirror.contents | later.contents == contents_of(upriver_node)


def _consistent(consumer: Consumer, changes: int) -> bool:
    """Has it received this many changes, and does it know that each vbucket is consistent?"""
    positions = [each.position for each in consumer.progress.values()]
    return sum(each.seqno for each in positions) == sum(each.consistent_seqno for each in positions) == changes


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_flush_is_handed_out_and_followed(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    async def flushed() -> None:
        mirror = Mirror()
        async with KvClient(upriver_node.address) as kv, Consumer(upriver_node.address, dialect=dialect) as consumer:
            # A flush that comes while a stream is being asked for is learned of as a reset, and in a draft so is that
            # of all vbuckets on the same connection: all of them shall stream.
            await kv.set_many({f"before{n}": "1" for n in range(1000)})
            await follow(consumer, mirror, lambda: len(mirror.held) == len(list(upriver_node.bucket)))
            await asyncio.to_thread(upriver_node.call, upriver_node.bucket.flush)
            await kv.set("after", "2")
            await follow(consumer, mirror, lambda: mirror.contents == {b"after": b"2"})
        assert Flush.__name__ in mirror.events

    run(flushed())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("window_bytes", [0, 1])
def test_the_smallest_windows(upriver_node: EmbeddedNode, dialect: DialectName, window_bytes: int) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many({f"key{n}": bytes(1000) for n in range(2000)})

    async def all_of_it() -> None:
        async with asyncio.timeout(30):
            mirror, _ = await read(upriver_node.address, dialect=dialect, window_bytes=window_bytes)
        assert len(mirror.contents) == 2000

    run(all_of_it())


def test_a_consumer_that_found_no_node_can_be_tried_again() -> None:
    async def twice() -> None:
        with start(vbuckets=8) as node:
            port = node.port
        consumer = Consumer(f"127.0.0.1:{port}", end="latest")
        for _ in range(2):
            with pytest.raises(Unreachable):
                await anext(consumer)
        with start(vbuckets=8, port=port):
            with pytest.raises(StopAsyncIteration):
                await anext(consumer)
            await consumer.close()

    run(twice())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("policy", ["fail", "rewind", "emit"])
def test_a_source_that_was_flushed_meanwhile_is_a_reset(
    upriver_node: EmbeddedNode, dialect: DialectName, policy: str
) -> None:
    fill(upriver_node, 0)
    _, consumer = run(read(upriver_node.address, dialect=dialect))
    upriver_node.call(upriver_node.bucket.flush)
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("after", "2")
    again = read(upriver_node.address, dialect=dialect, start=consumer.progress, on_rollback=policy)
    if policy == "fail":
        with pytest.raises(StreamRolledBack):
            run(again)
        return
    mirror, _ = run(again)
    assert mirror.contents == {b"after": b"2"}
    assert set(mirror.events) == {"Reset"}


def test_the_first_draft_on_its_own_listener() -> None:
    with start(vbuckets=4, listen=DRAFT1) as node:
        fill(node, 0)
        port = node.node.listen_addresses[1].port
        mirror, _ = run(read(node.address, dialect="upr_draft1", stream_port=port))
        assert mirror.contents == contents_of(node)
        assert len(mirror.contents) > 400
