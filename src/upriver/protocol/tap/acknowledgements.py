"""The messages of a TAP connection that are sent and not acknowledged.

Every message has a number, which is its opaque. The consumer answers the messages that ask for it, and one answer
covers all before it. Until then messages are kept as they were sent, because a message that the consumer refuses
temporarily is sent again later, under a new number. The number and size of kept messages are limited; beyond that the
connection waits.

A message that is sent again must not overtake a newer one with the same key: it is dropped if a newer one was sent
after it, or is sent while it waits.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from upriver.model import HEADER
from upriver.wire.codec import DELETE, MUTATION

if TYPE_CHECKING:
    from upriver.protocol.tap.producer_stream import TapProducerStream

_OPAQUES: Final = 2**32


@dataclass(slots=True, eq=False)
class Piece:
    """Messages that were sent together, with consecutive numbers."""

    first: int
    count: int
    data: bytes
    #: Their stream; None for messages of the connection.
    stream: "TapProducerStream | None" = None
    #: The position of the stream before and after them.
    before_seqno: int = 0
    seqno: int = 0
    #: They were sent before and refused temporarily.
    again: bool = False
    #: The numbers of those that were refused temporarily; None if there are none.
    _refused: set[int] | None = None
    #: The offset of each message, once it was needed.
    _offsets: list[int] | None = None

    @property
    def last(self) -> int:
        """The number of its last message."""
        return self.first + self.count - 1

    def refuse(self, number: int) -> bool:
        """Note that a message was refused temporarily; False if that was noted before."""
        if self._refused is None:
            self._refused = set()
        known = number in self._refused
        self._refused.add(number)
        return not known

    def message(self, number: int) -> bytes:
        """One of its messages."""
        if self._offsets is None:
            self._offsets = [0, *itertools.accumulate(map(len, messages_in(self.data)))]
        if not self.first <= number <= self.last:
            raise LookupError(number)
        begin, end = self._offsets[number - self.first : number - self.first + 2]
        return self.data[begin:end]


class AckWindow:
    """The messages that are not acknowledged, oldest first."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        #: Numbers begin at 1.
        self.next_number = 1
        self.messages = 0
        self.bytes = 0
        #: How often the window was full.
        self.times_full = 0
        self._pieces: deque[Piece] = deque()
        self._of_stream: Counter[TapProducerStream] = Counter()
        #: The newest number of each key, from the first refusal until everything is answered, so that a stream without
        #: refusals does not pay for it.
        self._newest: dict[tuple[int, bytes], int] | None = None

    @property
    def room(self) -> int:
        """How many more messages may be sent."""
        return self.room_beside(0, 0)

    def room_beside(self, messages: int, size: int) -> int:
        """How many more may be sent while this many other messages, of this size, are kept too."""
        return max(0, self.messages_max - self.messages - messages) if self.bytes + size < self.bytes_max else 0

    @property
    def oldest(self) -> int:
        """The first number that is not answered."""
        return self._pieces[0].first if self._pieces else self.next_number

    def take_numbers(self, count: int) -> int:
        """Reserve this many numbers; return the first."""
        first = self.next_number
        self.next_number += count
        return first

    def sent(self, piece: Piece) -> None:
        """Add a piece that was sent."""
        self._pieces.append(piece)
        if piece.stream is not None:
            self._of_stream[piece.stream] += 1
        if self._newest is not None:
            self._newest |= _numbers_in(piece)
        self.messages += piece.count
        self.bytes += len(piece.data)
        if not self.room:
            self.times_full += 1

    def number_of(self, opaque: int) -> int | None:
        """The number of the message that an answer belongs to; None if no answer is awaited for it."""
        if not self._pieces:
            return None
        number = self._pieces[0].first + (opaque - self._pieces[0].first) % _OPAQUES
        return number if number < self.next_number else None

    def covered(self, number: int) -> list[Piece]:
        """Remove and return the pieces that an answer to this message covers completely."""
        out: list[Piece] = []
        while self._pieces and self._pieces[0].last <= number:
            piece = self._pieces.popleft()
            self.messages -= piece.count
            self.bytes -= len(piece.data)
            self._forget(piece)
            out.append(piece)
        if not self._pieces:
            self._newest = None
        return out

    def _forget(self, piece: Piece) -> None:
        if piece.stream is not None:
            self._of_stream[piece.stream] -= 1
            if not self._of_stream[piece.stream]:
                del self._of_stream[piece.stream]
        if self._newest is not None:
            for key, number in _numbers_in(piece).items():
                if self._newest.get(key) == number:
                    del self._newest[key]

    def holds_of(self, stream: "TapProducerStream") -> bool:
        """Whether a message of this stream is unanswered."""
        return stream in self._of_stream

    def piece_of(self, number: int) -> Piece | None:
        """The piece with this message."""
        for piece in self._pieces:
            if piece.first <= number <= piece.last:
                return piece
        return None

    def sent_since(self, number: int, key: tuple[int, bytes]) -> bool:
        """Whether a newer change of the key was sent after this message."""
        if self._newest is None:
            self._newest = {}
            for piece in self._pieces:
                self._newest |= _numbers_in(piece)
        return self._newest.get(key, 0) > number


def _numbers_in(piece: Piece) -> dict[tuple[int, bytes], int]:
    """The newest number of each key in the piece."""
    found = ((key_of(message), piece.first + place) for place, message in enumerate(messages_in(piece.data)))
    return {key: number for key, number in found if key is not None}


def messages_in(data: bytes) -> Iterator[bytes]:
    """The single messages of a piece."""
    at = 0
    while at < len(data):
        end = at + HEADER.size + int(HEADER.unpack_from(data, at)[6])
        yield data[at:end]
        at = end


def key_of(message: bytes) -> tuple[int, bytes] | None:
    """Vbucket and key of a change; None for other messages."""
    _, opcode, key_length, extras, _, vbucket, _, _, _ = HEADER.unpack_from(message)
    if opcode not in (MUTATION, DELETE):
        return None
    private = int.from_bytes(message[HEADER.size : HEADER.size + 2], "big")
    at = HEADER.size + extras + private
    return vbucket, message[at : at + key_length]
