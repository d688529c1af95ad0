"""Messages: declared classes that encode themselves.

``Request`` and ``Response`` have the 24-byte header, ``DraftMessage`` the 12-byte one. A dialect's decorator
gives a declared class its opcode and layout. ``encode`` is a method of every message; decoding starts at the
dialect, because only the dialect knows the class of an opcode.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Self, dataclass_transform

from upriver.errors import WireError
from upriver.model import Event
from upriver.wire.codes import Magic, OpenEnum, Sender, Status, meaning_of
from upriver.wire.fields import count_of
from upriver.wire.framing import DRAFT, EXTRAS_LENGTH_AT, KEY_LENGTH_AT, MEMCACHED, STATUS_AT, Framing, u16_at
from upriver.wire.layout import Buffer, Layout, Span, packed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a dialect declares about a message, besides its fields."""

    dialect: str
    opcode: int
    #: First byte of the body; only messages of the 12-byte header have one.
    type_code: int | None = None
    #: The statuses that select a response; the one that is sent comes first.
    statuses: tuple[Status, ...] = ()
    sender: Sender = Sender.CLIENT
    #: The fixed part is accepted in the extras or in the value, and sent where it is declared.
    either: bool = False
    #: The event that a change message reports; None for other messages.
    change: Event | None = None
    #: Whether the receiver answers it; most messages of a stream are not answered.
    answered: bool = True
    #: Why the request may be refused: status and reason.
    errors: tuple[tuple[Status, str], ...] = ()


@dataclass_transform(kw_only_default=True, field_specifiers=(count_of,))
class Message:
    """A decoded packet."""

    __slots__ = ()
    framing: ClassVar[Framing]
    layout: ClassVar[Layout]
    declaration: ClassVar[Declaration]

    @property
    def code(self) -> int:
        """The opcode."""
        return self.declaration.opcode

    def encode(self) -> bytes:
        """The complete packet."""
        raise NotImplementedError

    @classmethod
    def decode(cls, packet: Buffer) -> Self:
        """Decode one complete packet. The framing has already checked its lengths."""
        raise NotImplementedError

    @classmethod
    def body_spans(cls, packet: Buffer) -> Iterator[Span]:
        """The offsets of each field of the body, counted from the start of the packet."""
        raise NotImplementedError

    @classmethod
    def title(cls) -> str:
        """The class's name as words: ``SnapshotMarker`` is a "snapshot marker"."""
        words = "".join(" " + c.lower() if c.isupper() else c for c in cls.__name__)
        return words.strip()


class MemcachedMessage(Message):
    """A packet with the 24-byte header."""

    __slots__ = ()
    framing = MEMCACHED

    def _encode(self, magic: int, sixth: int, opaque: int, datatype: int, cas: int) -> bytes:
        layout = self.layout
        fixed, rest = layout.encode(self, layout.choose_length(self))
        extras = len(fixed) if layout.private is None else layout.extras_lengths[0]
        key_length = 0 if layout.key_place is None else len(rest[layout.key_place])
        body = len(fixed) + sum(map(len, rest))
        numbers = magic, self.code, key_length, extras, datatype, sixth, body, opaque, cas
        header = packed(MEMCACHED.header, layout.header_name, *numbers)
        return b"".join((header, fixed, *rest))

    @classmethod
    def _fixed_length(cls, packet: Buffer) -> int:
        """The length of the fixed part of this packet; refuses an undeclared length."""
        layout, extras = cls.layout, packet[EXTRAS_LENGTH_AT]
        if cls.declaration.either:
            if extras not in (0, len(packet) - MEMCACHED.header_size):
                raise WireError(EXTRAS_LENGTH_AT, "all of the body in the extras, or none", f"{extras} bytes of extras")
            return layout.lengths[0]
        length = extras
        if layout.private is not None and extras in layout.extras_lengths:
            length += u16_at(packet, MEMCACHED.header_size)
            # Any engine may send more than we know of; ``Layout.decode`` skips it.
            length = max((known for known in layout.lengths if known <= length), default=length)
        if length not in layout.parts:
            what = "extras" if layout.private is None else "extras and engine-private part"
            lengths = " or ".join(map(str, layout.lengths))
            raise WireError(EXTRAS_LENGTH_AT, f"{what} of {lengths} bytes in {cls.title()}", f"{length}")
        return length

    @classmethod
    def _body(cls, packet: Buffer) -> tuple[int, int, int, int]:
        """The offsets of the body, and the lengths of its fixed part and key."""
        key_length = u16_at(packet, KEY_LENGTH_AT)
        if key_length and not cls.layout.has_key:
            raise WireError(KEY_LENGTH_AT, f"no key in {cls.title()}", f"a key of {key_length} bytes")
        return MEMCACHED.header_size, len(packet), cls._fixed_length(packet), key_length

    @classmethod
    def body_spans(cls, packet: Buffer) -> Iterator[Span]:
        return cls.layout.spans(packet, *cls._body(packet), origin=0)


