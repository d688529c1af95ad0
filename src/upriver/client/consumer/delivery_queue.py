"""The queue between the feeds of a consumer and the application.

Entries leave the queue in order and are done when the application asks for the next one. An entry need not hold a
batch: a vbucket may advance without a change, and a TAP answer may go out only after everything before it is done. The
queue pauses a source without flow control while too many bytes are queued.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pyarrow as pa

from upriver.client.consumer.batches import Batch, VbucketEvent, without_values
from upriver.client.consumer.end_positions import EndPositions
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import ConsumerSettings
from upriver.client.consumer.tap_feed import TapFeed
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.protocol.consumer import Run


class _Queued(NamedTuple):
    """An entry of the queue; without a batch it is only progress, or an answer to send."""

    number: int
    batch: Batch | None
    feed: Feed | TapFeed | None
    progress: dict[int, Progress]
    on_done: Callable[[], object] | None


class Acknowledgements:
    """The delivered batches in order, and the progress before the first one that is not done.

    Progress never passes an open batch, so a crash can repeat changes but never skip one.
    """

    def __init__(self) -> None:
        #: The progress of each vbucket that has advanced.
        self.progress: dict[int, Progress] = {}
        self._delivered: deque[tuple[int, Mapping[int, Progress], Callable[[], object] | None]] = deque()
        self._done: set[int] = set()

    def deliver(
        self, number: int, progress: Mapping[int, Progress], on_done: Callable[[], object] | None = None
    ) -> None:
        """Deliver a batch; numbers increase. ``on_done`` is called when it and all before it are done."""
        self._delivered.append((number, progress, on_done))

    def done(self, number: int) -> bool:
        """Mark a batch as done; returns whether the progress advanced. A batch that is done already is ignored."""
        if not self._delivered or number < self._delivered[0][0]:
            return False
        self._done.add(number)
        moved = False
        while self._delivered and self._delivered[0][0] in self._done:
            first, progress, on_done = self._delivered.popleft()
            self._done.discard(first)
            self.progress.update(progress)
            if on_done is not None:
                on_done()
            moved = True
        return moved

    @property
    def open(self) -> int:
        """The number of delivered batches that are not done."""
        return len(self._delivered) - len(self._done)


class DeliveryQueue:
    """Turns received changes into numbered batches, and counts the batches that are done."""

    def __init__(self, settings: ConsumerSettings, tracked: TrackedVbuckets, ends: EndPositions) -> None:
        self._settings = settings
        self._tracked = tracked
        self._ends = ends
        #: The number of received bytes in the queue.
        self.queued_bytes = 0
        self.changes_received = 0
        #: Raised to the application after everything that came before it.
        self.failure: BaseException | None = None
        self._acknowledgements = Acknowledgements()
        self._queue: deque[_Queued] = deque()
        self._paused: set[Feed | TapFeed] = set()
        self._arrived = asyncio.Event()
        self._number = 0
        #: Taken by the application, and not done yet.
        self._taken: list[tuple[Batch, Feed | TapFeed | None]] = []

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def progress(self) -> dict[int, Progress]:
        """The progress behind the last batch that is acknowledged together with all before it."""
        return self._acknowledgements.progress

    # Coming in

    def received(
        self,
        feed: Feed | TapFeed,
        records: pa.RecordBatch,
        runs: tuple[Run, ...],
        wire_bytes: int,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        """Queue changes that a feed received."""
        progress = {run.vbucket: self._tracked[run.vbucket].progress for run in runs}
        if (
            self._ends.has_ends
            and isinstance(feed, Feed)
            and (self._ends.may_overshoot or not feed.connection.is_upriver_node)
        ):
            records, runs, beyond = self._ends.cut(records, runs)
            for number, position in beyond.items():
                progress[number] = progress[number].moved(position)
                asyncio.get_running_loop().call_soon(feed.close_stream, number)
            if not runs:
                feed.processed(wire_bytes)
                self.note(progress)
                return
        columns = self._settings.columns
        if len(records.schema) > len(columns):
            records = records.select(list(columns))
        if self._settings.keys_only:
            records = without_values(records)
        self.changes_received += records.num_rows
        self._put(Batch(records, runs, None, progress, wire_bytes, self._number + 1), feed, progress, on_done)

    def put_event(self, event: VbucketEvent, progress: Progress) -> None:
        """Queue an event of a whole vbucket."""
        batch = Batch.of_event(event, progress, self._number + 1)
        self._put(batch, None, batch.progress)

    def note(self, progress: dict[int, Progress], on_done: Callable[[], object] | None = None) -> None:
        """Queue progress without changes, or an answer that must wait for everything before it."""
        self._put(None, None, progress, on_done)

    def _put(
        self,
        batch: Batch | None,
        feed: Feed | TapFeed | None,
        progress: dict[int, Progress],
        on_done: Callable[[], object] | None = None,
    ) -> None:
        if self.failure is not None:  # the entries before this one may have a gap
            return
        self._number += 1
        self._queue.append(_Queued(self._number, batch, feed, progress, on_done))
        if batch is not None:
            self.queued_bytes += batch.wire_bytes
        if feed is not None and self.queued_bytes > 2 * self._settings.window_bytes:  # the source ignores the window
            feed.connection.pause()
            self._paused.add(feed)
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Accept nothing more; the first error is kept."""
        if self.failure is None:
            self.failure = error
            self._arrived.set()

    def forget(self, feed: Feed | TapFeed) -> None:
        """The feed's connection is lost."""
        self._paused.discard(feed)

    def wake(self) -> None:
        """Let ``wait`` return."""
        self._arrived.set()

    # Going out

    async def wait(self) -> None:
        """Wait for an entry, a failure or ``wake``."""
        self._arrived.clear()
        await self._arrived.wait()

    def take(self) -> Batch | None:
        """The next batch; None if the queue has none."""
        while self._queue:
            number, batch, feed, progress, on_done = self._queue.popleft()
            self._acknowledgements.deliver(number, progress, on_done)
            if batch is not None:
                self.queued_bytes -= batch.wire_bytes
                self._taken.append((batch, feed))
                return batch
            self._acknowledgements.done(number)
        return None

    def take_changes(self, wire_bytes_max: int) -> Batch | None:
        """The next batch if it holds changes and is at most this large on the wire."""
        batch = self._queue[0].batch if self._queue else None
        return self.take() if batch is not None and batch.event is None and batch.wire_bytes <= wire_bytes_max else None

    def done(self, count: int) -> None:
        """The application is done with the first ``count`` batches that it took, and ignored the others."""
        for batch, feed in self._taken[:count]:
            if feed is not None:
                feed.processed(batch.wire_bytes)
            if self._settings.auto_acknowledge:
                self.acknowledge(batch)
        self._taken.clear()
        if self._paused and self.queued_bytes <= self._settings.window_bytes:
            for each in self._paused:
                each.connection.resume()
            self._paused.clear()

    def acknowledge(self, batch: Batch) -> None:
        """Mark a batch as done. Progress advances when all batches before it are done too."""
        self._acknowledgements.done(batch.number)
