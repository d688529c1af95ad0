"""A connection of the consumer type: it feeds the node's replicas.

Runs of changes go from the received bytes to the engine without becoming packets. If the engine has no room for them,
because the disk does not keep up or memory is short, the connection stops reading until there is. The producer is then
held back by its window and its socket, and nothing is lost.
"""

from typing import TYPE_CHECKING, Final

from upriver.errors import StatusError
from upriver.node.session import Session
from upriver.node.streams.streaming_session import StreamingSession
from upriver.protocol.consumer import ConsumerOptions, ConsumerStream, Replica
from upriver.wire import Buffer, Message, dcp, upr

if TYPE_CHECKING:
    from upriver.node.streams.service import StreamService

#: The pause before retrying a run for which there was no room.
RETRY_S: Final = 0.01
#: What the node asks for where a listener is pinned to a dialect. `upr` has no settings, and therefore no noops.
_OPTIONS: Final = {
    "upr": ConsumerOptions(window_bytes=0, noop_interval_s=0, expirations=False, dialects=("upr",)),
    "dcp": ConsumerOptions(dialects=("dcp",)),
}


class ReplicaConnection(StreamingSession):
    """A session over which the node consumes."""

    type: Final = "consumer"
    #: The producer type has one.
    producer: Final = None
    #: An add stream is answered after the producer has answered; later requests must not wait for that.
    answers_at_once = False

    def __init__(self, service: "StreamService", session: Session, name: str) -> None:
        super().__init__(service.node, session)
        self.service = service
        self.name = name
        self.created = self.node.clock()
        pinned = session.listen_address.dialect
        #: Decodes its packets.
        self.wire = upr.upr if pinned == "upr" else dcp.dcp
        self.replica = Replica(
            service.sink,
            self.node.ticks(),
            _OPTIONS.get(pinned),
            on_output=self._on_output,
            on_end=self._on_end,
            on_refusal=self._on_refusal,
        )

    # Receiving

    def receive_run(self, data: Buffer, at: int) -> int:
        """Take the next run of changes; return the offset where it ends."""
        end, _ = self.replica.receive_runs(data, at, self.node.ticks())
        if self.replica.full and not self.full:
            self.full = True
            self.node.scheduler.later(RETRY_S, self._retry)
        self._settle()
        return end

    def _retry(self) -> None:
        self.full = False
        self.replica.go_on()
        self.flush()

    def receive(self, message: Message) -> bool:
        """Take a message; return False if it does not belong to a stream."""
        if not self.replica.receive(message, self.node.ticks()):
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        """Carry out what the replica decided: answer, set a timer, close."""
        replica = self.replica
        self.session.put(replica.data_to_send())
        if replica.closing:
            self.service.close(self.session, replica.closing)
        else:
            self.call_at(replica.deadline)

    def _on_output(self) -> None:
        self._settle()
        self.flush()

    def _on_end(self, stream: ConsumerStream) -> None:
        self.session.log.info("the stream into vbucket %d has ended: %s", stream.vbucket, stream.end_reason)

    def _on_refusal(self, vbucket: int, error: StatusError) -> None:
        self.session.log.info("no stream into vbucket %d: %s", vbucket, error)

    # Sending

    def produce(self) -> bytes:
        """Return nothing: it sends only answers and requests, which ``_settle`` gives to the session."""
        return b""

    @property
    def has_output(self) -> bool:
        """Always False."""
        return False

    def on_time(self, now: float) -> None:
        """Acknowledge bytes, or close the connection if the producer was silent for too long."""
        self.replica.tick(now)
        self._settle()
        self.flush()

    def end(self) -> None:
        """End at once, and refuse the streams that were being added."""
        self.lose()
        self.session.put(self.replica.data_to_send())

    def lose(self) -> None:
        """Forget the connection, which is closed."""
        if self.lost:
            return
        super().lose()
        self.replica.lose()
        self.service.forget(self)
