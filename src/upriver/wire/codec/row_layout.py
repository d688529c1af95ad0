"""The layout of changes in packets, as tables derived from the declarations, for the columnar codecs.

A *row layout* gives the offset of each column for one kind of change message and one length of its fixed part. Both
codecs, plain and compiled, know dialects only through these tables, so a new dialect needs no new code.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pyarrow as pa

from upriver.model import CHANGES, Event
from upriver.wire.dialect import Dialect
from upriver.wire.fields import UInt
from upriver.wire.framing import MEMCACHED, Framing
from upriver.wire.message import Message, Request

#: Data of a change that only the connection needs. Only `tap` has the last two.
TRANSPORT: Final = pa.schema(
    [
        pa.field("opaque", pa.uint32(), nullable=False),
        pa.field("tap_flags", pa.uint16(), nullable=False),
        pa.field("ttl", pa.uint8(), nullable=False),
    ]
)

#: Columns whose field has another name in the texts.
_FIELD_NAMES: Final = {"by_seqno": "seqno", "expiration": "expiry", "delete_time": "expiry"}
#: Columns in the header, by the header's own names.
_HEADER_NAMES: Final = {
    "data type": "datatype",
    "vbucket": "vbucket",
    "opaque": "opaque",
    "request id": "opaque",
    "cas": "cas",
}


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """Offset and size of a number in a packet."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One kind of change message with a fixed part of one length."""

    message: type[Message]
    event: Event
    opcode: int
    extras_length: int
    fixed_length: int
    places: dict[str, FieldPlace]
    #: Offset of the length of the engine-private part; None if the message has none.
    private: FieldPlace | None
    #: Offset of the number of bytes after the value; None if there are none.
    trailer: FieldPlace | None
    has_value: bool


def field_column(field_name: str) -> str | None:
    """The column that a field of a change message fills; None if it fills none."""
    name = _FIELD_NAMES.get(field_name, field_name)
    return name if name in CHANGES.names or name in TRANSPORT.names else None


@cache
def row_layouts(dialect: Dialect) -> tuple[RowLayout, ...]:
    """All layouts that a change of this dialect may have, inherited ones included.

    None for the 12-byte drafts: their changes are read message by message.
    """
    if dialect.framing is not MEMCACHED:
        return ()
    found: dict[tuple[int, int, int], RowLayout] = {}
    for message in dialect.change_messages():
        for fixed_length in message.layout.lengths:
            layout = _row_layout(message, fixed_length)
            found[layout.opcode, layout.extras_length, fixed_length] = layout
    return tuple(found.values())


def _row_layout(message: type[Message], fixed_length: int) -> RowLayout:
    layout, event = message.layout, message.declaration.change
    assert event is not None
    places = {
        _HEADER_NAMES[field.name]: FieldPlace(field.first, field.size)
        for field in message.framing.request_fields
        if field.name in _HEADER_NAMES
    }
    counters: dict[str, FieldPlace] = {}
    for field, offset, size in layout.parts[fixed_length].offsets():
        place = FieldPlace(_body_start(message) + offset, size)
        column = field_column(field.name)
        if field.counts:
            counters[field.name] = place
        elif column is not None and isinstance(field.kind, UInt):
            if place.size != _width(column):
                raise TypeError(f"{message.__name__}.{field.name} takes {size} bytes, its column {_width(column)}")
            places[column] = place
    private = counters.pop(layout.private) if layout.private is not None else None
    (trailer,) = counters.values() or (None,)
    return RowLayout(
        message=message,
        event=event,
        opcode=message.declaration.opcode,
        extras_length=fixed_length if private is None else layout.extras_lengths[0],
        fixed_length=fixed_length,
        places=places,
        private=private,
        trailer=trailer,
        has_value=any(field.name == "value" for field in layout.rest),
    )


def _body_start(message: type[Message]) -> int:
    """Offset of the fixed part: after the header, and in the drafts after the type."""
    return message.framing.header_size + (message.declaration.type_code is not None)


def _width(column: str) -> int:
    schema = CHANGES if column in CHANGES.names else TRANSPORT
    return int(schema.field(column).type.bit_width) // 8


@dataclass(frozen=True, slots=True)
class RowTemplate:
    """How to encode the changes of one event: the first bytes of each packet, and the fields patched into them.

    Both headers have the lengths of key and body at the same offsets.
    """

    layout: RowLayout
    head: bytes
    #: The vbucket of a stream is part of the head; a client's requests set it for each key.
    vbucket_varies: bool = False

    @property
    def framing(self) -> Framing:
        """The framing of the head."""
        return self.layout.message.framing

    @property
    def tells_key_length(self) -> bool:
        """The drafts do so only if a value follows; otherwise the key is the rest of the body."""
        return self.framing is MEMCACHED or self.layout.has_value

    @property
    def key_bytes_min(self) -> int:
        """The drafts cannot distinguish an empty key from a missing one."""
        return 0 if self.framing is MEMCACHED else 1


def row_templates(
    dialect: Dialect, *, vbucket: int, expirations: bool, delete_times: bool, given: dict[str, Any]
) -> dict[Event, RowTemplate]:
    """The template for each event of a stream; ``given`` are fields with the same value in all its messages.

    Expirations are encoded as deletions if they are not wanted or the dialect has no message for them.
    """
    templates: dict[Event, RowTemplate] = {}
    unknown = set(given) - {field.name for message in dialect.change_messages() for field in message.layout.fields}
    if unknown:
        raise TypeError(f"no change message of {dialect.name} has a field {', '.join(sorted(unknown))}")
    for message in dialect.change_messages():
        event = message.declaration.change
        assert event is not None
        names = {field.name for field in message.layout.fixed_fields}
        values = {name: 0 for name in names if field_column(name) in CHANGES.names}
        values |= {name: value for name, value in given.items() if name in names}
        if event is Event.DELETION and not delete_times:
            values.pop("delete_time", None)
        if issubclass(message, Request):
            values["vbucket"] = vbucket
        head = message(key=b"k", **values).encode()[:-1]  # type: ignore[call-arg]
        templates[event] = RowTemplate(_row_layout(message, len(head) - _body_start(message)), head)
    if not expirations or Event.EXPIRATION not in templates:
        templates[Event.EXPIRATION] = templates[Event.DELETION]
    return templates
