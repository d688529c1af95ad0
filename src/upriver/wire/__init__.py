"""Bytes and messages: every message of every dialect, declared once.

``DIALECTS`` lists the dialects by name. A dialect decodes a packet into a message object; a message encodes itself.
``framing`` cuts a stream of bytes into packets, ``detect`` recognises the dialect of a connection, and ``codec``
processes whole buffers at once.
"""

from upriver.wire.codes import Magic, Status
from upriver.wire.detect import detect
from upriver.wire.dialect import Dialect
from upriver.wire.dialects import DIALECTS, dcp, memcached, tap, upr, upr_draft1, upr_draft2, upr_draft3
from upriver.wire.explain import Explanation, Ink, explain, explanation_json, explanation_text, uncoloured
from upriver.wire.framing import (
    BODY_BYTES_MAX,
    DRAFT,
    EXTENDED_REQUEST,
    MEMCACHED,
    VALUE_BYTES_MAX,
    Framer,
    Framing,
    packet_size,
    u16_at,
)
from upriver.wire.hexdump import NotHexadecimal, read_hexdump
from upriver.wire.layout import Buffer
from upriver.wire.message import AnyRequest, AnyResponse, DraftMessage, DraftOpcode, Message, Request, Response

__all__ = [
    "BODY_BYTES_MAX",
    "DIALECTS",
    "DRAFT",
    "EXTENDED_REQUEST",
    "MEMCACHED",
    "VALUE_BYTES_MAX",
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
    "NotHexadecimal",
    "Request",
    "Response",
    "Status",
    "dcp",
    "detect",
    "explain",
    "explanation_json",
    "explanation_text",
    "memcached",
    "packet_size",
    "read_hexdump",
    "tap",
    "u16_at",
    "uncoloured",
    "upr",
    "upr_draft1",
    "upr_draft2",
    "upr_draft3",
]
