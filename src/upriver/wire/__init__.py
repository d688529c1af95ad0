"""Bytes and messages: every message of every dialect, declared once.

``DIALECTS`` lists the dialects by name. A dialect decodes a packet into a message object; a message encodes itself.
``framing`` cuts a stream of bytes into packets, ``detect`` recognises the dialect of a connection, and ``codec``
processes whole buffers at once.
"""

from upriver.wire import explain, hexdump
from upriver.wire.codes import Magic, Status
from upriver.wire.detect import detect
from upriver.wire.dialect import Dialect
from upriver.wire.dialects import DIALECTS, dcp, memcached, tap, upr, upr_draft1, upr_draft2, upr_draft3
from upriver.wire.explain import Explanation, Ink
from upriver.wire.framing import (
    BODY_BYTES_MAX,
    DRAFT,
    EXTENDED_REQUEST,
    MEMCACHED,
    Framer,
    Framing,
    packet_size,
    u16_at,
)
from upriver.wire.layout import Buffer
from upriver.wire.message import AnyRequest, AnyResponse, DraftMessage, DraftOpcode, Message, Request, Response

__all__ = [
    "BODY_BYTES_MAX",
    "DIALECTS",
    "DRAFT",
    "EXTENDED_REQUEST",
    "MEMCACHED",
    "AnyRequest",
    "AnyResponse",
    "Buffer",
    "Dialect",
    "DraftMessage",
    "DraftOpcode",
    "Explanation",
    "Framer",
    "Framing",
    "Ink",
    "Magic",
    "Message",
    "Request",
    "Response",
    "Status",
    "dcp",
    "detect",
    "explain",
    "hexdump",
    "memcached",
    "packet_size",
    "tap",
    "u16_at",
    "upr",
    "upr_draft1",
    "upr_draft2",
    "upr_draft3",
]
