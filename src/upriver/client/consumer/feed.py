"""One connection that feeds a consumer: received changes become Arrow batches, other messages go to the protocol.

The socket reads into a buffer that is reused. The protocol's consumer checks runs of changes without an object for each
change; then adjacent runs are decoded together, whichever vbuckets they belong to. Only the start of an incomplete
packet is copied and kept.
"""

import asyncio
import secrets
from typing import Final, Protocol

import pyarrow as pa

from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.connection import Connection
from upriver.errors import UpriverError, WireError
from upriver.model import UUID_BITS, inflated_batch
from upriver.protocol.consumer import (
    Answered,
    ConsumerConnection,
    ConsumerOptions,
    ConsumerStream,
    DraftTranslator,
    Run,
)
from upriver.wire import MEMCACHED, AnyResponse, Dialect, Framer, dcp, packet_size, upr_draft3
from upriver.wire.codec import ChangeBatch, ChangeDecoder

#: The number of bytes to read at once. More would not fit into the processor's cache until they are decoded.
RECEIVE_BYTES: Final = 512 * 1024


class FeedReceiver(Protocol):
    """Takes the changes of a feed."""

    def received(self, feed: "Feed", records: pa.RecordBatch, runs: tuple[Run, ...], wire_bytes: int) -> None:
        """Changes arrived; call ``feed.processed`` when they are used."""


class FeedOwner(Protocol):
    """Hears of the streams of a feed."""

    def stream_ended(self, feed: "Feed", stream: ConsumerStream) -> None:
        """An accepted stream ended."""

    def feed_lost(self, feed: "Feed", error: UpriverError) -> None:
        """The connection is lost with all its streams."""

    def failed(self, error: BaseException) -> None:
        """An error happened that another attempt would meet too."""


