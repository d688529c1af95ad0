"""Relays what a producer and a consumer send each other, reading only headers.

Changes, nearly all of the bytes, are relayed as they came, without being split into packets. All other packets are
read, because some of them are for the mover: the answers to its own requests. The mover's requests and those of the two
nodes have different opcodes, so the opcode tells whose an answer is.
"""

from collections.abc import Iterator
from typing import Final

from upriver.wire import Buffer, Magic, Message, dcp, memcached, packet_size, upr
from upriver.wire.codec import changes_end

#: The requests of the mover: answers to them are not relayed.
ASKED: Final = frozenset(
    message.declaration.opcode
    for message in (
        dcp.Open,
        upr.AddStream,
        memcached.GetVbucket,
        memcached.SetVbucket,
        memcached.GetFailoverLog,
        memcached.GetAllVbucketSeqnos,
        memcached.ObserveSeqno,
        memcached.SetClusterConfig,
    )
)


class PacketSplitter:
    """Splits the bytes of one direction into runs of changes and single packets."""

    __slots__ = ("_partial", "_rest")

    def __init__(self) -> None:
        self._partial = b""
        #: How many bytes of a relayed change are still to come.
        self._rest = 0

    @property
    def in_change(self) -> bool:
        """Whether only a part of a change was relayed: nothing may be sent before its rest."""
        return self._rest > 0

    def split(self, data: Buffer) -> Iterator[tuple[Buffer, bool]]:
        """The pieces in their order, and whether each is a packet. An incomplete packet waits, unless it is a
        change."""
        if self._partial:
            data, self._partial = self._partial + bytes(data), b""
        at = min(self._rest, len(data))
        if at:
            self._rest -= at
            yield memoryview(data)[:at], False
        while at < len(data):
            end = changes_end(data, at)
            if end > at:
                self._rest = max(0, end - len(data))
                yield memoryview(data)[at:end], False
                at = end
                continue
            size = packet_size(data, at)
            if size is None or len(data) - at < size:
                self._partial = bytes(data[at:])
                return
            yield bytes(data[at : at + size]), True
            at += size


def is_for_mover(packet: bytes) -> bool:
    """Whether the packet answers a request of the mover."""
    return packet[0] == Magic.RESPONSE and packet[1] in ASKED


def decoded(packet: bytes) -> Message:
    """The message; the mover speaks `dcp` and everything that it extends."""
    return dcp.dcp.decode(packet)
