"""Which streams a task requests, and what a rollback or a missing owner does to its ranges."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_feed import FakeFeed
from upriver.client.consumer import Progress, Rollback, Run, VbucketEvent
from upriver.errors import ClusterMapError, DataLoss, InvalidArguments, NodeUnavailable, OutOfRange, StreamRefused
from upriver.model import FailoverEntry, FailoverLog, Snapshot, StreamPosition
from upriver.protocol.consumer import ConsumerStream
from upriver.spark.batch_planner import Range, RangeEnd, RangeRollback, Rules
from upriver.spark.offsets import VbucketOffset
from upriver.spark.options import ReadOptions
from upriver.spark.range_policy import RangePolicy
from upriver.spark.rows import Bounds
from upriver.wire import dcp
from upriver.wire.dialects.memcached import GetAllVbucketSeqnos

LOG = FailoverLog((FailoverEntry(7, 0),))
RANGE = Range(VbucketOffset(3, 7, 8, 8, 2, 5), 12)


class PolicyUnderTest(RangePolicy):
    """A policy with one range, and what it reports."""

    def __init__(self, rules: Rules = Rules("emit"), ranges: tuple[Range, ...] = (RANGE,)) -> None:  # noqa: B008
        self.reported: list[tuple[VbucketEvent, Bounds]] = []
        self.finished = 0
        super().__init__(
            ReadOptions().consumer_settings(("seqno",)),
            rules,
            on_rollback=self._note,
            on_finished=self._count,
        )
        self.start(ranges)

    def _note(self, event: VbucketEvent, progress: Progress) -> None:
        self.reported.append((event, self.bounds(Run(event.vbucket, 1, progress.position))))

    def _count(self) -> None:
        self.finished += 1

    def roll_back(self, seqno: int, log: FailoverLog) -> None:
        vbucket = self.tracked.open(3)
        vbucket.roll_back(seqno)
        vbucket.replace_failover_log(log)


@pytest.mark.parametrize(
    ("feed", "flags", "must_check"),
    [
        (FakeFeed(), int(dcp.StreamFlag.ACTIVE_ONLY), False),
        (FakeFeed(is_upriver_node=False), int(dcp.StreamFlag.ACTIVE_ONLY), True),
        (FakeFeed(speaks_dcp=False), 0, True),
    ],
)
def test_only_active_copies_are_read(feed: Any, flags: int, must_check: bool) -> None:
    policy = PolicyUnderTest()
    assert (policy.flags(feed), policy.must_check_active(feed)) == (flags, must_check)


def test_a_planned_rollback_is_reported_at_the_start() -> None:
    policy = PolicyUnderTest(
        ranges=(RANGE._replace(rollback=RangeRollback(8, 1, 7)), Range(VbucketOffset(4, 7, 5, 5), 5))
    )
    assert policy.reported == [(Rollback(3, 8, 1, 7), Bounds(7, 2, 8, 8))]
    assert policy.ends.unfinished == {3}  # the other range is empty


def test_a_rollback_on_the_same_branch_is_read_again_and_reported_with_the_next_snapshot() -> None:
    policy = PolicyUnderTest()
    policy.roll_back(6, LOG)
    assert policy.reported == []
    run = Run(3, 2, StreamPosition(7, 9, Snapshot(6, 20)))
    policy.received([run])
    assert policy.reported == [(Rollback(3, 6, 7, 7), Bounds(7, 2, 6, 20))]
    assert policy.bounds(run) == Bounds(7, 2, 6, 20)
    with pytest.raises(StreamRefused, match="the task must run again"):
        policy.roll_back(6, LOG)  # rows above it have left the task


def test_a_rollback_to_another_branch_finishes_the_range() -> None:
    policy = PolicyUnderTest()
    policy.roll_back(6, FailoverLog((FailoverEntry(9, 6), FailoverEntry(7, 0))))
    assert policy.reported == [(Rollback(3, 6, 7, 9), Bounds(9, 2, 6, 6))]
    assert (policy.ends.unfinished, policy.finished) == (set(), 1)
    feed: Any = FakeFeed()
    assert policy.accepted(feed, ConsumerStream(policy.tracked[3], 1), 12) == ""
    assert feed.closed == [3]


def test_a_node_that_does_not_know_the_branch_is_doubted_once() -> None:
    policy = PolicyUnderTest()
    feed: Any = FakeFeed()
    feed.endpoint = "a:1"
    for expected in ("a:1 does not know its branch", ""):
        policy.tracked[3].replace_failover_log(FailoverLog((FailoverEntry(9, 0),)))
        assert policy.accepted(feed, ConsumerStream(policy.tracked[3], 1), 12) == expected
    assert policy.ends.unfinished == set()


def test_an_exact_end_that_is_not_retained_is_read_without() -> None:
    policy = PolicyUnderTest()
    exact = policy.settings_for(3)
    assert policy.changes_request(3, OutOfRange())
    assert not policy.changes_request(3, OutOfRange())
    assert not policy.changes_request(3, InvalidArguments())
    inexact = policy.settings_for(3)
    assert (inexact.exact_end, inexact.name) == (False, f"current:{exact.name}")


def test_an_exact_range_of_a_batch_fails_where_its_end_is_not_retained() -> None:
    policy = PolicyUnderTest(ranges=(RANGE._replace(end=RangeEnd.EXACT),))
    with pytest.raises(StreamRefused, match="vbucket 3: the state at 12 is gone: leave out endingOffsets"):
        policy.changes_request(3, OutOfRange("the state at 12 is gone"))
    with pytest.raises(StreamRefused, match="cannot give the state at 12"):
        policy.received([Run(3, 2, StreamPosition(7, 13, Snapshot(6, 20)))])


def test_an_exact_range_of_a_batch_is_read_on_a_branch_that_shares_its_end() -> None:
    for begun, shares in ((12, True), (11, False)):
        policy, feed = PolicyUnderTest(ranges=(RANGE._replace(end=RangeEnd.EXACT),)), FakeFeed()
        other: Any = feed
        policy.tracked[3].replace_failover_log(FailoverLog((FailoverEntry(9, begun), FailoverEntry(7, 0))))
        if shares:
            assert policy.accepted(other, ConsumerStream(policy.tracked[3], 1), 12) == ""
            assert (feed.closed, policy.ends.unfinished) == ([], {3})
        else:
            with pytest.raises(StreamRefused, match="another history before 12"):
                policy.accepted(other, ConsumerStream(policy.tracked[3], 1), 12)


def test_an_open_range_ends_at_the_high_seqno_of_the_node_that_accepts_it() -> None:
    policy, feed = PolicyUnderTest(ranges=(RANGE._replace(end=RangeEnd.OPEN),)), FakeFeed()
    other: Any = feed
    assert (policy.end_seqno(3), policy.must_check_active(other)) == (12, True)
    assert not policy.changes_request(3, OutOfRange())  # it is asked again, up to a newer end
    asyncio.run(policy.prepare(other, ask_for_seqnos({3: 20}), [3]))
    assert policy.end_seqno(3) == 20
    policy.tracked[3].replace_failover_log(FailoverLog((FailoverEntry(9, 11), FailoverEntry(7, 0))))
    assert policy.accepted(other, ConsumerStream(policy.tracked[3], 1), 20) == ""
    asyncio.run(policy.prepare(other, ask_for_seqnos({3: 6}), [3]))
    policy.roll_back(6, FailoverLog((FailoverEntry(10, 6), FailoverEntry(7, 0))))
    assert "below the requested end" in policy.accepted(other, ConsumerStream(policy.tracked[3], 1), 8)
    assert (feed.closed, policy.ends.unfinished) == ([3], {3})


def test_an_open_range_of_an_empty_vbucket_is_finished_without_a_stream() -> None:
    policy, feed = PolicyUnderTest(ranges=(Range(VbucketOffset(3), 0, end=RangeEnd.OPEN),)), FakeFeed()
    other: Any = feed
    asyncio.run(policy.prepare(other, ask_for_seqnos({3: 0}), [3]))
    assert (policy.ends.unfinished, policy.finished) == (set(), 1)


def ask_for_seqnos(seqnos: dict[int, int]) -> Any:
    """A connection to a node with these high seqnos."""

    class Answering:
        async def ask(self, request: object) -> Any:
            assert isinstance(request, GetAllVbucketSeqnos)
            pairs = (number.to_bytes(2, "big") + seqno.to_bytes(8, "big") for number, seqno in seqnos.items())
            return SimpleNamespace(value=b"".join(pairs))

    return Answering()


def test_a_stream_is_complete_at_the_end_of_its_range() -> None:
    policy = PolicyUnderTest()
    stream = ConsumerStream(policy.tracked[3], 1)
    stream.end_reason = "disconnected"
    assert not policy.is_complete(stream)
    stream.position = StreamPosition.at(7, 12)
    assert policy.is_complete(stream)


def test_everything_is_retried_until_the_patience_ends(caplog: pytest.LogCaptureFixture) -> None:
    strict, lax = PolicyUnderTest(), PolicyUnderTest(Rules("emit", fail_on_data_loss=False))
    assert all(strict.retries(error) for error in (InvalidArguments(), ClusterMapError("no map")))
    assert strict.settings.gives_up_after_s == 60
    assert not strict.retries(NodeUnavailable("a:1", "gone"))  # the supervisor itself retries it
    assert isinstance(strict.give_up(3, "why", unowned=True), DataLoss)
    for policy in (strict, lax):
        error = policy.give_up(3, "why", unowned=False)
        assert isinstance(error, StreamRefused)
        assert "why (changes 8 to 12, tried for 60 s)" in str(error)
    with caplog.at_level(logging.WARNING):
        assert lax.give_up(3, "why", unowned=True) is None
    assert "left out, because failOnDataLoss is false" in caplog.text
    assert (lax.ends.unfinished, strict.ends.unfinished) == (set(), {3})
