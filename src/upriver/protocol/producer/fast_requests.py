"""Stream requests that stand in a row, read without a message for each.

A consumer asks for all its vbuckets at once, a thousand requests of the same form: what the general decoder does for
each of them would cost more than the stream behind it. So runs of `dcp` requests are read here, whole packets with
nothing unusual in them; a test holds this against the declared message, and whatever is different goes the general way.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from upriver.wire import MEMCACHED, Buffer, Magic, dcp

#: So many are taken at once, so that others have their turn.
RUN_REQUESTS_MAX: Final = 64

_OPCODE: Final = dcp.StreamRequest.declaration.opcode
(_BODY_SIZE,) = dcp.StreamRequest.layout.lengths
_PACKET: Final = struct.Struct(">6sHIIQIIQQQQQ")
#: Magic, opcode, no key, the length of the extras, no data type.
_PREFIX: Final = struct.pack(">BBHBB", Magic.REQUEST, _OPCODE, 0, _BODY_SIZE, 0)
assert _PACKET.size == MEMCACHED.header_size + _BODY_SIZE


class PlainRequest(NamedTuple):
    """What a `dcp` stream request asks for, under the names of its message."""

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


#: How long each of them is.
REQUEST_BYTES: Final = _PACKET.size
