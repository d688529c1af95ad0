"""A node without sockets: sessions over a bucket in memory, with time that passes when told."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tests.support.command_peers import ManualTimer
from upriver.engine import Bucket, Vbucket
from upriver.node.cluster_map import NodeClusterMap, single_node
from upriver.node.commands import COMMANDS
from upriver.node.options import ListenAddress
from upriver.node.server import add_services
from upriver.node.session import Session
from upriver.node.state import NodeState
from upriver.node.tap.client_registry import TapRegistry
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.wire import Dialect, Framer, Message, dcp, tap

T = TypeVar("T")


class ManualScheduler:
    """Callbacks that run when a test says so."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self._due: list[tuple[float, int, ManualTimer]] = []
        self._soon: deque[Callable[[], object]] = deque()
        self._order = itertools.count()

    def later(self, delay_s: float, callback: Callable[[], object]) -> "ManualTimer":
        timer = ManualTimer(callback)
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), timer))
        return timer

    def from_thread(self, callback: Callable[[], object]) -> None:
        self._soon.append(callback)

    def beside(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        result = work()
        self._soon.append(lambda: done(result))

    on_disk = beside

    def step(self) -> bool:
        """Run one callback that is due; False if there is none."""
        if self._soon:
            self._soon.popleft()()
        elif self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2].run()
        else:
            return False
        return True

    @property
    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None


class Peer:
    """The other end of one session."""

    def __init__(
        self, node: "InMemoryNode", name: str, wire: Dialect = dcp.dcp, listen_address: ListenAddress | None = None
    ) -> None:
        self.node = node
        self.wire = wire
        self.session = Session(node.state, name, listen_address=listen_address or ListenAddress())
        self.received: list[Message] = []
        self._framer = Framer(wire.framing)

    @property
    def closed(self) -> bool:
        return self.session.closing

    def send(self, *messages: Message | bytes) -> list[Message]:
        """Send messages and let the node work until it is quiet; what came back."""
        self.put(*messages)
        self.node.settle()
        return self.take()

    def put(self, *messages: Message | bytes) -> None:
        """Send messages, in one piece, and nothing more."""
        data = b"".join(message if isinstance(message, bytes) else message.encode() for message in messages)
        if not self.closed:
            self.session.receive(data)

    def take(self) -> list[Message]:
        """What has come since the last time."""
        received, self.received = self.received, []
        return received

    def open(self, name: bytes = b"peer", flags: int = dcp.OpenFlag.PRODUCER) -> "Peer":
        """Open the connection for streams."""
        self.send(dcp.Open(name=name, flags=dcp.OpenFlag(flags)))
        return self

    def lose(self) -> None:
        """The connection is cut."""
        assert self.session.stream is not None
        self.session.closing = True
        self.session.stream.lose()

    def collect(self) -> bool:
        """Take over what the session wants to send, and let it go on; False if that is nothing."""
        if self.session.stalled and not self.session.blocked:
            self.session.resume()
        data = self.session.data_to_send()
        if self.session.stream is not None:
            data += self.session.stream.produce()
        self._framer.feed(data)
        while packet := self._framer.next_packet():
            dialect = tap.tap if packet[0] >= 0x80 and packet[1] in range(0x40, 0x48) else self.wire
            self.received.append(dialect.decode(packet))
        if self.closed and self.session.stream is not None:
            self.session.stream.lose()
        return bool(data)


class InMemoryNode:
    """A node, its clock and its peers."""

    def __init__(
        self, vbuckets: int = 64, tap_settings: TapSettings | None = None, tap_registry: TapRegistry | None = None
    ) -> None:
        self.scheduler = ManualScheduler()
        #: How far somebody has set the clock.
        self.clock_set_s = 0.0
        self.bucket = Bucket.open(None, vbuckets=vbuckets, clock=self.clock, background=False)
        self.state = NodeState(
            bucket=self.bucket,
            bucket_name="default",
            scheduler=self.scheduler,
            clock=self.clock,
            ticks=lambda: self.scheduler.now,
            started=self.clock(),
            cluster=NodeClusterMap(
                single_node(bucket="default", uuid="0" * 32, kv_port=1, mgmt_port=1, vbuckets=vbuckets, active=[])
            ),
            commands=COMMANDS,
        )
        self.service, self.tap = add_services(self.state, tap_settings, tap_registry)
        self.peers: list[Peer] = []
        #: Whether the flusher runs whenever the node is otherwise quiet.
        self.disk_works = True

    def clock(self) -> float:
        return self.scheduler.now + self.clock_set_s

    def connect(self, name: str = "peer", wire: Dialect = dcp.dcp, listen_address: ListenAddress | None = None) -> Peer:
        peer = Peer(self, name, wire, listen_address)
        self.peers.append(peer)
        return peer

    def settle(self) -> None:
        """Let everything happen that can happen now."""
        while True:
            if self.scheduler.step() or self._collect():
                continue
            if not (self.disk_works and self.bucket.flusher.step()) and not self.scheduler.step():
                return

    def _collect(self) -> bool:
        return sum(peer.collect() for peer in self.peers) > 0

    def pass_by(self, seconds: float) -> None:
        """Let time pass, and everything that falls due on the way."""
        until = self.scheduler.now + seconds
        while (at := self.scheduler.next_at) is not None and at <= until:
            self.scheduler.now = max(self.scheduler.now, at)
            self.settle()
        self.scheduler.now = until
        self.settle()

    def vbucket(self, number: int) -> Vbucket:
        """A vbucket that exists."""
        return self.bucket.vbucket(number)

    def write(self, vbucket: int, *keys: bytes, value: bytes = b"v") -> None:
        """Set keys."""
        for key in keys:
            self.bucket.vbucket(vbucket).set(key, value)


def node_with_peer(*keys: bytes, vbucket: int = 0, name: bytes = b"peer", flags: int = 1) -> tuple[InMemoryNode, Peer]:
    """A node whose vbucket holds these keys, and a peer that has opened a connection."""
    node = InMemoryNode()
    node.bucket.create_vbucket(vbucket)
    node.write(vbucket, *keys)
    return node, node.connect().open(name, flags)
