"""Connections that stream: what an *open* makes of a session.

Theory of operation. A session hands every packet here before its own commands see it. Until an open comes, a packet of
a stream closes the connection, because nobody could say whose it is. After it the packets of the streams go to the
connection's producer or replica, and all others stay with the session's commands: whoever streams may also ask for
statistics.

How the changes reach the peer is the pump's business.
"""

from collections.abc import Iterator
from typing import Final

from upriver.errors import StatusError, WireError
from upriver.node.auth.users import Role
from upriver.node.role_changes import RoleChanges
from upriver.node.session import Session, malformed, refusal
from upriver.node.state import NodeState
from upriver.node.streams import draft_connections
from upriver.node.streams.engine_sink import EngineSink
from upriver.node.streams.engine_source import EngineSource
from upriver.node.streams.replica_connection import ReplicaConnection
from upriver.node.streams.stall_check import backlog
from upriver.node.streams.streaming_session import StreamingSession
from upriver.protocol import checked_name, made_up, successor_by_open
from upriver.protocol.producer import OPENED, PIECE_BYTES, REQUEST_BYTES, Producer, StreamDialect
from upriver.wire import DRAFT, AnyResponse, Buffer, Framing, Magic, Message, dcp, detect, upr_draft3

#: The opcodes of streams, from open to seqno advanced.
_OPCODES: Final = frozenset({*range(0x50, 0x5F), 0x64})
_OPEN: Final = dcp.Open.declaration.opcode


