"""One stream into one copy: what it takes, what it refuses, and its position after each message."""

import pytest

from tests.support.recording_sink import RecordingCopy
from upriver.errors import InvalidArguments, KeyExists, KeyNotFound, OutOfRange, ProtocolViolation
from upriver.model import FailoverEntry, FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.model.position import NO_END, SEQNO_MAX
from upriver.protocol.consumer.consumer_stream import ConsumerStream
from upriver.protocol.stream_state import TRANSITIONS, StreamEvent, StreamState
from upriver.wire import dcp, upr

LOG = FailoverLog((FailoverEntry(7, 3), FailoverEntry(6, 0)))


def opened(
    position: StreamPosition | None = None, *, speaks_dcp: bool = True, starts_inclusive: bool = False
) -> tuple[ConsumerStream, RecordingCopy]:
    copy = RecordingCopy(0, position)
    stream = ConsumerStream(copy, 9, starts_inclusive=starts_inclusive)
    stream.accept(LOG, speaks_dcp=speaks_dcp)
    return stream, copy


def changes(*seqnos: int, speaks_dcp: bool = True) -> bytes:
    mutation = dcp.Mutation if speaks_dcp else upr.Mutation
    return b"".join(mutation(by_seqno=seqno, key=b"k%d" % seqno, opaque=9).encode() for seqno in seqnos)


def test_a_snapshot_and_its_changes() -> None:
    stream, copy = opened()
    assert copy.failover_log == LOG
    stream.marker(0, 5, 1)
    data = changes(2, 3, 5)
    assert stream.run(data, 0) == len(data)
    assert stream.position == StreamPosition(7, 5, Snapshot(0, 5))
    assert copy.told == ["(0,5] 0x1", "k2 k3 k5"]
    assert stream.changes_received == 3


def test_the_end_of_a_drafts_snapshot_proves_it_whole() -> None:
    """A consumer that is cut off there need not roll back behind it; nothing comes before the next snapshot begins."""
    stream, copy = opened(StreamPosition(7, 4, Snapshot(2, 8)), speaks_dcp=False)  # resumed inside a snapshot
    stream.unbounded_marker()
    data = changes(5, 8, speaks_dcp=False)
    assert stream.run(data, 0) == len(data)
    assert copy.position.consistent_seqno == 2
    stream.snapshot_end()
    assert copy.position == StreamPosition.at(7, 8)
    assert stream.position == StreamPosition.at(7, 8)
    assert stream.run(changes(9, speaks_dcp=False), 0) == 0
    assert isinstance(stream.refuse(9), InvalidArguments)
    assert stream.life.ended


@pytest.mark.parametrize("draft", [False, True])
def test_a_stream_that_was_cut_at_its_end_stands_there(draft: bool) -> None:
    """The change at the end may be a deletion that is purged: at the last change before it the key was still there."""
    copy = RecordingCopy()
    stream = ConsumerStream(copy, 9)
    stream.accept(LOG, speaks_dcp=False, end_seqno=3)
    stream.unbounded_marker()
    stream.run(changes(2, speaks_dcp=False), 0)
    if draft:
        stream.snapshot_end()
    assert copy.position.consistent_seqno == 0
    stream.end(upr.EndReason.OK)
    assert copy.position == StreamPosition.at(7, 3)


def test_a_stream_without_anything_before_its_end_stands_there_too() -> None:
    copy = RecordingCopy(0, StreamPosition.at(7, 5))
    stream = ConsumerStream(copy, 9)
    stream.accept(LOG, speaks_dcp=False, end_seqno=8)
    stream.end(upr.EndReason.OK)
    assert copy.position == StreamPosition.at(7, 8)


