"""One TAP connection that feeds a consumer: received changes become Arrow batches, and used ones are acknowledged.

TAP has no seqnos. Only the source remembers a consumer's progress, under the consumer's name, by what was acknowledged.
So an acknowledgement goes out when the application is done with the changes and with everything before them, not when
they arrive. Unacknowledged changes come again after a reconnect. A source that cannot resume says *initial vbucket
stream*, which is a reset here.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from upriver.client.consumer.batches import Flush, Reset
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import ConsumerSettings
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.connection import Connection
from upriver.errors import Busy, StatusError, StreamRefused, StreamRolledBack, TemporaryFailure, UpriverError, WireError
from upriver.model import Event, inflated_batch
from upriver.protocol import SilenceWatch
from upriver.protocol.consumer import Run
from upriver.wire import AnyResponse, Message, Request, Response, memcached, tap
from upriver.wire.codec import ChangeBatch, ChangeDecoder
from upriver.wire.dialects.tap import Control, TapFlag

#: Columns that the feed needs beside the requested ones: to find the vbucket, and to acknowledge.
_NEEDED: Final = ("vbucket", "event")
_OPCODES: Final = {Event.MUTATION: tap.Mutation.declaration.opcode, Event.DELETION: tap.Delete.declaration.opcode}


class TapFeedReceiver(Protocol):
    """Takes the changes of a TAP feed."""

    def received(
        self,
        feed: "TapFeed",
        records: pa.RecordBatch,
        runs: tuple[Run, ...],
        wire_bytes: int,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        """Changes arrived; call ``on_done`` when they and all before them are used."""

    def note(self, progress: dict[int, Progress], on_done: Callable[[], object] | None = None) -> None:
        """Call ``on_done`` when everything before it is used."""


class TapFeedOwner(Protocol):
    """Hears what happens to a TAP feed."""

    def dumped(self, feed: "TapFeed", vbuckets: Iterable[int]) -> None:
        """The source has sent everything of these vbuckets, and ends."""

    def branched(self, feed: "TapFeed") -> None:
        """The source has changed branches, and the feed follows it."""

    def feed_lost(self, feed: "TapFeed", error: UpriverError) -> None:
        """The connection is lost."""

    def failed(self, error: BaseException) -> None:
        """An error happened that another attempt would meet too."""


class TapFeed:
    """The vbuckets of one node, over one TAP connection."""

    def __init__(
        self,
        connection: Connection,
        tracked: TrackedVbuckets,
        receiver: TapFeedReceiver,
        owner: TapFeedOwner,
        settings: ConsumerSettings,
        vbuckets: Iterable[int],
    ) -> None:
        self.connection = connection
        self.endpoint = connection.endpoint
        #: The vbuckets that were requested here.
        self.carried = set(vbuckets)
        self._tracked = tracked
        self._receiver = receiver
        self._owner = owner
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        decoded = settings.decoded
        needed = tuple(name for name in _NEEDED if name not in decoded)
        self._decoder = ChangeDecoder(tap.tap, columns=(*decoded, *needed))
        #: Vbuckets whose stream has started on this connection.
        self._begun: set[int] = set()
        #: Vbuckets whose backfill is complete.
        self._backfilled: set[int] = set()
        self._silence = SilenceWatch(settings.noop_interval_s if connection.is_upriver_node else 0.0, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False
        connection.stream_to(self)
        self._watch()

    def processed(self, wire_bytes: int) -> None:
        """Nothing to do: unacknowledged changes bound TAP."""

    # The connection's receiver

    def receive(self, data: memoryview) -> None:
        """Handle bytes from the socket."""
        self._silence.heard(self._loop.time())
        self._decoder.feed(data)
        try:
            for item in self._decoder:
                if isinstance(item, ChangeBatch):
                    self._changes(item)
                else:
                    self._message(item)
        except WireError:
            raise
        except Exception as error:
            self._owner.failed(error)

    def _changes(self, batch: ChangeBatch) -> None:
        records, flags = batch.records, batch.transport.column("tap_flags")
        runs, at = [], 0
        encoded = pc.run_end_encode(records.column("vbucket"))
        for number, end in zip(encoded.values.to_pylist(), encoded.run_ends.to_pylist(), strict=True):
            if number not in self.carried:
                raise WireError(self._decoder.offset, "a requested vbucket", f"vbucket {number}")
            vbucket = self._tracked[number]
            if not vbucket.progress.is_unplaced:
                vbucket.progress = Progress.unplaced(vbucket.failover_log)
            runs.append(Run(number, end - at, vbucket.position))
            at = end
        asking = pc.indices_nonzero(pc.bit_wise_and(flags, pa.scalar(int(TapFlag.ACK), pa.uint16())))
        on_done = None
        if len(asking):  # one acknowledgement covers all before it
            row = asking[-1].as_py()
            opcode = _OPCODES[Event(records.column("event")[row].as_py())]
            on_done = partial(self._answer, opcode, batch.transport.column("opaque")[row].as_py())
        try:
            records = inflated_batch(records, self.connection.inflate)
        except WireError as error:  # a damaged value: another connection would bring it again
            self._owner.failed(error)
        else:
            self._receiver.received(self, records, tuple(runs), batch.wire_bytes, on_done)

    def _message(self, message: Message) -> None:
        if isinstance(message, memcached.Noop):
            self._answer(message.code, message.opaque)
        elif isinstance(message, Response):
            self._answered(message)
        elif isinstance(message, Request):
            if isinstance(message, tap.Flush):
                self._flushed()
            elif isinstance(message, tap.Opaque):
                self._control(message)
            if TapFlag.ACK in getattr(message, "tap_flags", TapFlag(0)):
                self._receiver.note({}, partial(self._answer, message.code, message.opaque))
            if isinstance(message, tap.Opaque) and message.control is Control.CLOSE_TAP_STREAM:
                self._owner.dumped(self, self._backfilled)

    def _answered(self, message: Response) -> None:
        """A connect is answered only if it is refused."""
        if message.code != tap.Connect.declaration.opcode or not message.status:
            return
        error = StatusError.of(int(message.status), bytes(getattr(message, "value", b"")).decode(errors="replace"))
        if not isinstance(error, (TemporaryFailure, Busy)):  # which may pass
            vbucket = min(self.carried)
            self._owner.failed(StreamRefused(vbucket, f"{self.endpoint} refuses the TAP stream: {error}"))

    def _control(self, message: tap.Opaque) -> None:
        if message.control is Control.INITIAL_VBUCKET_STREAM and message.vbucket in self.carried and not message.cas:
            self._start_over(message.vbucket)
        elif message.control is Control.CLOSE_BACKFILL:
            self._backfilled.add(message.vbucket)

    def _start_over(self, number: int) -> None:
        vbucket = self._tracked[number]
        again = number in self._begun
        self._begun.add(number)
        self._backfilled.discard(number)
        if not vbucket.progress.is_unplaced:
            return
        if again and self._settings.on_rollback == "fail":
            # The source's history broke; a reconnect is not the reason.
            raise StreamRolledBack(number, 0, vbucket.position)
        uuid = vbucket.position.vbucket_uuid
        self._tracked.happened(vbucket, Reset(number, uuid, uuid))
        if again:
            self._owner.branched(self)

    def _flushed(self) -> None:
        """The source was flushed."""
        for number in sorted(self.carried):
            self._tracked.happened(self._tracked[number], Flush(number))
        self._owner.branched(self)

    def _answer(self, opcode: int, opaque: int) -> None:
        if not self._lost:
            self.connection.write(AnyResponse(opcode=opcode, opaque=opaque).encode())

    def lost(self, error: UpriverError) -> None:
        """The connection is lost."""
        if self._lost:
            return
        self._end()
        self._owner.feed_lost(self, error)

    # Time

    def _watch(self) -> None:
        """Check that the source responds, if it is an Upriver node: others may not answer during a stream."""
        self._timer = None
        if self._silence.is_dead(self._loop.time()):
            self.connection.abort()
        elif self._silence.interval_s and not self._lost:
            self.connection.write(memcached.Noop().encode())
            self._timer = self._loop.call_later(self._silence.interval_s, self._watch)

    def _end(self) -> None:
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()

    async def close(self) -> None:
        """Close the connection without a report to the owner."""
        self._end()
        await self.connection.close()
