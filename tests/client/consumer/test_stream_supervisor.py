"""Every vbucket is found, wherever it is and whatever the map said."""

import asyncio
from typing import Any, cast

import pytest

from tests.support.consumer_mirror import Mirror, contents_of, follow
from tests.support.consumer_runs import DIALECTS, run
from tests.support.fake_feed import FakeFeed
from tests.support.node_clusters import push_map, two_nodes
from upriver.client import Consumer, KvClient
from upriver.client.cluster.node_queries import active_seqnos
from upriver.client.consumer import stream_supervisor
from upriver.client.consumer.end_positions import EndPositions
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import ConsumerSettings, DialectName
from upriver.client.consumer.stream_supervisor import StreamPolicy
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.connection import Connection
from upriver.errors import InvalidArguments, NotMyVbucket, TemporaryFailure
from upriver.model import NO_END, StreamPosition, VbucketState, vbucket_of
from upriver.protocol.consumer import ConsumerStream
from upriver.wire import dcp

KEY = next(b"key%d" % n for n in range(100) if vbucket_of(b"key%d" % n, 8) == 0)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_map_that_names_a_dead_copy_is_not_believed(dialect: DialectName) -> None:
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


def test_the_consumer_waits_for_a_vbucket_without_an_owner() -> None:
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


def test_a_connection_that_is_lost_while_its_node_is_asked_what_it_has_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafts and `upr` cannot ask for an active copy, so the supervisor asks the node first, before any stream."""

    async def look() -> None:
        mirror, cut = Mirror(), list[Connection]()

        async def cut_off(connection: Connection) -> dict[int, int]:
            found = await active_seqnos(connection)
            if not cut:
                cut.extend(consumer.connections)
                cut[0].abort()
                while cut[0].is_open:
                    await asyncio.sleep(0)
            return found

        with two_nodes() as (first, _):
            first.call(first.bucket.vbucket(0).set, KEY, b"here")
            consumer = Consumer(first.address, dialect="upr", stall_s=1000)
            monkeypatch.setattr(stream_supervisor, "active_seqnos", cut_off)
            async with consumer:
                await follow(consumer, mirror, lambda: mirror.contents == {KEY: b"here"})
        assert cut

    run(look())


def policy_of(seqno: int = 0, ends: dict[int, int] | None = None, **settings: Any) -> StreamPolicy:
    tracked = TrackedVbuckets({3: Progress.at(StreamPosition.at(7, seqno))}, "emit", on_event=print, on_move=print)
    positions = EndPositions(on_finished=print)
    positions.start([3], ends or {})
    return StreamPolicy(ConsumerSettings(**settings), tracked, positions)


@pytest.mark.parametrize(
    ("feed", "flags", "must_check"),
    [
        (FakeFeed(), int(dcp.StreamFlag.ACTIVE_ONLY), False),
        (FakeFeed(is_upriver_node=False), 0, False),
        (FakeFeed(speaks_dcp=False), 0, True),
    ],
)
def test_only_active_copies_are_read(feed: Any, flags: int, must_check: bool) -> None:
    assert policy_of().flags(feed) == flags
    assert policy_of().must_check_active(feed) == must_check
    anything = policy_of(active_only=False)
    assert (anything.flags(feed), anything.must_check_active(feed)) == (0, False)


def test_an_end_below_the_position_is_raised_until_a_rollback() -> None:
    policy = policy_of(9, {3: 5})
    assert policy.end_seqno(3) == 9
    stream = ConsumerStream(policy.tracked[3], 1)
    feed, draft = FakeFeed(), FakeFeed(is_draft=True)
    assert policy.accepted(cast(Feed, feed), stream, 9) == ""
    policy.tracked.put(3, Progress.at(StreamPosition.at(7, 4)))
    assert "rolled back" in policy.accepted(cast(Feed, feed), stream, 9)
    assert policy.accepted(cast(Feed, draft), stream, 9) == ""
    assert (feed.closed, draft.closed, policy.ends.may_overshoot) == ([3], [], True)


def test_a_stream_without_an_end_is_never_complete() -> None:
    endless, finite = policy_of(), policy_of(ends={3: 5})
    stream = ConsumerStream(endless.tracked[3], 1)
    stream.end_reason = "ok"
    assert endless.end_seqno(3) == NO_END
    assert not endless.is_complete(stream)
    assert finite.is_complete(stream)
    stream.end_reason = "state changed"
    assert not finite.is_complete(stream)


def test_refusals_that_may_pass_are_retried_until_the_patience_ends() -> None:
    policy = policy_of(patience_s=2.5)
    assert policy.retries(NotMyVbucket())
    assert policy.retries(TemporaryFailure())
    assert not policy.retries(InvalidArguments())
    assert str(policy.give_up(3, "why", unowned=True)) == "vbucket 3: no stream for 2.5 s: why"
