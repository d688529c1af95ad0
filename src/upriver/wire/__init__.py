"""Bytes and messages: every message of every dialect, declared once.

``DIALECTS`` holds them all by name. A dialect decodes a packet into a message object and a message encodes itself;
``framing`` cuts a stream of bytes into packets, ``detect`` tells which dialect a connection speaks, ``columns`` does
whole buffers at once.
"""

from upriver.wire.dialect import Dialect
from upriver.wire.dialects import DIALECTS, dcp, memcached, tap, upr, upr_draft1, upr_draft2, upr_draft3
from upriver.wire.framing import Framer
from upriver.wire.message import AnyRequest, AnyResponse, Message, Request, Response

__all__ = [
    "DIALECTS",
    "AnyRequest",
    "AnyResponse",
    "Dialect",
    "Framer",
    "Message",
    "Request",
    "Response",
    "dcp",
    "memcached",
    "tap",
    "upr",
    "upr_draft1",
    "upr_draft2",
    "upr_draft3",
]
