"""Cut a stream of bytes into packets, with the 24-byte header of memcached or the 12-byte header of the drafts.

A ``Framer`` takes bytes in pieces of any size and returns complete packets. It checks the lengths before it keeps
anything, so a peer that announces four gigabytes is refused at its header. Offsets in errors count from the first
byte that the framer was fed.
"""

import struct
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Final

from upriver.errors import WireError
from upriver.wire.codes import Magic

#: A value may have 20 MiB; key and extras are added to that.
VALUE_BYTES_MAX: Final = 20 * 1024 * 1024
#: The largest key length that a header can express.
KEY_BYTES_MAX: Final = 0xFFFF
BODY_BYTES_MAX: Final = VALUE_BYTES_MAX + KEY_BYTES_MAX + 0xFF
#: The first byte of a request with framing extras, which SDKs send for durability. It is not supported, but its body
#: length is at the usual offset, so the node can refuse the request and skip it.
EXTENDED_REQUEST: Final = 0x08


_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class HeaderField:
    """A field of a header: its name in the texts, offset and size."""

    name: str
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Framing:
    """One of the two headers."""

    name: str
    request_fields: tuple[HeaderField, ...]
    response_fields: tuple[HeaderField, ...]
    length_name: str
    first_bytes: tuple[int, ...]
    first_byte_name: str
    #: The fields of messages without a key length, whose bytes are reserved, as in the texts of the drafts.
    keyless_fields: tuple[HeaderField, ...] = ()

    #: Derived from the fields.
    header: struct.Struct = dataclass_field(init=False)
    header_size: int = dataclass_field(init=False)
    length_offset: int = dataclass_field(init=False)

    def __post_init__(self) -> None:
        codes = "".join(_CODES[field.size] for field in self.request_fields)
        object.__setattr__(self, "header", struct.Struct(">" + codes))
        object.__setattr__(self, "header_size", self.header.size)
        object.__setattr__(self, "length_offset", self.at(self.length_name))

    def at(self, name: str) -> int:
        """The offset of a field of the header."""
        return next(field.first for field in (*self.request_fields, *self.response_fields) if field.name == name)

    def check_packet(self, packet: "bytes | bytearray | memoryview") -> None:
        """Refuse anything that is not exactly one packet."""
        if not len(packet):
            raise WireError(0, f"a {self.name}", "nothing")
        self.check_first_byte(packet, 0)
        if len(packet) < self.header_size:
            raise WireError(len(packet), f"a {self.name}", f"{len(packet)} bytes")
        size = self.header_size + self.body_length(packet, 0, len(packet))
        if len(packet) != size:
            raise WireError(min(size, len(packet)), f"a packet of {size} bytes", f"{len(packet)}")

    def body_length(self, data: "bytes | bytearray | memoryview", start: int, limit: int) -> int:
        """The body length in the complete header at ``start``; refuses impossible lengths."""
        (length,) = _U32.unpack_from(data, start + self.length_offset)
        if length > limit:
            raise WireError(start + self.length_offset, f"a body of at most {limit} bytes", f"a length of {length}")
        if self is MEMCACHED and data[start] != EXTENDED_REQUEST:
            key_length, extras_length = u16_at(data, start + KEY_LENGTH_AT), data[start + EXTRAS_LENGTH_AT]
            if key_length + extras_length > length:
                raise WireError(
                    start + self.length_offset,
                    f"a body that holds the key ({key_length} bytes) and the extras ({extras_length} bytes)",
                    f"a length of {length}",
                )
        return int(length)

    def check_first_byte(self, data: "bytes | bytearray | memoryview", start: int) -> None:
        if data[start] not in self.first_bytes:
            allowed = " or ".join(f"0x{byte:02x}" for byte in self.first_bytes)
            raise WireError(start, f"{self.first_byte_name} {allowed}", f"0x{data[start]:02x}")


def u16_at(data: "bytes | bytearray | memoryview", at: int) -> int:
    """The 16-bit number at an offset."""
    return int(_U16.unpack_from(data, at)[0])


