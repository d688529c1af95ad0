"""Recordings of real servers, replayed against sessions of ours.

Each recorded connection becomes one session of one node, and its client's bytes are sent at their recorded time, on a
clock that the replay moves. What differs from run to run by nature is left out: CAS, uuids (a request gets ours in the
place of the recorded one), times, data types. What the two servers say is then compared within each vbucket, as lines
of text.

A snapshot may be cut in pieces at will, and its start may be printed as the last seqno before it or as the first in it.
So markers are not lines of their own. All changes up to the next message of another kind are one *run*; of its markers
counts which flags they had and where the last one ends. Where the first marker of a stream starts counts as printed,
and the others start behind the last change: any other start is a line. Of opaques counts whose request they echo.
"""

import difflib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.in_memory_node import InMemoryNode, Peer
from upriver.wire import Framer, Message, Request, Response, dcp, memcached, upr
from upriver.wire.framing import MEMCACHED

FOLDER = Path(__file__).parent.parent / "data" / "transcripts"

#: What a list of lines belongs to: the connection, and the vbucket of a stream; None for other messages.
ConversationPart = tuple[str, int | None]


@dataclass(frozen=True)
class Line:
    """Bytes that went over a recorded connection; none if the server closed it."""

    at: float
    connection: str
    from_client: bool
    data: bytes


def recordings() -> list[str]:
    """Those in which the node produces."""
    return sorted(path.stem for path in FOLDER.glob("*.txt") if path.stem.startswith(("upr", "dcp")))


def lines_of(recording: str) -> Iterator[Line]:
    for text in (FOLDER / f"{recording}.txt").read_text().splitlines():
        if not text.startswith("#"):
            at, connection, direction, *data = text.split()
            yield Line(float(at), connection, direction == "C>S", bytes.fromhex("".join(data)))


def pipelined(lines: Iterator[Line]) -> Iterator[Line]:
    """Join what a client sent at once, without waiting for an answer."""
    held: Line | None = None
    for line in lines:
        key = line.from_client, line.at, line.connection
        if held is not None and line.from_client and key == (held.from_client, held.at, held.connection):
            held = Line(held.at, held.connection, True, held.data + line.data)
            continue
        if held is not None:
            yield held
        held = line
    if held is not None:
        yield held


def packets_of(data: bytes) -> Iterator[bytes]:
    framer = Framer(MEMCACHED)
    framer.feed(data)
    while packet := framer.next_packet():
        yield packet


@dataclass
class Conversation:
    """What one server said on one connection."""

    name: str
    messages: list[Message] = field(default_factory=list)
    closed: bool = False
    #: The vbucket of each request that was sent, by opcode and opaque; answers name none.
    asked: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def lines(self) -> dict[ConversationPart, list[str]]:
        """The messages by vbucket, normalised."""
        asked = {key: list(vbuckets) for key, vbuckets in self.asked.items()}
        by_vbucket: dict[ConversationPart, list[Message]] = defaultdict(list)
        for message in self.messages:
            vbucket = message.vbucket if isinstance(message, Request) else None
            if isinstance(message, Response):
                waiting = asked.get((message.code, message.opaque))
                vbucket = waiting.pop(0) if waiting else None
            by_vbucket[self.name, vbucket].append(message)
        requests = [opaque for opcode, opaque in self.asked if opcode == dcp.StreamRequest.declaration.opcode]
        out = {place: list(normalised(messages, requests)) for place, messages in by_vbucket.items()}
        if self.closed:
            out[self.name, None] = [*out.get((self.name, None), []), "closed"]
        return out

    def uuids(self) -> list[int]:
        """The uuids that it told, in order."""
        logs = (m.log for m in self.messages if isinstance(m, upr.StreamRequestResponse | upr.FailoverLogResponse))
        return [entry.vbucket_uuid for log in logs for entry in log]


#: What carries the opaque of the request that it answers to.
OF_STREAMS = (
    dcp.SnapshotMarker,
    upr.SnapshotMarker,
    *(dcp.Mutation, dcp.Deletion, dcp.Expiration, upr.Mutation, upr.Deletion, upr.Expiration),
    *(upr.Flush, upr.SetVbucketState, dcp.StreamEnd, upr.StreamEnd),
)


def normalised(messages: list[Message], requests: list[int]) -> Iterator[str]:
    """Messages of a vbucket as lines; ``requests`` are the opaques of the streams that were asked for."""
    flags: set[str] = set()
    end: int | None = None
    in_run = False
    stream: int | None = None
    #: Of the stream; None before its first marker.
    last_seqno: int | None = None
    for message in messages:
        if isinstance(message, OF_STREAMS) and message.opaque != stream:
            stream = message.opaque
            yield f"stream {requests.index(stream)}" if stream in requests else "a stream that was not requested"
        match message:
            case dcp.SnapshotMarker():
                flags.add(f"0x{int(message.flags):x}")
                end, in_run = message.end_seqno, True
                if last_seqno is None:
                    yield f"from {message.start_seqno}"
                    last_seqno = message.start_seqno
                elif message.start_seqno < last_seqno:  # read as exclusive: one more is the same place
                    yield f"back to {message.start_seqno}"
            case upr.SnapshotMarker():
                in_run = True
            case _ if (line := change_line(message)) is not None:
                yield line
                in_run, last_seqno = True, message.by_seqno  # type: ignore[attr-defined]
            case _:
                if in_run and end is not None:
                    yield f"whole at {end}, flags {' '.join(sorted(flags))}"
                flags, end, in_run = set(), None, False
                if isinstance(message, Response | dcp.StreamEnd | upr.StreamEnd):
                    last_seqno = None
                yield control_line(message)
    if in_run and end is not None:
        yield f"whole at {end}, flags {' '.join(sorted(flags))}"


