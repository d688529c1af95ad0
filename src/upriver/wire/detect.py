"""Recognise the dialect of a connection from its first bytes (docs/semantics.md).

The two 12-byte drafts look alike, so the first draft is served only where a listener is pinned to it. A connection
that starts with memcached commands may still become a stream: call ``detect`` for each packet until it returns
another dialect than `memcached`.
"""

from upriver.errors import WireError
from upriver.wire.codes import Magic
from upriver.wire.dialect import Dialect
from upriver.wire.dialects.dcp import dcp
from upriver.wire.dialects.memcached import memcached
from upriver.wire.dialects.tap import tap
from upriver.wire.dialects.upr import upr
from upriver.wire.dialects.upr_draft2 import upr_draft2
from upriver.wire.dialects.upr_draft3 import upr_draft3
from upriver.wire.layout import Buffer
from upriver.wire.message import DraftOpcode

#: Bytes needed to recognise a 24-byte header: magic, opcode, key length, extras length.
_ENOUGH = 5

_BY_OPCODE_AND_EXTRAS: dict[tuple[int, int], Dialect] = {
    (0x50, 8): dcp,  # an open; each stream request then selects `upr` or `dcp`
    (0x50, 40): upr_draft3,  # a stream request without an open before it
    (0x51, 0): upr_draft3,  # a failover log request
    (0x53, 40): upr,
    (0x53, 48): dcp,
}


def detect(data: Buffer) -> Dialect | None:
    """The dialect of a client's packet; None while there are too few bytes."""
    if not data:
        return None
    if data[0] == DraftOpcode.REQUEST:
        return upr_draft2
    if data[0] != Magic.REQUEST:
        raise WireError(0, "0x80 (memcached request) or 0x01 (draft request)", f"0x{data[0]:02x}")
    if len(data) < _ENOUGH:
        return None
    opcode, extras = data[1], data[4]
    if 0x40 <= opcode <= 0x47:
        return tap
    return _BY_OPCODE_AND_EXTRAS.get((opcode, extras), memcached)
