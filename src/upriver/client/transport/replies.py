"""Reads replies from received bytes.

A reply is split only into header, extras, key and value; the caller knows what they mean. Decoding the declared
messages would cost ten times as much. Consecutive errors that say the same, such as those for rows that a node already
has, become one reply with many opaques.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from upriver.errors import StatusError, WireError
from upriver.wire import BODY_BYTES_MAX, MEMCACHED, Magic, Status
from upriver.wire.codec import alike_run


class Reply(NamedTuple):
    """One reply."""

    opcode: int
    status: int
    opaque: int
    cas: int
    datatype: int
    extras: bytes
    key: bytes
    value: bytes
    #: The opaques of the following errors that say the same.
    alike: Sequence[int] = ()

    def error(self, vbucket: int | None = None) -> StatusError | None:
        """The error that the reply reports, if any."""
        if self.status in (Status.SUCCESS, Status.AUTH_CONTINUE):
            return None
        # A refused vbucket comes with the cluster map, which is not a message for people.
        is_map = self.status == Status.NOT_MY_VBUCKET and self.value[:1] == b"{"
        text = "" if self.datatype or is_map else self.value.decode(errors="replace")[:500]
        return StatusError.of(self.status, text if text.isprintable() else "", vbucket=vbucket)


class ReplyReader:
    """Turns bytes into replies."""

    __slots__ = ("_rest", "offset")

    def __init__(self) -> None:
        self._rest = bytearray()
        self.offset = 0

    def feed(self, received: memoryview) -> Iterator[Reply]:
        """Add bytes and yield the replies that are complete now."""
        data: bytes | bytearray
        if self._rest:
            self._rest += received
            if not self._is_whole():
                return
            data, self._rest = self._rest, bytearray()
        else:
            data = bytes(received)
        at = 0
        while len(data) - at >= _HEADER:
            end = at + _HEADER + self._body_length(data, at)
            if end > len(data):
                break
            reply = _reply(data, at, end)
            if reply.status and data[end : end + _SAME] == data[at : at + _SAME]:
                end, opaques = alike_run(data, at)
                reply = reply._replace(alike=opaques[1:])
            yield reply
            at = end
        self.offset += at
        self._rest += data[at:]

    def _is_whole(self) -> bool:
        """Whether at least one reply is complete: a large value comes in many pieces."""
        rest = self._rest
        return len(rest) >= _HEADER and len(rest) >= _HEADER + self._body_length(rest, 0)

    def _body_length(self, data: bytes | bytearray, at: int) -> int:
        if data[at] != Magic.RESPONSE:
            raise WireError(self.offset + at, f"magic 0x{Magic.RESPONSE:02x} of a reply", f"0x{data[at]:02x}")
        return MEMCACHED.body_length(data, at, BODY_BYTES_MAX)


_HEADER: Final = MEMCACHED.header_size
#: The number of bytes before the opaque, which are equal in replies that say the same.
_SAME: Final = 12


def _reply(data: bytes | bytearray, at: int, end: int) -> Reply:
    _, opcode, key_length, extras_length, datatype, status, _, opaque, cas = MEMCACHED.header.unpack_from(data, at)
    extras_at = at + _HEADER
    key_at = extras_at + extras_length
    value_at = key_at + key_length
    return Reply(
        opcode,
        status,
        opaque,
        cas,
        datatype,
        bytes(data[extras_at:key_at]),
        bytes(data[key_at:value_at]),
        bytes(data[value_at:end]),
    )
