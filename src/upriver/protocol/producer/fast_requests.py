"""Runs of stream requests, read without making a message of each.

A consumer requests all its vbuckets at once, a thousand requests of the same form; decoding each of them would cost
more than its stream. So runs of complete `dcp` requests are read here. A test compares this with the declared message.
A request with anything unusual ends the run and goes through the general decoder.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from upriver.wire import MEMCACHED, Buffer, Magic, dcp

#: At most this many are read at once, so that other connections get their turn.
RUN_REQUESTS_MAX: Final = 64

_OPCODE: Final = dcp.StreamRequest.declaration.opcode
(_BODY_SIZE,) = dcp.StreamRequest.layout.lengths
_PACKET: Final = struct.Struct(">6sHIIQIIQQQQQ")
#: Magic, opcode, no key, the length of the extras, no data type.
_PREFIX: Final = struct.pack(">BBHBB", Magic.REQUEST, _OPCODE, 0, _BODY_SIZE, 0)
assert _PACKET.size == MEMCACHED.header_size + _BODY_SIZE


class PlainRequest(NamedTuple):
    """The fields of a `dcp` stream request, under the names of its message."""

    vbucket: int
    opaque: int
    flags: int
    start_seqno: int
    end_seqno: int
    vbucket_uuid: int
    snapshot_start: int
    snapshot_end: int

    @property
    def code(self) -> int:
        """The opcode."""
        return _OPCODE


def plain_requests(data: Buffer, at: int) -> Iterator[PlainRequest]:
    """The run of requests that begins at ``at``; each takes ``REQUEST_BYTES``."""
    unpack, last = _PACKET.unpack_from, len(data) - _PACKET.size
    for _ in range(RUN_REQUESTS_MAX):
        if at > last:
            return
        prefix, vbucket, body, opaque, _, flags, reserved, *seqnos = unpack(data, at)
        if prefix != _PREFIX or body != _BODY_SIZE or reserved:
            return
        yield PlainRequest(vbucket, opaque, flags, *seqnos)
        at += _PACKET.size


#: The size of one request.
REQUEST_BYTES: Final = _PACKET.size