@pytest.mark.parametrize("reason", [upr.EndReason.OK, upr.EndReason.STATE_CHANGED])
def test_an_end_that_proves_nothing_leaves_the_place(reason: upr.EndReason) -> None:
    torn = StreamPosition(7, 4, Snapshot(2, 8))
    copy = RecordingCopy(0, torn if reason is upr.EndReason.OK else StreamPosition.at(7, 4))
    stream = ConsumerStream(copy, 9)
    stream.accept(LOG, speaks_dcp=False, end_seqno=6)
    before = copy.position
    stream.end(reason)
    assert copy.position == before


def test_a_snapshot_that_has_not_begun_cannot_end() -> None:
    stream, _ = opened(speaks_dcp=False)
    with pytest.raises(ProtocolViolation):
        stream.snapshot_end()


def test_an_old_change_is_refused_and_the_stream_goes_on() -> None:
    stream, _ = opened(StreamPosition.at(7, 4))
    stream.marker(4, 9, 1)
    assert stream.run(changes(4), 0) == 0
    assert isinstance(stream.refuse(4), OutOfRange)
    assert not stream.life.ended
    assert stream.run(changes(5), 0) > 0


def test_a_change_beyond_its_snapshot_ends_the_stream() -> None:
    """What lies between may be missing: no stream may resume from here, and the position stays."""
    stream, copy = opened()
    stream.marker(0, 3, 1)
    data = changes(2, 4)
    assert stream.run(data, 0) == len(changes(2))
    assert isinstance(stream.refuse(4), OutOfRange)
    assert stream.life.ended
    assert copy.closed
    assert copy.position.seqno == 2
    assert "beyond" in stream.end_reason


def test_a_change_without_a_marker_ends_the_stream() -> None:
    stream, _ = opened()
    assert stream.run(changes(1), 0) == 0
    assert isinstance(stream.refuse(1), InvalidArguments)
    assert stream.life.ended


def test_a_change_without_a_key_ends_the_stream() -> None:
    stream, _ = opened()
    stream.marker(0, 3, 1)
    assert isinstance(stream.refuse(1), InvalidArguments)
    assert stream.life.ended


def test_a_copy_that_became_active_receives_no_more() -> None:
    stream, copy = opened()
    stream.marker(0, 3, 1)
    copy.state = VbucketState.ACTIVE
    assert stream.run(changes(1), 0) == 0
    assert isinstance(stream.refuse(1), KeyNotFound)
    assert stream.life.ended


def test_a_copy_that_was_active_meanwhile_receives_no_more() -> None:
    """What it wrote may lie between two changes that follow each other: no seqno shows it."""
    for event in ("marker", "run", "advance", "flush", "handed_over"):
        stream, copy = opened()
        stream.marker(0, 9, 1)
        copy.replace_failover_log(LOG.branch(99, 0))
        told = list(copy.told)
        if event == "run":
            assert stream.run(changes(5), 0) == 0
            assert isinstance(stream.refuse(5), KeyNotFound)
            assert stream.life.ended
        else:
            arguments = {"marker": (0, 12, 1), "advance": (5,), "flush": (), "handed_over": (VbucketState.PENDING,)}
            with pytest.raises(KeyNotFound):
                getattr(stream, event)(*arguments[event])
        assert copy.told == told


def test_a_copy_that_refuses_the_log_has_no_stream() -> None:
    class Active(RecordingCopy):
        def replace_failover_log(self, log: FailoverLog) -> None:
            raise KeyExists(f"an active vbucket keeps its own failover log, not {log}")

    stream = ConsumerStream(Active(), 9)
    with pytest.raises(KeyExists):
        stream.accept(LOG, speaks_dcp=True)
    stream.refused(KeyExists("active"))
    assert stream.life.ended


def test_a_marker_that_ends_before_where_we_stand_is_refused() -> None:
    stream, copy = opened(StreamPosition.at(7, 4))
    with pytest.raises(OutOfRange):
        stream.marker(0, 3, 1)
    assert copy.told == []


