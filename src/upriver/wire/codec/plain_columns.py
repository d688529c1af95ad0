"""The plain Python twin of the compiled columnar codec: the reference, and the fallback without a C compiler.

Both codecs decode only valid rows. At anything else (a control message, an incomplete packet, an error) they stop and
leave it to the message layer, so that both give the same results.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from upriver.errors import WireError
from upriver.model import Event, vbucket_of
from upriver.wire.codec.row_layout import RowLayout, RowTemplate, field_column
from upriver.wire.codes import Magic
from upriver.wire.dialect import Dialect
from upriver.wire.framing import DRAFT, EXTRAS_LENGTH_AT, KEY_BYTES_MAX, KEY_LENGTH_AT, MEMCACHED, OPCODE_AT
from upriver.wire.layout import Buffer
from upriver.wire.message import DraftMessage

_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_HEADER_SIZE: Final = MEMCACHED.header_size
T = TypeVar("T")


#: Number of rows, where reading stopped, the changes and their transport table.
Read = tuple[int, int, pa.RecordBatch | None, pa.RecordBatch | None]


def _batches(
    schemas: tuple[pa.Schema, pa.Schema], rows: Sequence[T], column: Callable[[Sequence[T], str], list[Any]]
) -> Iterator[pa.RecordBatch]:
    for schema in schemas:
        columns = [pa.array(column(rows, field.name), field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


class _RowStruct:
    """One ``struct`` over the header and the fixed part of a layout that reads just the wanted numbers."""

    def __init__(self, layout: RowLayout, columns: Sequence[str]) -> None:
        self.layout = layout
        wanted = sorted((layout.places[name].offset, name) for name in columns if name in layout.places)
        #: Index of each column in the unpacked tuple.
        self.positions = {name: position for position, (_, name) in enumerate(wanted)}
        code, at = ">", 0
        for offset, name in wanted:
            size = layout.places[name].size
            code += f"{offset - at}x{_CODES[size]}"
            at = offset + size
        self.struct = struct.Struct(code)


class _Row(NamedTuple):
    kind: _RowStruct
    numbers: tuple[int, ...]
    key: bytes
    value: bytes
    size: int


def _column(rows: Sequence[_Row], name: str) -> list[Any]:
    match name:
        case "key":
            return [row.key for row in rows]
        case "value":
            return [row.value for row in rows]
        case "event":
            return [row.kind.layout.event for row in rows]
    places = ((row.numbers, row.kind.positions.get(name)) for row in rows)
    return [0 if position is None else numbers[position] for numbers, position in places]


class RowReader:
    """Turns runs of change packets into Arrow arrays."""

    def __init__(
        self,
        layouts: Iterable[RowLayout],
        records_schema: pa.Schema,
        transport_schema: pa.Schema,
        body_bytes_max: int,
    ) -> None:
        self._schemas = records_schema, transport_schema
        columns = (*records_schema.names, *transport_schema.names)
        self._body_bytes_max = body_bytes_max
        self._structs: dict[tuple[int, int], dict[int, _RowStruct]] = {}
        for layout in layouts:
            by_length = self._structs.setdefault((layout.opcode, layout.extras_length), {})
            by_length[layout.fixed_length] = _RowStruct(layout, columns)

    def read(self, head: bytes, data: Buffer, start: int, rows_max: int, bytes_max: int) -> Read:
        """Decode the packet ``head``, if any, and those of ``data`` from ``start``; stop at the first other packet.

        Returns the number of rows, the offset of the first byte of ``data`` that was not consumed, the changes and
        their transport table.
        """
        rows: list[_Row] = []
        budget = bytes_max
        if head:
            row = self._row_at(head, 0)
            if row is None:
                return 0, start, None, None
            rows.append(row)
            budget -= row.size
        while len(rows) < rows_max and budget > 0:
            row = self._row_at(data, start)
            if row is None:
                break
            rows.append(row)
            start += row.size
            budget -= row.size
        return len(rows), start, *_batches(self._schemas, rows, _column)

    def _row_at(self, data: Buffer, start: int) -> _Row | None:
        """The complete, valid row at ``start``; None for anything else."""
        available = len(data) - start
        if available < _HEADER_SIZE or data[start] != Magic.REQUEST:
            return None
        known = self._structs.get((data[start + OPCODE_AT], data[start + EXTRAS_LENGTH_AT]))
        if known is None:
            return None
        try:
            size = _HEADER_SIZE + MEMCACHED.body_length(data, start, self._body_bytes_max)
        except WireError:
            return None
        if available < size:
            return None
        first = next(iter(known.values())).layout
        fixed_length = first.extras_length
        if first.private is not None:
            fixed_length += _U16.unpack_from(data, start + first.private.offset)[0]
        kind = known.get(fixed_length)
        if kind is None and first.private is not None:  # of a longer engine-private part we know the beginning
            kind = known.get(max((length for length in known if length < fixed_length), default=0))
        if kind is None:
            return None
        key = start + _HEADER_SIZE + fixed_length
        value = key + _U16.unpack_from(data, start + KEY_LENGTH_AT)[0]
        trailer = kind.layout.trailer
        end = start + size - (0 if trailer is None else _U16.unpack_from(data, start + trailer.offset)[0])
        if value > end or (value < end and not kind.layout.has_value):
            return None
        numbers = kind.struct.unpack_from(data, start)
        return _Row(kind, numbers, bytes(data[key:value]), bytes(data[value:end]), size)


def write_rows(
    batch: pa.RecordBatch,
    templates: Mapping[Event, RowTemplate],
    *,
    opaque: int,
    opaque_step: int,
    keys_only: bool,
) -> bytes:
    """The packets of a batch of changes, joined."""
    out = bytearray()
    rows = batch.to_pydict()
    for index in range(batch.num_rows):
        template, key = templates.get(rows["event"][index]), rows["key"][index]
        if template is None or not template.key_bytes_min <= len(key) <= KEY_BYTES_MAX:
            raise _no_packet(index, rows["event"][index], key)
        layout, packet = template.layout, bytearray(template.head)
        value = rows["value"][index] if layout.has_value and not keys_only else b""
        framing = template.framing
        if template.tells_key_length:
            _U16.pack_into(packet, KEY_LENGTH_AT, len(key))
        _U32.pack_into(packet, framing.length_offset, len(packet) - framing.header_size + len(key) + len(value))
        _U32.pack_into(packet, layout.places["opaque"].offset, (opaque + index * opaque_step) & 0xFFFFFFFF)
        for column, place in layout.places.items():
            if column in rows and (column != "vbucket" or template.vbucket_varies):
                struct.pack_into(">" + _CODES[place.size], packet, place.offset, rows[column][index])
        out += packet
        out += key
        out += value
    return bytes(out)


def key_vbuckets(keys: pa.BinaryArray, vbuckets: int) -> pa.UInt16Array:
    """The vbucket of each key of a binary Arrow array without nulls, in a bucket with this number of vbuckets."""
    if not vbuckets:
        raise ValueError("a bucket must have at least one vbucket")
    return pa.array([vbucket_of(key, vbuckets) for key in keys.to_pylist()], pa.uint16())


def _no_packet(row: int, event: int, key: bytes) -> ValueError:
    return ValueError(f"row {row} cannot be a packet: event {event}, a key of {len(key)} bytes")


class DraftRowReader:
    """The row reader of the 12-byte drafts, message by message.

    Their changes carry the request id of the stream instead of a vbucket; ``vbuckets`` maps one to the other.
    """

    def __init__(
        self,
        dialect: Dialect,
        records_schema: pa.Schema,
        transport_schema: pa.Schema,
        body_bytes_max: int,
        vbuckets: Mapping[int, int],
    ) -> None:
        self._dialect = dialect
        self._schemas = records_schema, transport_schema
        self._body_bytes_max = body_bytes_max
        self._vbuckets = vbuckets

    def read(self, head: bytes, data: Buffer, start: int, rows_max: int, bytes_max: int) -> Read:
        """As ``RowReader.read``."""
        messages: list[DraftMessage] = []
        budget = bytes_max
        if head:
            message = self._change(head)
            if message is None:
                return 0, start, None, None
            messages.append(message)
            budget -= len(head)
        while len(messages) < rows_max and budget > 0:
            packet = self._packet(data, start)
            message = self._change(packet)
            if message is None:
                break
            messages.append(message)
            start, budget = start + len(packet), budget - len(packet)
        return len(messages), start, *_batches(self._schemas, messages, self._column)

    def _packet(self, data: Buffer, start: int) -> bytes:
        if len(data) - start < DRAFT.header_size:
            return b""
        try:
            size = DRAFT.header_size + DRAFT.body_length(data, start, self._body_bytes_max)
        except WireError:
            return b""
        return bytes(data[start : start + size]) if len(data) - start >= size else b""

    def _change(self, packet: bytes) -> DraftMessage | None:
        """The change in a packet; None for other or invalid packets, which the message layer reports."""
        if not packet:
            return None
        try:
            message = self._dialect.decode(packet)
        except WireError:
            return None
        return message if isinstance(message, DraftMessage) and message.declaration.change is not None else None

    def _column(self, messages: Sequence[DraftMessage], name: str) -> list[Any]:
        return [self._cell(message, name) for message in messages]

    def _cell(self, message: DraftMessage, column: str) -> Any:
        if column == "event":
            return int(message.declaration.change or 0)
        if column == "vbucket":
            return self._vbuckets.get(message.request_id, 0)
        if column == "opaque":
            return message.request_id
        names = [field.name for field in message.layout.fields if field_column(field.name) == column]
        return getattr(message, names[0]) if names else b"" if column == "value" else 0
