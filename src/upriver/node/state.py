"""What all connections of a node share."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from upriver import __version__
from upriver.engine import Bucket, MallocTuning
from upriver.model import VbucketState
from upriver.node.auth.login_queue import LoginQueue
from upriver.node.auth.login_throttle import LoginThrottle
from upriver.node.auth.users import Role
from upriver.node.auth.users_file import Users
from upriver.node.buffer_budget import BufferBudget
from upriver.node.cluster_map import ClusterConfig
from upriver.node.streams.stall_check import StallCheck
from upriver.node.streams.wake_queue import WakeQueue
from upriver.protocol.producer import PIECE_BYTES, SendBuffer
from upriver.wire import BODY_BYTES_MAX

if TYPE_CHECKING:
    from upriver.node._fast_path import FastPath
    from upriver.node.connection import ServerConnection
    from upriver.node.packet_handlers import PacketHandler
    from upriver.node.session import Command, Session
    from upriver.node.streams.service import StreamService
    from upriver.node.tap.service import TapService
    from upriver.wire import Request


T = TypeVar("T")

LOGGER: Final = "upriver.node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one connection, or all of them together, may cost."""

    connections_max: int = 20_000
    body_bytes_max: int = BODY_BYTES_MAX
    #: Who has to log in, and has not, may not make the node keep more of a request than this.
    login_bytes_max: int = 64 * 1024
    #: A peer that has so many bytes of answers unread gets no more answers until it reads.
    unread_answer_bytes_max: int = 1024 * 1024
    #: So many answers may wait for the disk before the next request is looked at.
    waiting_answers_max: int = 10_000
    #: After so much work that the compiled loop did not do, others have their turn. A request is 1, and so is
    #: everything that it asks for beyond the first: each key, each pair of statistics.
    turn_work_max: int = 256
    #: Or after so many seconds, whatever it was: some requests copy megabytes, or wait for a disk.
    turn_s: float = 0.005
    #: All connections together may leave so many bytes of answers unread.
    unread_total_bytes_max: int = 256 * 2**20
    #: A connection with nothing going on for so long is closed; 0 for never.
    idle_s: float = 0.0
    #: The same for one that has sent half a request or leaves answers unread; 0 for never.
    stuck_s: float = 60.0
    #: A peer that takes longer over its TLS handshake is closed.
    tls_handshake_s: float = 10.0
    #: A peer that has not logged in for so long, where one has to, is closed.
    login_s: float = 60.0
    #: All connections together may make the node keep so many bytes of requests that are not whole yet.
    partial_bytes_max: int = 256 * 2**20
    #: A connection may wait so many times at once for a seqno to reach the disk.
    disk_waits_max: int = 1024


class Timer(Protocol):
    """A call that is still to come."""

    def cancel(self) -> object:
        """Do not call any more; nothing happens if it was called already."""


class Scheduler(Protocol):
    """How a session gets something done later; the node's event loop, or a test's own clock."""

    def later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Call back after so many seconds."""

    def beside(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        """Run work that takes milliseconds beside the sessions, and hand its result to ``done`` in their thread."""

    def on_disk(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        """The same for work that waits for a disk: nobody's login waits behind it."""

    def from_thread(self, callback: Callable[[], object]) -> None:
        """Call back soon, in the thread that runs the sessions, and after those who asked before."""


@dataclass(slots=True)
class Counters:
    """What only the node counts; the engine counts the rest."""

    connections: int = 0
    connections_total: int = 0
    connections_refused: int = 0
    handshakes_failed: int = 0
    logins_failed: int = 0
    flushes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(slots=True, kw_only=True)
class NodeState:
    """The bucket, who may use it, and what there is to know about the node."""

    bucket: Bucket
    bucket_name: str
    scheduler: Scheduler
    clock: Callable[[], float]
    started: float
    #: Tells how long something takes, and when it is due: a time that nobody sets, unlike the clock's.
    ticks: Callable[[], float]
    cluster: ClusterConfig
    users: Users | None = None
    throttle: LoginThrottle = field(default_factory=LoginThrottle)
    limits: Limits = field(default_factory=Limits)
    counters: Counters = field(default_factory=Counters)
    logins: LoginQueue = field(default_factory=LoginQueue)
    #: A flush that was put off; it stands only until the next is asked for.
    flush_timer: Timer | None = None
    log: logging.Logger = field(default_factory=lambda: logging.getLogger(LOGGER))
    version: str = __version__
    #: What each request type runs, and the role that it needs; None for what everybody may do.
    commands: "Mapping[type[Request], tuple[Command, Role | None]]" = field(default_factory=dict)
    #: The parts that answer packets, in the order in which they are offered one. The last takes every packet.
    handlers: "Sequence[PacketHandler]" = ()
    #: The compiled loop for plain requests; None where it was not built.
    fast_path: "FastPath | None" = None
    stream_watch: StallCheck = field(default_factory=StallCheck)
    #: The connections that stream; None where there are no streams.
    streams: "StreamService | None" = None
    #: TAP, in both directions; None where there is none.
    tap: "TapService | None" = None
    #: Every connection that is open, in its handshake or on its way out.
    connections: "set[ServerConnection]" = field(default_factory=set)
    #: Those among them that hold something or are on their way out: somebody has to look whether they move.
    watched: "set[ServerConnection]" = field(default_factory=set)
    #: What is kept of requests that are not answered, and of answers that are not read or wait for others.
    partial: "BufferBudget[Session]" = field(default_factory=lambda: BufferBudget())
    unread: "BufferBudget[ServerConnection]" = field(default_factory=lambda: BufferBudget())
    #: Gives back what such holders have left.
    heap: MallocTuning = field(default_factory=lambda: MallocTuning(4 * 2**20))
    #: Where one connection after the other puts together what its streams send.
    outbox: SendBuffer = field(default_factory=lambda: SendBuffer(PIECE_BYTES))
    #: Collects the streams that requests wake.
    wake_queue: WakeQueue = field(init=False)
    #: No more connections are taken.
    stopping: bool = False
    #: The oldest change may wait so long for the disk, and a stream stand still, before the node is unhealthy.
    stall_s: float = 10.0

    def __post_init__(self) -> None:
        self.wake_queue = WakeQueue(self.scheduler)
        self.bucket.role_listeners.append(self._role_changed)

    def _role_changed(self, _: int) -> None:
        """Whoever gives a vbucket its role, a peer or the program around the node, clients are told who owns what."""
        self.cluster.own_vbuckets_changed(self._active)

    def _active(self) -> list[int]:
        return [vbucket.number for vbucket in self.bucket if vbucket.state is VbucketState.ACTIVE]

    @property
    def open_opcodes(self) -> frozenset[int]:
        """The requests that are answered before a login."""
        declared = ((kind.declaration.opcode, role) for kind, (_, role) in self.commands.items())
        return frozenset(opcode for opcode, role in declared if role is None)
