"""The node's streaming connections: an *open* makes a session one of them.

Theory of operation. The service handles the packets of streams. Before an open, such a packet closes the connection,
because it belongs to no stream. After it, the packets go to the connection's producer or replica. All other packets
stay with the commands: a client that streams may also ask for statistics.
"""

from collections.abc import Iterator
from typing import Final

from upriver.errors import StatusError, WireError
from upriver.node.auth.users import Role
from upriver.node.packet_handlers import ConnectionFormat, PacketHandler
from upriver.node.session import Session, malformed, refusal
from upriver.node.state import NodeState
from upriver.node.streams import draft_connections
from upriver.node.streams.engine_sink import EngineSink
from upriver.node.streams.engine_source import EngineSource
from upriver.node.streams.replica_connection import ReplicaConnection
from upriver.node.streams.role_changes import RoleChanges
from upriver.node.streams.stream_connection import StreamConnection
from upriver.protocol import checked_name, made_up
from upriver.protocol.producer import StreamDialect
from upriver.wire import AnyResponse, Magic, Message, dcp, detect, upr, upr_draft3

#: The opcodes of streams, from open to seqno advanced.
_OPCODES: Final = frozenset({*range(0x50, 0x5F), 0x64})
_OPEN: Final = dcp.Open.declaration.opcode
#: Requests whose answers bypass the answers that wait.
_ANSWERED_AT_ONCE: Final = frozenset(
    each.declaration.opcode
    for each in (
        dcp.Open,
        dcp.StreamRequest,
        dcp.Control,
        upr.CloseStream,
        upr.FailoverLogRequest,
        upr_draft3.StreamRequest,
        upr_draft3.FailoverLogRequest,
    )
)


class StreamService(PacketHandler):
    """All streaming connections of a node, by name."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.source = EngineSource(node)
        self.sink = EngineSink(node)
        self._by_name: dict[str, StreamConnection | ReplicaConnection] = {}
        #: The totals of closed connections.
        self.bytes_sent_before = 0
        self.changes_sent_before = 0
        self._roles = RoleChanges(node, self._tell_roles)

    def __iter__(self) -> Iterator[StreamConnection | ReplicaConnection]:
        return iter(list(self._by_name.values()))

    def claim(self, session: Session, first_byte: int) -> ConnectionFormat | None:
        """Claim connections of the 12-byte drafts."""
        return draft_connections.claim(self, session, first_byte)

    def may_overtake(self, session: Session, opcode: int) -> bool:
        """A stream's answers go straight out, unless the node consumes on this connection."""
        return opcode in _ANSWERED_AT_ONCE and (session.stream is None or session.stream.answers_at_once)

    def handle(self, session: Session, packet: bytes) -> bool:
        """Take a packet that belongs to a stream."""
        if packet[0] == Magic.REQUEST:
            if packet[1] not in _OPCODES:
                return False
        elif session.stream is None:
            return False
        third = session.stream is None and detect(packet) is upr_draft3.upr_draft3
        if third and not draft_connections.begin_third(self, session, packet):
            return True
        stream = session.stream
        wire = stream.wire if isinstance(stream, StreamConnection | ReplicaConnection) else dcp.dcp
        try:
            message = wire.class_of(packet).decode(packet)
        except WireError as error:
            self._refuse(session, packet, error)
            return True
        return self.receive(session, message)

    def receive(self, session: Session, message: Message) -> bool:
        """Take a message; return False if it does not belong to a stream. If that fails, close the connection."""
        try:
            return self._receive(session, message)
        except Exception:
            session.log.exception("%s failed", message.title())
            session.closing = True
            return True

    def _refuse(self, session: Session, packet: bytes, error: WireError) -> None:
        """Refuse a malformed request. A malformed response ends the connection."""
        if session.stream is None and packet[1] != _OPEN:
            self.close(session, f"a stream's packet before an open: {error}")
        elif packet[0] == Magic.REQUEST:
            session.send(malformed(packet, error))
        else:
            self.close(session, str(error))

    def _receive(self, session: Session, message: Message) -> bool:
        stream = session.stream
        if stream is not None:
            return stream.receive(message)
        if isinstance(message, dcp.Open):
            self._open(session, message)
        else:
            self.close(session, f"{message.title()} before an open")
        return True

    def connect(self, session: Session, dialect: StreamDialect) -> StreamConnection:
        """Make a session a draft's connection, named after its peer's address."""
        name = made_up(f"{dialect.name}:{session.peer}")
        stream = StreamConnection(self, session, name, dcp.OpenFlag.PRODUCER, (dialect,))
        session.stream = self._by_name[name] = stream
        return stream

    def _open(self, session: Session, request: dcp.Open) -> None:
        try:
            session.authorize(Role.STREAM)
            produces = bool(request.flags & (dcp.OpenFlag.PRODUCER | dcp.OpenFlag.NOTIFIER))
            if not produces:  # feeding replicas means writing, and deciding which copy is active
                session.authorize(Role.ADMIN)
            name = checked_name(request.name)
        except StatusError as error:
            session.send(refusal(request, error))
            return
        old = self._by_name.get(name)
        if old is not None:
            self.close(old.session, f"the name {name!r} was opened by {session.peer}")
            old.lose()
            if old.session.on_output is not None:
                old.session.on_output()
        if produces:
            session.stream = self._by_name[name] = StreamConnection(self, session, name, request.flags)
        else:
            session.stream = self._by_name[name] = ReplicaConnection(self, session, name)
        session.send(AnyResponse(opcode=request.code, opaque=request.opaque))

    def _tell_roles(self, numbers: set[int]) -> None:
        for connection in self:
            if isinstance(connection, ReplicaConnection):
                for number in numbers:
                    connection.replica.role_changed(number)

    def end_streams(self) -> None:
        """Tell all consumers that the node stops."""
        for connection in self:
            if isinstance(connection, StreamConnection):
                connection.session.put(connection.last_words())

    def close(self, session: Session, why: str) -> None:
        """Close a connection that broke the rules, or was replaced."""
        session.log.info("closed: %s", why)
        session.closing = True

    def forget(self, connection: StreamConnection | ReplicaConnection) -> None:
        """Forget a closed connection, and its name unless another connection has it already."""
        if connection.producer is not None:
            self.bytes_sent_before += connection.producer.bytes_sent_total
            self.changes_sent_before += connection.producer.changes_sent
        if self._by_name.get(connection.name) is connection:
            del self._by_name[connection.name]
