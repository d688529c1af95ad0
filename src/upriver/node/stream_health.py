"""Streams that do not move: what ``/healthz`` says of them.

Theory of operation. Once a second the watch looks at every stream that has changes to send and notes where it stands.
One that stands still for long has one of three reasons. The consumer gave a window and has not acknowledged: it is his
own decision and no problem of the node. The consumer has stopped reading: nothing the node could do, but somebody must
look. Or neither, and then it is the node that does not get on.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upriver.node.replicas import ReplicaConnection
    from upriver.node.state import NodeState
    from upriver.node.streams import StreamConnection
    from upriver.protocol.stream_output import ProducerStream


@dataclass(slots=True)
class _Place:
    stream: "ProducerStream"
    seqno: int
    since: float


class StreamWatch:
    """Remembers where streams with a backlog stood, and since when."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], _Place] = {}

    def look(self, node: "NodeState", now: float) -> None:
        """Take note of where every stream stands."""
        found: dict[tuple[str, int], _Place] = {}
        for connection in node.streams or ():
            if connection.producer is None or connection.producer.window.room_bytes == 0:
                continue
            for number, stream in connection.producer.streams.items():
                if not backlog(node, stream):
                    continue
                key, seqno = (connection.name, number), stream.history.seqno
                before = self._places.get(key)
                moved = before is None or before.stream is not stream or before.seqno != seqno
                found[key] = _Place(stream, seqno, now) if before is None or moved else before
        self._places = found

    def problems(self, node: "NodeState", now: float, stall_s: float) -> list[str]:
        """Each connection with streams that have stood still for longer, and why, as far as one can tell."""
        by_name: dict[str, list[tuple[int, float]]] = {}
        for (name, number), place in self._places.items():
            if now - place.since > stall_s:
                by_name.setdefault(name, []).append((number, now - place.since))
        connections = {connection.name: connection for connection in node.streams or ()}
        return [_sentence(connections[name], still) for name, still in by_name.items() if name in connections]


def backlog(node: "NodeState", stream: "ProducerStream") -> int:
    """How many seqnos lie between what the stream has read and what it could send."""
    vbucket = node.bucket.existing(stream.vbucket.number)
    if vbucket is None or stream.notifier:
        return 0
    high = vbucket.persisted_seqno if stream.options.persisted_only else vbucket.high_seqno
    return max(0, min(high, stream.end_seqno) - stream.history.seqno)


def _sentence(connection: "StreamConnection | ReplicaConnection", still: list[tuple[int, float]]) -> str:
    number, age_s = max(still, key=lambda each: each[1])
    what = f"{len(still)} streams of {connection.name!r} stall, that of vbucket {number} for {age_s:.1f} s"
    return f"{what}: {'its consumer stopped reading' if connection.blocked else 'they have changes to send'}"
