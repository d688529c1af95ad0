"""The state that all connections of a node share."""

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
from upriver.node.cluster_map import NodeClusterMap
from upriver.node.logs import RepeatLimit
from upriver.node.streams.fed_copies import FedCopies
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
    """The limits of one connection, and of all connections together."""

    connections_max: int = 20_000
    body_bytes_max: int = BODY_BYTES_MAX
    #: The longest request before a login, where one is needed.
    login_bytes_max: int = 64 * 1024
    #: A peer with this many unread bytes of answers gets no more until it reads.
    unread_answer_bytes_max: int = 1024 * 1024
    #: This many answers may wait for the disk before the session stops to take requests.
    waiting_answers_max: int = 10_000
    #: The work of a turn outside of the compiled loop. A request counts 1, and so does each further thing that it
    #: asks for: a key, a pair of statistics.
    turn_work_max: int = 256
    #: The longest turn: some requests copy megabytes, or wait for a disk.
    turn_s: float = 0.005
    #: The most bytes of answers that all connections together may leave unread.
    unread_total_bytes_max: int = 256 * 2**20
    #: An idle connection is closed after this time; 0 for never.
    idle_s: float = 0.0
    #: The same for one that has sent an incomplete request or leaves answers unread; 0 for never.
    stuck_s: float = 60.0
    #: The longest TLS handshake.
    tls_handshake_s: float = 10.0
    #: A peer that must log in and has not is closed after this time.
    login_s: float = 60.0
    #: The most bytes of incomplete requests that the node keeps for all connections together.
    partial_bytes_max: int = 256 * 2**20
    #: The most waits of one connection for seqnos to reach the disk.
    disk_waits_max: int = 1024


class Timer(Protocol):
    """A planned call."""

    def cancel(self) -> object:
        """Cancel the call, if it has not happened yet."""


class Scheduler(Protocol):
    """Runs work later, or in other threads: the node's event loop, or a test's manual clock."""

    def later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Call back after this many seconds."""

    def beside(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        """Run work that takes milliseconds in another thread; pass its result to ``done`` in the sessions' thread."""

    def on_disk(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        """Do the same for work that waits for a disk, so that logins do not wait behind it."""

    def from_thread(self, callback: Callable[[], object]) -> None:
        """Call back soon in the sessions' thread, in the order of the calls."""


@dataclass(slots=True)
class Counters:
    """Counters of the node; the engine has its own."""

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
    """The bucket, its users, and everything that connections share."""

    bucket: Bucket
    bucket_name: str
    scheduler: Scheduler
    clock: Callable[[], float]
    started: float
    #: A monotonic time for durations and deadlines; setting the clock does not change it.
    ticks: Callable[[], float]
    cluster: NodeClusterMap
    users: Users | None = None
    throttle: LoginThrottle = field(default_factory=LoginThrottle)
    limits: Limits = field(default_factory=Limits)
    counters: Counters = field(default_factory=Counters)
    logins: LoginQueue = field(default_factory=LoginQueue)
    #: A delayed flush; the next request for a flush replaces it.
    flush_timer: Timer | None = None
    log: logging.Logger = field(default_factory=lambda: logging.getLogger(LOGGER))
    version: str = __version__
    #: The command of each request type, and its role; None if it needs no login.
    commands: "Mapping[type[Request], tuple[Command, Role | None]]" = field(default_factory=dict)
    #: The parts that answer packets, in the order in which they are offered one. The last takes every packet.
    handlers: "Sequence[PacketHandler]" = ()
    #: The compiled loop for plain requests; None in tests without it.
    fast_path: "FastPath | None" = None
    stall_check: StallCheck = field(default_factory=StallCheck)
    #: The copies that streams and TAP peers feed.
    fed_copies: FedCopies = field(default_factory=FedCopies)
    #: The streaming connections; None if the node has no streams.
    streams: "StreamService | None" = None
    #: TAP in both directions; None if the node has no TAP.
    tap: "TapService | None" = None
    #: Every connection, also in its handshake or while it closes.
    connections: "set[ServerConnection]" = field(default_factory=set)
    #: The connections that hold memory or are closing: the sweep checks whether their bytes move.
    watched: "set[ServerConnection]" = field(default_factory=set)
    #: The memory of incomplete requests, and of answers that are not read or wait.
    partial: "BufferBudget[Session]" = field(default_factory=lambda: BufferBudget())
    unread: "BufferBudget[ServerConnection]" = field(default_factory=lambda: BufferBudget())
    #: Returns memory to the system after large buffers were freed.
    malloc_tuning: MallocTuning = field(default_factory=lambda: MallocTuning(4 * 2**20))
    #: The buffer in which each connection in turn builds the next piece of its streams.
    send_buffer: SendBuffer = field(default_factory=lambda: SendBuffer(PIECE_BYTES))
    #: Limits the log lines that peers can cause.
    log_limit: RepeatLimit = field(init=False)
    #: Collects the streams that requests wake.
    wake_queue: WakeQueue = field(init=False)
    #: The node accepts no more connections.
    stopping: bool = False
    #: The node is unhealthy when a change waits longer for the disk, or a stream does not advance for longer.
    stall_s: float = 10.0

    def __post_init__(self) -> None:
        self.log_limit = RepeatLimit(self.log, self.ticks)
        self.wake_queue = WakeQueue(self.scheduler)
        self.bucket.role_listeners.append(self._role_changed)

    def _role_changed(self, _: int) -> None:
        """Update the cluster map when a vbucket changes role, whether a peer or the embedding program changed it."""
        self.cluster.own_vbuckets_changed(self._active)

    def _active(self) -> list[int]:
        return [vbucket.number for vbucket in self.bucket if vbucket.state is VbucketState.ACTIVE]

    @property
    def open_opcodes(self) -> frozenset[int]:
        """The opcodes that need no login."""
        declared = ((kind.declaration.opcode, role) for kind, (_, role) in self.commands.items())
        return frozenset(opcode for opcode, role in declared if role is None)
