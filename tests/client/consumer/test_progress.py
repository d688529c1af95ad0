"""Where a consumer stands, kept and read again."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.client.consumer.progress import Progress
from upriver.errors import PositionError
from upriver.model import FailoverEntry, FailoverLog, Snapshot, StreamPosition

u64 = st.integers(0, 2**64 - 1)


@st.composite
def progress(draw: st.DrawFn) -> Progress:
    start, seqno, end = sorted(draw(st.tuples(u64, u64, u64)))
    entries = draw(st.lists(st.builds(FailoverEntry, u64, u64), min_size=1, max_size=5))
    position = StreamPosition(draw(u64), seqno, Snapshot(start, end))
    return Progress(position, FailoverLog(tuple(entries)), draw(st.none() | u64))


@given(progress())
def test_json_and_back(value: Progress) -> None:
    assert Progress.from_json(json.loads(json.dumps(value.as_json()))) == value


@pytest.mark.parametrize(
    "value",
    [None, [], [1, 2, 3], [1, 9, 0, 5, 0, [[1, 0]]], [1, 1, 0, 5, 0, []], ["a", 1, 0, 5, 0, [[1, 0]]],
     [1, 1, 0, 5, 0, [[1]]], [1.5, 1, 0, 5, 0, [[1, 0]]], [1, 1, 0, 2**70, 0, [[1, 0]]]],
)  # fmt: skip
def test_what_cannot_be_right(value: object) -> None:
    with pytest.raises(PositionError):
        Progress.from_json(value)


def test_the_first_whole_seqno_is_kept() -> None:
    now = Progress.beginning()
    assert now.consistent_from is None
    for seqno, end, consistent_from in ((2, 5, None), (5, 5, 5), (8, 8, 5)):
        now = now.moved(StreamPosition(1, seqno, Snapshot(0, end)))
        assert now.consistent_from == consistent_from


def test_an_unknown_past_is_not_gone_back_into() -> None:
    inside = StreamPosition(1, 7, Snapshot(4, 9))
    assert Progress.at(inside).consistent_from == 4
    assert Progress.at(inside, consistent_from=2).consistent_from == 2
    assert Progress.at(StreamPosition.beginning()) == Progress.beginning()
