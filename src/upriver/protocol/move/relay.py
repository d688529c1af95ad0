"""Between a producer and a consumer: passing on what the one says to the other, at the price of looking at headers.

Changes, nearly all of the bytes, are passed on as they came, without being cut into packets. Everything else is looked
at, because some of it is for the mover itself: answers to what it asked on either connection. The two sets of questions
do not overlap, so the opcode tells whose an answer is.
"""

from collections.abc import Iterator
from typing import Final

from upriver.wire import Buffer, Magic, Message, dcp, memcached, packet_size, upr
from upriver.wire.codec import changes_end

#: What a mover asks on either connection: nobody else gets these answers.
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
    """One direction: pieces that are passed on as they are, and packets that somebody may want to see."""

    __slots__ = ("_partial", "_rest")

    def __init__(self) -> None:
        self._partial = b""
        #: How much is still to come of a change that was passed on already.
        self._rest = 0

    @property
    def in_change(self) -> bool:
        """Part of a change was passed on, and the rest is still to come: nothing else may go between."""
        return self._rest > 0

    def split(self, data: Buffer) -> Iterator[tuple[Buffer, bool]]:
        """The pieces in their order, and whether each is a packet. What is not whole waits, unless it is a change."""
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
    """An answer to what the mover asked?"""
    return packet[0] == Magic.RESPONSE and packet[1] in ASKED


def decoded(packet: bytes) -> Message:
    """The message; the mover speaks `dcp` and everything that it extends."""
    return dcp.dcp.decode(packet)