def test_a_marker_that_ends_before_it_starts_is_refused() -> None:
    stream, copy = opened(StreamPosition.at(7, 4))
    with pytest.raises(OutOfRange):
        stream.marker(9, 7, 1)
    assert copy.told == []
    stream.marker(8, 7, 1)  # the first seqno of nothing, where starts are inclusive
    assert stream.position.snapshot == Snapshot(4, 7)


def test_the_bounds_that_are_kept_in_mid_snapshot() -> None:
    """The start is not later than what was whole, and the larger end counts."""
    stream, _ = opened(StreamPosition(7, 5, Snapshot(2, 9)))
    stream.marker(5, 7, 1)
    assert stream.position.snapshot == Snapshot(2, 9)
    stream, _ = opened(StreamPosition(7, 5, Snapshot(2, 9)))
    stream.marker(5, 12, 1)
    assert stream.position.snapshot == Snapshot(2, 12)


def test_starts_of_deployed_servers_are_the_first_seqno() -> None:
    stream, copy = opened(starts_inclusive=True)
    stream.marker(1, 3, 1)
    stream.marker(0, 3, 1)
    assert copy.told == ["(0,3] 0x1", "(0,3] 0x1"]


def test_a_marker_is_answered_when_its_last_change_has_come() -> None:
    stream, _ = opened()
    stream.marker(0, 3, 9)
    stream.run(changes(2), 0)
    assert not stream.take_marker_answer()
    stream.advance(3)
    assert stream.take_marker_answer()
    assert not stream.take_marker_answer()


def test_advance_stays_inside_its_snapshot() -> None:
    stream, copy = opened()
    stream.marker(0, 3, 1)
    stream.advance(2)
    for wrong in (2, 4):
        with pytest.raises(OutOfRange):
            stream.advance(wrong)
    assert copy.told[-1] == "advanced to 2"


def test_upr_does_not_say_how_far_it_is() -> None:
    """Its snapshots have no end that would bound it."""
    stream, copy = opened(speaks_dcp=False)
    stream.unbounded_marker()
    for seqno in (5, SEQNO_MAX, 2**64 - 1):
        with pytest.raises(InvalidArguments):
            stream.advance(seqno)
    assert copy.position.seqno == 0


def test_a_flush_empties_the_copy() -> None:
    stream, copy = opened(StreamPosition.at(7, 4))
    stream.flush()
    assert copy.told == ["cleared"]
    assert stream.position.seqno == 0
    stream.end(dcp.EndReason.STATE_CHANGED)
    assert stream.end_reason == "state changed"


def test_upr_is_whole_at_the_next_marker() -> None:
    stream, copy = opened(speaks_dcp=False)
    stream.unbounded_marker()
    stream.run(changes(2, 5, speaks_dcp=False), 0)
    assert copy.position.consistent_seqno == 0
    stream.unbounded_marker()
    assert copy.told == [f"(0,{NO_END}] 0x0", "k2 k5", "whole at 5", f"(5,{NO_END}] 0x0"]
    stream.run(changes(6, speaks_dcp=False), 0)
    assert copy.position.consistent_seqno == 5
    stream.end(upr.EndReason.OK)
    assert copy.position.consistent_seqno == 6


def test_upr_resumed_inside_a_snapshot_is_not_whole_at_its_first_marker() -> None:
    stream, copy = opened(StreamPosition(7, 5, Snapshot(2, NO_END)), speaks_dcp=False)
    stream.unbounded_marker()
    assert copy.position.consistent_seqno == stream.position.consistent_seqno == 2
    stream.run(changes(6, speaks_dcp=False), 0)
    stream.unbounded_marker()
    assert copy.position.consistent_seqno == stream.position.consistent_seqno == 6


