"""Producers of UPR, DCP and TAP over a fake store, without sessions, sockets or an engine.

A peer that is opened gets a ``Producer``, and one that sends a TAP *connect* a ``TapProducer``. Time passes when a test
says so.
"""

import itertools
from collections.abc import Callable

from tests.support.fake_source import FakeSource, FakeVbucket
from upriver.errors import StatusError
from upriver.model import VbucketState
from upriver.protocol import successor_by_open, successor_by_tap
from upriver.protocol.producer.dialects import STREAM_DIALECTS
from upriver.protocol.producer.fast_requests import REQUEST_BYTES
from upriver.protocol.producer.producer import Producer
from upriver.protocol.tap.clients import TapClient, TapClients
from upriver.protocol.tap.connect_plan import TapSettings, plan_of
from upriver.protocol.tap.producer import TapProducer, check_takeover
from upriver.wire import AnyResponse, Framer, Message, Status, dcp, tap

_TAP_OPCODES = range(0x40, 0x48)


class FakePeer:
    """The other end of one connection."""

    def __init__(self, node: "FakeNode", name: str, dialect: str = "") -> None:
        self.node = node
        self.wire = STREAM_DIALECTS[dialect].wire if dialect else dcp.dcp
        self.received: list[Message] = []
        self.closed = False
        #: Why the connection was closed.
        self.close_reason = ""
        self._producer: Producer | None = None
        self._tap: TapProducer | None = None
        self._client: TapClient | None = None
        self._to_node = Framer(self.wire.framing)
        self._from_node = Framer(self.wire.framing)
        self._unsent = b""
        if dialect:
            self._producer = Producer(
                node.source, name, dcp.OpenFlag.PRODUCER, node.now, speaks=(STREAM_DIALECTS[dialect],)
            )

    @property
    def producer(self) -> Producer:
        """What an open has led to."""
        assert self._producer is not None
        return self._producer

    @property
    def tap_producer(self) -> TapProducer:
        """What a connect has led to."""
        assert self._tap is not None
        return self._tap

    def open(self, name: bytes = b"peer", flags: int = dcp.OpenFlag.PRODUCER) -> "FakePeer":
        """Open the connection for streams."""
        text = name.decode()
        successor = successor_by_open(text)
        self._producer = Producer(self.node.source, text, dcp.OpenFlag(flags), self.node.now, successor=successor)
        return self

    # Messages

    def send(self, *messages: Message | bytes) -> list[Message]:
        """Send messages and let the node work until it is quiet; return what came back."""
        self.put(*messages)
        self.node.settle()
        return self.take()

    def put(self, *messages: Message | bytes) -> None:
        """Send messages, in one piece, and nothing more."""
        data = b"".join(message if isinstance(message, bytes) else message.encode() for message in messages)
        if self._producer is not None and self.wire is dcp.dcp:
            at = 0
            while not self.closed and (end := self._producer.receive_run(data, at)) > at:
                assert (end - at) % REQUEST_BYTES == 0
                at = end
            data = data[at:]
        self._to_node.feed(data)
        while not self.closed and (packet := self._to_node.next_packet()) is not None:
            self._receive(_decoded(packet, self.wire.decode))
        self._close_if_due()

    def take(self) -> list[Message]:
        """What has come since the last time."""
        received, self.received = self.received, []
        return received

    def collect(self) -> bool:
        """Receive one piece of what the node has to send; False if that is nothing."""
        data, self._unsent = self._unsent, b""
        if not self.closed and self._producer is not None:
            data += self._producer.produce(self._producer.turn_bytes)
        elif not self.closed and self._tap is not None:
            data += self._tap.produce()
            if self._tap.done and not data:
                self._close("everything is sent")
        self._from_node.feed(data)
        while packet := self._from_node.next_packet():
            self.received.append(_decoded(packet, self.wire.decode))
        return bool(data) or (not self.closed and self._has_more)

    @property
    def _has_more(self) -> bool:
        producer = self._producer or self._tap
        return producer is not None and producer.has_output

    def _receive(self, message: Message) -> None:
        if isinstance(message, tap.Connect):
            self._connect(message)
        elif self._producer is not None:
            assert self._producer.receive(message, self.node.now)
        else:
            assert self.tap_producer.receive(message, self.node.now)
        self._close_if_due()

    def _connect(self, request: tap.Connect) -> None:
        node = self.node
        try:
            plan = plan_of(request, node.clock())
            name = request.name.decode() or next(node.anonymous)
            check_takeover(node.source, plan, successor_by_tap(name))
            node.replace(name)
            self._client = node.clients.connected(name, plan, node.clock(), anonymous=not request.name)
        except StatusError as error:
            self._unsent = AnyResponse(opcode=request.code, status=Status(error.status)).encode()
            self._close(str(error))
            return
        self._tap = TapProducer(
            node.source,
            f"tap:{name}",
            plan,
            node.settings,
            node.now,
            successor=successor_by_tap(name),
            positions=self._client.positions,
            elsewhere=self._client.elsewhere,
            warn=node.warnings.append,
        )

    # Time, and the end

    @property
    def client_name(self) -> str:
        """The name of a TAP client; empty for other peers, and once it is gone."""
        return "" if self._client is None or self.closed else self._client.name

    @property
    def deadline(self) -> float | None:
        """When the connection has to look at the time again."""
        if self.closed:
            return None
        if self._tap is not None:
            return self._tap.deadline
        return None if self._producer is None else self._producer.noops.deadline

    def tick(self) -> None:
        """Time has passed."""
        producer = self._producer or self._tap
        if producer is not None and not self.closed:
            producer.tick(self.node.now)
            self._close_if_due()

    def role_changed(self, number: int) -> None:
        """A vbucket has changed role."""
        if self._tap is not None and not self.closed:
            self._tap.role_changed(number)

    def _close_if_due(self) -> None:
        producer = self._producer or self._tap
        if producer is not None and producer.closing:
            self._close(producer.closing)

    def lose(self) -> None:
        """The connection is cut."""
        self._close("lost")

    def _close(self, reason: str) -> None:
        if self.closed:
            return
        self.closed, self.close_reason = True, reason
        if self._producer is not None:
            self._producer.lose()
        if self._tap is not None and self._client is not None:
            producer = self._tap
            producer.lose()
            done = producer.done or self._client.anonymous
            self.node.clients.left(
                self._client, lambda: producer.positions, self.node.clock(), elsewhere=producer.elsewhere, done=done
            )


