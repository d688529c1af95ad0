"""Decode received bytes into Arrow batches of changes, and encode batches again.

A ``ChangeDecoder`` takes bytes in pieces of any size and returns batches of changes, with the control messages between
them as objects, in order. A ``ChangeEncoder`` turns batches into the packets of one stream. The loops are compiled if a
C compiler was available (see ``CODEC``); the results are the same either way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, Final

import pyarrow as pa

from upriver.errors import WireError
from upriver.model import CHANGES
from upriver.wire.codec import plain_columns
from upriver.wire.codec.row_layout import TRANSPORT, row_layouts, row_templates
from upriver.wire.dialect import Dialect
from upriver.wire.framing import BODY_BYTES_MAX, DRAFT, truncation
from upriver.wire.layout import Buffer
from upriver.wire.message import Message

_codec: ModuleType
try:
    from upriver.wire.codec import _columns

    _codec, CODEC = _columns, "compiled"
except ImportError:  # built where there was no C compiler
    _codec, CODEC = plain_columns, "plain"

#: Limits of a batch, in rows and in bytes of packets. Larger batches are slower, because they outgrow the cache
#: between the two passes of the decoder.
BATCH_ROWS_MAX: Final = 65_536
BATCH_BYTES_MAX: Final = 1024 * 1024
#: Arrow's offsets have 31 bits; the last packet of a batch may exceed the limit by its own size.
_BATCH_BYTES_LIMIT: Final = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Consecutive changes, with no control message between them."""

    #: The changes, with the schema ``CHANGES`` or the requested part of it.
    records: pa.RecordBatch
    #: Data for the connection, with the schema ``TRANSPORT`` or a part of it: the opaque of each change, and in `tap`
    #: its flags and time to live.
    transport: pa.RecordBatch
    #: Size of their packets in bytes, for flow control.
    wire_bytes: int

    def __len__(self) -> int:
        return int(self.transport.num_rows)