@pytest.mark.parametrize("reason", [upr.EndReason.STATE_CHANGED, upr.EndReason.STATE_CHANGED_EARLY])
def test_upr_that_ends_otherwise_is_not_whole(reason: upr.EndReason) -> None:
    stream, copy = opened(speaks_dcp=False)
    stream.unbounded_marker()
    stream.run(changes(2, speaks_dcp=False), 0)
    stream.end(reason)
    assert copy.position.consistent_seqno == 0


def test_upr_that_ends_ok_where_it_was_resumed_is_not_whole() -> None:
    stream, copy = opened(StreamPosition(7, 5, Snapshot(2, NO_END)), speaks_dcp=False)
    stream.end(upr.EndReason.OK)
    assert copy.position.consistent_seqno == 2


@pytest.mark.parametrize("speaks_dcp", [True, False])
def test_a_takeover(speaks_dcp: bool) -> None:
    stream, copy = opened(StreamPosition(7, 5, Snapshot(2, NO_END)) if not speaks_dcp else None, speaks_dcp=speaks_dcp)
    stream.handed_over(VbucketState.PENDING)
    copy.state = VbucketState.PENDING
    assert stream.life.state.value == StreamState.PENDING.value
    if not speaks_dcp:
        assert copy.position.consistent_seqno == 5  # there was nothing more to send
    stream.pending_answered()
    stream.handed_over(VbucketState.ACTIVE)
    assert stream.life.state.value == StreamState.ACTIVATING.value
    stream.end(dcp.EndReason.OK)
    assert stream.life.ended


def test_no_copy_becomes_active_in_the_middle_of_a_snapshot() -> None:
    """What was announced and has not come would be missing for good."""
    stream, copy = opened()
    stream.handed_over(VbucketState.PENDING)
    copy.state = VbucketState.PENDING
    stream.pending_answered()
    stream.marker(0, 5, 1)
    stream.run(changes(2, 3), 0)
    with pytest.raises(OutOfRange, match="ends at 5"):
        stream.handed_over(VbucketState.ACTIVE)
    stream.run(changes(5), 0)
    stream.handed_over(VbucketState.ACTIVE)
    assert stream.life.state is StreamState.ACTIVATING


@pytest.mark.parametrize("speaks_dcp", [True, False])
@pytest.mark.parametrize("first", VbucketState)
@pytest.mark.parametrize("second", VbucketState)
def test_every_role_after_every_other(first: VbucketState, second: VbucketState, speaks_dcp: bool) -> None:
    stream, copy = opened(speaks_dcp=speaks_dcp)
    for state in (first, second):
        stream.handed_over(state)
        copy.state = state
        assert stream.has_given_role


@pytest.mark.parametrize("state", VbucketState)
@pytest.mark.parametrize("now", VbucketState)
def test_a_role_that_another_client_gave(now: VbucketState, state: VbucketState) -> None:
    """The copy must not become active, and neither leave a role in which it receives nothing."""
    stream, copy = opened()
    given = VbucketState.PENDING if now is VbucketState.REPLICA else VbucketState.REPLICA
    stream.handed_over(given)
    copy.state = now
    assert not stream.has_given_role
    if state is VbucketState.ACTIVE or now in (VbucketState.ACTIVE, VbucketState.DEAD):
        with pytest.raises(InvalidArguments, match=f"is {now.value} and cannot become {state.value}"):
            stream.handed_over(state)
    else:
        stream.handed_over(state)
        copy.state = state
        assert stream.has_given_role


def test_each_way_to_its_end() -> None:
    for leave, reason in (("close", "closed"), ("lose", "disconnected")):
        stream, copy = opened()
        getattr(stream, leave)()
        getattr(stream, leave)()  # once is enough
        assert stream.end_reason == reason
        assert copy.closed
    stream = ConsumerStream(RecordingCopy(), 9)
    stream.refused(OutOfRange("too far"))
    assert "too far" in stream.end_reason


