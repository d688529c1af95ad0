"""One TAP connection that feeds a consumer: received bytes become batches, and what is done is acknowledged.

TAP tells no seqnos: how far a consumer is only its source remembers, under the consumer's name, by what was
acknowledged. So an acknowledgement goes out when whoever uses the changes is done with them and with everything before
them, not when they arrive. What was sent and not acknowledged comes again after a reconnect; and where the source does
not know how to go on it says *initial vbucket stream*, which is a reset here.
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
from upriver.model import Event
from upriver.protocol import SilenceWatch
from upriver.protocol.consumer import Run
from upriver.wire import AnyResponse, Message, Request, Response, memcached, tap
from upriver.wire.codec import ChangeBatch, ChangeDecoder
from upriver.wire.dialects.tap import Control, TapFlag

#: What is needed of each change beside what was asked for: whose it is, and what to answer.
_NEEDED: Final = ("vbucket", "event")
_OPCODES: Final = {Event.MUTATION: tap.Mutation.declaration.opcode, Event.DELETION: tap.Delete.declaration.opcode}


class TapOwner(Protocol):
    """Whom a TAP feed belongs to."""

    def received(
        self,
        feed: "TapFeed",
        records: pa.RecordBatch,
        runs: tuple[Run, ...],
        wire_bytes: int,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        """Changes came."""

    def passed(self, on_done: Callable[[], object]) -> None:
        """Something came that is no change and wants an answer in its order."""

    def dumped(self, feed: "TapFeed", vbuckets: Iterable[int]) -> None:
        """The source has sent everything; of these vbuckets it is whole."""

    def branched(self, feed: "TapFeed") -> None:
        """The source lives on other branches now, and we follow it there."""

    def feed_lost(self, feed: "TapFeed", error: UpriverError) -> None:
        """The connection is gone."""

    def failed(self, error: BaseException) -> None:
        """Something went wrong that no other attempt would change."""


class TapFeed:
    """The vbuckets of one node that come over one TAP connection."""

    def __init__(
        self,
        connection: Connection,
        copies: TrackedVbuckets,
        owner: TapOwner,
        settings: ConsumerSettings,
        vbuckets: Iterable[int],
    ) -> None:
        self.connection = connection
        self.endpoint = connection.endpoint
        #: The vbuckets that were asked for here.
        self.carried = set(vbuckets)
        self._copies = copies
        self._owner = owner
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        decoded = settings.decoded
        needed = tuple(name for name in _NEEDED if name not in decoded)
        self._decoder = ChangeDecoder(tap.tap, columns=(*decoded, *needed))
        #: Those that have begun on this connection, and those of which everything was sent that there was.
        self._begun: set[int] = set()
        self._whole: set[int] = set()
        self._silence = SilenceWatch(settings.noop_interval_s if connection.is_upriver_node else 0.0, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False
        connection.stream_to(self)
        self._watch()

    def processed(self, wire_bytes: int) -> None:
        """Nothing to do: what bounds TAP is what is not acknowledged."""

    # The connection's receiver

    def receive(self, data: memoryview) -> None:
        """Take bytes from the socket."""
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
                raise WireError(self._decoder.offset, "a vbucket that was asked for", f"vbucket {number}")
            copy = self._copies[number]
            if not copy.progress.is_unplaced:
                copy.progress = Progress.unplaced(copy.failover_log)
            runs.append(Run(number, end - at, copy.position))
            at = end
        asking = pc.indices_nonzero(pc.bit_wise_and(flags, pa.scalar(int(TapFlag.ACK), pa.uint16())))
        on_done = None
        if len(asking):  # one answer covers all before it
            row = asking[-1].as_py()
            opcode = _OPCODES[Event(records.column("event")[row].as_py())]
            on_done = partial(self._answer, opcode, batch.transport.column("opaque")[row].as_py())
        try:
            self._owner.received(self, records, tuple(runs), batch.wire_bytes, on_done)
        except WireError as error:  # a value that cannot be inflated: another connection would bring it again
            self._owner.failed(error)

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
                self._owner.passed(partial(self._answer, message.code, message.opaque))
            if isinstance(message, tap.Opaque) and message.control is Control.CLOSE_TAP_STREAM:
                self._owner.dumped(self, self._whole)

    def _answered(self, message: Response) -> None:
        """The only answer that a connect gets is a refusal."""
        if message.code != tap.Connect.declaration.opcode or not message.status:
            return
        error = StatusError.of(int(message.status), bytes(getattr(message, "value", b"")).decode(errors="replace"))
        if not isinstance(error, (TemporaryFailure, Busy)):  # these may be different next time
            vbucket = min(self.carried)
            self._owner.failed(StreamRefused(vbucket, f"{self.endpoint} gives no TAP stream: {error}"))

    def _control(self, message: tap.Opaque) -> None:
        if message.control is Control.INITIAL_VBUCKET_STREAM and message.vbucket in self.carried:
            self._start_over(message.vbucket)
        elif message.control is Control.CLOSE_BACKFILL:
            self._whole.add(message.vbucket)

    def _start_over(self, number: int) -> None:
        copy = self._copies[number]
        again = number in self._begun
        self._begun.add(number)
        self._whole.discard(number)
        if not copy.progress.is_unplaced:
            return
        if again and self._settings.on_rollback == "fail":
            # Not because we came back: the history behind the stream broke.
            raise StreamRolledBack(number, 0, copy.position)
        self._copies.happened(copy, Reset(number, copy.position.vbucket_uuid, copy.position.vbucket_uuid))
        if again:
            self._owner.branched(self)

    def _flushed(self) -> None:
        """Everything that came over this connection is gone."""
        for number in sorted(self.carried):
            self._copies.happened(self._copies[number], Flush(number))
        self._owner.branched(self)

    def _answer(self, opcode: int, opaque: int) -> None:
        if not self._lost:
            self.connection.write(AnyResponse(opcode=opcode, opaque=opaque).encode())

    def lost(self, error: UpriverError) -> None:
        """The connection is gone."""
        if self._lost:
            return
        self._end()
        self._owner.feed_lost(self, error)

    # Time

    def _watch(self) -> None:
        """Ask whether the source is there, which only nodes of ours are sure to answer in the middle of a stream."""
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
        """Close the connection; nobody is told."""
        self._end()
        await self.connection.close()
