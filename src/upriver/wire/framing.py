"""Packets out of a stream of bytes: the 24-byte header of memcached and the 12-byte header of the drafts.

A ``Framer`` is fed bytes in any pieces and hands out whole packets. What the lengths say is checked before
anything is kept, so a peer that announces four gigabytes is refused at its header. Offsets in errors count
from the first byte that the framer was ever fed.
"""

import struct
from dataclasses import dataclass
from typing import Final

from upriver.errors import WireError
from upriver.wire.codes import Magic

#: A value may take 20 MiB; key and extras come on top.
VALUE_BYTES_MAX: Final = 20 * 1024 * 1024
#: What a header's key length can say at most.
KEY_BYTES_MAX: Final = 0xFFFF
BODY_BYTES_MAX: Final = VALUE_BYTES_MAX + KEY_BYTES_MAX + 0xFF


@dataclass(frozen=True, slots=True)
class HeaderField:
    """A field of a header: the texts' name, where it stands and how many bytes it takes."""

    name: str
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Framing:
    """One of the two headers."""

    name: str
    header: struct.Struct
    request_fields: tuple[HeaderField, ...]
    response_fields: tuple[HeaderField, ...]
    length_offset: int
    first_bytes: tuple[int, ...]
    first_byte_name: str
    #: The fields where nothing needs a key length and its bytes are reserved, as in the texts of the drafts.
    keyless_fields: tuple[HeaderField, ...] = ()

    @property
    def header_size(self) -> int:
        return self.header.size

    def body_length(self, data: "bytes | bytearray | memoryview", start: int, limit: int) -> int:
        """The length of the body behind the whole header at ``start``; refuses what cannot be right."""
        (length,) = _U32.unpack_from(data, start + self.length_offset)
        if length > limit:
            raise WireError(start + self.length_offset, f"a body of at most {limit} bytes", f"a length of {length}")
        if self is MEMCACHED:
            (key_length,) = _U16.unpack_from(data, start + 2)
            if key_length + data[start + 4] > length:
                raise WireError(
                    start + self.length_offset,
                    f"a body that holds the key ({key_length} bytes) and the extras ({data[start + 4]} bytes)",
                    f"a length of {length}",
                )
        return int(length)

    def check_first_byte(self, data: "bytes | bytearray | memoryview", start: int) -> None:
        if data[start] not in self.first_bytes:
            allowed = " or ".join(f"0x{byte:02x}" for byte in self.first_bytes)
            raise WireError(start, f"{self.first_byte_name} {allowed}", f"0x{data[start]:02x}")


_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")


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
    header=struct.Struct(">BBHBBHIIQ"),
    request_fields=_memcached_fields("vbucket"),
    response_fields=_memcached_fields("status"),
    length_offset=8,
    first_bytes=(Magic.REQUEST, Magic.RESPONSE),
    first_byte_name="magic",
)

#: Opcode, reserved, key length (reserved in the texts, DESIGN §3), request id, body length.
DRAFT: Final = Framing(
    name="12-byte draft header",
    header=struct.Struct(">BBHII"),
    request_fields=_DRAFT_FIELDS,
    response_fields=_DRAFT_FIELDS,
    length_offset=8,
    first_bytes=tuple(range(1, 8)),
    first_byte_name="opcode",
    keyless_fields=_header_fields(("opcode", 1), ("reserved", 3), ("request id", 4), ("length", 4)),
)


class Framer:
    """Cuts received bytes into whole packets. After an error it stays broken: the stream has lost its place."""

    def __init__(self, framing: Framing, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self.framing = framing
        self.body_bytes_max = body_bytes_max
        self._buffer = bytearray()
        self._start = 0
        #: How many bytes were handed out as packets: the offset of the next one.
        self.offset = 0
        self._error: WireError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take received bytes; after an error they are dropped, because nothing can be made of them."""
        if self._error is not None:
            return
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    @property
    def pending(self) -> int:
        """How many bytes wait for the rest of their packet."""
        return len(self._buffer) - self._start

    def next_packet(self) -> bytes | None:
        """The next whole packet, or None: more bytes are needed."""
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
