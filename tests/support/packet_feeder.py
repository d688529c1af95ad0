"""Received bytes, in any pieces, for a consumer: runs of changes as they are, everything else message by message."""

from typing import Protocol

from upriver.protocol.consumer import Run
from upriver.wire import Buffer, Message, dcp, packet_size


class PacketReceiver(Protocol):
    """A ``ConsumerConnection`` or a ``Replica``."""

    @property
    def full(self) -> bool:
        """There was no room for the last run."""

    def receive_runs(self, data: Buffer, at: int, now: float) -> tuple[int, list[Run]]:
        """Take the runs of changes at this offset; return where they end, and the runs."""

    def receive(self, message: Message, now: float) -> bool:
        """Take a message; False if it does not belong to a stream."""


class PacketFeeder:
    """Cuts received bytes into runs and messages. A WireError that it raises ends the connection."""

    def __init__(self, receiver: PacketReceiver) -> None:
        self._receiver = receiver
        self._partial = bytearray()

    def feed(self, data: Buffer, now: float) -> list[Message]:
        """Take bytes; return the messages that do not belong to a stream.

        If the receiver is ``full`` the rest is kept: call its ``go_on`` and feed nothing, or more.
        """
        if self._partial:
            self._partial += data
            data, self._partial = bytes(self._partial), bytearray()
        at = 0
        left: list[Message] = []
        while True:
            at, _ = self._receiver.receive_runs(data, at, now)
            size = packet_size(data, at)
            if self._receiver.full or size is None or len(data) - at < size:
                self._partial += data[at:]
                return left
            message = dcp.dcp.decode(bytes(data[at : at + size]))
            at += size
            if not self._receiver.receive(message, now):
                left.append(message)
