"""Whatever happens to a vbucket and however bytes are cut, a consumer that follows the rules ends with its contents.

The consumer here is a model: it moves through the same table by what it receives, keeps what each change says, and
checks that every message is allowed where it comes.
"""

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from tests.support.depth import examples
from tests.support.in_memory_node import InMemoryNode, Peer
from upriver.model import VbucketState
from upriver.node.options import ListenAddress
from upriver.protocol.producer.dialects import OPENED, STREAM_DIALECTS, StreamDialect, opaque_of, put_opaque
from upriver.protocol.stream_state import StreamEvent, StreamLife
from upriver.wire import AnyResponse, Message, dcp, upr, upr_draft1, upr_draft2, upr_draft3

KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])


class Follower:
    """One stream, as its consumer sees it."""

    def __init__(self, opaque: int, contents: dict[bytes, bytes]) -> None:
        self.opaque = opaque
        self.contents = contents
        self.life = StreamLife(0)
        self.seqno = 0
        self.end = 0
        self.in_snapshot: set[bytes] = set()

    def receive(self, message: Message) -> None:
        match message:
            case upr.StreamRequestResponse() | AnyResponse() | upr_draft1.Ok():
                self.life.move(StreamEvent.ACCEPT)
            case upr_draft1.StreamStart() | upr_draft3.StreamStart():
                self.life.move(StreamEvent.START)
            case dcp.SnapshotMarker():
                self.life.move(StreamEvent.MARKER)
                assert message.start_seqno == self.seqno == self.end or not self.end, "snapshots join without a gap"
                assert message.end_seqno > message.start_seqno
                self.end = message.end_seqno
                self.in_snapshot.clear()
            case upr.SnapshotMarker() | upr_draft1.SnapshotStart() | upr_draft3.SnapshotStart():
                self.life.move(StreamEvent.MARKER)
                self.in_snapshot.clear()
            case upr_draft1.SnapshotEnd() | upr_draft3.SnapshotEnd():
                self.life.move(StreamEvent.SNAPSHOT_END)
            case dcp.Mutation() | upr.Mutation() | upr_draft1.Mutation() | upr_draft3.Mutation():
                self._change(message.by_seqno, message.key)
                self.contents[message.key] = message.value
            case (
                dcp.Deletion() | upr.Deletion() | upr_draft1.Deletion() | upr_draft2.Deletion() | upr_draft3.Deletion()
            ):
                self._change(message.by_seqno, message.key)
                self.contents.pop(message.key, None)
            case upr.Flush() | upr_draft2.Flush() | upr_draft3.Flush():
                self.life.move(StreamEvent.FLUSH)
                self.contents.clear()
            case dcp.StreamEnd() | upr.StreamEnd() | upr_draft1.StreamEnd() | upr_draft3.StreamEnd():
                self.life.move(StreamEvent.END)
            case _:
                raise AssertionError(f"unexpected: {message}")

    def _change(self, seqno: int, key: bytes) -> None:
        self.life.move(StreamEvent.CHANGE)
        assert seqno > self.seqno
        assert not self.end or seqno <= self.end
        assert key not in self.in_snapshot, "each key comes once in a snapshot"
        self.in_snapshot.add(key)
        self.seqno = seqno


