"""The sending side of UPR and DCP: answers stream requests and schedules what goes out on one connection.

`Producer` is the connection, `ProducerStream` one vbucket's stream, `dialects` the messages of each dialect.
"""

from upriver.protocol.producer.dialects import OPENED, STREAM_DIALECTS, StreamDialect, text_of
from upriver.protocol.producer.fast_requests import REQUEST_BYTES
from upriver.protocol.producer.producer import Producer
from upriver.protocol.producer.producer_stream import ProducerStream
from upriver.protocol.producer.send_buffer import SendBuffer
from upriver.protocol.producer.source import StreamOptions
from upriver.protocol.producer.stream_scheduler import PIECE_BYTES, TURN_BYTES

__all__ = [
    "OPENED",
    "PIECE_BYTES",
    "REQUEST_BYTES",
    "STREAM_DIALECTS",
    "TURN_BYTES",
    "Producer",
    "ProducerStream",
    "SendBuffer",
    "StreamDialect",
    "StreamOptions",
    "text_of",
]