def change_line(message: Message) -> str | None:
    match message:
        case dcp.Mutation() | upr.Mutation():
            expires = " expires" if message.expiration else ""
            return (
                f"mutation {message.by_seqno} rev {message.rev_seqno} flags {message.flags:x}{expires}"
                f" lock {message.lock_time} {message.key.decode()}={message.value.decode()}"
            )
        case dcp.Expiration() | upr.Expiration():
            return f"expiration {message.by_seqno} rev {message.rev_seqno} {message.key.decode()}"
        case dcp.Deletion() | upr.Deletion():
            return f"deletion {message.by_seqno} rev {message.rev_seqno} {message.key.decode()}"
    return None


def control_line(message: Message) -> str:
    match message:
        case upr.StreamRequestResponse() | upr.FailoverLogResponse():
            return f"0x{message.code:02x} success, log {[entry.seqno for entry in message.log]}"
        case dcp.RollbackRequired() | upr.RollbackRequired():
            return f"0x{message.code:02x} rollback to {message.seqno}"
        case memcached.GetVbucketResponse():
            return f"0x{message.code:02x} success, state {int(message.state)}"
        case memcached.CreateCheckpointResponse():
            return f"0x{message.code:02x} success"
        case Response():
            return f"0x{message.code:02x} {message.status.name.lower()}"
        case dcp.StreamEnd() | upr.StreamEnd():
            return f"stream end {int(message.reason)}"
        case upr.SetVbucketState():
            return f"set vbucket state {int(message.state)}"
    return message.title()


class Replay:
    """A recording, and what our node says to the same client."""

    def __init__(self, recording: str) -> None:
        self.node = InMemoryNode(vbuckets=64)
        self.recorded: dict[str, Conversation] = {}
        self.ours: dict[str, Conversation] = {}
        self._peers: dict[str, Peer] = {}
        started = self.node.clock()
        for line in pipelined(lines_of(recording)):
            conversation = self.recorded.setdefault(line.connection, Conversation(line.connection))
            if line.from_client:
                self.node.pass_by(max(0.0, started + line.at - self.node.clock()))
                self._send(line)
            elif line.data:
                conversation.messages += [dcp.dcp.decode(packet) for packet in packets_of(line.data)]
            else:
                conversation.closed = True
        self.node.settle()
        self._take()

    def _send(self, line: Line) -> None:
        if line.connection not in self._peers:
            self._peers[line.connection] = self.node.connect(line.connection)
            self.ours[line.connection] = Conversation(line.connection)
        packets = [self._with_our_uuid(packet) for packet in packets_of(line.data)]
        for packet in packets:
            key = packet[1], int.from_bytes(packet[12:16], "big")
            for conversation in (self.recorded[line.connection], self.ours[line.connection]):
                conversation.asked[key].append(int.from_bytes(packet[6:8], "big"))
        self._peers[line.connection].put(*packets)
        self.node.settle()
        self._take()

    def _take(self) -> None:
        for name, peer in self._peers.items():
            self.ours[name].messages += peer.take()
            self.ours[name].closed = peer.closed

    def _with_our_uuid(self, packet: bytes) -> bytes:
        """Each server chooses its uuids: where a client repeats a recorded one, it gets ours instead."""
        if packet[0] != 0x80 or packet[1] != 0x53:
            return packet
        known: dict[int, int] = {}
        for name, recorded in self.recorded.items():
            if name in self.ours:
                known |= zip(recorded.uuids(), self.ours[name].uuids(), strict=False)
        place = slice(24 + 24, 24 + 32)
        theirs = int.from_bytes(packet[place], "big")
        return packet[: place.start] + known.get(theirs, theirs).to_bytes(8, "big") + packet[place.stop :]

    def differences(self) -> dict[ConversationPart, list[str]]:
        """What the two do not have in common: ``-`` was recorded, ``+`` is ours."""
        out: dict[ConversationPart, list[str]] = {}
        for name, conversation in self.recorded.items():
            recorded, ours = conversation.lines(), self.ours[name].lines()
            for place in {**recorded, **ours}:
                compared = difflib.ndiff(recorded.get(place, []), ours.get(place, []))
                found = [line for line in compared if line.startswith(("-", "+"))]
                if found:
                    out[place] = found
        return out


def consumer_recordings() -> list[str]:
    """Those in which the node consumes."""
    return sorted(path.stem for path in FOLDER.glob("cons_*.txt"))


