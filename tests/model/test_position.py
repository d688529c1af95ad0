"""Where a consumer stands: a position cannot be wrong, and "whole" means what it says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import examples
from upriver.errors import PositionError
from upriver.model import Snapshot, StreamPosition
from upriver.model.position import NO_END

SEQNOS = st.integers(0, NO_END)
SMALL = st.integers(0, 20)


@st.composite
def positions(draw: st.DrawFn) -> StreamPosition:
    start, seqno, end = sorted(draw(st.tuples(SMALL, SMALL, SMALL)))
    return StreamPosition(7, seqno, Snapshot(start, end))


def test_a_stream_without_an_end_ends_at_the_largest_number() -> None:
    assert NO_END == 0xFFFFFFFFFFFFFFFF


@given(st.integers(-5, NO_END + 5), st.integers(-5, NO_END + 5))
def test_a_snapshot_reaches_from_a_seqno_to_one_not_before_it(start: int, end: int) -> None:
    if 0 <= start <= end <= NO_END:
        assert (Snapshot(start, end).start, Snapshot(start, end).end) == (start, end)
    else:
        with pytest.raises(PositionError):
            Snapshot(start, end)


@given(SMALL, SMALL, SMALL)
def test_the_start_of_a_snapshot_does_not_belong_to_it(start: int, size: int, seqno: int) -> None:
    snapshot = Snapshot(start, start + size)
    assert (seqno in snapshot) == (seqno in range(start + 1, start + size + 1))


@given(SMALL, SMALL, SMALL)
def test_a_position_lies_in_its_snapshot(start: int, size: int, seqno: int) -> None:
    snapshot = Snapshot(start, start + size)
    if start <= seqno <= start + size:
        assert StreamPosition(1, seqno, snapshot).seqno == seqno
    else:
        with pytest.raises(PositionError, match="lies outside its snapshot"):
            StreamPosition(1, seqno, snapshot)


def test_the_beginning_is_before_every_change() -> None:
    beginning = StreamPosition.beginning()
    assert (beginning.vbucket_uuid, beginning.seqno, beginning.consistent_seqno) == (0, 0, 0)


@given(SEQNOS)
def test_a_position_held_whole_is_whole(seqno: int) -> None:
    position = StreamPosition.at(7, seqno)
    assert position.consistent_seqno == position.seqno == seqno
    assert position.vbucket_uuid == 7


@given(positions())
def test_a_position_is_whole_before_and_after_its_snapshot_and_not_inside(position: StreamPosition) -> None:
    start, end = position.snapshot.start, position.snapshot.end
    expected = start if start < position.seqno < end else position.seqno
    assert position.consistent_seqno == expected


@given(positions(), SMALL)
def test_only_a_change_that_follows_inside_the_snapshot_is_taken(position: StreamPosition, seqno: int) -> None:
    if position.seqno < seqno <= position.snapshot.end:
        after = position.advanced(seqno)
        assert (after.seqno, after.snapshot, after.vbucket_uuid) == (seqno, position.snapshot, 7)
    else:
        with pytest.raises(PositionError, match=f"change {seqno} does not follow {position.seqno}"):
            position.advanced(seqno)


@given(positions(), SMALL, SMALL)
def test_a_marker_is_kept_with_the_earlier_start_and_the_later_end(
    position: StreamPosition, start: int, size: int
) -> None:
    marker = Snapshot(start, start + size)
    whole = position.consistent_seqno
    unfinished = whole != position.seqno
    end = max(marker.end, position.snapshot.end) if unfinished else marker.end
    if end < position.seqno:
        with pytest.raises(PositionError, match=f"before the last change {position.seqno}"):
            position.announced(marker)
    else:
        after = position.announced(marker)
        assert after.snapshot == Snapshot(min(marker.start, whole), end)
        assert (after.seqno, after.vbucket_uuid) == (position.seqno, 7)
        assert after.consistent_seqno <= whole


class Feed:
    """One producer that writes, one consumer that is cut off and comes back: the brute force behind "whole".

    Snapshots hold each key once. They end wherever the script says, as those of deployed servers do.
    """

    def __init__(self) -> None:
        self.history: list[str] = []
        self.data: dict[str, int] = {}
        self.position = StreamPosition.at(7, 0)
        self.cursor: int | None = None
        self.queue: list[int] = []

    def state_at(self, seqno: int) -> dict[str, int]:
        return {key: place + 1 for place, key in enumerate(self.history[:seqno])}

    def write(self, key: str) -> None:
        self.history.append(key)

    def cut(self) -> None:
        self.cursor, self.queue = None, []

    def receive(self, size: int, prints_first: bool) -> None:
        if self.queue:
            seqno = self.queue.pop(0)
            self.data[self.history[seqno - 1]] = seqno
            self.position = self.position.advanced(seqno)
            return
        cursor = self.position.seqno if self.cursor is None else self.cursor
        end = min(cursor + size, len(self.history))
        if end == cursor:
            return
        newest = self.state_at(end)
        self.queue = sorted(seqno for seqno in newest.values() if seqno > cursor)
        self.position = self.position.announced(Snapshot(self.queue[0] if prints_first else cursor, end))
        self.cursor = end


STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from("abc")),
    st.tuples(st.just("receive"), st.integers(1, 6)),
    st.tuples(st.just("receive"), st.integers(1, 6)),
    st.tuples(st.just("cut")),
)


@settings(max_examples=examples(600))
@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(STEPS, max_size=25), st.booleans())
def test_a_consumer_that_is_whole_holds_a_state_that_the_producer_had(
    before: list[str], script: list[tuple[str, object]], prints_first: bool
) -> None:
    feed = Feed()
    feed.history += before
    for action, *argument in script:
        if action == "write":
            feed.write(str(argument[0]))
        elif action == "cut":
            feed.cut()
        else:
            feed.receive(int(str(argument[0])), prints_first)
        if feed.position.consistent_seqno == feed.position.seqno:
            assert feed.data == feed.state_at(feed.position.seqno)


def test_a_snapshot_not_finished_before_a_cut_must_be_finished_after_it() -> None:
    feed = Feed()
    feed.history += ["a", "b", "a"]
    feed.receive(3, False)
    feed.receive(3, False)  # b@2: a@1 was left out, because a@3 comes later
    feed.cut()
    feed.write("c")
    feed.receive(2, False)
    assert feed.position.snapshot == Snapshot(0, 4)
    assert feed.position.consistent_seqno == 0


def test_a_position_for_people() -> None:
    assert str(StreamPosition.beginning()) == "the beginning"
    assert str(StreamPosition.at(0x2A, 7)) == "seqno 7 of uuid 0x2a"
    assert str(StreamPosition(0x2A, 7, Snapshot(5, 9))) == "seqno 7 of uuid 0x2a (consistent at 5)"