class World:
    """One vbucket, one connection, one stream at a time."""

    def __init__(self, *, dialect: StreamDialect, window: int) -> None:
        self.node = InMemoryNode(vbuckets=2)
        self.vbucket = self.node.bucket.create_vbucket(0)
        self.dialect = dialect
        self.opened = dialect in OPENED
        if self.opened:
            self.peer: Peer = self.node.connect().open()
        else:
            self.peer = self.node.connect(wire=dialect.wire, listen_address=ListenAddress(dialect=dialect.name))
        self.window = window if self.opened else 0
        if self.window:
            self.peer.send(dcp.Control(key=b"connection_buffer_size", value=b"%d" % window))
        self.follower: Follower | None = None
        self.opaque = 0

    def write(self, key: bytes) -> None:
        if self.vbucket.state is VbucketState.ACTIVE:
            self.vbucket.set(key, b"%d" % self.vbucket.high_seqno)

    def delete(self, key: bytes) -> None:
        item = self.vbucket.table.find(key)
        if self.vbucket.state is VbucketState.ACTIVE and item is not None and self.contents().get(key) is not None:
            self.vbucket.delete(key)

    def flush(self) -> None:
        if self.vbucket.state is VbucketState.ACTIVE:
            self.vbucket.flush()

    def turn_over(self) -> None:
        active = self.vbucket.state is VbucketState.ACTIVE
        self.vbucket.set_state(VbucketState.REPLICA if active else VbucketState.ACTIVE)

    def checkpoint(self) -> None:
        self.vbucket.checkpoints.create()

    def close(self) -> None:
        if self.follower is not None and self.opened:
            self.peer.put(upr.CloseStream(opaque=0xFFFF))
            self.follower = None

    def ask(self) -> None:
        """Start over from 0 if nothing streams."""
        if self.follower is None or self.follower.life.ended:
            self.opaque += 1
            self.follower = Follower(self.opaque, {})
            request = self.dialect.request(vbucket=0)  # type: ignore[call-arg]
            put_opaque(request, self.opaque)
            self.peer.put(request)

    def settle(self) -> None:
        """Deliver everything, acknowledging as it comes."""
        while True:
            self.node.settle()
            messages = self.peer.take()
            if not messages:
                return
            for message in messages:
                if self.follower is not None and opaque_of(message) == self.follower.opaque:
                    self.follower.receive(message)
            if self.window:
                self.peer.put(dcp.BufferAck(bytes_processed=sum(len(message.encode()) for message in messages)))

    def contents(self) -> dict[bytes, bytes]:
        """What the vbucket holds."""
        return {key: self.vbucket.get(key).value for key in self.vbucket.table.live_keys()}


STEPS = st.one_of(
    st.tuples(st.just("write"), KEYS),
    st.tuples(st.just("write"), KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("settle")),
    st.tuples(st.just("settle")),
    st.tuples(st.sampled_from(["ask", "ask", "close", "checkpoint", "turn_over", "flush"])),
)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(STEPS, max_size=40),
    dialect=st.sampled_from(list(STREAM_DIALECTS.values())),
    window=st.sampled_from([0, 1, 200]),
)
def test_a_consumer_ends_with_what_the_vbucket_holds(
    steps: list[tuple[str, ...]], dialect: StreamDialect, window: int
) -> None:
    world = World(dialect=dialect, window=window)
    world.ask()
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
    for _ in range(2):  # the first may find the old stream at its end
        world.settle()
        world.ask()
        world.settle()
    assert world.follower is not None
    if world.vbucket.state is not VbucketState.ACTIVE:
        world.turn_over()
        world.settle()
        world.ask()
        world.settle()
    assert world.follower.contents == world.contents()
    assert not world.follower.life.ended
    assert not world.peer.closed


@settings(max_examples=examples(60))
@given(cuts=st.lists(st.integers(1, 200), max_size=30))
def test_requests_may_come_in_any_pieces(cuts: list[int]) -> None:
    node = InMemoryNode(vbuckets=4)
    node.bucket.create_vbuckets()
    for vbucket in range(4):
        node.write(vbucket, b"a", b"b")
    data = b"".join(
        [
            dcp.Open(name=b"x", flags=dcp.OpenFlag.PRODUCER).encode(),
            dcp.Control(key=b"connection_buffer_size", value=b"100000").encode(),
            *(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket).encode() for vbucket in range(4)),
            dcp.BufferAck(bytes_processed=5).encode(),
            upr.FailoverLogRequest(vbucket=1, opaque=9).encode(),
        ]
    )
    peer, at = node.connect(), 0
    for cut in [*cuts, len(data)]:
        peer.put(data[at : at + cut])
        at += cut
        node.settle()
    received = peer.take()
    assert sum(isinstance(message, dcp.Mutation) for message in received) == 8
    assert sum(isinstance(message, upr.StreamRequestResponse) for message in received) == 4