class Feed:
    """The streams of one node to one consumer."""

    def __init__(
        self,
        connection: Connection,
        tracked: TrackedVbuckets,
        receiver: FeedReceiver,
        owner: FeedOwner,
        options: ConsumerOptions,
        *,
        columns: tuple[str, ...],
        draft: Dialect | None = None,
    ) -> None:
        self.connection = connection
        self.endpoint = connection.endpoint
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._owner = owner
        self._protocol = ConsumerConnection(
            tracked, self._loop.time(), options, on_output=self._send, on_end=self._ended
        )
        self._decoder = ChangeDecoder(dcp.dcp, columns=columns, batch_rows_max=1 << 24, batch_bytes_max=1 << 30)
        self._partial = bytearray()
        #: A change that came in two pieces, and its run: decoded together with the changes behind it.
        self._head = b""
        self._head_runs: list[Run] = []
        self._draft = draft
        unknown_uuid = secrets.randbits(UUID_BITS) or 1
        self._translator = DraftTranslator(draft.name, unknown_uuid) if draft is not None else None
        self._framer = Framer(draft.framing) if draft is not None else None
        self._left_over: dict[tuple[int, int], tuple[int, int, int]] = {}
        #: Whether it speaks a draft, which cannot close a stream.
        self.is_draft = draft is not None
        #: Whether it speaks `dcp`, in which only active copies can be requested.
        self.speaks_dcp = "dcp" in options.dialects
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False
        #: The vbuckets that were requested here.
        self.carried: set[int] = set()
        connection.stream_to(self)

    # Requests

    def add_stream(self, vbucket: int, done: Answered, *, end_seqno: int, flags: int = 0) -> None:
        """Request a vbucket's changes from its tracked position; ``flush`` sends the request."""
        self._protocol.add_stream(vbucket, done, flags=flags, end_seqno=end_seqno)
        self.carried.add(vbucket)

    def flush(self) -> None:
        """Send the requests."""
        self._send()

    def has_stream(self, vbucket: int) -> bool:
        """Whether a stream was requested here and has not ended."""
        stream = self._protocol.streams.get(vbucket)
        return stream is not None and not stream.life.ended

    def close_stream(self, vbucket: int) -> None:
        """Close a stream, here and on the node."""
        stream = self._protocol.streams.get(vbucket)
        if stream is not None and not stream.life.ended:
            if self._translator is None:  # a draft cannot say so; the rest of the stream is ignored
                self.connection.write(dcp.CloseStream(vbucket=vbucket, opaque=stream.opaque).encode())
            self._protocol.close_stream(vbucket)

    def processed(self, wire_bytes: int) -> None:
        """The receiver has used this many bytes of changes."""
        if not self._lost:
            self._protocol.processed(wire_bytes, self._loop.time())
            self._send()

    def _ended(self, stream: ConsumerStream) -> None:
        self._owner.stream_ended(self, stream)

    # The connection's receiver

    def receive(self, data: memoryview) -> None:
        """Handle bytes from the socket."""
        now = self._loop.time()
        try:
            if self._framer is None:
                self._receive(data, now)
            else:
                self._receive_draft(data, now)
        except WireError:
            raise
        except Exception as error:
            self._owner.failed(error)
            return
        self._protocol.silence.heard(now)
        self._send()

    def _receive(self, data: memoryview, now: float) -> None:
        if self._partial:
            data = self._completed(data, now)
        try:
            at = self._receive_whole(data, now)
        finally:
            if self._head:  # the protocol has taken it, whatever came behind it
                self._decode(data[:0], [])
        if at < len(data):
            self._partial += data[at:]

    def _receive_draft(self, data: memoryview, now: float) -> None:
        """Handle packets of a draft, translated into `upr`, and the draft's messages that `upr` does not have."""
        assert self._framer is not None
        assert self._translator is not None
        assert self._draft is not None
        self._framer.feed(data)
        out: list[bytes] = []
        while (packet := self._framer.next_packet()) is not None:
            for message in self._translator.incoming(self._draft.decode(packet), len(packet)):
                if isinstance(message, upr_draft3.StreamStart | upr_draft3.SnapshotEnd):
                    self._receive_translated(out, now)
                    self._protocol.receive(message, now, len(packet))
                else:
                    out.append(message.encode())
        self._receive_translated(out, now)

    def _receive_translated(self, packets: list[bytes], now: float) -> None:
        assert self._translator is not None
        # The translator may release deletions whose extra fields are needed only by a later batch.
        self._left_over |= self._translator.take_left_over()
        self._receive(memoryview(b"".join(packets)), now)
        packets.clear()

    def _completed(self, data: memoryview, now: float) -> memoryview:
        """Handle the packet whose first bytes came earlier; returns the rest of the new bytes."""
        partial = self._partial
        for _ in range(2):  # first the header, which has the packet's length
            size = packet_size(partial, 0)
            missing = (24 if size is None else size) - len(partial)
            if missing > 0:
                partial += data[:missing]
                data = data[missing:]
            if size is not None and len(partial) >= size:
                break
        size = packet_size(partial, 0)
        if size is None or len(partial) < size:
            return data[len(data) :]
        whole, self._partial = bytes(partial), bytearray()
        end, runs = self._protocol.receive_runs(whole, 0, now)
        if end == size:
            self._head, self._head_runs = whole, runs
        else:
            self._receive_whole(memoryview(whole), now)
        return data

    def _receive_whole(self, data: memoryview, now: float) -> int:
        """Handle all complete packets; returns where the incomplete one starts."""
        at = 0
        while True:
            end, runs = self._protocol.receive_runs(data, at, now)
            if runs:
                self._decode(data[at:end], runs)
                at = end
            size = packet_size(data, at)
            if size is None or len(data) - at < size:
                return at
            if self._head:  # the change comes before this message
                self._decode(data[:0], [])
            message = self._decoder.dialect.decode(bytes(data[at : at + size]))
            at += size
            if isinstance(message, AnyResponse) and message.status:
                self.connection.refused(int(message.status), message.value)
            self._protocol.receive(message, now, size)

    def _decode(self, region: memoryview, runs: list[Run]) -> None:
        decoder = self._decoder
        if self._head:
            decoder.feed_behind(self._head, region)
            runs = [*self._head_runs, *runs]
            self._head = b""
        else:
            decoder.feed(region)
        batch = decoder.next()
        assert isinstance(batch, ChangeBatch)
        records = batch.records if self._translator is None else self._restored(batch.records)
        try:
            records = inflated_batch(records, self.connection.inflate)
        except WireError as error:  # a damaged value: another connection would start behind it
            self._owner.failed(error)
        else:
            self._receiver.received(self, records, tuple(runs), batch.wire_bytes)

    def _restored(self, records: pa.RecordBatch) -> pa.RecordBatch:
        """Add the fields of a draft's deletions that `upr` does not have."""
        if not self._left_over:
            return records
        keys = zip(records.column("vbucket").to_pylist(), records.column("seqno").to_pylist(), strict=True)
        found = {row: self._left_over.pop(key) for row, key in enumerate(keys) if key in self._left_over}
        for at, name in enumerate(("flags", "expiry", "lock_time")):
            index = records.schema.get_field_index(name)
            if index >= 0 and found:
                values = records.column(index).to_pylist()
                for row, left_over in found.items():
                    values[row] = left_over[at]
                field = records.schema.field(index)
                records = records.set_column(index, field, pa.array(values, field.type))
        return records

    def lost(self, error: UpriverError) -> None:
        """The connection is lost."""
        if self._lost:
            return
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._protocol.lose()
        self._owner.feed_lost(self, error)

    # Going out, and time

    def _send(self) -> None:
        data = self._protocol.data_to_send()
        if self._translator is not None and data:
            framer = Framer(MEMCACHED)
            framer.feed(data)
            messages = map(dcp.dcp.decode, iter(framer.next_packet, None))
            data = b"".join(self._translator.outgoing(message) for message in messages)
        if data:
            self.connection.write(data)
        if self._timer is None and self._protocol.deadline is not None and not self._lost:
            self._timer = self._loop.call_at(self._protocol.deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._lost:
            return
        self._protocol.tick(self._loop.time())
        if self._protocol.closing:
            self.connection.abort()
        else:
            self._send()

    async def close(self) -> None:
        """Close the connection without a report to the owner."""
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        await self.connection.close()