class ChangeDecoder:
    """Received bytes in, batches of changes and control messages out, in order.

    Fed buffers are read in place: drain the decoder before their memory is reused. Returned batches are copies and
    stay valid. After a ``WireError`` the decoder stays broken, because the stream is out of step.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        columns: Sequence[str] = tuple(CHANGES.names),
        batch_rows_max: int = BATCH_ROWS_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        body_bytes_max: int = BODY_BYTES_MAX,
        vbuckets: Mapping[int, int] = MappingProxyType({}),
        codec: ModuleType = _codec,
    ) -> None:
        """``vbuckets`` maps request ids to vbuckets, which the 12-byte drafts do not name in their changes."""
        if batch_rows_max < 1 or batch_bytes_max < 1:
            raise ValueError("a batch must have room for at least one row and one byte")
        self.dialect = dialect
        layouts = row_layouts(dialect)
        transport = [name for name in TRANSPORT.names if any(name in row.places for row in layouts)] or ["opaque"]
        schemas = (
            pa.schema([CHANGES.field(name) for name in columns]),
            pa.schema([TRANSPORT.field(name) for name in transport]),
        )
        self._reader = (
            plain_columns.DraftRowReader(dialect, *schemas, body_bytes_max, vbuckets)
            if dialect.framing is DRAFT
            else codec.RowReader(layouts, *schemas, body_bytes_max)
        )
        self._limits = batch_rows_max, min(batch_bytes_max, _BATCH_BYTES_LIMIT)
        self._body_bytes_max = body_bytes_max
        self._data: Buffer = b""
        self._at = 0
        self._partial = bytearray()
        #: Number of bytes consumed: the offset of the next packet.
        self.offset = 0
        self._error: WireError | None = None

    def feed(self, data: Buffer | pa.Buffer) -> None:
        """Take received bytes. Unless ``next`` has returned None before the next feed, they are copied."""
        if self._error is not None:
            return  # the decoder is broken
        if not isinstance(data, bytes | bytearray):
            data = memoryview(data).cast("B")
        if self._at < len(self._data):
            data = b"".join((self._data[self._at :], data))
        self._data, self._at = data, 0

    def feed_behind(self, head: bytes, data: Buffer) -> None:
        """Take a complete packet and the bytes after it, from two buffers, as one batch."""
        self.feed(data)
        self._partial += head

    def __iter__(self) -> Iterator[ChangeBatch | Message]:
        while (item := self.next()) is not None:
            yield item

    def next(self) -> ChangeBatch | Message | None:
        """The next batch or control message, or None if more bytes are needed."""
        if self._error is not None:
            raise self._error
        try:
            if self._partial and not self._complete_partial():
                return None
            batch = self._next_batch()
            return self._next_message() if batch is None else batch
        except WireError as error:
            self._error = error.shifted(self.offset)
            raise self._error from None

    def finish(self) -> None:
        """The stream has ended: refuse an incomplete packet."""
        if self._error is None and self._partial:
            raise truncation(self.dialect.framing, self._partial, self.offset)

    def _next_batch(self) -> ChangeBatch | None:
        head = bytes(self._partial)
        rows, at, records, transport = self._reader.read(head, self._data, self._at, *self._limits)
        if not rows:
            return None
        size = len(head) + at - self._at
        self._partial.clear()
        self._at = at
        self.offset += size
        return ChangeBatch(records=records, transport=transport, wire_bytes=size)

    def _next_message(self) -> Message | None:
        packet = bytes(self._partial) or self._cut_packet()
        if packet is None:
            return None
        message = self.dialect.decode(packet)
        self.offset += len(packet)
        self._partial.clear()
        return message

    def _cut_packet(self) -> bytes | None:
        """The next packet if it is complete; otherwise its bytes are set aside."""
        start, data = self._at, self._data
        size = self._packet_size(data, start)
        if size is not None and len(data) - start >= size:
            self._at = start + size
            return bytes(data[start : start + size])
        self._partial += data[start:]
        self._data, self._at = b"", 0
        return None

    def _complete_partial(self) -> bool:
        """Complete the packet that was set aside; False if there are too few bytes."""
        for _ in range(2):  # first the header, which has the packet's length
            size = self._packet_size(self._partial, 0) or self.dialect.framing.header_size
            missing = size - len(self._partial)
            if missing > 0:
                self._partial += self._data[self._at : self._at + missing]
                self._at = min(self._at + missing, len(self._data))
            if len(self._partial) < size:
                return False
        return True

    def _packet_size(self, data: Buffer, start: int) -> int | None:
        """The size of the packet at ``start``; None while its header is incomplete."""
        framing = self.dialect.framing
        try:
            if start < len(data):
                framing.check_first_byte(data, start)
            if len(data) - start < framing.header_size:
                return None
            return framing.header_size + framing.body_length(data, start, self._body_bytes_max)
        except WireError as error:
            raise error.shifted(-start) from None


class ChangeEncoder:
    """Encodes batches of changes as the packets of one stream."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        opaque: int,
        vbucket: int,
        keys_only: bool = False,
        expirations: bool = True,
        delete_times: bool = False,
        opaque_step: int = 0,
        codec: ModuleType = _codec,
        **given: Any,
    ) -> None:
        """``opaque_step`` numbers the messages, as in `tap`; ``given`` are fields with the same value in all messages.

        Without ``expirations`` they are sent as deletions; with ``delete_times`` deletions carry their time.
        """
        if not 0 <= opaque < 2**32:
            raise ValueError(f"the opaque {opaque} does not fit into 32 bits")
        self.dialect = dialect
        self.opaque = opaque
        self._keys_only = keys_only
        self._opaque_step = opaque_step
        self._codec = codec
        self._templates = row_templates(
            dialect, vbucket=vbucket, expirations=expirations, delete_times=delete_times, given=given
        )

    def encode(self, batch: pa.RecordBatch) -> bytes | pa.Buffer:
        """The packets of the batch's changes, in one buffer."""
        if batch.schema != CHANGES:
            batch = batch.select(CHANGES.names).cast(CHANGES)
        for name, column in zip(CHANGES.names, batch.columns, strict=True):
            if column.null_count:
                raise ValueError(f"the column {name} has nulls, which a change cannot have")
        out = self._codec.write_rows(
            batch,
            self._templates,
            opaque=self.opaque,
            opaque_step=self._opaque_step,
            keys_only=self._keys_only,
        )
        self.opaque = (self.opaque + batch.num_rows * self._opaque_step) & 0xFFFFFFFF
        return out
