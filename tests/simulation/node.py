"""One simulated machine: a disk that survives, a bucket that does not, and the node's sessions over it.

Everything but sockets and threads is the real thing: engine, flusher, maintenance, sessions, stream service. The
flusher steps and callbacks run when the scheduler says so, in its thread.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal, Protocol, TypeVar

from tests.simulation.disk import Disk, PowerLost
from tests.simulation.logins import NO_THROTTLE, PASSWORD, ROLES, STREAMER, SimulatedUsers, log_in
from tests.simulation.truth import Violation
from upriver.engine import Bucket, Retention, Vbucket
from upriver.errors import StorageError
from upriver.model import VbucketState
from upriver.node.auth.login_queue import take_new_users
from upriver.node.auth.users import Role
from upriver.node.cluster_map import NodeClusterMap, single_node
from upriver.node.commands import COMMANDS
from upriver.node.options import SHORT_DRAFTS, ListenAddress
from upriver.node.server import add_services
from upriver.node.session import Session
from upriver.node.state import NodeState
from upriver.node.streams.role_changes import RoleChanges
from upriver.node.streams.stream_connection import StreamConnection
from upriver.node.tap.connections import TapConnection
from upriver.wire import MEMCACHED, Framer, Magic, Status

T = TypeVar("T")

#: Nothing is kept longer than asked for: the history says when to compact and to purge.
RETENTION = Retention(history_s=0, history_bytes=0, tombstone_s=0)
#: More bytes than any peer sends; a producer sets this much memory aside whenever it is asked for them.
ALL: Final = 2**20
Duty = Literal["expire", "purge", "compact", "evict"]


class Clock:
    """Time that passes only when told; the same for all."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Errand:
    """Something to be done later, unless it is called off."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    def __call__(self) -> None:
        if self._callback is not None:
            self._callback()

    def cancel(self) -> None:
        self._callback = None


class Errands:
    """What a node's sessions want done later: when it is due, and the node gets a turn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._soon: deque[Callable[[], object]] = deque()
        self._due: list[tuple[float, int, Errand]] = []
        self._order = itertools.count()

    def later(self, delay_s: float, callback: Callable[[], object]) -> Errand:
        errand = Errand(callback)
        heapq.heappush(self._due, (self._clock() + delay_s, next(self._order), errand))
        return errand

    def from_thread(self, callback: Callable[[], object]) -> None:
        self._soon.append(callback)

    def beside(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        result = work()
        self._soon.append(lambda: done(result))

    on_disk = beside

    def run(self) -> bool:
        """Do all that is due; False if nothing was."""
        found = False
        while self._soon or (self._due and self._due[0][0] <= self._clock()):
            found = True
            callback = self._soon.popleft() if self._soon else heapq.heappop(self._due)[2]
            callback()
        return found


class Machine:
    """A node that can be started, stopped, and lose its power."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        vbuckets: int,
        *,
        replicate_locks: bool = False,
        users: SimulatedUsers | None = None,
    ) -> None:
        self.name = name
        self.replicate_locks = replicate_locks
        self.users = users
        self.clock = clock
        self.vbuckets = vbuckets
        self.disk = Disk(name)
        self.up = False
        self.starts = 0
        self.links: list[Link] = []
        #: Called when it goes down, whatever the reason: the connections that it made itself are gone too.
        self.on_fall: Callable[[], object] = lambda: None
        #: Called when some copies took on a role, for what is received over those.
        self.on_roles: Callable[[set[int]], object] = lambda _numbers: None
        self._duty: Iterator[None] | None = None
        self.start()

    def __str__(self) -> str:
        return self.name

    # Life.

    def start(self) -> None:
        """Load what the disk holds, and serve, unless the disk has trouble once more."""
        self._at_risk(self._start)

    def _start(self) -> None:
        self.starts += 1
        self.errands = Errands(self.clock)
        self.bucket = Bucket(
            self.disk,
            vbuckets=self.vbuckets,
            ack="disk",
            clock=self.clock,
            replicate_locks=self.replicate_locks,
            retention=RETENTION,
            interval_s=0,
        )
        config = single_node(bucket="default", uuid="0" * 32, kv_port=1, mgmt_port=1, vbuckets=self.vbuckets, active=[])
        self.state = NodeState(
            bucket=self.bucket,
            bucket_name="default",
            scheduler=self.errands,
            clock=self.clock,
            ticks=self.clock,
            started=self.clock(),
            cluster=NodeClusterMap(config),
            commands=COMMANDS,
            users=self.users,
            throttle=NO_THROTTLE,
        )
        self.service, _ = add_services(self.state)
        RoleChanges(self.state, lambda numbers: self.on_roles(numbers))
        self.up = True

    def vbucket(self, number: int) -> Vbucket:
        return self.bucket.vbucket(number)

    def role(self, number: int) -> VbucketState | None:
        """What this copy is now; None while the machine is down, or if it has no such copy."""
        found = self.bucket.existing(number) if self.up else None
        return None if found is None else found.state

    def become(self, number: int, state: VbucketState) -> None:
        """An operator gives a copy a role; an empty one if there was none."""
        found = self.bucket.existing(number)
        if found is None:
            self.bucket.create_vbucket(number, state)
        else:
            found.set_state(state)

    def owns(self, number: int) -> bool:
        """It believes to be active for this vbucket."""
        return self.role(number) is VbucketState.ACTIVE

    def change_user(self, name: str, what: str) -> None:
        """An operator changes a user, and the machine notices it at once."""
        if self.users is not None:
            self.users.change(name, what)
            if self.up:
                take_new_users(self.state, self.users)

    @property
    def copies(self) -> list[tuple[int, VbucketState, int, int]]:
        """The copies, their roles, and how far they are on which branch."""
        return [
            (copy.number, copy.state, copy.high_seqno, copy.failover_log.newest.vbucket_uuid) for copy in self.bucket
        ]

    def crash(self) -> None:
        """Everything that was not committed is gone."""
        if self.up:
            self._fall()
            self.bucket.abandon()

    def stop(self) -> None:
        """A clean stop: everything is written first."""
        if self.up:
            self._fall()
            self._at_risk(self.bucket.close)

    def _fall(self) -> None:
        self.up = False
        self._duty = None
        for link in list(self.links):
            link.cut()
        self.on_fall()

    # Disk.

    def write(self) -> None:
        """One step of the flusher; the disk may refuse, or take the machine with it."""
        self._at_risk(lambda: self.bucket.flusher.step())

    def rest(self) -> bool:
        """Do all that waits; False if nothing did."""
        return self.up and any([self.bucket.flusher.step(), self.errands.run()])

    def checkpoint(self) -> None:
        """Move all groups into blocks."""
        self.bucket.flusher.request_checkpoint()
        self._at_risk(self.bucket.flusher.drain)

    def compact_disk(self) -> None:
        """Take out of the blocks what memory no longer holds."""
        for vbucket in self.bucket:
            self.bucket.flusher.request_compaction(vbucket)
        self._at_risk(self.bucket.flusher.drain)

    def _at_risk(self, work: Callable[[], object]) -> None:
        try:
            work()
        except StorageError:
            pass  # kept for the next step
        except PowerLost:
            self.crash()

    def maintain(self, duty: Duty, steps: int) -> None:
        """Begin a duty, or go on with it if it was left off halfway."""
        if self._duty is None:
            self._duty = getattr(self.bucket.maintenance, duty)()
        # While it evicts memory is short, however little there is.
        ledger, ledger.quota_bytes = self.bucket.ledger, 1 if duty == "evict" else 0
        try:
            for _ in range(steps):
                next(self._duty)
        except StopIteration:
            self._duty = None
        finally:
            ledger.quota_bytes = 0


class Peer(Protocol):
    """The other end of a link."""

    def receive(self, link: "Link", data: bytes) -> None:
        """Bytes have come."""

    def lost(self, link: "Link") -> None:
        """The connection is gone."""


class Link:
    """One connection to a machine: bytes in flight both ways, in any pieces, until it is cut.

    Where the machine has users, the connection logs in first. Under the roles that the user has now the peer neither
    hears of changes nor makes any, unless these roles are enough for it.
    """

    def __init__(self, machine: Machine, peer: Peer, name: str, dialect: str = "", user: str = STREAMER) -> None:
        self.machine = machine
        self.peer = peer
        listen_address = ListenAddress(dialect=dialect, anonymous=dialect in SHORT_DRAFTS)
        self.session = Session(machine.state, name, listen_address=listen_address)
        self.up = bytearray()
        self.down = bytearray()
        self.open = True
        #: The user that is logged in; None where no login is needed.
        self.user: str | None = None
        #: Another user has logged in on the connection of the peer, which hears nothing more.
        self.estranged = False
        self._refused = False
        machine.links.append(self)
        machine.state.connections.add(self)  # type: ignore[arg-type]  # of a connection only the session counts here
        if machine.users is not None and not listen_address.anonymous:
            self._log_in(user, PASSWORD)

    @property
    def _roles(self) -> Role:
        """The roles that the operator has left to the user."""
        if self.user is None or self.machine.users is None:
            return Role.ADMIN
        return self.machine.users.roles_of(self.user)

    def _log_in(self, user: str, password: str) -> None:
        log_in(self.session, user, password)
        self.session.data_to_send()  # the end of what ran before
        self.user = user if password == PASSWORD else ""
        self.machine.errands.run()
        self.session.data_to_send()
        self._refused = not self._roles and not self.estranged  # a peer may still try what is left

    def log_in_again(self, user: str, password: str) -> bool:
        """Between two of the peer's packets a login arrives, of that user; False if there is none to replace."""
        if not self.open or self.user is None or self.session.unread or self.session.blocked:
            return False
        self.estranged = True
        self._log_in(user, password)
        return True

    def send(self, data: bytes) -> None:
        """The peer sends."""
        self.up += data

    def deliver_up(self, size: int) -> bool:
        """Some bytes reach the machine."""
        if not self._check_open() or not self.up:
            return False
        data = bytes(self.up[:size])
        del self.up[:size]
        self._unchanged_without_admin(lambda: self.session.receive(data))
        self._settle()
        return True

    def produce(self, size: int) -> bool:
        """The machine puts something on the wire, if it has something."""
        if not self._check_open():
            return False
        self._settle()
        if not self.open:
            return False
        data = self.session.data_to_send()
        stream = self.session.stream
        if isinstance(stream, StreamConnection | TapConnection) and not self.session.closing:
            data += self._unchanged_without_admin(lambda: stream.producer.produce(size))
        if self.user is not None:
            self._check_roles(data)
        if self._check_open():
            self.down += data
        return bool(data)

    def deliver_down(self, size: int) -> bool:
        """Some bytes reach the peer."""
        if not self.open or not self.down:
            return False
        data = bytes(self.down[:size])
        del self.down[:size]
        if self.estranged:
            return False
        self.peer.receive(self, data)
        return True

    def _check_open(self) -> bool:
        """A machine that refuses the user has nothing more to say."""
        if self._refused:
            self.cut()
        return self.open

    def _check_roles(self, data: bytes) -> None:
        """Requests go only to users that may have streams, and only others are refused."""
        framer = Framer(MEMCACHED)
        framer.feed(data)
        while packet := framer.next_packet():
            if packet[0] == Magic.REQUEST and Role.STREAM not in self._roles:
                raise Violation(
                    f"{self.machine} sends opcode {packet[1]:#x} to {self.peer}, which lost the role for it"
                )
            if packet[0] == Magic.RESPONSE and int.from_bytes(packet[6:8]) in (Status.EACCESS, Status.AUTH_ERROR):
                if self.user and self._roles == ROLES[self.user] and not self.estranged:
                    raise Violation(f"{self.machine} refuses opcode {packet[1]:#x} to {self.peer}, which may use it")
                self._refused = True

    def _unchanged_without_admin(self, work: Callable[[], T]) -> T:
        """Only administrators change copies over their links."""
        if Role.ADMIN in self._roles:
            return work()
        before = self.machine.copies
        result = work()
        if self.machine.copies != before:
            raise Violation(f"{self.peer} changes {self.machine} from {before} to {self.machine.copies} without a role")
        return result

    def _settle(self) -> None:
        self.machine.errands.run()
        while self.open and self.session.stalled and not self.session.blocked:
            self.session.resume()
            self.machine.errands.run()
        if self.session.closing:
            self.cut()

    def dismiss(self, _why: str) -> None:
        """The machine closes the connection, after its last words."""
        self.down += self.session.data_to_send()
        self.deliver_down(ALL)
        self.cut()

    def cut(self) -> None:
        """Both ends notice; what was in flight is lost."""
        if not self.open:
            return
        self.open = False
        self.machine.links.remove(self)
        self.machine.state.connections.discard(self)
        if self.session.stream is not None:
            self.session.stream.lose()
        self.peer.lost(self)
