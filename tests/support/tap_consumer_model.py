"""A model of a TAP client that follows the messages, refuses some, is cut off and comes back; and what may happen."""

import contextlib
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.support.in_memory_node import InMemoryNode, Peer
from upriver.errors import KeyNotFound
from upriver.model import VbucketState
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.wire import AnyResponse, Message, Request, memcached, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import Control, TapFlag

VBUCKETS = (1, 2)
KEYS = [b"a", b"b", b"c", b"d"]
SETTINGS = TapSettings(ack_interval=2, window_messages_max=5, backoff_s=5, keep_alive_s=30, noop_interval_s=0)
VERDICTS = st.lists(
    st.sampled_from([Status.SUCCESS, Status.SUCCESS, Status.ETMPFAIL, Status.EBUSY, Status.NOT_MY_VBUCKET, None]),
    max_size=8,
)
#: What may happen to the node itself.
AT_THE_NODE = (
    st.tuples(st.just("set"), st.sampled_from(VBUCKETS), st.sampled_from(KEYS)),
    st.tuples(st.just("set"), st.sampled_from(VBUCKETS), st.sampled_from(KEYS)),
    st.tuples(st.just("delete"), st.sampled_from(VBUCKETS), st.sampled_from(KEYS)),
    st.tuples(st.just("flush"), st.sampled_from([0, *VBUCKETS])),
    st.tuples(st.just("checkpoint"), st.sampled_from(VBUCKETS)),
    st.tuples(st.just("role"), st.sampled_from(VBUCKETS)),
)


@dataclass
class TapConsumerModel:
    """Follows the messages; what it refuses it does not do."""

    node: InMemoryNode
    request: tap.Connect
    acks: bool
    #: It has been told that nothing more comes.
    finished: bool = False
    held: dict[int, dict[bytes, bytes]] = field(default_factory=lambda: {vbucket: {} for vbucket in VBUCKETS})
    peer: Peer | None = None

    def connect(self) -> None:
        self.peer = self.node.connect()
        self.peer.put(self.request)

    def cut(self, kept: int) -> None:
        """The connection breaks; only this many of the messages on the way still arrive."""
        if self.peer is None:
            return
        self.node.settle()
        for message in self.peer.take()[:kept]:
            self._apply(message)
        self.peer.session.closing = True
        if self.peer.session.stream is not None:
            self.peer.session.stream.lose()
        self.peer = None

    def read(self, verdicts: list[Status | None]) -> None:
        """Take what comes, and answer with these verdicts, then with success."""
        if self.peer is None or self.peer.closed:
            self.connect()
        assert self.peer is not None
        self.node.settle()
        while messages := self.peer.take():
            for message in messages:
                self._judge(message, verdicts.pop(0) if verdicts and self.acks else Status.SUCCESS)
            self.node.settle()

    def _judge(self, message: Message, verdict: Status | None) -> None:
        assert self.peer is not None
        if isinstance(message, memcached.Noop):
            verdict = Status.SUCCESS
        if verdict is None or verdict is Status.SUCCESS:
            self._apply(message)
        asked = isinstance(message, memcached.Noop) or TapFlag.ACK in getattr(message, "tap_flags", TapFlag(0))
        if verdict is not None and (asked or verdict is not Status.SUCCESS):
            assert isinstance(message, Request)
            answer = AnyResponse(opcode=message.code, opaque=message.opaque, status=verdict).encode()
            self.peer.put(answer if verdict is Status.SUCCESS else answer * 2)  # it insists

    def _apply(self, message: Message) -> None:
        assert not self.finished
        match message:
            case tap.Opaque() if message.control is Control.CLOSE_TAP_STREAM:
                self.finished = True
            case tap.Mutation():
                self.held[message.vbucket][message.key] = message.value
            case tap.Delete():
                self.held[message.vbucket].pop(message.key, None)
            case tap.Flush():
                for held in self.held.values():
                    held.clear()
            case tap.Opaque(control=Control.INITIAL_VBUCKET_STREAM, cas=0):
                self.held[message.vbucket].clear()


def take_step(node: InMemoryNode, consumer: TapConsumerModel, step: tuple[object, ...], number: int) -> None:
    """Do one step."""
    match step:
        case ("set", int(vbucket), bytes(key)):
            node.bucket.vbucket(vbucket).set(key, b"%d" % number)
        case ("delete", int(vbucket), bytes(key)):
            with contextlib.suppress(KeyNotFound):
                node.bucket.vbucket(vbucket).delete(key)
        case ("flush", 0):
            node.bucket.flush()
        case ("flush", int(vbucket)):
            node.bucket.vbucket(vbucket).flush()
        case ("checkpoint", int(vbucket)):
            node.bucket.vbucket(vbucket).checkpoints.create()
        case ("role", int(vbucket)):
            node.bucket.vbucket(vbucket).set_state(VbucketState.REPLICA)
            node.bucket.vbucket(vbucket).set_state(VbucketState.ACTIVE)
        case ("roll back", int(vbucket), int(seqno)):
            node.bucket.vbucket(vbucket).set_state(VbucketState.REPLICA)
            node.bucket.vbucket(vbucket).roll_back(seqno)
            node.bucket.vbucket(vbucket).set_state(VbucketState.ACTIVE)
        case ("read", list(verdicts)):
            consumer.read(list(verdicts))
        case ("cut", int(kept)):
            consumer.cut(kept)
        case ("time", float(seconds)):
            node.pass_by(seconds)
        case ("purge",):
            node.pass_by(3)
            node.bucket.maintenance.run_all()
