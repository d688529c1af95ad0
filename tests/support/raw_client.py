"""A client that writes and reads packets byte by byte, without our own codec: what it checks is on the wire."""

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.node_process import PATIENCE_S

_HEADER = struct.Struct(">BBHBBHIIQ")
_SHORT_HEADER = struct.Struct(">BBHII")


class Packet(NamedTuple):
    """A packet with the 24-byte header."""

    raw: bytes
    magic: int
    opcode: int
    extras: bytes
    key: bytes
    value: bytes
    datatype: int
    #: The vbucket of a request, the status of a response.
    vbucket: int
    opaque: int
    cas: int

    @property
    def status(self) -> int:
        assert self.magic == 0x81, f"{self.raw.hex()} is a request"
        return self.vbucket


class ShortPacket(NamedTuple):
    """A packet with the 12-byte header."""

    raw: bytes
    opcode: int
    #: The first byte of the reserved ones.
    reserved: int
    #: The other two, in which Upriver puts the length of the key.
    key_length: int
    request_id: int
    body: bytes


def packet(
    opcode: int,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    *,
    vbucket: int = 0,
    opaque: int = 0,
    cas: int = 0,
    magic: int = 0x80,
    datatype: int = 0,
) -> bytes:
    """The bytes of a packet with the 24-byte header; ``vbucket`` is the status of a response."""
    body = extras + key + value
    header = _HEADER.pack(magic, opcode, len(key), len(extras), datatype, vbucket, len(body), opaque, cas)
    return header + body


def short_packet(opcode: int, body: bytes = b"", *, request_id: int = 0, key_length: int = 0) -> bytes:
    """The bytes of a packet with the 12-byte header."""
    return _SHORT_HEADER.pack(opcode, 0, key_length, request_id, len(body)) + body


class _Socket:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)

    def close(self) -> None:
        self.socket.close()

    def send(self, *packets: bytes) -> None:
        self.socket.sendall(b"".join(packets))

    @property
    def closed(self) -> bool:
        """Read until the node closes the connection, which it must do."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    def _exactly(self, size: int) -> bytes:
        """The next bytes; fewer if the node has closed the connection."""
        received = bytearray()
        while len(received) < size and (piece := self.socket.recv(size - len(received))):
            received += piece
        return bytes(received)


class RawClient(_Socket):
    """A connection whose packets have the 24-byte header."""

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self) -> Packet | None:
        """The next packet; None if the node has closed the connection."""
        header = self._exactly(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        magic, opcode, key_length, extras_length, datatype, vbucket, length, opaque, cas = _HEADER.unpack(header)
        body = self._exactly(length)
        extras, rest = body[:extras_length], body[extras_length:]
        key, value = rest[:key_length], rest[key_length:]
        return Packet(header + body, magic, opcode, extras, key, value, datatype, vbucket, opaque, cas)

    def take(self) -> Packet:
        """The next packet, which must come."""
        found = self.next()
        assert found is not None, "the node closed the connection"
        return found

    def ask(self, request: bytes) -> Packet:
        """Send a request and return the next packet."""
        self.send(request)
        return self.take()

    def until(self, *opcodes: int) -> Iterator[Packet]:
        """The packets up to the first with one of these opcodes, that one included."""
        while True:
            found = self.take()
            yield found
            if found.opcode in opcodes:
                return


class ShortClient(_Socket):
    """A connection whose packets have the 12-byte header."""

    def __enter__(self) -> "ShortClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self) -> ShortPacket | None:
        """The next packet; None if the node has closed the connection."""
        header = self._exactly(_SHORT_HEADER.size)
        if len(header) < _SHORT_HEADER.size:
            return None
        opcode, reserved, key_length, request_id, length = _SHORT_HEADER.unpack(header)
        body = self._exactly(length)
        return ShortPacket(header + body, opcode, reserved, key_length, request_id, body)

    def take(self) -> ShortPacket:
        """The next packet, which must come."""
        found = self.next()
        assert found is not None, "the node closed the connection"
        return found

    def ask(self, request: bytes) -> ShortPacket:
        """Send a request and return the next packet."""
        self.send(request)
        return self.take()
