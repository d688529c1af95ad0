"""Which stream has the next turn."""

from dataclasses import dataclass

import pytest

from upriver.protocol.producer.stream_scheduler import StreamScheduler


@dataclass
class Stream:
    name: str
    queued: bool = False


def test_a_stream_that_woke_up_goes_first_and_none_starves() -> None:
    turns: StreamScheduler[Stream] = StreamScheduler()
    backfill = Stream("backfill")
    turns.again(backfill)
    served = []
    for number in range(12):
        turns.wake(Stream(f"live {number}"))
        stream = turns.next()
        assert stream is not None
        served.append(stream.name.split()[0])
        if stream is backfill:
            turns.again(stream)
    assert served == (["live"] * 3 + ["backfill"]) * 3
    assert len(turns) == 4


@pytest.mark.parametrize("turns_before", range(8))
def test_a_stream_that_wakes_up_goes_first_whatever_was_before(turns_before: int) -> None:
    turns: StreamScheduler[Stream] = StreamScheduler()
    backfill, live = Stream("backfill"), Stream("live")
    for _ in range(turns_before):
        turns.wake(live)
        assert turns.next() is live
    turns.again(backfill)
    for _ in range(turns_before):
        assert turns.next() is backfill
        turns.again(backfill)
    turns.wake(live)
    assert turns.next() is live


def test_no_stream_is_in_the_queue_twice() -> None:
    turns: StreamScheduler[Stream] = StreamScheduler()
    one, other = Stream("one"), Stream("other")
    assert turns.wake(one)
    assert not turns.wake(one)
    assert not turns.again(one)
    assert turns.again(other)
    assert turns.next() is one
    assert turns.wake(one)
    assert {id(turns.next()), id(turns.next())} == {id(one), id(other)}
    assert turns.next() is None


def test_a_stream_that_leaves_has_no_turn_and_may_come_back() -> None:
    turns: StreamScheduler[Stream] = StreamScheduler()
    woken, busy, other = Stream("woken"), Stream("busy"), Stream("other")
    turns.remove(other)  # it is not there
    turns.wake(woken)
    turns.again(busy)
    turns.again(other)
    turns.remove(woken)
    turns.remove(busy)
    assert (len(turns), turns.next(), turns.next()) == (1, other, None)
    assert turns.wake(woken)
    assert turns.again(busy)


def test_after_the_end_no_stream_has_a_turn() -> None:
    turns: StreamScheduler[Stream] = StreamScheduler()
    turns.wake(Stream("one"))
    turns.again(Stream("other"))
    turns.clear()
    assert not turns
    assert turns.next() is None


def test_in_line_one_is_served_to_its_end_before_the_next() -> None:
    turns: StreamScheduler[Stream] = StreamScheduler()
    streams = [Stream("a"), Stream("b"), Stream("c")]
    for stream in streams:
        turns.wake(stream, last=True)
    served = []
    left = {"a": 3, "b": 2, "c": 1}
    while (stream := turns.next()) is not None:  # type: ignore[assignment]
        served.append(stream.name)
        left[stream.name] -= 1
        if left[stream.name]:
            turns.again(stream, first=True)
    assert "".join(served) == "aaabbc"


def test_a_stream_that_wakes_up_goes_before_those_in_line() -> None:
    turns: StreamScheduler[Stream] = StreamScheduler()
    turns.wake(Stream("backfill"), last=True)
    turns.wake(Stream("live"))
    assert [getattr(turns.next(), "name", None) for _ in range(3)] == ["live", "backfill", None]
