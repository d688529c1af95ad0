"""What waits is handed out in order, and counts when it is done."""

import asyncio
from typing import Any, cast

from upriver.client.consumer.batches import Batch
from upriver.client.consumer.delivery_queue import DeliveryQueue
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.progress import Progress
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


def batch(seqno: int, wire_bytes: int = 100) -> Batch:
    position = StreamPosition.at(7, seqno)
    rows = change_batch([Change(vbucket=0, event=Event.MUTATION, seqno=seqno, key=b"k")])
    return Batch(rows, (Run(0, 1, position),), None, {0: Progress.at(position)}, wire_bytes)


def seqno(handing_out: DeliveryQueue) -> int:
    return handing_out.progress[0].position.seqno if handing_out.progress else 0


def run(window_bytes: int = 1000, *, auto_acknowledge: bool = True) -> tuple[DeliveryQueue, Any]:
    async def made() -> DeliveryQueue:
        return DeliveryQueue(window_bytes, auto_acknowledge=auto_acknowledge)

    return asyncio.run(made()), Source()


def test_a_batch_is_done_when_the_next_is_asked_for() -> None:
    handing_out, source = run()
    for number in (1, 2, 3):
        handing_out.put(batch(number), cast(Feed, source))
    assert handing_out.queued_bytes == 300
    first = handing_out.take()
    assert first is not None
    assert (first.number, seqno(handing_out), source.done_bytes) == (1, 0, 0)
    handing_out.done(1)
    assert (seqno(handing_out), source.done_bytes) == (1, 100)
    handing_out.take()
    handing_out.take()
    assert handing_out.take() is None
    handing_out.done(1)  # of two that were taken the second was never looked at
    assert (seqno(handing_out), source.done_bytes, handing_out.queued_bytes) == (2, 200, 0)


def test_what_is_no_batch_keeps_its_place() -> None:
    handing_out, source = run()
    answered: list[str] = []
    handing_out.put(batch(1), cast(Feed, source), lambda: answered.append("first"))
    handing_out.note({0: Progress.at(StreamPosition.at(7, 5))}, lambda: answered.append("second"))
    handing_out.put(batch(6), cast(Feed, source))
    handing_out.take()
    assert not answered
    handing_out.done(1)
    assert (answered, seqno(handing_out)) == (["first"], 1)
    handing_out.take()
    assert (answered, seqno(handing_out)) == (["first", "second"], 5)


def test_only_what_is_acknowledged_counts() -> None:
    handing_out, source = run(auto_acknowledge=False)
    handing_out.put(batch(1), cast(Feed, source))
    handing_out.put(batch(2), cast(Feed, source))
    first, second = handing_out.take(), handing_out.take()
    assert first is not None
    assert second is not None
    handing_out.done(2)
    assert (seqno(handing_out), source.done_bytes) == (0, 200)
    handing_out.acknowledge(second)
    assert seqno(handing_out) == 0
    handing_out.acknowledge(first)
    assert seqno(handing_out) == 2


def test_a_source_that_knows_no_window_is_held_back() -> None:
    handing_out, source = run(window_bytes=150)
    for number in range(1, 5):
        handing_out.put(batch(number), cast(Feed, source))
    assert source.paused
    while handing_out.take() is not None:
        assert source.paused == (handing_out.queued_bytes >= 100)
        handing_out.done(1)
    assert not source.paused


def test_whoever_waits_hears_of_everything() -> None:
    async def wait() -> None:
        handing_out = DeliveryQueue(1000, auto_acknowledge=True)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            for tell in (
                lambda: handing_out.put(batch(1), None),
                lambda: handing_out.note({}),
                handing_out.wake,
                lambda: handing_out.fail(LookupError("first")),
            ):
                loop.call_soon(tell)
                await handing_out.wait()
        handing_out.fail(LookupError("second"))
        assert str(handing_out.failure) == "first"
        assert handing_out

    asyncio.run(wait())


def test_what_comes_after_a_failure_is_not_handed_out() -> None:
    """Something before it may be missing."""
    handing_out, source = run()
    handing_out.put(batch(1), cast(Feed, source))
    handing_out.fail(ValueError("what came then could not be read"))
    handing_out.put(batch(3), cast(Feed, source))
    handing_out.note({0: Progress.at(StreamPosition.at(7, 4))})
    assert handing_out.take() is not None
    handing_out.done(1)
    assert handing_out.take() is None
    assert seqno(handing_out) == 1
