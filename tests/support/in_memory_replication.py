"""A producer and a replica back to back, in memory: two nodes' buckets, and a mover between that only passes on.

Bytes wait in two pipes until somebody delivers some of them, in pieces of any size; time passes when told.
"""

from collections.abc import Callable

from tests.support.in_memory_node import InMemoryNode
from tests.support.packet_feeder import PacketFeeder
from upriver.engine import Vbucket
from upriver.model import VbucketState
from upriver.node.streams.engine_sink import EngineSink
from upriver.node.streams.engine_source import EngineSource
from upriver.protocol.consumer.consumer import ConsumerOptions
from upriver.protocol.consumer.consumer_stream import ConsumerStream
from upriver.protocol.consumer.replica import Replica
from upriver.protocol.producer.dialects import OPENED, StreamDialect
from upriver.protocol.producer.producer import Producer
from upriver.protocol.producer.producer_stream import ProducerStream
from upriver.wire import Dialect, Framer, Message, Response, dcp, upr
from upriver.wire.framing import MEMCACHED

#: Answers to the mover itself.
_TO_MOVER = (upr.AddStream.declaration.opcode, upr.CloseStream.declaration.opcode)


class ConnectionPair:
    """One pair of connections: what was sent and not delivered."""

    #: What the producer hears.
    wire: Dialect = dcp.dcp
    speaks: tuple[StreamDialect, ...] = OPENED

    def __init__(self, world: "InMemoryReplication", options: ConsumerOptions | None) -> None:
        self.world = world
        now = world.clock()
        source = EngineSource(world.source.state)
        self.producer = Producer(source, "move", dcp.OpenFlag.PRODUCER, now, speaks=self.speaks)
        self.replica = Replica(EngineSink(world.destination.state), now, options)
        self.to_consumer = bytearray()
        self.to_producer = bytearray()
        #: What the mover was answered.
        self.answers: list[Message] = []
        self._feeder = PacketFeeder(self.replica)
        self._framer = Framer(MEMCACHED)
        self._at_producer = Framer(self.wire.framing)
        #: The replica has given the connections up, as it must.
        self.given_up = False

    def collect(self) -> bool:
        """Let both sides put into the pipes what they have; False if that is nothing."""
        sent = self.producer.produce()
        self.to_consumer += sent
        back = self.replica.data_to_send()
        self._framer.feed(back)
        while packet := self._framer.next_packet():
            if packet[0] == 0x81 and packet[1] in _TO_MOVER:
                self.answers.append(dcp.dcp.decode(packet))
            else:
                self.to_producer += self.outgoing(packet)
        return bool(sent or back)

    def deliver(self, to_consumer: int, to_producer: int) -> None:
        """Deliver this many bytes in each direction."""
        piece, self.to_consumer = bytes(self.to_consumer[:to_consumer]), self.to_consumer[to_consumer:]
        self.incoming(piece)
        piece, self.to_producer = bytes(self.to_producer[:to_producer]), self.to_producer[to_producer:]
        self._at_producer.feed(piece)
        while packet := self._at_producer.next_packet():
            self.producer.receive(self.wire.decode(packet), self.world.clock())

    def outgoing(self, packet: bytes) -> bytes:
        """What goes over the wire for a packet of the replica."""
        return packet

    def incoming(self, piece: bytes) -> None:
        """Give the replica what has come."""
        self._feeder.feed(piece, self.world.clock())

    def lose(self) -> None:
        """The connections are cut; what was on its way is lost."""
        self.producer.lose()
        self.replica.lose()


class InMemoryReplication:
    """Two buckets with one vbucket each, and the connections between them."""

    def __init__(self, options: ConsumerOptions | None = None) -> None:
        self.options = options
        self.source = InMemoryNode(vbuckets=2)
        self.destination = InMemoryNode(vbuckets=2)
        self.here: Vbucket = self.source.bucket.create_vbucket(0)
        self.there: Vbucket = self.destination.bucket.create_vbucket(0, VbucketState.REPLICA)
        self.wires = self.connected()

    def connected(self) -> ConnectionPair:
        """A new pair of connections."""
        return ConnectionPair(self, self.options)

    def clock(self) -> float:
        return self.source.clock()

    @property
    def sending(self) -> ProducerStream:
        return self.wires.producer.streams[0]

    @property
    def receiving(self) -> ConsumerStream:
        return self.wires.replica.consumer.streams[0]

    # What the mover does

    def add_stream(self, *, takeover: bool = False, opaque: int = 1) -> None:
        flags = upr.AddStreamFlag.TAKEOVER if takeover else upr.AddStreamFlag(0)
        self.wires.replica.receive(upr.AddStream(flags=flags, opaque=opaque), self.clock())

    def close_stream(self, opaque: int = 2) -> None:
        self.wires.replica.receive(upr.CloseStream(opaque=opaque), self.clock())
        self.wires.producer.receive(upr.CloseStream(opaque=opaque), self.clock())

    def cut(self) -> None:
        """Lose the connections and make new ones."""
        self.wires.lose()
        self.wires = self.connected()

    # Time and bytes

    def settle(self, until: Callable[[], bool] | None = None) -> None:
        """Deliver everything and let both nodes work until all is quiet, or something has come about."""
        while until is None or not until():
            busy = self.wires.collect() or self.wires.to_consumer or self.wires.to_producer
            self.wires.deliver(len(self.wires.to_consumer), len(self.wires.to_producer))
            if not self.work() and not busy:
                return

    def work(self) -> bool:
        """Let the nodes run what is due, disks included; False if there was nothing."""
        worked = [
            node.scheduler.step() or node.bucket.flusher.step() or node.scheduler.step()
            for node in (self.source, self.destination)
        ]
        return any(worked)

    def pass_by(self, seconds: float) -> None:
        """Let time pass on both sides."""
        self.source.scheduler.now = self.destination.scheduler.now = self.clock() + seconds
        self.wires.producer.tick(self.clock())
        self.wires.replica.tick(self.clock())

    # What is there

    def contents(self, vbucket: Vbucket) -> dict[bytes, tuple[bytes, int, int, int]]:
        """Everything that clients can see, and what decides conflicts."""
        found = {}
        for key in vbucket.table.live_keys():
            item = vbucket.table.find(key)
            assert item is not None
            found[key] = item.value, item.cas, item.rev_seqno, item.seqno
        return found

    def same(self) -> bool:
        return self.contents(self.here) == self.contents(self.there)


def statuses(messages: list[Message]) -> list[str]:
    """The answers among the messages, by status."""
    return [message.status.name for message in messages if isinstance(message, Response)]
