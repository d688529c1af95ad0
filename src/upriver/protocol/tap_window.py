"""What a TAP connection has sent and not heard of again.

Every message has a number, which is its opaque. The consumer answers those that ask for it, and one answer covers all
before it. Until then the messages are kept as they were sent, because one that the consumer could not take for the
moment is sent again later, under a new number. So what is kept is bounded, in messages and in bytes: beyond that the
connection waits.

A message that waits for its second try must not overtake a newer one with the same key: whatever went out behind it, or
goes out while it waits, makes it needless.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from upriver.model.record import HEADER, OPAQUE_OFFSET
from upriver.wire.tap_records import ACK, DELETE, FLAGS_OFFSET, MUTATION

if TYPE_CHECKING:
    from upriver.protocol.tap_stream import TapStream

_OPAQUES: Final = 2**32


@dataclass(slots=True, eq=False)
class Piece:
    """Messages that went out together, with consecutive numbers."""

    first: int
    count: int
    data: bytes
    #: Whose they are; None for those of the connection.
    stream: "TapStream | None" = None
    #: Where the stream stood before and after them.
    before_seqno: int = 0
    seqno: int = 0
    #: They were sent before, and refused for the moment.
    again: bool = False

    @property
    def last(self) -> int:
        """The number of its last message."""
        return self.first + self.count - 1

    def message(self, number: int) -> bytes:
        """One of its messages."""
        for place, message in enumerate(messages_in(self.data)):
            if self.first + place == number:
                return message
        raise LookupError(number)


@dataclass(slots=True, eq=False)
class Retry:
    """A message that is to be sent again."""

    message: bytes
    stream: "TapStream | None"
    before_seqno: int
    due: float

    @property
    def key(self) -> tuple[int, bytes] | None:
        """Vbucket and key of a change; None for a control message."""
        return key_of(self.message)

    def numbered(self, number: int) -> bytes:
        """The message under its new number, asking for an answer."""
        out = bytearray(self.message)
        out[OPAQUE_OFFSET : OPAQUE_OFFSET + 4] = (number % _OPAQUES).to_bytes(4, "big")
        out[FLAGS_OFFSET + 1] |= ACK
        return bytes(out)


class AckWindow:
    """The messages that are not acknowledged, oldest first."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        #: Numbers begin at 1.
        self.next_number = 1
        self.messages = 0
        self.bytes = 0
        #: How often nothing more could be sent.
        self.times_full = 0
        self._pieces: deque[Piece] = deque()

    @property
    def room(self) -> int:
        """How many more messages may be sent."""
        return max(0, self.messages_max - self.messages) if self.bytes < self.bytes_max else 0

    @property
    def oldest(self) -> int:
        """The first number that is not answered."""
        return self._pieces[0].first if self._pieces else self.next_number

    def take_numbers(self, count: int) -> int:
        """The first of so many new numbers."""
        first = self.next_number
        self.next_number += count
        return first

    def sent(self, piece: Piece) -> None:
        """It is on its way."""
        self._pieces.append(piece)
        self.messages += piece.count
        self.bytes += len(piece.data)
        if not self.room:
            self.times_full += 1

    def number_of(self, opaque: int) -> int | None:
        """Which message an answer means; None if none that is awaited."""
        if not self._pieces:
            return None
        number = self._pieces[0].first + (opaque - self._pieces[0].first) % _OPAQUES
        return number if number < self.next_number else None

    def covered(self, number: int) -> list[Piece]:
        """Take out what an answer to this message covers: whole pieces, up to the one that it ends."""
        out: list[Piece] = []
        while self._pieces and self._pieces[0].last <= number:
            piece = self._pieces.popleft()
            self.messages -= piece.count
            self.bytes -= len(piece.data)
            out.append(piece)
        return out

    def holds_of(self, stream: "TapStream") -> bool:
        """Is anything of this stream unanswered?"""
        return any(piece.stream is stream for piece in self._pieces)

    def piece_of(self, number: int) -> Piece | None:
        """The piece that holds a message."""
        for piece in self._pieces:
            if piece.first <= number <= piece.last:
                return piece
        return None

    def sent_since(self, number: int, key: tuple[int, bytes]) -> bool:
        """Has a newer change of the key gone out behind this message?"""
        for piece in self._pieces:
            if piece.last > number:
                for place, message in enumerate(messages_in(piece.data)):
                    if piece.first + place > number and key_of(message) == key:
                        return True
        return False


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