class ConsumerReplay:
    """A recording of one or two servers; each connection's name ends with its server, if there are two."""

    def __init__(self, recording: str) -> None:
        self.recorded: dict[str, Conversation] = {}
        self.ours: dict[str, Conversation] = {}
        self._nodes: dict[str, InMemoryNode] = {}
        self._peers: dict[str, Peer] = {}
        #: What our node calls what the recorded one called otherwise, by connection.
        self._opaques: dict[str, dict[bytes, bytes]] = defaultdict(dict)
        self._uuids: dict[int, int] = {}
        self._now = 0.0
        lines = list(lines_of(recording))
        for line in lines:
            conversation = self.recorded.setdefault(line.connection, Conversation(line.connection))
            self.ours.setdefault(line.connection, Conversation(line.connection))
            if line.from_client:
                self.pass_by(max(0.0, line.at - self._now))
                self._send(line)
            elif line.data:
                conversation.messages += [dcp.dcp.decode(packet) for packet in packets_of(line.data)]
            else:
                conversation.closed = True
            self._learn(line.connection)
        self.pass_by(0.0)

    def _node_of(self, connection: str) -> InMemoryNode:
        server = connection.rstrip("0123456789")[-1:] if connection.rstrip("0123456789")[-1:].isupper() else ""
        if server not in self._nodes:
            self._nodes[server] = InMemoryNode(vbuckets=64)
        return self._nodes[server]

    def pass_by(self, seconds: float) -> None:
        """Let time pass on all servers."""
        self._now += seconds
        for node in self._nodes.values():
            node.pass_by(seconds)
        for name, peer in self._peers.items():
            self.ours[name].messages += peer.take()
            self.ours[name].closed = peer.closed

    def _send(self, line: Line) -> None:
        node = self._node_of(line.connection)
        if line.connection not in self._peers:
            self._peers[line.connection] = node.connect(line.connection)
        for packet in packets_of(line.data):
            key = packet[1], int.from_bytes(packet[12:16], "big")
            self.recorded[line.connection].asked[key].append(int.from_bytes(packet[6:8], "big"))
            ours = self._translated(line.connection, packet)
            key = ours[1], int.from_bytes(ours[12:16], "big")
            self.ours[line.connection].asked[key].append(int.from_bytes(ours[6:8], "big"))
            self._peers[line.connection].put(ours)
        self.pass_by(0.0)

    def _translated(self, connection: str, packet: bytes) -> bytes:
        """The packet with our opaque in the place of the recorded server's, and our uuid in a request for a stream."""
        known = self._opaques[connection]
        # What a relay passes on comes from the other server's side of the recording.
        for others in self._opaques.values():
            known = {**others, **known}
        packet = packet[:12] + known.get(packet[12:16], packet[12:16]) + packet[16:]
        if packet[:2] == b"\x80\x53":
            place = slice(24 + 24, 24 + 32)
            theirs = int.from_bytes(packet[place], "big")
            packet = packet[: place.start] + self._uuids.get(theirs, theirs).to_bytes(8, "big") + packet[place.stop :]
        return packet

    def _learn(self, connection: str) -> None:
        """Match what the two servers have asked so far, kind by kind, and what they told of their uuids."""
        recorded, ours = self.recorded[connection].messages, self.ours[connection].messages
        for kind in (dcp.StreamRequest, dcp.Control):
            pairs = zip(_of(kind, recorded), _of(kind, ours), strict=False)
            for one, other in pairs:
                if kind is dcp.Control and one.key != other.key:  # type: ignore[attr-defined]
                    continue
                theirs, our_own = (m.opaque.to_bytes(4, "big") for m in (one, other))  # type: ignore[attr-defined]
                self._opaques[connection][theirs] = our_own
        told = zip(self.recorded[connection].uuids(), self.ours[connection].uuids(), strict=False)
        self._uuids |= dict(told)

    def differences(self) -> dict[ConversationPart, list[str]]:
        """What the two do not have in common, without the acknowledgements: ``-`` was recorded, ``+`` is ours."""
        out: dict[ConversationPart, list[str]] = {}
        for name, conversation in self.recorded.items():
            recorded, ours = without_acks(conversation).lines(), without_acks(self.ours[name]).lines()
            for place in {**recorded, **ours}:
                compared = difflib.ndiff(recorded.get(place, []), ours.get(place, []))
                found = [line for line in compared if line.startswith(("-", "+"))]
                if found:
                    out[place] = found
        return out

    def acknowledged(self) -> Iterator[tuple[int, int]]:
        """How many bytes the recorded server acknowledged on each connection, and ours."""
        for name, conversation in self.recorded.items():
            recorded, ours = (
                sum(m.bytes_processed for m in one.messages if isinstance(m, dcp.BufferAck))
                for one in (conversation, self.ours[name])
            )
            if recorded:
                yield recorded, ours


def _of(kind: type[Message], messages: list[Message]) -> list[Message]:
    return [message for message in messages if type(message) is kind]


def without_acks(conversation: Conversation) -> Conversation:
    """The same, but for acknowledgements of bytes."""
    kept = [message for message in conversation.messages if not isinstance(message, dcp.BufferAck)]
    return Conversation(conversation.name, kept, conversation.closed, conversation.asked)
