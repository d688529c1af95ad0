"""A consumer of change streams: batches of changes of all vbuckets, wherever these are, for as long as wanted.

Theory of operation. One *feed* for each node brings the streams of its vbuckets; ``seeking`` finds out who has them and
asks there, whenever one is without a stream. What feeds receive goes into one queue (``handing_out``), which gives it
out in order. Where each vbucket ends, and what is left out beyond that, ``ranges`` knows.

Changes are acknowledged to the source when they are handed out and the next are asked for, so what waits here is
bounded by the window, while noops are still answered. Where a source knows no window the connection is not read
meanwhile.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final, Self, Unpack

from upriver.client.cluster.cluster import Cluster
from upriver.client.consumer.batches import Batch, VbucketEvent
from upriver.client.consumer.checkpoint import Checkpoint
from upriver.client.consumer.delivery_queue import DeliveryQueue
from upriver.client.consumer.end_positions import Ranges
from upriver.client.consumer.feed_factory import opening_progress, range_ends
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import ConsumerArguments, ConsumerSettings
from upriver.client.consumer.stall_watch import StallWatch
from upriver.client.consumer.stream_supervisor import StreamSupervisor
from upriver.client.consumer.tap_supervisor import tap_progress
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.address import Address
from upriver.client.transport.connection import Connection
from upriver.errors import StreamRefused, UpriverError
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

    #: What the consumer was told, with all defaults filled in.
    settings: ConsumerSettings
    #: The connections that find the streams, and the cluster map that the consumer follows.
    cluster: Cluster

    def __init__(
        self, address: str | Address, *, checkpoint: Checkpoint | None = None, **settings: Unpack[ConsumerArguments]
    ) -> None:
        """``settings`` are those of ``ConsumerSettings``. A checkpoint that has progress wins over ``start``."""
        self.settings = ConsumerSettings(**settings)
        self.cluster = Cluster(address)
        self._checkpoint = checkpoint
        self._saved: dict[int, Progress] = {}
        self._saving = asyncio.Lock()
        self._handing_out = DeliveryQueue(self.settings.window_bytes, auto_acknowledge=self.settings.auto_acknowledge)
        self._ranges: Ranges
        self._seeking: StreamSupervisor | None = None
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
        except BaseException:  # another attempt may find what this one did not
            self._started = False
            raise

    async def _begin(self) -> None:
        known = await self.cluster.open()
        vbuckets = self._chosen(known.vbuckets, known.owners)
        self._saved = {} if self._checkpoint is None else dict(await self._checkpoint.load())
        settings, ends = self.settings, dict[int, int]()
        if settings.dialect == "tap":
            progress = tap_progress(vbuckets, settings.start, self._saved)
        else:
            progress = await opening_progress(self.cluster, vbuckets, settings.start, self._saved)
            ends = await range_ends(self.cluster, vbuckets, settings.end)
        copies = TrackedVbuckets(progress, settings.on_rollback, on_event=self._happened, on_move=self._moved)
        self._ranges = Ranges(vbuckets, ends, on_over=self._handing_out.wake)
        self._seeking = StreamSupervisor(self.cluster, settings, copies, self._ranges, self._handing_out)
        self._stalls = StallWatch(
            self.cluster,
            self._ranges,
            copies,
            tells_seqnos=settings.dialect != "tap",
            on_stalled=self._seeking.ask_anew,
        )
        self._seeking.start()
        self._watching = asyncio.create_task(self._watch(self._stalls))

    def _chosen(self, count: int, owners: tuple[int, ...]) -> list[int]:
        for given in (self.settings.start, self.settings.end):
            for number in given if isinstance(given, Mapping) else ():
                self.cluster.map.owner(number)  # complains about one that does not exist
        chosen = self.settings.vbuckets
        if chosen is None:
            # A range of a vbucket that nobody has would never end.
            return [number for number in range(count) if self.settings.end == "never" or owners[number] >= 0]
        for number in chosen:
            if self.cluster.map.owner(number) is None:
                raise StreamRefused(number, "no node of the cluster has it; look at the cluster map")
        return list(chosen)

    async def close(self) -> None:
        """Stop, save the progress that was acknowledged, close all connections."""
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._seeking is not None:
            await self._seeking.close()
        await self.cluster.close()
        try:
            await self.save()
        finally:
            self._handing_out.wake()

    # Handing out

    @property
    def queued_bytes(self) -> int:
        """How many received bytes wait to be handed out."""
        return self._handing_out.queued_bytes

    @property
    def changes_received(self) -> int:
        """How many changes have come."""
        return 0 if self._seeking is None else self._seeking.changes_received

    @property
    def reconnects(self) -> int:
        """How often a connection was lost."""
        return 0 if self._seeking is None else self._seeking.reconnects

    @property
    def connections(self) -> list[Connection]:
        """Those over which streams come now."""
        return [] if self._seeking is None else self._seeking.connections

    @property
    def stalled(self) -> dict[int, str]:
        """Vbuckets that do not move although they should, each with the reason."""
        return {} if self._stalls is None else self._stalls.stalled

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        await self.start()
        self._handing_out.done(1)
        return await self._next()

    async def several(self, done: int) -> list[Batch]:
        """The next batch and those that wait behind it already, for the synchronous twin; empty at the end.

        ``done`` says how many of those before are done with; the others were never looked at.
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
                batch = self._handing_out.take() if size < self.settings.window_bytes // 4 else None
        return out

    async def leave(self, done: int) -> None:
        """Whoever took several batches goes before he was done with all of them."""
        self._handing_out.done(done)

    async def _next(self) -> Batch:
        while True:
            batch = self._handing_out.take()
            if batch is not None:
                return batch
            if self._handing_out.failure is not None:
                raise self._handing_out.failure
            if self._closed or not self._ranges.unfinished:
                await self.save()
                raise StopAsyncIteration
            await self._handing_out.wait()

    async def changes(self) -> AsyncIterator[Change | VbucketEvent]:
        """Single changes, and what happened to whole vbuckets, for comfort."""
        async for batch in self:
            if batch.event is not None:
                yield batch.event
            else:
                for change in batch.changes():
                    yield change

    def _happened(self, event: VbucketEvent, progress: Progress) -> None:
        LOG.warning("vbucket %d: %s", event.vbucket, event)
        self._handing_out.put(Batch.of_event(event, progress), None)

    def _moved(self, vbucket: int, progress: Progress) -> None:
        self._handing_out.note({vbucket: progress})

    # Progress

    @property
    def progress(self) -> dict[int, Progress]:
        """How far everything that was acknowledged without a gap leads: where another consumer may go on."""
        return {**self._saved, **self._handing_out.progress}

    def acknowledge(self, batch: Batch) -> None:
        """This batch is done. Progress follows when all before it are done too."""
        self._handing_out.acknowledge(batch)

    async def save(self) -> None:
        """Write the progress to the checkpoint, if there is one and it moved."""
        async with self._saving:  # one after the other, or an older state could be written last
            moved = self._handing_out.progress
            if self._checkpoint is None or all(self._saved.get(number) == each for number, each in moved.items()):
                return
            progress = {**self._saved, **moved}
            await self._checkpoint.save(progress)
            self._saved = progress

    async def _watch(self, stalls: StallWatch) -> None:
        """Save progress, and complain about vbuckets that stand still."""
        looked_at = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(min(self.settings.checkpoint_interval_s, self.settings.stall_s))
            try:
                await asyncio.shield(self.save())  # what has begun to be written is written
            except UpriverError as error:
                self._handing_out.fail(error)
            now = asyncio.get_running_loop().time()
            if now - looked_at >= self.settings.stall_s:
                looked_at = now
                if not self._handing_out:  # else we are the ones who are slow
                    with contextlib.suppress(UpriverError):
                        await stalls.look()
