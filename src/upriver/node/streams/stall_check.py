"""Finds streams that do not advance, for ``/healthz``.

Theory of operation. Once a second the check notes the seqno of every stream with a backlog, of any protocol. A stream
that does not advance has one of three reasons. The consumer's window is full, or it has not acknowledged: that is the
consumer's decision and not reported. The consumer has stopped reading: an operator must look at it. Or neither: then
the node itself does not make progress.

One look is bounded: with many connections of a thousand streams each, it checks some and leaves the rest to the next.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from upriver.node.state import NodeState
    from upriver.node.streams.streaming_session import StreamingSession
    from upriver.protocol.producer import ProducerStream

#: A stream: the name of its connection, and its vbucket.
Key = tuple[str, int]
#: A look checks connections until they have had this many streams.
STREAMS_PER_LOOK: Final = 4096


@dataclass(slots=True)
class _Place:
    #: A stream that was closed and opened again is another one.
    stream: object
    seqno: int
    connection: "StreamingSession"
    since: float


class StallCheck:
    """Remembers the seqno of each stream with a backlog, and since when."""

    def __init__(self) -> None:
        self._places: dict[Key, _Place] = {}
        #: The number of connections checked since all had their turn.
        self._looked = 0

    def look(self, node: "NodeState", now: float) -> None:
        """Note the seqnos of all streams, or of as many as one look may check."""
        chosen = self._chosen([*(node.streams or ()), *(node.tap or ())])
        places = self._places
        found = {k: old for k, old in places.items() if not (old.connection.lost or old.connection in chosen)}
        for connection in chosen:
            for key, stream, seqno in connection.behind():
                before = places.get(key)
                moved = before is None or before.stream is not stream or before.seqno != seqno
                found[key] = _Place(stream, seqno, connection, now) if before is None or moved else before
        self._places = found

    def _chosen(self, connections: "list[StreamingSession]") -> "dict[StreamingSession, None]":
        """The connections to check now."""
        if self._looked >= len(connections):
            self._looked = 0
        chosen: dict[StreamingSession, None] = {}
        streams = 0
        while streams < STREAMS_PER_LOOK and self._looked < len(connections):
            connection = connections[self._looked]
            chosen[connection] = None
            streams += connection.stream_count
            self._looked += 1
        return chosen

    def problems(self, now: float, stall_s: float) -> list[str]:
        """One sentence for each connection with streams that have not advanced for longer, with the likely reason."""
        by_name: dict[str, list[tuple[float, int, StreamingSession]]] = {}
        for (name, number), place in self._places.items():
            if now - place.since > stall_s and not place.connection.lost:
                by_name.setdefault(name, []).append((now - place.since, -number, place.connection))
        return [_sentence(name, still) for name, still in by_name.items()]


def backlog(node: "NodeState", stream: "ProducerStream") -> int:
    """The number of seqnos that the stream has yet to read."""
    vbucket = node.bucket.existing(stream.vbucket.number)
    if vbucket is None or stream.notifier:
        return 0
    high = vbucket.persisted_seqno if stream.options.persisted_only else vbucket.high_seqno
    return max(0, min(high, stream.end_seqno) - stream.cursor.seqno)


def _sentence(name: str, still: "list[tuple[float, int, StreamingSession]]") -> str:
    age_s, number, connection = max(still, key=lambda each: each[:2])
    what = f"{len(still)} streams of {name!r} stall, that of vbucket {-number} for {age_s:.1f} s"
    return f"{what}: {'its consumer stopped reading' if connection.blocked else 'they have changes to send'}"
