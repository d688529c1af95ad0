"""The queue delivers batches in order, and counts them when they are done."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from upriver.client.consumer.delivery_queue import Acknowledgements, DeliveryQueue
from upriver.client.consumer.end_positions import EndPositions
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import ConsumerSettings
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.model import Change, Event, StreamPosition, change_batch
from upriver.protocol.consumer import Run


class Source:
    """Stands for a feed and for its connection."""

    def __init__(self) -> None:
        self.connection = self
        self.done_bytes = 0
        self.paused = False

    def processed(self, wire_bytes: int) -> None:
        self.done_bytes += wire_bytes

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


def put(queue: DeliveryQueue, seqno: int, source: Any, on_done: Callable[[], object] | None = None) -> None:
    position = StreamPosition.at(7, seqno)
    queue._tracked.put(0, Progress.at(position))
    rows = change_batch([Change(vbucket=0, event=Event.MUTATION, seqno=seqno, key=b"k")])
    queue.received(cast(Feed, source), rows, (Run(0, 1, position),), 100, on_done)


def new_queue(window_bytes: int = 1000, *, auto_acknowledge: bool = True) -> DeliveryQueue:
    settings = ConsumerSettings(window_bytes=window_bytes, auto_acknowledge=auto_acknowledge)
    tracked = TrackedVbuckets({}, "fail", on_event=print, on_move=print)
    return DeliveryQueue(settings, tracked, EndPositions(print))


def seqno(queue: DeliveryQueue) -> int:
    return queue.progress[0].position.seqno if queue.progress else 0


def run(window_bytes: int = 1000, *, auto_acknowledge: bool = True) -> tuple[DeliveryQueue, Any]:
    return new_queue(window_bytes, auto_acknowledge=auto_acknowledge), Source()


def test_a_batch_is_done_when_the_next_is_asked_for() -> None:
    queue, source = run()
    for number in (1, 2, 3):
        put(queue, number, source)
    assert queue.queued_bytes == 300
    first = queue.take()
    assert first is not None
    assert (first.number, seqno(queue), source.done_bytes) == (1, 0, 0)
    queue.done(1)
    assert (seqno(queue), source.done_bytes) == (1, 100)
    queue.take()
    queue.take()
    assert queue.take() is None
    queue.done(1)  # of two that were taken the second was never looked at
    assert (seqno(queue), source.done_bytes, queue.queued_bytes) == (2, 200, 0)


def test_what_is_no_batch_keeps_its_place() -> None:
    queue, source = run()
    answered: list[str] = []
    put(queue, 1, source, lambda: answered.append("first"))
    queue.note({0: Progress.at(StreamPosition.at(7, 5))}, lambda: answered.append("second"))
    put(queue, 6, source)
    queue.take()
    assert not answered
    queue.done(1)
    assert (answered, seqno(queue)) == (["first"], 1)
    queue.take()
    assert (answered, seqno(queue)) == (["first", "second"], 5)


def test_only_what_is_acknowledged_counts() -> None:
    queue, source = run(auto_acknowledge=False)
    put(queue, 1, source)
    put(queue, 2, source)
    first, second = queue.take(), queue.take()
    assert first is not None
    assert second is not None
    queue.done(2)
    assert (seqno(queue), source.done_bytes) == (0, 200)
    queue.acknowledge(second)
    assert seqno(queue) == 0
    queue.acknowledge(first)
    assert seqno(queue) == 2


def test_a_source_that_knows_no_window_is_held_back() -> None:
    queue, source = run(window_bytes=150)
    for number in range(1, 5):
        put(queue, number, source)
    assert source.paused
    while queue.take() is not None:
        assert source.paused == (queue.queued_bytes >= 100)
        queue.done(1)
    assert not source.paused


def test_waiters_hear_of_everything() -> None:
    async def wait() -> None:
        queue = new_queue()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            for tell in (
                lambda: put(queue, 1, Source()),
                lambda: queue.note({}),
                queue.wake,
                lambda: queue.fail(LookupError("first")),
            ):
                loop.call_soon(tell)
                await queue.wait()
        queue.fail(LookupError("second"))
        assert str(queue.failure) == "first"
        assert queue

    asyncio.run(wait())


def test_what_comes_after_a_failure_is_not_handed_out() -> None:
    """Something before it may be missing."""
    queue, source = run()
    put(queue, 1, source)
    queue.fail(ValueError("what came then could not be read"))
    put(queue, 3, source)
    queue.note({0: Progress.at(StreamPosition.at(7, 4))})
    assert queue.take() is not None
    queue.done(1)
    assert queue.take() is None
    assert seqno(queue) == 1


def at(seqno: int) -> Progress:
    return Progress.at(StreamPosition.at(7, seqno))


@given(st.permutations(range(1, 9)), st.integers(0, 8))
def test_only_what_has_no_gap_before_it_counts(order: list[int], count: int) -> None:
    batches = Acknowledgements()
    for number in range(1, 9):
        batches.deliver(number, {number % 2: at(number)})
    for number in order[:count]:
        batches.done(number)
        batches.done(number)
    whole = next((n for n in range(1, 9) if n not in order[:count]), 9) - 1
    expected = {
        vbucket: at(max(n for n in range(1, whole + 1) if n % 2 == vbucket))
        for vbucket in {n % 2 for n in range(1, whole + 1)}
    }
    assert batches.progress == expected
    assert batches.open == 8 - count


def test_a_batch_that_was_never_handed_out_counts_for_nothing() -> None:
    batches = Acknowledgements()
    assert not batches.done(1)
    batches.deliver(1, {0: at(5)})
    assert batches.done(1)
    assert not batches.done(1)
    assert batches.progress == {0: at(5)}