@dataclasses.dataclass(kw_only=True, slots=True)
class Request(MemcachedMessage):
    """A packet with magic 0x80. Producers of a stream send requests too."""

    vbucket: int = 0
    opaque: int = 0
    datatype: int = 0
    cas: int = 0

    def encode(self) -> bytes:
        return self._encode(Magic.REQUEST, self.vbucket, self.opaque, self.datatype, self.cas)

    @classmethod
    def decode(cls, packet: Buffer) -> Self:
        _, _, _, _, datatype, vbucket, _, opaque, cas = MEMCACHED.header.unpack_from(packet)
        values: dict[str, Any] = {"vbucket": vbucket, "opaque": opaque, "datatype": datatype, "cas": cas}
        cls.layout.decode(packet, *cls._body(packet), values)
        return cls(**values)


@dataclasses.dataclass(kw_only=True, slots=True)
class Response(MemcachedMessage):
    """A packet with magic 0x81: the response to the request with the same opaque."""

    status: Status = Status.SUCCESS
    opaque: int = 0
    datatype: int = 0
    cas: int = 0

    def encode(self) -> bytes:
        return self._encode(Magic.RESPONSE, self.status, self.opaque, self.datatype, self.cas)

    @classmethod
    def decode(cls, packet: Buffer) -> Self:
        _, _, _, _, datatype, status, _, opaque, cas = MEMCACHED.header.unpack_from(packet)
        values: dict[str, Any] = {
            "status": Status(status), "opaque": opaque, "datatype": datatype, "cas": cas
        }  # fmt: skip
        cls.layout.decode(packet, *cls._body(packet), values)
        return cls(**values)


@dataclasses.dataclass(kw_only=True, slots=True)
class AnyRequest(Request):
    """A request with an undeclared opcode, kept as it is so that it can be refused or relayed."""

    opcode: int
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""

    @property
    def code(self) -> int:
        return self.opcode

    def encode(self) -> bytes:
        return _encode_any(self, Magic.REQUEST, self.vbucket)

    @classmethod
    def decode(cls, packet: Buffer) -> Self:
        return cls(vbucket=u16_at(packet, STATUS_AT), **_any_values(packet))

    @classmethod
    def body_spans(cls, packet: Buffer) -> Iterator[Span]:
        return _any_spans(packet)


@dataclasses.dataclass(kw_only=True, slots=True)
class AnyResponse(Response):
    """A response without a declared layout: plain success, or a refusal with its text."""

    opcode: int
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""

    @property
    def code(self) -> int:
        return self.opcode

    @property
    def text(self) -> str:
        """The value as readable text."""
        return self.value.decode(errors="replace")

    def encode(self) -> bytes:
        return _encode_any(self, Magic.RESPONSE, self.status)

    @classmethod
    def decode(cls, packet: Buffer) -> Self:
        return cls(status=Status(u16_at(packet, STATUS_AT)), **_any_values(packet))

    @classmethod
    def body_spans(cls, packet: Buffer) -> Iterator[Span]:
        return _any_spans(packet)


def _encode_any(message: AnyRequest | AnyResponse, magic: int, sixth: int) -> bytes:
    body = message.extras + message.key + message.value
    header = packed(
        MEMCACHED.header,
        f"the header of {type(message).__name__}",
        magic,
        message.opcode,
        len(message.key),
        len(message.extras),
        message.datatype,
        sixth,
        len(body),
        message.opaque,
        message.cas,
    )
    return header + body


