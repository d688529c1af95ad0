"""The two kinds of TAP connections: a client that asked for a stream, and a peer that sends TAP messages."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from upriver.node.session import Session
from upriver.node.streams.streaming_session import StreamingSession
from upriver.protocol.tap import TapClient, TapProducer
from upriver.wire import Message

if TYPE_CHECKING:
    from upriver.node.tap.service import TapService


class TapConnection(StreamingSession):
    """A session over which a client receives its TAP stream."""

    def __init__(
        self,
        service: "TapService",
        session: Session,
        client: TapClient,
        successor: str = "",
        checkpoints: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(service.node, session)
        self.service = service
        self.client = client
        #: Nothing is sent until the disk says that this registered client is connected.
        self.held = client.registered
        assert client.plan is not None
        self.plan = client.plan
        self.created = self.node.clock()
        #: Takes the control messages that the client may send.
        self.consumer = service.consumer(session)
        self.producer = TapProducer(
            service.source,
            f"tap:{client.name}",
            self.plan,
            service.settings,
            self.node.ticks(),
            successor=successor,
            positions=client.positions,
            elsewhere=client.elsewhere,
            checkpoints=checkpoints,
            on_ready=self.wake,
            warn=lambda text: session.log.warning("TAP client %s: %s", client.name, text),
        )
        self._begins = False
        self.call_at(self.producer.deadline)
        self.wake()

    def receive(self, message: Message) -> bool:
        """Take a response of the consumer; return False for any other message."""
        if not self.producer.receive(message, self.node.ticks()):
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        if self.producer.closing:
            self.service.close(self.session, self.producer.closing)
            return
        self.call_at(self.producer.deadline)
        if self.has_output:
            self.wake()

    def release(self) -> None:
        """Start to send."""
        self.held = False
        self.wake()

    def produce(self) -> bytes:
        """Return the next messages. After the last, close the connection once the transport has sent all of them."""
        if self.session.closing or self.held:
            return b""
        out = self.producer.produce(begin=False)
        if self.producer.done and not out:
            self.service.close(self.session, "everything is sent")
        elif self.producer.done:
            self.wake()
        if self.producer.may_begin and not self._begins:
            self._begins = True
            self.service.turns.add(self._begin_some)
        return out

    def _begin_some(self) -> None:
        """Begin more streams, in this connection's turn."""
        self._begins = False
        if not (self.lost or self.session.closing):
            self.producer.begin_some()
            self.flush()

    @property
    def has_output(self) -> bool:
        """Whether there may be something to send."""
        return self.producer.can_send and not self.held

    @property
    def stream_count(self) -> int:
        """The number of streams that it sends."""
        return len(self.producer.streams)

    def behind(self) -> Iterator[tuple[tuple[str, int], object, int]]:
        """The streams with a backlog whose consumer has room for it."""
        if self.producer.room:
            for number, stream in self.producer.streams.items():
                if stream.backlog:
                    yield (self.producer.cursor_name, number), stream, stream.seqno

    def on_time(self, now: float) -> None:
        """Send again what was not acknowledged, or a noop that is due."""
        self.producer.tick(now)
        self._settle()
        self.flush()

    def last_words(self) -> bytes:
        """The message that nothing more comes, unless nothing has come yet."""
        return b"" if self.held else self.producer.close_message()

    def lose(self) -> None:
        """Forget the connection, which is closed."""
        if not self.lost:
            super().lose()
            self.producer.lose()
            self.service.forget(self)


class TapReceiver(StreamingSession):
    """A session over which a peer sends TAP messages."""

    def __init__(self, service: "TapService", session: Session) -> None:
        super().__init__(service.node, session)
        self.service = service
        self.consumer = service.consumer(session)

    def receive(self, message: Message) -> bool:
        """Close the connection: a response answers nothing that the node asked for."""
        self.service.close(self.session, f"{message.title()} on a connection that only receives")
        return True

    def produce(self) -> bytes:
        """Return nothing: a consumer sends only answers."""
        return b""

    @property
    def has_output(self) -> bool:
        """Always False."""
        return False

    def on_time(self, now: float) -> None:
        """Do nothing: it has no deadlines."""

    def lose(self) -> None:
        """Forget the connection, which is closed."""
        super().lose()
        self.service.sink.forget(self.consumer)
        self.service.receivers.discard(self)