class StreamConnection(StreamingSession):
    """A session on which the node produces."""

    def __init__(
        self,
        service: "StreamService",
        session: Session,
        name: str,
        flags: dcp.OpenFlag,
        speaks: tuple[StreamDialect, ...] = OPENED,
    ) -> None:
        super().__init__(service.node, session)
        self.service = service
        self.name = name
        self.flags = flags
        self.created = self.node.clock()
        #: What decodes its packets: the last of its dialects extends the others.
        self.wire = speaks[-1].wire
        #: How many bytes of the 12-byte drafts were understood.
        self.bytes_taken = 0
        self.producer = Producer(
            service.source,
            name,
            flags,
            self.node.ticks(),
            self.wake,
            speaks,
            lambda: session.authorize(Role.ADMIN),
            # Only an open names somebody: who has no name cannot come back for what died for him, and nobody in his
            # place.
            successor=successor_by_open(name) if speaks is OPENED else f"{name} at {self.created}",
        )

    @property
    def type(self) -> str:
        """What the statistics call it."""
        return "notifier" if self.flags & dcp.OpenFlag.NOTIFIER else "producer"

    # Coming in

    def receive_run(self, data: Buffer, at: int) -> int:
        """Take requests in a row. Each packet is looked at instead where a listener speaks one dialect only, and while
        answers wait that were asked for before."""
        session, producer = self.session, self.producer
        if session.listen_address.dialect or session.waiting:
            return at
        try:
            end = producer.receive_run(data, at)
        except Exception:
            session.log.exception("stream requests failed")
            session.closing = True
            return at
        if end > at:
            session.charge((end - at) // REQUEST_BYTES - 1)
            self._settle(producer)
        return end

    def receive(self, message: Message) -> bool:
        """Take a message; False if it is none of a stream's."""
        if not self.producer.receive(message, self.node.ticks()):
            return False
        self._settle(self.producer)
        return True

    def say_goodbye(self) -> None:
        """The node stops: tell the consumer that nothing follows."""
        self.producer.say_goodbye()
        self.session.put(self.producer.answers())

    def _settle(self, producer: Producer) -> None:
        """Do what the producer has decided: answer, set a timer, close."""
        self.session.put(producer.answers())
        if producer.closing:
            self.service.close(self.session, producer.closing)
            return
        self.call_at(producer.noops.deadline)
        if producer.has_output:
            self.wake()

    # Going out

    def produce(self) -> Buffer:
        """The next piece of the streams; empty if there is nothing to send, no window, or nothing has passed yet."""
        if self.session.closing:
            return b""
        outbox = self.node.outbox
        outbox.clear()  # whoever used it before may have failed half-way
        self.producer.put(min(PIECE_BYTES, self.producer.turn_bytes), outbox)
        if not outbox.size and self.producer.has_output:
            self.wake()  # filters have more to look at, when others had their turn
        return outbox.take()

    @property
    def has_output(self) -> bool:
        """May there be something to send?"""
        return self.producer.has_output

    @property
    def turn_bytes(self) -> int:
        """Its share; but what filters look at for one piece takes a turn by itself."""
        return 0 if self.producer.filtered_bytes else self.producer.turn_bytes

    @property
    def stream_count(self) -> int:
        """How many streams it sends."""
        return len(self.producer.streams)

    def behind(self) -> Iterator[tuple[tuple[str, int], object, int]]:
        """The streams that have something to send, and whose consumer would take it."""
        if self.producer.window.room_bytes != 0:
            for number, stream in self.producer.streams.items():
                if backlog(self.node, stream):
                    yield (self.name, number), stream, stream.history.seqno

    def on_time(self, now: float) -> None:
        """A noop is due, or was not answered."""
        self.producer.tick(now)
        self._settle(self.producer)
        self.flush()

    def lose(self) -> None:
        """The connection is gone."""
        if self.lost:
            return
        super().lose()
        self.producer.lose()
        self.service.forget(self)


class StreamService:
    """All streaming connections of a node, by name."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.source = EngineSource(node)
        self.sink = EngineSink(node)
        self._by_name: dict[str, StreamConnection | ReplicaConnection] = {}
        #: What connections sent that are gone.
        self.bytes_sent_before = 0
        self.changes_sent_before = 0
        self._roles = RoleChanges(node, self._tell_roles)

    def __iter__(self) -> Iterator[StreamConnection | ReplicaConnection]:
        return iter(list(self._by_name.values()))

    def take(self, session: Session, packet: bytes) -> bool:
        """Take a packet that belongs to a stream; False if it is the session's own."""
        if session.framing is DRAFT:
            message = draft_connections.read_short(session, packet)
            return message is None or self._receive_safely(session, message)
        if packet[0] == Magic.REQUEST and not draft_connections.admits(session.listen_address, packet):
            why = WireError(
                1, f"a packet of {session.listen_address.dialect}, as is spoken here", "one of another dialect"
            )
            session.send(malformed(packet, why))
            return True
        if packet[0] == Magic.REQUEST and packet[1] not in _OPCODES:
            return False
        if session.stream is None and packet[0] != Magic.REQUEST:
            return False
        third = session.stream is None and detect(packet) is upr_draft3.upr_draft3
        if third and not draft_connections.begin_third(self, session, packet):
            return True
        wire = session.stream.wire if isinstance(session.stream, StreamConnection) else dcp.dcp
        try:
            message = wire.class_of(packet).decode(packet)
        except WireError as error:
            self._refuse(session, packet, error)
            return True
        return self._receive_safely(session, message)

    def _receive_safely(self, session: Session, message: Message) -> bool:
        try:
            return self._receive(session, message)
        except Exception:
            session.log.exception("%s failed", message.title())
            session.closing = True
            return True

    def _refuse(self, session: Session, packet: bytes, error: WireError) -> None:
        """A request that cannot be read is answered; an answer that cannot be read is the end."""
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

    def begin(self, session: Session, first_byte: int) -> Framing:
        """A connection's first byte has come: which header its packets have."""
        return draft_connections.begin(self, session, first_byte)

    def connect(self, session: Session, dialect: StreamDialect) -> None:
        """Make a session one of a draft's connections, which are named for where they come from."""
        name = made_up(f"{dialect.name}:{session.peer}")
        stream = StreamConnection(self, session, name, dcp.OpenFlag.PRODUCER, (dialect,))
        session.stream = self._by_name[name] = stream

    def lose_place(self, session: Session, error: WireError) -> None:
        """The bytes of one of the 12-byte drafts cannot be understood."""
        draft_connections.lose_place(session, error)

    def _open(self, session: Session, request: dcp.Open) -> None:
        try:
            session.authorize(Role.STREAM)
            produces = bool(request.flags & (dcp.OpenFlag.PRODUCER | dcp.OpenFlag.NOTIFIER))
            if not produces:  # whoever feeds replicas writes, and decides who is active
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

    def say_goodbye(self) -> None:
        """The node stops."""
        for connection in self:
            if isinstance(connection, StreamConnection):
                connection.say_goodbye()

    def close(self, session: Session, why: str) -> None:
        """Close a connection that broke the rules, or is no longer wanted."""
        session.log.info("closed: %s", why)
        session.closing = True

    def forget(self, connection: StreamConnection | ReplicaConnection) -> None:
        """The connection is gone; its name is free, unless somebody has taken it already."""
        if connection.producer is not None:
            self.bytes_sent_before += connection.producer.bytes_sent_total
            self.changes_sent_before += connection.producer.changes_sent
        if self._by_name.get(connection.name) is connection:
            del self._by_name[connection.name]
