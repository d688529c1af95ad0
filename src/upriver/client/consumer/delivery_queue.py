"""What was received and waits for whoever uses it: handed out in order, and done when the next is asked for.

Everything has its place in the order, also what is no batch: a vbucket that moved on without a change, an answer that
may go out only when all before it is done. Sources that know no window are not read while too much waits.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from upriver.client.consumer.acknowledgements import Acknowledgements
from upriver.client.consumer.batches import Batch
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.tap_feed import TapFeed


class _Queued(NamedTuple):
    """Something that waits; without a batch only progress, or an answer, at its place in the order."""

    batch: Batch | None
    feed: Feed | TapFeed | None
    progress: dict[int, Progress]
    on_done: Callable[[], object] | None


class DeliveryQueue:
    """The queue between the feeds of a consumer and whoever iterates over it."""

    def __init__(self, window_bytes: int, *, auto_acknowledge: bool) -> None:
        self._window_bytes = window_bytes
        self._auto_acknowledge = auto_acknowledge
        #: How many received bytes wait.
        self.queued_bytes = 0
        #: Why nothing more can be handed out, once everything before is.
        self.failure: BaseException | None = None
        self._acknowledgements = Acknowledgements()
        self._queue: deque[_Queued] = deque()
        self._paused: set[Feed | TapFeed] = set()
        self._arrived = asyncio.Event()
        self._number = 0
        #: Handed out, and not said to be done.
        self._given: list[tuple[Batch, Feed | TapFeed | None]] = []

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def progress(self) -> dict[int, Progress]:
        """How far everything that was acknowledged without a gap leads."""
        return self._acknowledgements.progress

    # Coming in

    def put(self, batch: Batch, feed: Feed | TapFeed | None, on_done: Callable[[], object] | None = None) -> None:
        """A batch came."""
        if self.failure is not None:  # something between it and what came before may be missing
            return
        self._queue.append(_Queued(batch, feed, batch.progress, on_done))
        self.queued_bytes += batch.wire_bytes
        if feed is not None and self.queued_bytes > 2 * self._window_bytes:  # somebody who does not keep to the window
            feed.connection.pause()
            self._paused.add(feed)
        self._arrived.set()

    def note(self, progress: dict[int, Progress], on_done: Callable[[], object] | None = None) -> None:
        """Something came that is nobody's business but has its place in the order."""
        if self.failure is not None:
            return
        self._queue.append(_Queued(None, None, progress, on_done))
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Nothing more can be done; the first reason counts."""
        if self.failure is None:
            self.failure = error
            self._arrived.set()

    def forget(self, feed: Feed | TapFeed) -> None:
        """A connection is gone."""
        self._paused.discard(feed)

    def wake(self) -> None:
        """Whoever waits shall look again."""
        self._arrived.set()

    # Going out

    async def wait(self) -> None:
        """Until something came, or somebody says that there is something to look at."""
        self._arrived.clear()
        await self._arrived.wait()

    def take(self) -> Batch | None:
        """The next batch; None if none waits."""
        while self._queue:
            batch, feed, progress, on_done = self._queue.popleft()
            self._number += 1
            self._acknowledgements.hand_out(self._number, progress, on_done)
            if batch is not None:
                object.__setattr__(batch, "number", self._number)
                self.queued_bytes -= batch.wire_bytes
                self._given.append((batch, feed))
                return batch
            self._acknowledgements.done(self._number)
        return None

    def done(self, count: int) -> None:
        """So many of those that were taken are done with; the others were never looked at."""
        for batch, feed in self._given[:count]:
            if feed is not None:
                feed.processed(batch.wire_bytes)
            if self._auto_acknowledge:
                self.acknowledge(batch)
        self._given.clear()
        if self._paused and self.queued_bytes <= self._window_bytes:
            for each in self._paused:
                each.connection.resume()
            self._paused.clear()

    def acknowledge(self, batch: Batch) -> None:
        """This batch is done. Progress follows when all before it are done too."""
        self._acknowledgements.done(batch.number)
