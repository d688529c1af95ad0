"""Writes answers and changes to the transport of a streaming connection.

Answers go first. Changes are read from the history only while the transport's buffer is empty, one piece at a time. A
consumer that stops reading therefore costs one piece of memory. After a few pieces the connection waits for the event
loop's next turn, so that others have theirs.
"""

import contextlib
import socket
from typing import Any, Final, Protocol

from upriver.node.packet_handlers import SessionStream
from upriver.protocol.producer import PIECE_BYTES, TURN_BYTES, SendBuffer
from upriver.wire import Buffer

#: The most that the kernel may buffer before it is sent: one turn, so that a turn fits.
UNSENT_BYTES: Final = TURN_BYTES


class Transport(Protocol):
    """The part of asyncio's transport that is needed here."""

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        """Call ``pause_writing`` when more than ``high`` bytes are buffered."""

    def write(self, data: bytes | memoryview) -> None:
        """Send, or buffer until it can be sent."""

    def get_extra_info(self, name: str) -> Any:
        """Return a fact about the connection, such as its ``socket``."""


def prepare_for_streams(transport: Transport) -> None:
    """Report every unsent byte as blocked, and keep the kernel's queue short: live changes wait behind it."""
    transport.set_write_buffer_limits(high=0)
    peer = transport.get_extra_info("socket")
    if peer is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):  # not a TCP socket, or closed already
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def write_turn(transport: Transport, answers: bytes, stream: SessionStream, send_buffer: SendBuffer) -> int:
    """Write the answers, then pieces until the turn is over or the transport blocks; return the number of bytes."""
    data: Buffer = stream.produce()
    if answers:
        data = answers + data
    written = 0
    while data:
        transport.write(memoryview(data))  # asyncio slices off what it has sent; a view makes that free of copies
        written += len(data)
        if stream.blocked:
            if isinstance(data, memoryview):
                send_buffer.let_go()  # the transport still reads from this memory
            break
        if not stream.has_output:
            break
        if stream.turn_bytes - written < PIECE_BYTES // 2:  # pieces are never quite full
            stream.wake()
            break
        data = stream.produce()
    return written
