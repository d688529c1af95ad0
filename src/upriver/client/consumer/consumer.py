"""A consumer of change streams: batches of the changes of all vbuckets, wherever they are.

Theory of operation. One *feed* for each node receives the streams of its vbuckets. The ``StreamSupervisor`` looks up
the owner of each vbucket without a stream and requests the stream there. Feeds put changes into one ``DeliveryQueue``,
from which the application takes batches in order. ``EndPositions`` knows where each vbucket ends.

The consumer acknowledges changes to the source when the application asks for the next batch. So the window bounds the
queue, while noops are still answered. A connection without flow control is not read while the queue is full.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final, Self, Unpack

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.cluster_map import ClusterMap
from upriver.client.cluster.newest_copies import NewestCopies
from upriver.client.consumer.batches import Batch, VbucketEvent
from upriver.client.consumer.checkpoint import Checkpoint, SelectiveCheckpoint
from upriver.client.consumer.delivery_queue import DeliveryQueue
from upriver.client.consumer.end_positions import EndPositions
from upriver.client.consumer.feed_factory import FeedFactory
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import ConsumerArguments, ConsumerSettings
from upriver.client.consumer.stall_watch import StallWatch
from upriver.client.consumer.start_positions import end_seqnos, owned_vbuckets, start_positions
from upriver.client.consumer.stream_supervisor import StreamPolicy, StreamSupervisor
from upriver.client.consumer.tap_supervisor import TapSupervisor, tap_progress
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.address import Address
from upriver.client.transport.connection import Connection
from upriver.errors import UpriverError
from upriver.model import Change

if TYPE_CHECKING:
    from upriver.client.sync.consumer import SyncConsumer

LOG: Final = logging.getLogger("upriver.client")


class Consumer:
    """The changes of a cluster, batch by batch.

    ::

        async with Consumer("127.0.0.1:11210", start="earliest") as consumer:
            async for batch in consumer:
                print(len(batch), batch.records)
    """

    #: The settings, with all defaults filled in.
    settings: ConsumerSettings
    #: The connections that find the streams, and the cluster map that the consumer follows.
    cluster: Cluster

    def __init__(
        self, address: str | Address, *, checkpoint: Checkpoint | None = None, **settings: Unpack[ConsumerArguments]
    ) -> None:
        """``settings`` are those of ``ConsumerSettings``. A checkpoint that has progress wins over ``start``."""
        self.settings = ConsumerSettings(**settings)
        self.cluster = Cluster(address) if self.settings.active_only else NewestCopies(address)
        self._checkpoint = checkpoint
        self._saved: dict[int, Progress] = {}
        self._saving = asyncio.Lock()
        self._tracked = TrackedVbuckets({}, self.settings.on_rollback, on_event=self._happened, on_move=self._moved)
        self._ends = EndPositions(on_finished=lambda _: self._queue.wake())
        self._queue = DeliveryQueue(self.settings, self._tracked, self._ends)
        self._supervisor: StreamSupervisor | None = None
        self._stalls: StallWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._started = False
        self._closed = False

    @staticmethod
    def sync(
        address: str | Address, *, checkpoint: Checkpoint | None = None, **settings: Unpack[ConsumerArguments]
    ) -> "SyncConsumer":
        """Return the same consumer for synchronous code, an ordinary iterator: use it in a ``with``."""
        from upriver.client.sync.consumer import SyncConsumer

        return SyncConsumer(address, checkpoint=checkpoint, **settings)

    @property
    def cluster_map(self) -> ClusterMap:
        """The newest known cluster map."""
        return self.cluster.map

    # Beginning and end

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Find the cluster and ask for all streams; iterating does so too."""
        if self._started:
            return
        self._started = True
        try:
            await self._begin()
        except BaseException:  # another attempt may succeed
            self._started = False
            raise

    async def _begin(self) -> None:
        known = await self.cluster.open()
        vbuckets = await self._chosen(known)
        if isinstance(self._checkpoint, SelectiveCheckpoint):
            self._checkpoint.select(self.settings.selection)
        self._saved = {} if self._checkpoint is None else dict(await self._checkpoint.load())
        settings, ends = self.settings, dict[int, int]()
        active_only = settings.active_only
        if settings.dialect == "tap":
            progress = tap_progress(vbuckets, settings.start, self._saved)
        else:
            progress = await start_positions(
                self.cluster, vbuckets, settings.start, self._saved, active_only=active_only
            )
            ends = await end_seqnos(self.cluster, vbuckets, settings.end, active_only=active_only)
        for number, each in progress.items():
            self._tracked.put(number, each)
        self._ends.start(vbuckets, ends)
        self._supervisor = self._new_supervisor()
        self._stalls = StallWatch(
            self.cluster,
            self._ends,
            self._tracked,
            has_seqnos=settings.dialect != "tap",
            on_stalled=self._supervisor.request_again,
        )
        self._supervisor.start()
        self._watching = asyncio.create_task(self._watch(self._stalls))

    def _new_supervisor(self) -> StreamSupervisor:
        policy, queue = StreamPolicy(self.settings, self._tracked, self._ends), self._queue
        if self.settings.dialect == "tap":
            return TapSupervisor(self.cluster, policy, queue)
        factory = FeedFactory(self.cluster, self._tracked, queue)
        return StreamSupervisor(self.cluster, policy, factory, on_failure=queue.fail, on_feed_lost=queue.forget)

    async def _chosen(self, known: ClusterMap) -> list[int]:
        start, end, chosen = self.settings.start, self.settings.end, self.settings.vbuckets
        for given in (start, end):
            for number in given if isinstance(given, Mapping) else ():
                known.owner(number)  # raises if it does not exist
        if chosen is None and end == "never":  # a vbucket without an owner may get one
            return list(range(known.vbuckets))
        if chosen is None:
            named = end if isinstance(end, Mapping) else range(known.vbuckets)
            chosen = [number for number in range(known.vbuckets) if number in named or known.owner(number) is not None]
        settings = self.settings
        return await owned_vbuckets(
            self.cluster, list(chosen), settings.gives_up_after_s, active_only=settings.active_only
        )

    async def close(self) -> None:
        """Stop, save the progress that was acknowledged, close all connections."""
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._supervisor is not None:
            await self._supervisor.close()
        await self.cluster.close()
        try:
            await self.save()
        finally:
            self._queue.wake()

    # Delivery

    @property
    def queued_bytes(self) -> int:
        """The number of received bytes in the queue."""
        return self._queue.queued_bytes

    @property
    def changes_received(self) -> int:
        """The number of changes received."""
        return self._queue.changes_received

    @property
    def reconnects(self) -> int:
        """How many connections were lost."""
        return 0 if self._supervisor is None else self._supervisor.reconnects

    @property
    def connections(self) -> list[Connection]:
        """The open connections that carry streams."""
        return [] if self._supervisor is None else self._supervisor.connections

    @property
    def stalled(self) -> dict[int, str]:
        """Vbuckets that do not advance although they should, each with the reason."""
        return {} if self._stalls is None else self._stalls.stalled

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        await self.start()
        self._queue.done(1)
        return await self._next()

    async def several(self, done: int) -> list[Batch]:
        """The next batch and those queued behind it, for the synchronous consumer; empty at the end.

        The application is done with the first ``done`` batches of the previous call, and ignored the others.
        """
        await self.start()
        await self.leave(done)
        out: list[Batch] = []
        size = 0
        with contextlib.suppress(StopAsyncIteration):
            batch: Batch | None = await self._next()
            while batch is not None:
                out.append(batch)
                size += batch.wire_bytes
                batch = self._queue.take() if size < self.settings.window_bytes // 4 else None
        return out

    async def leave(self, done: int) -> None:
        """The application is done with this many of the batches that it took, and ignores the others."""
        self._queue.done(done)

    async def _next(self) -> Batch:
        while True:
            batch = self._queue.take()
            if batch is not None:
                return batch
            if self._queue.failure is not None:
                raise self._queue.failure
            if self._closed or not self._ends.unfinished:
                await self.save()
                raise StopAsyncIteration
            await self._queue.wait()

    async def changes(self) -> AsyncIterator[Change | VbucketEvent]:
        """Iterate over single changes and vbucket events."""
        async for batch in self:
            if batch.event is not None:
                yield batch.event
            else:
                for change in batch.changes():
                    yield change

    def _happened(self, event: VbucketEvent, progress: Progress) -> None:
        LOG.warning("vbucket %d: %s", event.vbucket, event)
        self._queue.put_event(event, progress)

    def _moved(self, vbucket: int, progress: Progress) -> None:
        self._queue.note({vbucket: progress})

    # Progress

    @property
    def progress(self) -> dict[int, Progress]:
        """The progress behind the last batch acknowledged with all before it: where another consumer can resume."""
        return {**self._saved, **self._queue.progress}

    def acknowledge(self, batch: Batch) -> None:
        """Mark a batch as done. Progress advances when all batches before it are done too."""
        self._queue.acknowledge(batch)

    async def save(self) -> None:
        """Write the progress to the checkpoint, if there is one and the progress has changed."""
        async with self._saving:  # one at a time, so that an older state is never written last
            moved = self._queue.progress
            if self._checkpoint is None or all(self._saved.get(number) == each for number, each in moved.items()):
                return
            progress = {**self._saved, **moved}
            await self._checkpoint.save(progress)
            self._saved = progress

    async def _watch(self, stalls: StallWatch) -> None:
        """Save progress, and report vbuckets that do not advance."""
        looked_at = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(min(self.settings.checkpoint_interval_s, self.settings.stall_s))
            try:
                await asyncio.shield(self.save())  # a write that has begun is completed
            except UpriverError as error:
                self._queue.fail(error)
            now = asyncio.get_running_loop().time()
            if now - looked_at >= self.settings.stall_s:
                looked_at = now
                if not self._queue:  # otherwise the application is the slow one
                    with contextlib.suppress(UpriverError):
                        await stalls.look()
