"""A connection of the producer type: the node sends change streams over it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from upriver.node.auth.users import Role
from upriver.node.session import Session
from upriver.node.streams.stall_check import backlog
from upriver.node.streams.streaming_session import StreamingSession
from upriver.protocol import successor_by_open
from upriver.protocol.producer import OPENED, PIECE_BYTES, REQUEST_BYTES, Producer, StreamDialect
from upriver.wire import Buffer, Message, dcp

if TYPE_CHECKING:
    from upriver.node.streams.service import StreamService


class StreamConnection(StreamingSession):
    """A session over which the node produces."""

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
        #: Decodes its packets: the last of its dialects extends the others.
        self.wire = speaks[-1].wire
        self.producer = Producer(
            service.source,
            name,
            flags,
            self.node.ticks(),
            self.wake,
            speaks,
            lambda: session.authorize(Role.ADMIN),
            # Only an open names the consumer. A connection without a name cannot resume its takeover, and neither can
            # another one.
            successor=successor_by_open(name) if speaks is OPENED else f"{name} at {self.created}",
        )

    @property
    def type(self) -> str:
        """The type that statistics show."""
        return "notifier" if self.flags & dcp.OpenFlag.NOTIFIER else "producer"

    # Receiving

    def receive_run(self, data: Buffer, at: int) -> int:
        """Take a run of stream requests; return the offset where it ends.

        It takes none where the listener is pinned to one dialect, or while earlier answers wait.
        """
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
        """Take a message; return False if it does not belong to a stream."""
        if not self.producer.receive(message, self.node.ticks()):
            return False
        self._settle(self.producer)
        return True

    def last_words(self) -> bytes:
        """End the streams, except takeovers, which are cut: both sides can recover from that."""
        self.producer.end_streams()
        return self.producer.answers()

    def _settle(self, producer: Producer) -> None:
        """Carry out what the producer decided: answer, set a timer, close."""
        self.session.put(producer.answers())
        if producer.closing:
            self.service.close(self.session, producer.closing)
            return
        self.call_at(producer.noops.deadline)
        if producer.has_output:
            self.wake()

    # Sending

    def produce(self) -> Buffer:
        """Return the next piece of the streams, empty if there is none, no window, or no change passed the filters."""
        if self.session.closing:
            return b""
        send_buffer = self.node.send_buffer
        send_buffer.clear()  # the previous user may have failed half-way
        self.producer.put(min(PIECE_BYTES, self.producer.turn_bytes), send_buffer)
        if not send_buffer.size and self.producer.has_output:
            self.wake()  # filters have more changes to check, after the others' turns
        return send_buffer.take()

    @property
    def has_output(self) -> bool:
        """Whether there may be something to send."""
        return self.producer.has_output

    @property
    def turn_bytes(self) -> int:
        """Its share. Filtering for one piece takes a whole turn."""
        return 0 if self.producer.filtered_bytes else self.producer.turn_bytes

    @property
    def stream_count(self) -> int:
        """The number of streams that it sends."""
        return len(self.producer.streams)

    def behind(self) -> Iterator[tuple[tuple[str, int], object, int]]:
        """The streams with a backlog whose consumer has room for it."""
        if self.producer.window.room_bytes != 0:
            for number, stream in self.producer.streams.items():
                if backlog(self.node, stream):
                    yield (self.name, number), stream, stream.cursor.seqno

    def on_time(self, now: float) -> None:
        """Send a noop that is due, or close the connection if the last one was not answered."""
        self.producer.tick(now)
        self._settle(self.producer)
        self.flush()

    def lose(self) -> None:
        """Forget the connection, which is closed."""
        if self.lost:
            return
        super().lose()
        self.producer.lose()
        self.service.forget(self)
