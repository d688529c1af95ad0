"""A machine that follows another: the project's own consumer, between its bucket and a link."""

from collections.abc import Callable, Sequence

from tests.simulation.node import Link, Machine
from tests.support.packet_feeder import PacketFeeder
from upriver.node.streams.replica_connection import RETRY_S
from upriver.protocol.consumer.consumer import ConsumerConnection, ConsumerOptions
from upriver.protocol.consumer.replica import Replica
from upriver.protocol.stream_state import StreamState
from upriver.wire import Framer, Response, dcp, upr
from upriver.wire.framing import MEMCACHED


def unanswered(consumer: ConsumerConnection) -> list[int]:
    """The vbuckets whose stream, or failover log, was requested from the producer and not answered yet."""
    return [number for number, stream in consumer.streams.items() if stream.life.state is StreamState.REQUESTED]


class StreamFedReplica:
    """All vbuckets of a machine that are not active there, fed over one link."""

    def __init__(self, machine: Machine, options: ConsumerOptions, note: Callable[[str], None]) -> None:
        self.name = f"replica-{machine}"
        self.machine = machine
        self.options = options
        self.note = note
        self.link: Link | None = None
        self.replica: Replica | None = None
        self._opaque = 0
        machine.on_fall = self._fall
        machine.on_roles = self._tell_roles

    def __str__(self) -> str:
        return self.name

    def connect(self, source: Machine, wanted: Sequence[int] | None = None) -> None:
        """Open a connection and ask for everything, or what is wanted."""
        if self.link is not None:
            self.link.cut()
        self.link = Link(source, self, self.name)
        self.link.send(dcp.Open(name=self.name.encode(), flags=dcp.OpenFlag.PRODUCER).encode())
        self.replica = Replica(self.machine.service.sink, self.machine.clock(), self.options, on_output=self._pass_on)
        self._feeder = PacketFeeder(self.replica)
        self.ask_all(wanted)

    def ask_all(self, wanted: Sequence[int] | None = None) -> None:
        """Ask for every stream that is not there."""
        for number in self.idle:
            # Without bounds in its request only the active copy can be sure to finish a torn snapshot.
            able = self.link is not None and (self.options.dialects[0] == "dcp" or self.link.machine.owns(number))
            if able and self.replica is not None and (wanted is None or number in wanted):
                self._opaque += 1
                self.replica.receive(upr.AddStream(vbucket=number, opaque=self._opaque), self.machine.clock())
        self._pass_on()

    @property
    def idle(self) -> list[int]:
        """The vbuckets that could be fed and are not."""
        if self.replica is None or not self.machine.up:
            return []
        streams = self.replica.consumer.streams
        return [
            number
            for number in range(self.machine.vbuckets)
            if not self.machine.owns(number) and ((stream := streams.get(number)) is None or stream.life.ended)
        ]

    @property
    def waiting(self) -> list[int]:
        """The vbuckets whose request is not answered."""
        return [] if self.replica is None else unanswered(self.replica.consumer)

    def receive(self, link: Link, data: bytes) -> None:
        """Bytes of the source have come, in whatever pieces."""
        self._take(link, data)

    def _take(self, link: Link, data: bytes = b"") -> None:
        """Without room, because the disk refuses, the rest waits in the feeder; a node tries again by itself."""
        if self.replica is None or link is not self.link:
            return
        self.replica.go_on()
        self._feeder.feed(data, self.machine.clock())
        if self.replica.full:
            self.machine.errands.later(RETRY_S, lambda: self._take(link))
        self._pass_on()

    def _pass_on(self) -> None:
        """What the consumer says to its producer; its answers to *add stream* are for us."""
        if self.replica is None or self.link is None:
            return
        framer = Framer(MEMCACHED)
        framer.feed(self.replica.data_to_send())
        while packet := framer.next_packet():
            message = dcp.dcp.decode(packet)
            if not isinstance(message, Response) or message.code != upr.AddStream.declaration.opcode:
                self.link.send(packet)
            elif isinstance(message, upr.AddStreamResponse):
                self.note(f"{self}: a stream was accepted")
            else:
                self.note(f"{self}: a stream was refused, {message.status.label}")
        if self.replica.closing:
            self.note(f"{self}: closed, {self.replica.closing}")
            self.link.cut()

    def lost(self, link: Link) -> None:
        """The connection is gone."""
        if link is self.link:
            self.link = None
            if self.replica is not None:
                self.replica.lose()
                self.replica = None

    def _fall(self) -> None:
        """Our own machine is down."""
        if self.link is not None:
            self.link.cut()

    def _tell_roles(self, numbers: set[int]) -> None:
        """Somebody gave our copies other roles, a turn ago."""
        for number in sorted(numbers):
            if self.replica is not None:
                self.replica.role_changed(number)
        self._pass_on()

    def attend(self) -> None:
        """A machine's own copies need no operator."""
