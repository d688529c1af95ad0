"""Received bytes for a consumer: runs of changes as they are, everything else message by message."""

from typing import Protocol

from upriver.wire import BODY_BYTES_MAX, MEMCACHED, Buffer, Message, dcp


class Receiver(Protocol):
    """Who takes runs and messages: a ``Consumer`` or a ``Replica``."""

    @property
    def full(self) -> bool:
        """There was no room for the last run."""

    def receive_run(self, data: Buffer, at: int, now: float) -> int:
        """Take the run of changes that stands next; where it ends."""

    def receive(self, message: Message, now: float) -> bool:
        """Take a message; False if it is none of a stream's."""


class Intake:
    """Cuts what a socket gave, in any pieces. A WireError that it raises is the end of the connection."""

    __slots__ = ("_partial", "_receiver")

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._partial = bytearray()

    def feed(self, data: Buffer, now: float) -> list[Message]:
        """Take bytes; the messages that are none of a stream's, for whoever may want them.

        Where the receiver is ``full`` the rest is kept: say ``go_on`` to it and feed nothing, or more.
        """
        if self._partial:
            self._partial += data
            data, self._partial = bytes(self._partial), bytearray()
        at = 0
        left: list[Message] = []
        while True:
            at = self._receiver.receive_run(data, at, now)
            size = packet_size(data, at)
            if self._receiver.full or size is None or len(data) - at < size:
                self._partial += data[at:]
                return left
            message = dcp.dcp.decode(bytes(data[at : at + size]))
            at += size
            if not self._receiver.receive(message, now):
                left.append(message)


def packet_size(data: Buffer, at: int) -> int | None:
    """The size of the packet that starts at ``at``; None while its header is not whole."""
    if at < len(data):
        MEMCACHED.check_first_byte(data, at)
    if len(data) - at < MEMCACHED.header_size:
        return None
    return MEMCACHED.header_size + MEMCACHED.body_length(data, at, BODY_BYTES_MAX)
