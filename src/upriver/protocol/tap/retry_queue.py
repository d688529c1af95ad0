"""Messages that a TAP consumer has refused temporarily, to be sent again later.

Each waits equally long, so they wait in the order in which they were refused. There may be as many as the window
allows, so nothing here iterates over all of them: they are found by key and by stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from upriver.model import OPAQUE_OFFSET
from upriver.protocol.tap.acknowledgements import key_of
from upriver.wire.codec import ACK, FLAGS_OFFSET

if TYPE_CHECKING:
    from upriver.protocol.tap.producer_stream import TapProducerStream

_OPAQUES: Final = 2**32


@dataclass(slots=True, eq=False)
class Retry:
    """A message that is to be sent again."""

    message: bytes
    stream: "TapProducerStream | None"
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


class RetryQueue:
    """The messages of one connection that wait to be sent again."""

    def __init__(self) -> None:
        self.bytes = 0
        #: In the order of their time; a dict, because any of them may be removed.
        self._waiting: dict[Retry, None] = {}
        self._by_key: dict[tuple[int, bytes], Retry] = {}
        self._by_stream: dict[TapProducerStream, dict[Retry, None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, retry: Retry) -> None:
        """Add a message. Only the newest message of a key waits."""
        key = retry.key
        if key is not None:
            self._by_key[key] = retry
        if retry.stream is not None:
            self._by_stream.setdefault(retry.stream, {})[retry] = None
        self._waiting[retry] = None
        self.bytes += len(retry.message)

    @property
    def next_due(self) -> float | None:
        """When the first of them is to be sent; None if there is none."""
        first = next(iter(self._waiting), None)
        return None if first is None else first.due

    def take_due(self, now: float) -> Retry | None:
        """Remove and return one whose time has come."""
        first = next(iter(self._waiting), None)
        if first is None or first.due > now:
            return None
        self._remove(first)
        return first

    def overtaken(self, keys: Iterable[tuple[int, bytes] | None]) -> list[Retry]:
        """Remove and return those that newer changes of the same keys replace."""
        found = [self._by_key[key] for key in keys if key is not None and key in self._by_key]
        for retry in found:
            self._remove(retry)
        return found

    def drop(self, stream: "TapProducerStream") -> None:
        """Remove all messages of a stream."""
        for retry in list(self._by_stream.get(stream, ())):
            self._remove(retry)

    def holds_of(self, stream: "TapProducerStream") -> bool:
        """Whether a message of this stream waits."""
        return stream in self._by_stream

    def _remove(self, retry: Retry) -> None:
        del self._waiting[retry]
        self.bytes -= len(retry.message)
        key = retry.key
        if key is not None and self._by_key.get(key) is retry:
            del self._by_key[key]
        if retry.stream is not None:
            of_stream = self._by_stream[retry.stream]
            del of_stream[retry]
            if not of_stream:
                del self._by_stream[retry.stream]