def _header_fields(*sized: tuple[str, int]) -> tuple[HeaderField, ...]:
    fields, at = [], 0
    for name, size in sized:
        fields.append(HeaderField(name, at, size))
        at += size
    return tuple(fields)


def _memcached_fields(sixth: str) -> tuple[HeaderField, ...]:
    return _header_fields(
        ("magic", 1),
        ("opcode", 1),
        ("key length", 2),
        ("extra length", 1),
        ("data type", 1),
        (sixth, 2),
        ("total body", 4),
        ("opaque", 4),
        ("cas", 8),
    )


_DRAFT_FIELDS: Final = _header_fields(
    ("opcode", 1), ("reserved", 1), ("key length", 2), ("request id", 4), ("length", 4)
)

#: Magic, opcode, key length, extras length, data type, vbucket or status, body length, opaque, CAS.
MEMCACHED: Final = Framing(
    name="24-byte memcached header",
    request_fields=_memcached_fields("vbucket"),
    response_fields=_memcached_fields("status"),
    length_name="total body",
    first_bytes=(Magic.REQUEST, Magic.RESPONSE),
    first_byte_name="magic",
)

OPCODE_AT: Final = MEMCACHED.at("opcode")
KEY_LENGTH_AT: Final = MEMCACHED.at("key length")
EXTRAS_LENGTH_AT: Final = MEMCACHED.at("extra length")
STATUS_AT: Final = MEMCACHED.at("status")

#: Opcode, reserved, key length (reserved in the texts, docs/protocol/errata.md), request id, body length.
DRAFT: Final = Framing(
    name="12-byte draft header",
    request_fields=_DRAFT_FIELDS,
    response_fields=_DRAFT_FIELDS,
    length_name="length",
    first_bytes=tuple(range(1, 8)),
    first_byte_name="opcode",
    keyless_fields=_header_fields(("opcode", 1), ("reserved", 3), ("request id", 4), ("length", 4)),
)


def packet_size(data: "bytes | bytearray | memoryview", at: int) -> int | None:
    """The size of the memcached packet that starts at ``at``; None while its header is incomplete."""
    if at < len(data):
        MEMCACHED.check_first_byte(data, at)
    if len(data) - at < MEMCACHED.header_size:
        return None
    return MEMCACHED.header_size + MEMCACHED.body_length(data, at, BODY_BYTES_MAX)


class Framer:
    """Cuts received bytes into complete packets. After an error it stays broken: the stream is out of step."""

    def __init__(self, framing: Framing, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self.framing = framing
        self.body_bytes_max = body_bytes_max
        self._buffer = bytearray()
        self._start = 0
        #: Number of bytes returned as packets: the offset of the next one.
        self.offset = 0
        self._error: WireError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take received bytes; after an error they are dropped."""
        if self._error is not None:
            return
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    @property
    def pending(self) -> int:
        """Number of bytes that wait for the rest of their packet."""
        return len(self._buffer) - self._start

    def finish(self) -> None:
        """The stream has ended: refuse an incomplete packet."""
        if self._error is None and self.pending:
            raise truncation(self.framing, self._buffer[self._start :], self.offset)

    def next_packet(self) -> bytes | None:
        """The next complete packet, or None if more bytes are needed."""
        if self._error is not None:
            raise self._error
        buffer, start, framing = self._buffer, self._start, self.framing
        available = len(buffer) - start
        if not available:
            return None
        try:
            framing.check_first_byte(buffer, start)
            if available < framing.header_size:
                return None
            size = framing.header_size + framing.body_length(buffer, start, self.body_bytes_max)
        except WireError as error:
            self._error = error.shifted(self.offset - start)
            raise self._error from None
        if available < size:
            return None
        self._start = start + size
        self.offset += size
        return bytes(buffer[start : start + size])


def truncation(framing: Framing, rest: bytes | bytearray, offset: int) -> WireError:
    """The error of a stream that ends inside the packet at ``offset``, of which only ``rest`` arrived."""
    if len(rest) < framing.header_size:
        return WireError(offset, f"a {framing.name}", f"{len(rest)} bytes")
    size = framing.header_size + framing.body_length(rest, 0, 2**32)
    return WireError(offset, f"a packet of {size:,} bytes", f"{len(rest):,}")
