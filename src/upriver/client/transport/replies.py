"""Answers out of received bytes, for a client that asks much at once.

A reply is taken apart no further than header, extras, key and value: whoever asked knows what stands in them. Going
through the declared messages instead would cost ten times as much for each answer. Refusals that follow each other and
say the same, as those of rows that a node has already, are one reply with many opaques.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from upriver.errors import StatusError, WireError
from upriver.wire import BODY_BYTES_MAX, MEMCACHED, Magic, Status
from upriver.wire.codec import alike_run


class Reply(NamedTuple):
    """One answer."""

    opcode: int
    status: int
    opaque: int
    cas: int
    datatype: int
    extras: bytes
    key: bytes
    value: bytes
    #: The opaques of refusals that came behind this one and say the same.
    alike: Sequence[int] = ()

    def error(self, vbucket: int | None = None) -> StatusError | None:
        """What the answer refuses, if it does."""
        if self.status in (Status.SUCCESS, Status.AUTH_CONTINUE):
            return None
        # What stands in the refusal of a vbucket is the cluster map, which is nothing to read.
        is_map = self.status == Status.NOT_MY_VBUCKET and self.value[:1] == b"{"
        text = "" if self.datatype or is_map else self.value.decode(errors="replace")[:500]
        return StatusError.of(self.status, text if text.isprintable() else "", vbucket=vbucket)


class ReplyReader:
    """Bytes in, replies out."""

    __slots__ = ("_rest", "offset")

    def __init__(self) -> None:
        self._rest = bytearray()
        self.offset = 0

    def feed(self, received: memoryview) -> Iterator[Reply]:
        """The replies that are whole now."""
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
        """Whether at least one reply can be had: a large value comes in many pieces, each looked at once."""
        rest = self._rest
        return len(rest) >= _HEADER and len(rest) >= _HEADER + self._body_length(rest, 0)

    def _body_length(self, data: bytes | bytearray, at: int) -> int:
        if data[at] != Magic.RESPONSE:
            raise WireError(self.offset + at, f"magic 0x{Magic.RESPONSE:02x} of an answer", f"0x{data[at]:02x}")
        return MEMCACHED.body_length(data, at, BODY_BYTES_MAX)


_HEADER: Final = MEMCACHED.header_size
#: So many bytes stand before the opaque: alike in answers that say the same.
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
