"""Connections that stream: what an *open* makes of a session.

Theory of operation. A session hands every packet here before its own commands see it. Until an open comes, a packet of
a stream closes the connection, because nobody could say whose it is. After it the packets of the streams go to the
connection's producer, and all others stay with the session's commands: whoever streams may also ask for statistics.

Two things flow to the peer. Answers go out at once, before everything else. Changes are read from the history only when
the transport's buffer is empty, one piece at a time, and the next piece waits for the event loop's next turn: so a
consumer that stops reading costs one piece of memory, and one that reads as fast as it can leaves room for the others.
A stream that wakes up only takes note; it sends in the next turn, together with all that has come until then.
"""

from collections.abc import Iterator
from typing import Final, Protocol

from upriver.errors import NotSupported, StatusError, WireError
from upriver.node.authentication import Role
from upriver.node.session import Session, malformed, refusal
from upriver.node.source import EngineSource
from upriver.node.state import NodeState
from upriver.protocol.producer import Producer, checked_name
from upriver.wire import AnyResponse, Message, dcp, upr, upr_draft3
from upriver.wire.codes import Magic
from upriver.wire.detect import detect

#: What is read from the history at once, at most.
PIECE_BYTES: Final = 256 * 1024
#: The opcodes of streams, from open to seqno advanced.
_OPCODES: Final = frozenset({*range(0x50, 0x5F), 0x64})
_OPEN: Final = dcp.Open.declaration.opcode


class Transport(Protocol):
    """As much of asyncio's as is needed here."""

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        """Say so when more than that is kept."""

    def write(self, data: bytes) -> None:
        """Send, or keep until it can be sent."""


class StreamConnection:
    """A session that was opened for streams, in either role."""

    def __init__(self, service: "StreamService", session: Session, name: str, flags: dcp.OpenFlag) -> None:
        node = service.node
        self.service = service
        self.session = session
        self.name = name
        self.flags = flags
        self.created = node.clock()
        #: The transport has not sent yet what it was given.
        self.blocked = False
        self.producer: Producer | None = None
        if flags & (dcp.OpenFlag.PRODUCER | dcp.OpenFlag.NOTIFIER):
            self.producer = Producer(service.source, name, flags, self.created, self.wake)
        self._pumped = False
        self._woken = False
        self._lost = False
        self._timer_at: float | None = None

    @property
    def type(self) -> str:
        """What the statistics call it."""
        if self.flags & dcp.OpenFlag.NOTIFIER:
            return "notifier"
        return "consumer" if self.producer is None else "producer"

    # Coming in

    def receive(self, message: Message) -> bool:
        """Take a message; False if it is none of a stream's."""
        if self.producer is None:
            return self._receive_as_consumer(message)
        if not self.producer.receive(message, self.service.node.clock()):
            return False
        self._settle(self.producer)
        return True

    def _receive_as_consumer(self, message: Message) -> bool:
        if isinstance(message, upr.AddStream | upr.CloseStream):
            self.session.put(refusal(message, NotSupported("the node does not consume streams yet")).encode())
        else:
            self.service.close(self.session, f"{message.title()} on a connection of the consumer type")
        return True

    def _settle(self, producer: Producer) -> None:
        """Do what the producer has decided: answer, set a timer, close."""
        self.session.put(producer.answers())
        if producer.closing:
            self.service.close(self.session, producer.closing)
            return
        self._plan(producer)
        if producer.has_output:
            self.wake()

    # Going out

    def wake(self) -> None:
        """There may be something to send: look in the next turn."""
        if not self._woken and not self._lost:
            self._woken = True
            self.service.node.scheduler.later(0.0, self._run)

    def _run(self) -> None:
        self._woken = False
        if not self._lost and self.session.on_output is not None:
            self.session.on_output()

    def produce(self) -> bytes:
        """The next piece of the streams; empty if there is nothing to send, or no window."""
        return b"" if self.producer is None or self.session.closing else self.producer.produce(PIECE_BYTES)

    def pump(self, transport: Transport) -> int:
        """Write one piece if the transport is empty; how many bytes."""
        if not self._pumped:
            # Every byte that the transport keeps blocks us, until it has sent them all.
            self._pumped = True
            transport.set_write_buffer_limits(high=0)
        if self.blocked:
            return 0
        answers = self.session.data_to_send()
        data = self.produce()
        if answers:
            data = answers + data
        if data:
            transport.write(data)
            if not self.blocked and self.producer is not None and self.producer.has_output:
                self.wake()
        return len(data)

    @property
    def choked(self) -> bool:
        """The peer asks and asks and does not read the answers."""
        return self.blocked and self.session.unsent >= self.service.node.limits.unread_answer_bytes_max

    # Time

    def _plan(self, producer: Producer) -> None:
        deadline = producer.noops.deadline
        if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
            self._timer_at = deadline
            node = self.service.node
            node.scheduler.later(max(0.0, deadline - node.clock()), self._on_time)

    def _on_time(self) -> None:
        self._timer_at = None
        if self._lost or self.producer is None:
            return
        self.producer.tick(self.service.node.clock())
        self._settle(self.producer)
        self._run()

    # The end

    def lose(self) -> None:
        """The connection is gone."""
        if self._lost:
            return
        self._lost = True
        if self.producer is not None:
            self.producer.lose()
        self.service.forget(self)


class StreamService:
    """All streaming connections of a node, by name."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.source = EngineSource(node)
        self._by_name: dict[str, StreamConnection] = {}

    def __iter__(self) -> Iterator[StreamConnection]:
        return iter(list(self._by_name.values()))

    def take(self, session: Session, packet: bytes) -> bool:
        """Take a packet that belongs to a stream; False if it is the session's own."""
        if packet[0] == Magic.REQUEST and packet[1] not in _OPCODES:
            return False
        if session.stream is None and (packet[0] != Magic.REQUEST or detect(packet) is upr_draft3.upr_draft3):
            return False
        try:
            message = dcp.dcp.decode(packet)
        except WireError as error:
            self._refuse(session, packet, error)
            return True
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
            session.put(malformed(packet, error).encode())
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

    def _open(self, session: Session, request: dcp.Open) -> None:
        try:
            session.authorize(Role.STREAM)
            name = checked_name(request.name)
        except StatusError as error:
            session.put(refusal(request, error).encode())
            return
        old = self._by_name.get(name)
        if old is not None:
            self.close(old.session, f"the name {name!r} was opened by {session.peer}")
            old.lose()
            if old.session.on_output is not None:
                old.session.on_output()
        session.stream = self._by_name[name] = StreamConnection(self, session, name, request.flags)
        session.put(AnyResponse(opcode=request.code, opaque=request.opaque).encode())

    def close(self, session: Session, why: str) -> None:
        """Close a connection that broke the rules, or is no longer wanted."""
        session.log.info("closed: %s", why)
        session.closing = True

    def forget(self, connection: StreamConnection) -> None:
        """The connection is gone; its name is free, unless somebody has taken it already."""
        if self._by_name.get(connection.name) is connection:
            del self._by_name[connection.name]