def _decoded(packet: bytes, decode: Callable[[bytes], Message]) -> Message:
    is_tap = packet[0] >= 0x80 and packet[1] in _TAP_OPCODES
    return tap.tap.decode(packet) if is_tap else decode(packet)


class FakeNode:
    """A fake store, its peers and a clock."""

    def __init__(self, tap_settings: TapSettings | None = None) -> None:
        self.source = FakeSource()
        self.settings = tap_settings or TapSettings()
        self.clients = TapClients(self.settings.keep_alive_s)
        #: What TAP producers have logged.
        self.warnings: list[str] = []
        self.peers: list[FakePeer] = []
        #: Whether the disk follows whenever the node is otherwise quiet.
        self.disk_works = True
        self.anonymous = (f"anon_{number}" for number in itertools.count(1))

    # The store

    def create_vbucket(self, number: int, state: VbucketState = VbucketState.ACTIVE) -> FakeVbucket:
        """Make a vbucket."""
        return self.source.create_vbucket(number, state)

    def create_vbuckets(self, count: int) -> None:
        """Make active vbuckets with the first numbers."""
        for number in range(count):
            self.create_vbucket(number)

    def delete_vbucket(self, number: int) -> None:
        """Remove a vbucket."""
        self.source.delete_vbucket(number)

    def vbucket(self, number: int) -> FakeVbucket:
        """A vbucket that exists."""
        return self.source.by_number[number]

    def write(self, vbucket: int, *keys: bytes, value: bytes = b"v") -> None:
        """Set keys."""
        for key in keys:
            self.vbucket(vbucket).set(key, value)

    def flush(self) -> None:
        """Empty all active vbuckets, as one flush."""
        for vbucket in self.source.by_number.values():
            if vbucket.state is VbucketState.ACTIVE:
                vbucket.flush()
        marks = {vbucket.number: vbucket.flush_marks for vbucket in self.source.by_number.values()}
        for found in marks.values():
            if found:
                found[-1] = max(each[-1] for each in marks.values() if each)

    # Peers

    def connect(self, name: str = "peer", dialect: str = "") -> FakePeer:
        """A new connection; of one draft, or open to what its first message says."""
        peer = FakePeer(self, name, dialect)
        self.peers.append(peer)
        return peer

    def replace(self, name: str) -> None:
        """A TAP client connects under a name that may be in use."""
        for peer in self.peers:
            if peer.client_name == name:
                peer.lose()

    # Time

    @property
    def now(self) -> float:
        return self.source.now

    def clock(self) -> float:
        """Seconds of the epoch."""
        return self.source.now

    def settle(self) -> None:
        """Let everything happen that can happen now."""
        while True:
            changed, self.source.role_changes = self.source.role_changes, []
            for number, peer in itertools.product(dict.fromkeys(changed), self.peers):
                peer.role_changed(number)
            if sum(peer.collect() for peer in self.peers):
                continue
            if not self.source.role_changes and not (self.disk_works and self.source.reach_disk()):
                return

    def pass_by(self, seconds: float) -> None:
        """Let time pass, and everything that falls due on the way."""
        until = self.now + seconds
        while due := [at for peer in self.peers if (at := peer.deadline) is not None and at <= until]:
            self.source.now = max(self.now, min(due))
            for peer in self.peers:
                peer.tick()
            self.settle()
        self.source.now = until
        self.settle()


def node_with_peer(*keys: bytes, vbucket: int = 0, name: bytes = b"peer", flags: int = 1) -> tuple[FakeNode, FakePeer]:
    """A node whose vbucket holds these keys, and a peer that has opened a connection."""
    node = FakeNode()
    node.create_vbucket(vbucket)
    node.write(vbucket, *keys)
    return node, node.connect().open(name, flags)
