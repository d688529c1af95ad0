"""Clients for tests: one that talks to a session without any I/O, and one on a real socket, with the same methods."""

import heapq
import itertools
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from upriver.engine import Bucket
from upriver.model import VbucketState
from upriver.node._fast_path import FastPath
from upriver.node.auth.users_file import Users
from upriver.node.cluster_map import NodeClusterMap, single_node
from upriver.node.commands import COMMANDS, CommandHandler
from upriver.node.embedded import EmbeddedNode
from upriver.node.session import Session
from upriver.node.state import Limits, NodeState
from upriver.wire import AnyResponse, Request, Response
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import Feature, Hello, Noop, memcached
from upriver.wire.framing import MEMCACHED, Framer

T = TypeVar("T")

#: What each vbucket of a test's bucket is; the others are not there.
STATES = {
    0: VbucketState.ACTIVE,
    1: VbucketState.ACTIVE,
    2: VbucketState.REPLICA,
    3: VbucketState.PENDING,
    4: VbucketState.DEAD,
}
ABSENT = 5
VBUCKETS = 8
_LAST_OPAQUE = 0xFFFFFFFE


class ManualTimer:
    """A call that is still to come."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    @property
    def cancelled(self) -> bool:
        return self._callback is None

    def cancel(self) -> None:
        self._callback = None

    def run(self) -> None:
        if self._callback is not None:
            self._callback()


class ManualTime:
    """A clock and a scheduler: time passes only when told."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self._due: list[tuple[float, int, ManualTimer]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def later(self, delay_s: float, callback: Callable[[], object]) -> "ManualTimer":
        timer = ManualTimer(callback)
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), timer))
        return timer

    def beside(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        done(work())

    on_disk = beside

    def from_thread(self, callback: Callable[[], object]) -> None:
        callback()

    @property
    def timers(self) -> int:
        """How many calls are still to come."""
        return sum(not timer.cancelled for _, _, timer in self._due)

    def pass_by(self, seconds: float) -> None:
        """Let time pass, and what is due in it happen."""
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._due)
            timer.run()
        self.now = until


class Peer:
    """The client's side of one connection."""

    def send(self, *requests: Request | bytes) -> list[Response]:
        """Send requests together; all answers to them that are there."""
        raise NotImplementedError

    def ask(self, request: Request) -> Response:
        """Send one request and take its one answer."""
        answers = self.send(request)
        assert len(answers) == 1, answers
        assert answers[0].opaque == request.opaque
        assert answers[0].code == request.code
        return answers[0]

    def refused(self, request: Request, status: Status) -> str:
        """Send one request that is refused as it should be; the text that says why."""
        answer = self.ask(request)
        assert_refusal(answer, status)
        assert isinstance(answer, AnyResponse)
        return answer.text

    def hello(self, *features: Feature) -> None:
        """Agree on features."""
        self.ask(Hello(agent=b"test", features=features))


def assert_refusal(answer: Response, status: Status) -> None:
    """A refusal has its status, no CAS, no extras and a text."""
    assert isinstance(answer, AnyResponse), answer
    assert answer.status is status, (answer.status, answer.text)
    assert (answer.cas, answer.extras, answer.datatype) == (0, b"", 0)
    assert answer.value


def decoded(data: bytes) -> list[Response]:
    """The answers in some bytes, which end with a whole one."""
    framer = Framer(MEMCACHED)
    framer.feed(data)
    answers: list[Response] = []
    while (packet := framer.next_packet()) is not None:
        answer = memcached.decode(packet)
        assert isinstance(answer, Response)
        answers.append(answer)
    assert framer.pending == 0
    return answers


def encoded(*requests: Request | bytes) -> bytes:
    """The bytes of requests, one behind the other."""
    return b"".join(request if isinstance(request, bytes) else request.encode() for request in requests)


