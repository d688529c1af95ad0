"""Every vbucket is found, wherever it is and whatever the map said."""

import asyncio

import pytest

from tests.support.consumer_mirror import Mirror, contents_of, follow
from tests.support.consumer_runs import DIALECTS, run
from tests.support.node_clusters import push_map, two_nodes
from upriver.client import Consumer, KvClient
from upriver.client.consumer import stream_supervisor
from upriver.client.consumer.feed_factory import active_on
from upriver.client.transport.connection import Connection
from upriver.model import VbucketState, vbucket_of

KEY = next(b"key%d" % n for n in range(100) if vbucket_of(b"key%d" % n, 8) == 0)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_map_that_names_a_dead_copy_is_not_believed(dialect: str) -> None:
    """The copy that is left where a vbucket was would be streamed, and nothing new would ever come from it."""

    async def look() -> None:
        mirror = Mirror()
        with two_nodes() as (first, second):
            async with KvClient(first.address) as kv:
                await kv.set(KEY, "at the first")
                first.call(first.bucket.vbucket(0).set_state, VbucketState.DEAD)
                second.call(second.bucket.create_vbucket, 0, VbucketState.ACTIVE)
                second.call(second.bucket.vbucket(0).set, KEY, b"at the second")
                async with Consumer(first.address, dialect=dialect) as consumer:  # the maps do not say so yet
                    await kv.set_many({b"other%d" % n: b"" for n in range(100) if vbucket_of(b"other%d" % n, 8)})
                    others = contents_of(second) | contents_of(first)
                    del others[KEY]
                    await follow(consumer, mirror, lambda: mirror.contents == others)
                    push_map([first, second], [1, 0, 0, 0, 1, 1, 1, 1], rev=2)
                    await follow(consumer, mirror, lambda: mirror.contents == others | {KEY: b"at the second"})
        assert not mirror.events

    run(look())


def test_a_vbucket_that_nobody_has_is_waited_for() -> None:
    async def look() -> None:
        mirror = Mirror()
        with two_nodes() as (first, second):
            push_map([first, second], [-1, 0, 0, 0, 1, 1, 1, 1], rev=2)
            async with Consumer(first.address) as consumer:
                first.call(first.bucket.vbucket(0).set, KEY, b"here")
                first.call(first.bucket.vbucket(1).set, b"x", b"elsewhere")
                await follow(consumer, mirror, lambda: mirror.contents == {b"x": b"elsewhere"})
                push_map([first, second], [0, 0, 0, 0, 1, 1, 1, 1], rev=3)
                await follow(consumer, mirror, lambda: mirror.contents == {b"x": b"elsewhere", KEY: b"here"})
                assert consumer.changes_received == 2
                assert not consumer.reconnects
                assert len(consumer.connections) == 2

    run(look())


def test_a_connection_that_is_lost_while_its_node_is_asked_what_it_has_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafts and `upr` cannot ask for an active copy, so somebody asks before; nothing is carried yet then."""

    async def look() -> None:
        mirror, cut = Mirror(), list[Connection]()

        async def cut_off(connection: Connection) -> dict[int, int]:
            found = await active_on(connection)
            if not cut:
                cut.extend(consumer.connections)
                cut[0].abort()
                while cut[0].is_open:
                    await asyncio.sleep(0)
            return found

        with two_nodes() as (first, _):
            first.call(first.bucket.vbucket(0).set, KEY, b"here")
            consumer = Consumer(first.address, dialect="upr", stall_s=1000)
            monkeypatch.setattr(stream_supervisor, "active_on", cut_off)
            async with consumer:
                await follow(consumer, mirror, lambda: mirror.contents == {KEY: b"here"})
        assert cut

    run(look())