#: Events of the table that a stream never receives, with the reason.
NOT_RECEIVED = {
    StreamEvent.START: "only the drafts have it; their consumer hears it as nothing (draft_translation)",
    StreamEvent.SNAPSHOT_END: "only the drafts have it; their consumer is whole at the next marker (draft_translation)",
}
#: What `upr` cannot say.
NOT_IN_UPR = {StreamEvent.ADVANCE: "a filtered end of a snapshot shows by the next marker"}
ROADS = {
    StreamState.REQUESTED: (),
    StreamState.OPEN: (StreamEvent.ACCEPT,),
    StreamState.SNAPSHOT: (StreamEvent.ACCEPT, StreamEvent.MARKER),
    StreamState.PENDING: (StreamEvent.ACCEPT, StreamEvent.SET_PENDING),
    StreamState.DRAINING: (StreamEvent.ACCEPT, StreamEvent.SET_PENDING, StreamEvent.PENDING_ANSWERED),
    StreamState.ACTIVATING: (
        StreamEvent.ACCEPT,
        StreamEvent.SET_PENDING,
        StreamEvent.PENDING_ANSWERED,
        StreamEvent.SET_ACTIVE,
    ),
}


def happen(stream: ConsumerStream, copy: RecordingCopy, event: StreamEvent, *, speaks_dcp: bool) -> None:
    """Let a stream hear what the event stands for."""
    match event:
        case StreamEvent.ACCEPT:
            stream.accept(LOG, speaks_dcp=speaks_dcp)
        case StreamEvent.REFUSE:
            stream.refused(OutOfRange("too far"))
        case StreamEvent.MARKER:
            stream.marker(0, 50, 1) if speaks_dcp else stream.unbounded_marker()
        case StreamEvent.CHANGE:
            if stream.life.state is StreamState.DRAINING:
                happen(stream, copy, StreamEvent.MARKER, speaks_dcp=speaks_dcp)
            data = changes(stream.position.seqno + 1, speaks_dcp=speaks_dcp)
            assert stream.run(data, 0) == len(data)
        case StreamEvent.ADVANCE:
            if stream.life.state is StreamState.DRAINING:
                happen(stream, copy, StreamEvent.MARKER, speaks_dcp=speaks_dcp)
            stream.advance(stream.position.seqno + 1)
        case StreamEvent.FLUSH:
            stream.flush()
        case StreamEvent.SET_PENDING:
            stream.handed_over(VbucketState.PENDING)
            copy.state = VbucketState.PENDING
        case StreamEvent.PENDING_ANSWERED:
            stream.pending_answered()
        case StreamEvent.SET_ACTIVE:
            stream.handed_over(VbucketState.ACTIVE)
            copy.state = VbucketState.ACTIVE
        case StreamEvent.SET_OUT_OF_ORDER:
            stream.handed_over(VbucketState.REPLICA)
            copy.state = VbucketState.REPLICA
        case StreamEvent.END:
            stream.end(dcp.EndReason.OK if speaks_dcp else upr.EndReason.OK)
        case StreamEvent.CLOSE:
            stream.close()
        case _:
            assert event is StreamEvent.LOSE
            stream.lose()


@pytest.mark.parametrize("speaks_dcp", [True, False], ids=["dcp", "upr"])
@pytest.mark.parametrize(
    ("state", "event"),
    [(state, event) for state in TRANSITIONS for event in TRANSITIONS[state] if event not in NOT_RECEIVED],
    ids=str,
)
def test_each_transition_of_the_table(state: StreamState, event: StreamEvent, speaks_dcp: bool) -> None:
    copy = RecordingCopy()
    stream = ConsumerStream(copy, 9)
    for step in ROADS[state]:
        happen(stream, copy, step, speaks_dcp=speaks_dcp)
    assert stream.life.state is state
    if not speaks_dcp and event in NOT_IN_UPR:
        return
    happen(stream, copy, event, speaks_dcp=speaks_dcp)
    assert stream.life.state is TRANSITIONS[state][event]
    assert copy.closed is stream.life.ended
