"""Streams that do not move: what ``/healthz`` says of them.

Theory of operation. Once a second the watch looks at every stream that has changes to send, of whatever protocol, and
notes where it stands. One that stands still for long has one of three reasons. The consumer gave a window, or
acknowledges, and has not done so: it is his own decision and no problem of the node. The consumer has stopped reading:
nothing the node could do, but somebody must look. Or neither, and then it is the node that does not get on.

A look is bounded: of many connections with a thousand streams each it takes some, and the others next time.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from upriver.node.state import NodeState
    from upriver.node.streams.streaming_session import StreamingSession
    from upriver.protocol.producer import ProducerStream

#: Which stream: the name of its connection and the vbucket.
Key = tuple[str, int]
#: Connections are looked at until they have had so many streams.
STREAMS_PER_LOOK: Final = 4096


@dataclass(slots=True)
class _Place:
    #: A stream that was closed and opened again is another one.
    stream: object
    seqno: int
    connection: "StreamingSession"
    since: float


class StallCheck:
    """Remembers where streams with a backlog stood, and since when."""

    def __init__(self) -> None:
        self._places: dict[Key, _Place] = {}
        #: How many connections were looked at since all had their turn.
        self._looked = 0

    def look(self, node: "NodeState", now: float) -> None:
        """Take note of where streams stand: all of them, or as many as one look may cost."""
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
        """Whose turn it is to be looked at."""
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
        """Each connection with streams that have stood still for longer, and why, as far as one can tell."""
        by_name: dict[str, list[tuple[float, int, StreamingSession]]] = {}
        for (name, number), place in self._places.items():
            if now - place.since > stall_s and not place.connection.lost:
                by_name.setdefault(name, []).append((now - place.since, -number, place.connection))
        return [_sentence(name, still) for name, still in by_name.items()]


def backlog(node: "NodeState", stream: "ProducerStream") -> int:
    """How many seqnos lie between what the stream has read and what it could send."""
    vbucket = node.bucket.existing(stream.vbucket.number)
    if vbucket is None or stream.notifier:
        return 0
    high = vbucket.persisted_seqno if stream.options.persisted_only else vbucket.high_seqno
    return max(0, min(high, stream.end_seqno) - stream.history.seqno)


def _sentence(name: str, still: "list[tuple[float, int, StreamingSession]]") -> str:
    age_s, number, connection = max(still, key=lambda each: each[:2])
    what = f"{len(still)} streams of {name!r} stall, that of vbucket {-number} for {age_s:.1f} s"
    return f"{what}: {'its consumer stopped reading' if connection.blocked else 'they have changes to send'}"
