"""What a consumer's copies do when the source goes back."""

import pytest

from upriver.client.consumer.batches import Flush, Reset, Rollback, VbucketEvent
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.tracked_vbuckets import Policy, TrackedVbucket, TrackedVbuckets
from upriver.errors import KeyNotFound, NotSupported, StreamRolledBack
from upriver.model import FailoverEntry, FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.model.position import NO_END
from upriver.wire import dcp


class CopyUnderTest:
    """A copy and what it reported."""

    def __init__(self, policy: Policy) -> None:
        self.events: list[VbucketEvent] = []
        self.moves: list[int] = []
        self.tracked = TrackedVbuckets(
            {3: Progress.beginning()},
            policy,
            on_event=lambda event, _: self.events.append(event),
            on_move=lambda _, progress: self.moves.append(progress.position.seqno),
        )
        self.copy: TrackedVbucket = self.tracked.open(3)
        self.copy.replace_failover_log(FailoverLog.fresh(77))

    def receive(self, start: int, last: int, end: int) -> None:
        self.copy.begin_snapshot(Snapshot(start, end), 0)
        self.copy.apply(b"", dcp.dcp, last, 1)

    def back(self, seqno: int) -> int:
        where = self.copy.roll_back(seqno)
        assert self.events == []  # not before the source has accepted
        self.copy.replace_failover_log(FailoverLog((FailoverEntry(88, seqno), FailoverEntry(77, 0))))
        return where


def test_positions_follow() -> None:
    tested = CopyUnderTest("fail")
    tested.receive(0, 4, 9)
    assert tested.copy.position == StreamPosition(77, 4, Snapshot(0, 9))
    tested.copy.apply(b"", dcp.dcp, 9, 2)
    assert tested.copy.progress.consistent_from == 9
    tested.copy.begin_snapshot(Snapshot(9, 20), 0)
    tested.copy.advance(20)
    assert tested.moves == [20]
    tested.copy.begin_snapshot(Snapshot(20, NO_END), 0)  # as upr marks them
    tested.copy.apply(b"", dcp.dcp, 25, 1)
    assert tested.copy.position.consistent_seqno == 20
    tested.copy.complete_snapshot()
    assert tested.copy.position == StreamPosition.at(77, 25)
    assert tested.copy.state is VbucketState.REPLICA


def test_fail_says_where_it_stood() -> None:
    tested = CopyUnderTest("fail")
    tested.receive(0, 9, 9)
    with pytest.raises(StreamRolledBack) as caught:
        tested.copy.roll_back(5)
    assert (caught.value.vbucket, caught.value.seqno) == (3, 5)
    assert caught.value.position == StreamPosition(77, 9, Snapshot(0, 9))
    assert "use the policy 'rewind' or 'emit'" in str(caught.value)


def test_rewind_starts_over() -> None:
    tested = CopyUnderTest("rewind")
    tested.receive(0, 9, 9)
    tested.receive(9, 12, 12)
    assert tested.back(10) == 0
    assert tested.events == [Reset(3, 77, 88)]
    assert tested.copy.position.seqno == 0


def test_emit_reports_where_to_roll_back_to() -> None:
    tested = CopyUnderTest("emit")
    tested.receive(0, 9, 9)
    tested.receive(9, 12, 12)
    assert tested.back(10) == 10
    assert tested.events == [Rollback(3, 10, 77, 88)]
    assert tested.copy.position == StreamPosition.at(88, 10)


@pytest.mark.parametrize("seqno", [0, 8])
def test_a_rollback_below_the_first_consistent_state_is_a_reset(seqno: int) -> None:
    tested = CopyUnderTest("emit")
    tested.receive(0, 9, 9)
    tested.receive(9, 12, 12)
    assert tested.back(seqno) == 0
    assert tested.events == [Reset(3, 77, 88)]


def test_several_rollbacks_are_told_as_the_lowest() -> None:
    tested = CopyUnderTest("emit")
    tested.receive(0, 9, 9)
    tested.receive(9, 20, 20)
    tested.copy.roll_back(15)
    assert tested.back(11) == 11
    assert tested.events == [Rollback(3, 11, 77, 88)]


def test_a_flush_empties_and_starts_at_0() -> None:
    tested = CopyUnderTest("fail")
    tested.receive(0, 9, 9)
    tested.copy.clear()
    assert tested.events == [Flush(3)]
    assert tested.copy.position.seqno == 0
    assert tested.copy.progress.consistent_from is None


def test_nothing_is_taken_over_and_nothing_unknown_opened() -> None:
    tested = CopyUnderTest("fail")
    with pytest.raises(NotSupported):
        tested.tracked.set_state(3, VbucketState.ACTIVE, lambda: None)
    with pytest.raises(KeyNotFound):
        tested.tracked.open(4)