def _any_values(packet: Buffer) -> dict[str, Any]:
    _, opcode, key_length, extras_length, datatype, _, _, opaque, cas = MEMCACHED.header.unpack_from(packet)
    start = MEMCACHED.header_size
    key = start + extras_length
    return {
        "opcode": opcode,
        "opaque": opaque,
        "datatype": datatype,
        "cas": cas,
        "extras": bytes(packet[start:key]),
        "key": bytes(packet[key : key + key_length]),
        "value": bytes(packet[key + key_length :]),
    }


def _any_spans(packet: Buffer) -> Iterator[Span]:
    values, at = _any_values(packet), MEMCACHED.header_size
    for name in ("extras", "key", "value"):
        part = values[name]
        if part:
            yield Span(name, at, at + len(part) - 1, part)
        at += len(part)


class DraftOpcode(OpenEnum):
    """The first byte of a packet with the 12-byte header."""

    REQUEST = 1
    RESPONSE = 2
    STREAM_START = 3
    STREAM_MESSAGE = 4
    STREAM_END = 5
    REQUEST_ERROR = 6
    DECODE_ERROR = 7


@dataclasses.dataclass(kw_only=True, slots=True)
class DraftMessage(Message):
    """A packet with the 12-byte header of the first two drafts."""

    framing = DRAFT
    request_id: int = 0

    def encode(self) -> bytes:
        layout, type_code = self.layout, self.declaration.type_code
        fixed, rest = layout.encode(self, layout.choose_length(self))
        kind = b"" if type_code is None else bytes((type_code,))
        key_length = 0
        if layout.has_key and layout.has_value:  # otherwise the key is the rest of the body
            assert layout.key_place is not None
            key_length = len(rest[layout.key_place])
            if not key_length:
                raise ValueError(f"a {self.title()} needs a key: the draft cannot encode an empty one")
        length = len(kind) + len(fixed) + sum(map(len, rest))
        numbers = self.code, 0, key_length, self.request_id, length
        header = packed(DRAFT.header, layout.header_name, *numbers)
        return b"".join((header, kind, fixed, *rest))

    @classmethod
    def _body(cls, packet: Buffer) -> tuple[int, int, int, int | None]:
        layout = cls.layout
        start = 12 if cls.declaration.type_code is None else 13
        length = layout.lengths[0] if len(layout.lengths) == 1 else len(packet) - start
        if length not in layout.parts:
            lengths = " or ".join(map(str, layout.lengths))
            raise WireError(start, f"{lengths} bytes of {cls.title()}", f"{length}")
        key_length: int | None = None
        if layout.has_key and layout.has_value:
            key_length = u16_at(packet, DRAFT.at("key length"))
            if not key_length:
                raise WireError(2, "the length of the key in the reserved bytes 2-3", "0")
        return start, len(packet), length, key_length

    @classmethod
    def decode(cls, packet: Buffer) -> Self:
        _, _, _, request_id, _ = DRAFT.header.unpack_from(packet)
        values: dict[str, Any] = {"request_id": request_id}
        cls.layout.decode(packet, *cls._body(packet), values)
        return cls(**values)

    @classmethod
    def body_spans(cls, packet: Buffer) -> Iterator[Span]:
        if cls.declaration.type_code is not None:
            yield Span("type", 12, 12, cls.declaration.type_code, cls.title())
        yield from cls.layout.spans(packet, *cls._body(packet), origin=0)


def header_spans(message: type[Message], packet: Buffer) -> Iterator[Span]:
    """The offsets of each field of the header."""
    framing, response = message.framing, issubclass(message, Response)
    fields = framing.response_fields if response else framing.request_fields
    if framing is DRAFT and not (message.layout.has_key and message.layout.has_value):
        fields = framing.keyless_fields
    codes: dict[str, type[OpenEnum]] = {"magic": Magic, "status": Status}
    if framing is DRAFT:
        codes["opcode"] = DraftOpcode
    for field in fields:
        number = int.from_bytes(packet[field.first : field.first + field.size], "big")
        value = codes[field.name](number) if field.name in codes else number
        meaning = message.title() if field.name == "opcode" and framing is MEMCACHED else meaning_of(value)
        yield Span(field.name, field.first, field.first + field.size - 1, value, meaning)