class SessionPeer(Peer):
    """A client of a session without I/O."""

    def __init__(
        self, node: NodeState, name: str = "127.0.0.1:1", after_send: Callable[[], object] | None = None
    ) -> None:
        self.wakes = 0
        self._after_send = after_send
        self.session = Session(node, name, self._woken)

    def _woken(self) -> None:
        self.wakes += 1

    def send(self, *requests: Request | bytes) -> list[Response]:
        return decoded(self.send_bytes(encoded(*requests)))

    def send_bytes(self, data: bytes) -> bytes:
        """Send bytes; the bytes of all answers that are there, in as many turns as they take."""
        self.session.receive(memoryview(data))
        out = self.session.data_to_send()
        while self.session.stalled and not self.session.blocked:
            self.session.resume()
            out += self.session.data_to_send()
        if self._after_send is not None:
            self._after_send()
            out += self.session.data_to_send()
        return out

    def put(self, *requests: Request | bytes) -> None:
        """Send requests together and take no answers."""
        self.session.receive(memoryview(encoded(*requests)))

    def receive(self) -> list[Response]:
        """The answers that came since."""
        return decoded(self.session.data_to_send())


class SocketPeer(Peer):
    """A client on a real connection."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._framer = Framer(MEMCACHED)

    def __enter__(self) -> "SocketPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, *requests: Request | bytes) -> list[Response]:
        """A noop at the end shows where the answers end."""
        self.socket.sendall(encoded(*requests, Noop(opaque=_LAST_OPAQUE)))
        answers: list[Response] = []
        for answer in self.answers():
            if answer.opaque == _LAST_OPAQUE:
                return answers
            answers.append(answer)
        raise AssertionError("the node closed the connection")

    def answers(self) -> Iterator[Response]:
        """Answers as they come, until the node closes the connection."""
        while True:
            while (packet := self._framer.next_packet()) is not None:
                answer = memcached.decode(packet)
                assert isinstance(answer, Response)
                yield answer
            data = self.socket.recv(1 << 16)
            if not data:
                return
            self._framer.feed(data)


@dataclass
class ManualNode:
    """A node without a network, whose time and disk the test controls."""

    time: ManualTime
    node: NodeState

    @property
    def bucket(self) -> Bucket:
        return self.node.bucket

    def peer(self) -> SessionPeer:
        """A new connection."""
        return SessionPeer(self.node)

    def commit(self) -> None:
        """Write everything to disk."""
        self.bucket.flusher.step()


def open_manual_node(
    *,
    path: str | None = None,
    ack: Literal["memory", "disk"] = "memory",
    compiled: bool = False,
    users: Users | None = None,
    limits: Limits | None = None,
) -> ManualNode:
    """A bucket with the vbuckets of ``STATES`` and a node over it; close the bucket at the end."""
    time = ManualTime()
    bucket = Bucket.open(path, vbuckets=VBUCKETS, ack=ack, clock=time, background=False)
    for number, state in STATES.items():
        bucket.create_vbucket(number, state)
    bucket.flusher.step()
    config = single_node(
        bucket="default", uuid="0" * 32, kv_port=11210, mgmt_port=8091, vbuckets=VBUCKETS, active=(0, 1)
    )
    node = NodeState(
        bucket=bucket,
        bucket_name="default",
        scheduler=time,
        clock=time,
        ticks=time,
        started=time.now,
        cluster=NodeClusterMap(config),
        users=users,
        limits=limits or Limits(),
        commands=COMMANDS,
        handlers=(CommandHandler(),),
    )
    if compiled:
        node.fast_path = FastPath(bucket.tables, bucket.ledger, bucket.operations)
    return ManualNode(time, node)


def make_states(node: EmbeddedNode) -> None:
    """Give a running node the vbuckets of ``STATES``."""

    def make() -> None:
        for number, state in STATES.items():
            vbucket = node.bucket.existing(number) or node.bucket.create_vbucket(number, state)
            vbucket.set_state(state)

    node.call(make)
