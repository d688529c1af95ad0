"""The cluster, its consumers and its operator: what can happen, and what must be true after each event.

Every event is a tuple (name, arguments). One that makes no sense in the state that it meets is skipped, so any part of
a script is a script again; that is how a failing one is made short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.draft_takeover import DraftTakeover
from tests.simulation.follower import Follower, Habits
from tests.simulation.holders import Holder, Policy
from tests.simulation.logins import MOVER, REDUCED, WRITER, SimulatedUsers, log_in
from tests.simulation.mover_fed_replica import MoverFedReplica
from tests.simulation.moves import DESTINATION, SOURCE, Moving
from tests.simulation.node import ALL, Clock, Duty, Link, Machine
from tests.simulation.stream_fed_replica import StreamFedReplica
from tests.simulation.tap_client import TapClient
from tests.simulation.truth import (
    Contents,
    Truth,
    Violation,
    check_same,
    contents_of,
    describe,
    of_item,
)
from upriver.engine import Vbucket
from upriver.errors import NotLocked, StatusError, TemporaryFailure
from upriver.model import Event, VbucketState
from upriver.node.options import ListenAddress
from upriver.node.session import Session
from upriver.protocol.consumer.consumer import ConsumerOptions
from upriver.protocol.move import mover as steps
from upriver.protocol.move.mover import Goal
from upriver.protocol.tap.flush_mark import marked
from upriver.wire import Request, tap
from upriver.wire.dialects.tap import Control

Action = tuple[Any, ...]
Script = Sequence[Action]
SIDES: Final = {"source": SOURCE, "destination": DESTINATION}
#: What runs a takeover: a mover between two machines, or the destination itself, in the third draft.
Taker = Moving | DraftTakeover
TAKERS: Final[dict[str, type[Moving] | type[DraftTakeover]]] = {"mover": Moving, "draft": DraftTakeover}
#: How long clients lock keys, and how much of that a few hops may cost: they count in full seconds.
LOCK_TIME_S: Final = 30
LOCK_MARGIN_S: Final = 8
ACTIVE, REPLICA = VbucketState.ACTIVE, VbucketState.REPLICA
PENDING, DEAD = VbucketState.PENDING, VbucketState.DEAD


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock that a client holds."""

    cas: int
    until: float
    #: How often each machine had been started: a restart ends its locks.
    starts: tuple[int, ...]
    machine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The machines, consumers and vbuckets of a simulation."""

    machines: int = 3
    vbuckets: int = 1
    keys: int = 3
    replica_dialect: str = "dcp"
    replica_window_bytes: int = 0
    #: What has moved stays on its source as a dead copy, as movers leave it, and old moves are typed again.
    leaves_dead: bool = False
    #: A mover feeds each replica.
    fed_by_mover: bool = False
    #: Locks and unlocks are changes.
    replicate_locks: bool = False
    #: The machines have users: every connection logs in.
    users: bool = False
    #: A TAP client follows the first vbucket.
    tap: bool = False
    #: Policy and habits of each foreign consumer.
    consumers: tuple[tuple[Policy, Habits], ...] = ()


class World:
    """Everything there is, in one thread."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = Clock()
        self.history: list[str] = []
        self.machines = [
            Machine(
                f"node{n}",
                self.clock,
                plan.vbuckets,
                replicate_locks=plan.replicate_locks,
                users=SimulatedUsers() if plan.users else None,
            )
            for n in range(plan.machines)
        ]
        #: The locks that clients hold, by vbucket and key: the CAS, and when and where each was taken.
        self.locks: dict[tuple[int, bytes], Lock] = {}
        self.keys = [[f"k{v}{number}".encode() for number in range(plan.keys)] for v in range(plan.vbuckets)]
        self.truths = [Truth(v, self.keys[v]) for v in range(plan.vbuckets)]
        #: The machine that the operator wants active, by vbucket.
        self.owner = [v % plan.machines for v in range(plan.vbuckets)]
        #: Machines that were replaced while they could not be reached, and still believe to be active.
        self.stale: set[tuple[int, int]] = set()
        #: Promotions that the operator ordered and that were not seen to be durable: what they lose is given up.
        self._ordered: set[tuple[int, int]] = set()
        #: Copies that were replaced by an order, and perhaps have not heard of it or not written it: they may come back
        #: active beside the owner. No other copy may.
        self._replaced: set[tuple[int, int]] = set()
        #: Copies that a taker reported as active: it must not do so before their disks know it.
        self._confirmed: set[tuple[int, int]] = set()
        #: Under which uuid the owner of each vbucket was last seen writing.
        self._last_uuid = [0] * plan.vbuckets
        self._values = 0
        self._checked: dict[tuple[int, int], Any] = {}
        for n, machine in enumerate(self.machines):
            for v in range(plan.vbuckets):
                machine.bucket.create_vbucket(v, ACTIVE if self.owner[v] == n else REPLICA)
            machine.write()
        self.consumers = [self._consumer(n, policy, habits) for n, (policy, habits) in enumerate(plan.consumers)]
        self.replicas = [self._replica(machine) for machine in self.machines]
        self.tap_clients = [TapClient("tap", self.note)] if plan.tap else []
        self.followers: list[Follower | StreamFedReplica | MoverFedReplica | TapClient] = [
            *self.consumers,
            *self.replicas,
            *self.tap_clients,
        ]
        #: Takeovers that are not over, by vbucket: several at once, but all from the same machine; and old moves that
        #: an operator has typed again, each from the source that it had.
        self.moving: dict[int, list[Taker]] = {}
        #: The machines that were seen active since the first of them began, in this order, and the one before it.
        self._owners: dict[int, list[int]] = {}
        #: The sources and destinations of all moves since then, also of those that were stopped.
        self._ways: dict[int, list[dict[steps.Link, Machine]]] = {}
        #: The moves that an operator has typed, by vbucket: source and destination.
        self.typed: list[list[tuple[int, int]]] = [[] for _ in range(plan.vbuckets)]
        self.check()

    def _consumer(self, number: int, policy: Policy, habits: Habits) -> Follower:
        holders = {v: Holder(policy, self._reader(v)) for v in range(self.plan.vbuckets)}
        follower = Follower(f"{policy}{number}", habits, holders, self.note)
        follower.on_consistent = lambda v: self._check_claim(follower, v)
        return follower

    def _replica(self, machine: Machine) -> StreamFedReplica | MoverFedReplica:
        if self.plan.fed_by_mover:
            return MoverFedReplica(machine, self.note)
        options = ConsumerOptions(
            window_bytes=self.plan.replica_window_bytes, noop_interval_s=0, dialects=(self.plan.replica_dialect,)
        )
        return StreamFedReplica(machine, options, self.note)

    def _reader(self, v: int) -> Any:
        def read(keys: list[bytes]) -> tuple[Contents, int, int] | None:
            active = self._active(v)
            if active is None:
                return None
            return contents_of(active, keys), active.high_seqno, active.failover_log.newest.vbucket_uuid

        return read

    def note(self, text: str) -> None:
        """Write down what happens."""
        self.history.append(text)

    def _active(self, v: int) -> Vbucket | None:
        machine = self.machines[self.owner[v]]
        return machine.vbucket(v) if machine.role(v) is ACTIVE else None

    # Events.

    def apply(self, action: Action) -> None:
        """Let one thing happen, and look at everything."""
        name, *arguments = action
        self.note(f"[{' '.join(map(str, action))}]")
        self.clock.now += 0.25
        getattr(self, f"do_{name}")(*arguments)
        self._follow_moves()
        self.check()

    def do_write(self, n: int, v: int, kind: str, key: int, expiry: int = 0) -> None:
        """A client writes to a machine that believes to be active."""
        machine = self.machines[n]
        if machine.role(v) is not ACTIVE:
            return
        vbucket, name = machine.vbucket(v), self.keys[v][key]
        self._values += 1
        value = b"v%d" % self._values
        try:
            match kind:
                case "delete":
                    _, seqno = vbucket.delete(name)
                case "append":
                    _, seqno = vbucket.append(name, value)
                case "touch":
                    *_, seqno = vbucket.touch(name, expiry)
                case "meta":
                    cas = self.machines[n].bucket.ledger.next_cas(self.clock())
                    _, seqno = vbucket.set_with_meta(name, value, cas=cas, rev_seqno=self._values + 5, flags=3)
                case "get":
                    vbucket.get(name)
                    return
                case "lock":
                    cas = vbucket.get_and_lock(name, LOCK_TIME_S).cas
                    starts = tuple(each.starts for each in self.machines)
                    self.locks[v, name] = Lock(cas, self.clock() + LOCK_TIME_S, starts, n)
                    return
                case "unlock":
                    vbucket.unlock(name, self._held_cas(v, name))
                    del self.locks[v, name]
                    return
                case "held":
                    _, seqno = vbucket.set(name, value, cas=self._held_cas(v, name))
                    del self.locks[v, name]
                case _:
                    flags, datatype = self._values % 7, self._values % 2
                    _, seqno = vbucket.set(name, value, flags, expiry, datatype=datatype)
        except StatusError as error:
            self.note(f"  refused: {type(error).__name__}")
            return
        self._acknowledge(machine, v, seqno)

    def _held_cas(self, v: int, name: bytes) -> int:
        """The CAS of a client that holds a lock."""
        held = self.locks.get((v, name))
        if held is None:
            raise NotLocked(vbucket=v)
        return held.cas

    def _check_locks(self, n: int, v: int) -> None:
        """A machine has taken a vbucket over: it has the locks that the machine before it held until then."""
        starts = tuple(each.starts for each in self.machines)
        for (number, key), lock in self.locks.items():
            source = self.machines[lock.machine]
            if number != v or lock.machine == n or lock.starts != starts or lock.until < self.clock() + LOCK_MARGIN_S:
                continue
            before = source.vbucket(v).table.locks.get(key) if source.role(v) is DEAD else None
            item = self.machines[n].vbucket(v).table.find(key)
            if before is None or item is None or item.event != Event.MUTATION:
                continue
            held = self.machines[n].vbucket(v).table.locks.get(key)
            if held is None or held[0] != lock.cas:
                raise Violation(f"{self.machines[n]} vb{v}: the lock of {key.decode()} was not handed over")

    def _acknowledge(self, machine: Machine, v: int, seqno: int) -> None:
        vbucket, truth = machine.vbucket(v), self.truths[v]
        item = next(
            item for key in self.keys[v] if (item := vbucket.table.find(key)) is not None and item.seqno == seqno
        )
        uuid = vbucket.failover_log.newest.vbucket_uuid
        key = next(
            key for key in self.keys[v] if (found := vbucket.table.find(key)) is not None and found.seqno == seqno
        )
        written = of_item(key, item)
        self.note(f"  {machine} vb{v}: {written}")
        machine.bucket.acknowledge(vbucket, seqno, lambda: truth.acknowledged.append((uuid, written)))

    def do_connect(self, f: int, n: int, wanted: Sequence[int] | None = None) -> None:
        """A follower connects to a machine and asks for everything."""
        follower, machine = self.followers[f], self.machines[n]
        if not machine.up:
            return
        if isinstance(follower, StreamFedReplica | MoverFedReplica):
            number = f - len(self.consumers)
            if number == n or not self.machines[number].up:
                return
        follower.connect(machine, wanted)

    def do_ask(self, f: int) -> None:
        """A follower asks again for what ended."""
        self.followers[f].ask_all()

    def _link(self, f: int) -> Link | None:
        return self.followers[f].link

    def do_move(self, f: int, up: int, produce: int, down: int) -> None:
        """Bytes move on a follower's link: to the machine, out of its history, and back."""
        if (link := self._link(f)) is not None and up:
            link.deliver_up(up)
        if (link := self._link(f)) is not None and produce:
            link.produce(produce)
        if (link := self._link(f)) is not None and down:
            link.deliver_down(down)

    def do_cut(self, f: int) -> None:
        """A connection is lost."""
        link = self._link(f)
        if link is not None:
            link.cut()

    def do_operator(self, f: int) -> None:
        """An operator resets a consumer that stopped at a rollback."""
        self.followers[f].attend()

    def do_disk(self, n: int) -> None:
        """The flusher writes."""
        if self.machines[n].up:
            self.machines[n].write()

    def do_trouble(self, n: int, kind: int) -> None:
        """The next commit fails."""
        self.machines[n].disk.trouble = kind

    def do_checkpoint(self, n: int) -> None:
        """Groups become blocks."""
        if self.machines[n].up:
            self.machines[n].checkpoint()

    def do_maintain(self, n: int, duty: Duty, steps: int) -> None:
        """Some steps of a duty."""
        if self.machines[n].up:
            self.machines[n].maintain(duty, steps)

    def do_compact_disk(self, n: int) -> None:
        """Blocks are rewritten."""
        if self.machines[n].up:
            self.machines[n].compact_disk()

    def do_close_checkpoint(self, n: int, v: int) -> None:
        """The open checkpoint of an active vbucket ends here."""
        machine = self.machines[n]
        if machine.role(v) is ACTIVE:
            machine.vbucket(v).checkpoints.create()

    def do_time(self, seconds: int) -> None:
        """Time passes."""
        self.clock.now += seconds

    def do_crash(self, n: int) -> None:
        """The power fails."""
        self.machines[n].crash()

    def do_stop(self, n: int) -> None:
        """A clean stop."""
        self.machines[n].stop()

    def _lose_receiver(self, n: int) -> None:
        link = self.replicas[n].link
        if link is not None:
            link.cut()

    def do_start(self, n: int, how: str = "told") -> None:
        """A machine comes back; the operator tells it its roles before any client connects, unless it comes *alone*."""
        machine = self.machines[n]
        if machine.up:
            return
        machine.start()
        if not machine.up:
            return
        for v in range(self.plan.vbuckets):
            self.stale.discard((n, v))
            if self._takes_part(machine, v):
                continue  # what the disk says counts until the mover has finished
            self._check_come_back(n, v)
            if self.owner[v] == n:
                if machine.role(v) is not ACTIVE:  # an order that its disk had not heard of is given again
                    machine.become(v, ACTIVE)
            elif how == "alone":
                if machine.role(v) is ACTIVE:  # another machine is, and this one has not heard of that
                    self.stale.add((n, v))
                    self._give_up_own(n, v)
            else:  # active once, or dead since a takeover: no mover waits for it any more
                if machine.role(v) is ACTIVE:
                    self._give_up_own(n, v)
                machine.become(v, REPLICA)

    def _check_come_back(self, n: int, v: int) -> None:
        """What a takeover has made of a copy its disk knows."""
        machine = self.machines[n]
        owned, active = self.owner[v] == n, machine.role(v) is ACTIVE
        if active and not owned and (n, v) not in self._replaced:
            raise Violation(f"{machine} vb{v} has handed over, and comes back active beside node{self.owner[v]}")
        if owned and not active and (n, v) in self._confirmed:
            raise Violation(f"{machine} vb{v} was said to be active, and comes back {machine.vbucket(v).state.value}")

    def _takes_part(self, machine: Machine, v: int) -> bool:
        """Is it the source or the destination of a move?"""
        return any(machine in moving.machines.values() for moving in self.moving.get(v, ()))

    def do_promote(self, v: int, n: int, old: str, receiver: str = "cut") -> None:
        """An operator gives a vbucket to another copy; the old one is *down*, *told*, or *stale*: goes on unaware.

        What has fed the new one is *cut* before, or *kept* and left to itself.
        """
        machine, before = self.machines[n], self.owner[v]
        if n == before or machine.role(v) in (None, ACTIVE):
            return
        if v in self.moving and not self._break_off(v):
            return
        left = self._last_uuid[v]
        if old == "down":
            self.do_crash(before)
        elif self.machines[before].up:
            if old == "told" or self.machines[before].role(v) is not ACTIVE:
                self.machines[before].become(v, REPLICA)
            else:
                self.stale.add((before, v))
        self.owner[v] = n
        self._ordered.add((n, v))
        self._replaced.add((before, v))
        self._confirmed -= {(before, v), (n, v)}  # what it is now is an order, which its disk may not have heard of
        self.typed[v].clear()  # earlier moves are void, and their dead sources may belong to what was given up
        if receiver == "cut":
            self._lose_receiver(n)
        machine.become(v, ACTIVE)
        self._watch(n, v)
        self._give_up(v, left)

    def _break_off(self, v: int) -> bool:
        """An operator ends takeovers, once the roles of all destinations are known: none may become active any more.

        What was on its way at that time still arrives.
        """
        takers = self.moving[v]
        if not all(taker.machines[DESTINATION].up for taker in takers):
            return False
        left = [machine for taker in takers for machine in taker.machines.values() if machine.up]
        left = [machine for machine in left if machine.role(v) is not ACTIVE]
        for machine in left:
            machine.become(v, REPLICA)
        for taker in takers:
            for side, deliver in ((SOURCE, "deliver_down"), (DESTINATION, "deliver_up")):
                link = taker.links.get(side)
                if link is not None:
                    getattr(link, deliver)(ALL)
        self.check()
        self._forget_moves(v)
        for machine in left:
            if machine.up and machine.role(v) is not ACTIVE:
                machine.become(v, REPLICA)
        return True

    def do_takeover(self, v: int, n: int, by: str = "mover") -> None:
        """An operator lets a vbucket be taken over by another machine; ordinary replication to it stops."""
        machines = {SOURCE: self.machines[self.owner[v]], DESTINATION: self.machines[n]}
        if v in self.moving and self._owners[v][0] != self.owner[v]:
            return  # it is the next owner's by now
        if self._settled(v, machines) and n != self.owner[v]:
            self._lose_receiver(n)
            for number in (self.owner[v], n):
                self._replaced.discard((number, v))
                self._confirmed.discard((number, v))
            if by == "mover":
                self.typed[v].append((self.owner[v], n))
            self._begin(TAKERS[by](v, machines, self.note))

    def _settled(self, v: int, machines: dict[steps.Link, Machine]) -> bool:
        """Every machine has its orders on disk before a move starts, and no machine is active beside the owner."""
        for machine in dict.fromkeys(machines.values()):
            if machine.up:
                machine.write()
        written = all(machine.up and not machine.bucket.journal.changed for machine in machines.values())
        return written and not any(number == v for _, number in self.stale)

    def _begin(self, taker: Taker) -> None:
        self._owners.setdefault(taker.v, [self.owner[taker.v]])
        self._ways.setdefault(taker.v, []).append(taker.machines)
        self.moving.setdefault(taker.v, []).append(taker)
        taker.connect()

    def do_again(self, v: int, which: int, what: str) -> None:
        """An operator types an old move again, to *take over* or to *undo*, whichever machine owns the vbucket now."""
        if not self.typed[v]:
            return
        source, destination = self.typed[v][which % len(self.typed[v])]
        machines = {SOURCE: self.machines[source], DESTINATION: self.machines[destination]}
        if self._settled(v, machines):
            self._begin(Moving(v, machines, self.note, Goal(what)))

    def _taker(self, v: int, which: int) -> Taker | None:
        takers = self.moving.get(v)
        return takers[which % len(takers)] if takers else None

    def do_relay(self, v: int, which: int, side: str, up: int, produce: int, down: int) -> None:
        """Bytes move on one of a taker's links."""
        moving = self._taker(v, which)
        if moving is None:
            return
        for work, size in (("deliver_up", up), ("produce", produce), ("deliver_down", down)):
            link = moving.links.get(SIDES[side])
            if link is not None and size:
                getattr(link, work)(size)

    def do_mover(self, v: int, which: int, what: str) -> None:
        """Something happens to a taker: it connects, loses a side, changes its goal, or crashes and is replaced."""
        moving = self._taker(v, which)
        if moving is None:
            return
        if what == "connect":
            moving.connect()
        elif what in SIDES:
            link = moving.links.get(SIDES[what])
            if link is not None:
                link.cut()
        elif what == "undo":
            moving.undo()
        else:
            moving.begin(Goal.UNDO if what == "replaced to undo" else Goal.TAKE_OVER)

    def _follow_moves(self) -> None:
        """The machine that is active now is the owner. When all takers are done the operator looks at what is left."""
        for v, takers in list(self.moving.items()):
            concerned = self._concerned(v)
            for machine in concerned:
                n = self.machines.index(machine)
                if machine.owns(v) and n != self.owner[v]:
                    self.owner[v] = n
                    self._owners[v].append(n)
            others = [machine for taker in takers for machine in taker.machines.values()]
            if all(taker.over for taker in takers) and all(machine.up for machine in (*concerned, *others)):
                self._after_moves(v, takers)

    def _concerned(self, v: int) -> list[Machine]:
        """The machines that may be active while the vbucket moves.

        An old move that is typed again changes nothing, unless its source is the owner once more.
        """
        found = [self.machines[self._owners[v][0]]]
        for machine in found:
            for way in self._ways[v]:
                if way[SOURCE] is machine and way[DESTINATION] not in found:
                    found.append(way[DESTINATION])
        return found

    def _after_moves(self, v: int, takers: list[Taker]) -> None:
        """All sides can be reached and no taker is at work: the operator decides."""
        concerned = self._concerned(v)
        present = [taker for taker in takers if taker.machines[SOURCE] in concerned]
        for taker in present:
            destination = taker.machines[DESTINATION]
            handed_on = any(other.machines[SOURCE] is destination for other in present)
            if taker.moved and not destination.owns(v) and not handed_on:
                raise Violation(f"{taker} says moved, but {destination} is not active")
        # One that continues after the others may make the source dead.
        undone = bool(present) and all(taker.undone for taker in present)
        if undone and not concerned[0].owns(v):
            raise Violation(f"{present[-1]} says undone, but {concerned[0]} is not active")
        owner = self.machines[self.owner[v]]
        confirmed = undone or any(taker.moved and taker.machines[DESTINATION] is owner for taker in present)
        if owner.owns(v) and owner is not concerned[0] and not confirmed:
            # No taker has confirmed it, so the operator asks until it is on disk.
            owner.write()
            if not owner.up or owner.bucket.journal.changed:
                return
            confirmed = True
        # A machine that was active for a moment, and lost its power before its disk knew that, owns nothing.
        owners = [n for n in self._owners[v] if self.machines[n].role(v) in (ACTIVE, DEAD)]
        # There may be none: one that believed to be active has made even the dead copy a replica, as it held nothing.
        if owners:
            self.owner[v] = owners[-1]
        owner = self.machines[self.owner[v]]
        left = [machine for machine in self.machines if self._takes_part(machine, v) and machine is not owner]
        self._forget_moves(v)
        if confirmed and owner.owns(v):
            self._confirmed.add((self.owner[v], v))
        if not owner.owns(v):
            owner.become(v, ACTIVE)
        for machine in left:
            if machine.role(v) is PENDING or not self.plan.leaves_dead:
                machine.become(v, REPLICA)

    def _forget_moves(self, v: int) -> None:
        del self._owners[v], self._ways[v]
        for taker in self.moving.pop(v):
            taker.close()

    def do_reach(self, n: int) -> None:
        """A machine that was replaced unawares, or came back alone, is reached and told."""
        machine = self.machines[n]
        for v in range(self.plan.vbuckets) if machine.up else ():
            if (n, v) in self.stale:
                self._give_up_own(n, v)
                self.stale.discard((n, v))
            elif self.owner[v] == n or self._takes_part(machine, v) or machine.role(v) is REPLICA:
                continue
            machine.become(v, REPLICA)

    def do_usurp(self, n: int, v: int) -> None:
        """By mistake a replica is made active beside the owner, until it is reached; what feeds it is not cut."""
        machine = self.machines[n]
        if machine.role(v) is REPLICA and self.owner[v] != n and v not in self.moving:
            self.stale.add((n, v))
            self._replaced.add((n, v))
            machine.become(v, ACTIVE)

    def do_blink(self, n: int, v: int, key: int) -> None:
        """The same for one write, over before any machine has noticed; also at a takeover's destination."""
        machine = self.machines[n]
        if machine.role(v) is REPLICA and self.owner[v] != n:
            self.stale.add((n, v))
            self._replaced.add((n, v))
            machine.become(v, ACTIVE)
            self._watch(n, v)
            self.do_write(n, v, "set", key)
            self._give_up_own(n, v)
            self.stale.discard((n, v))
            machine.become(v, REPLICA)

    def do_demote(self, n: int, v: int) -> None:
        """An operator makes a pending copy a replica, perhaps before its disk knows that it is pending."""
        machine = self.machines[n]
        if machine.role(v) is PENDING:
            machine.become(v, REPLICA)

    def do_turn(self, n: int) -> None:
        """A machine's event loop has a turn: pending callbacks run."""
        if self.machines[n].up:
            self.machines[n].errands.run()

    def do_retire(self, n: int, v: int) -> None:
        """An operator has no use for a replica any more, and makes it dead."""
        machine = self.machines[n]
        if machine.role(v) is REPLICA and self.owner[v] != n and not self._takes_part(machine, v):
            machine.become(v, DEAD)
            # It has no successor now, so any of the moves that it was handed over by could be undone, or go on.
            self.typed[v] = [(source, destination) for source, destination in self.typed[v] if source != n]

    def do_delete(self, n: int, v: int, then: str = "replaced") -> None:
        """An operator deletes a dead copy, once the owner's disk holds everything, and wants an empty one there, or it
        is *gone*."""
        machine, owner = self.machines[n], self.machines[self.owner[v]]
        active = self._active(v)
        if active is None or n == self.owner[v] or machine.role(v) is not DEAD:
            return
        if active.persisted_seqno >= active.high_seqno and not owner.bucket.journal.changed:
            self.note(f"  {machine} vb{v} is deleted")
            machine.bucket.delete_vbucket(v)
            if then != "gone":
                machine.become(v, REPLICA)

    def do_flush(self, v: int, n: int | None = None) -> None:
        """Everything is deleted at once, at the owner or at one that is active beside it."""
        try:
            if n is not None:
                if (n, v) in self.stale and self.machines[n].role(v) is ACTIVE:
                    self._give_up_own(n, v)
                    self.machines[n].vbucket(v).flush()
                return
            active = self._active(v)
            if active is not None:
                self._watch(self.owner[v], v)
                vbucket_uuid = active.failover_log.newest.vbucket_uuid
                active.flush()
                self.truths[v].flushed(vbucket_uuid)
        except TemporaryFailure:
            self.note("  the disk refuses, and so is the flush")

    def do_tap_flush(self, v: int) -> None:
        """A TAP peer of the owner was flushed, and passes the flush on, without a mark of ours."""
        active = self._active(v)
        if active is not None:
            self._watch(self.owner[v], v)
            vbucket_uuid = active.failover_log.newest.vbucket_uuid
            self._tap_peer(self.machines[self.owner[v]], MOVER, tap.Flush(private=b"8 bytes!"))
            if active.failover_log.newest.vbucket_uuid != vbucket_uuid:
                self.truths[v].flushed(vbucket_uuid)
            elif active.high_seqno and not active.table.ledger.refusal:
                raise Violation(f"a TAP peer's flush did not empty {self.machines[self.owner[v]]} vb{v}")

    def do_foreign(self, n: int, v: int) -> None:
        """A TAP peer that has nothing to do with the takeover of a pending copy writes to it, and empties it."""
        if self.machines[n].role(v) is PENDING:
            change = tap.Mutation(vbucket=v, key=self.keys[v][0], value=b"foreign")
            begin = tap.Opaque(vbucket=v, control=Control.INITIAL_VBUCKET_STREAM)
            self._tap_peer(self.machines[n], WRITER, change, begin, tap.Flush(private=marked(1, {v})), change)

    def _tap_peer(self, machine: Machine, user: str, *messages: Request) -> None:
        """A TAP connection to a machine that brings these messages, and is gone."""
        session = Session(machine.state, "a foreign TAP peer", listen_address=ListenAddress())
        if machine.users is not None:
            log_in(session, user)
            machine.errands.run()
        for message in messages:
            session.receive(message.encode())
        if session.stream is not None:
            session.stream.lose()

    def do_login(self, f: int, user: str, password: str) -> None:
        """Another user logs in on a follower's connection, or on the one that feeds its machine, perhaps in vain."""
        follower = self.followers[f]
        link = follower.feeding_link if isinstance(follower, MoverFedReplica) else follower.link
        if link is not None and link.log_in_again(user, password):
            self.note(f"  {follower}: {user} logs in at {link.machine}")

    def do_mover_login(self, v: int, which: int, side: str, user: str, password: str) -> None:
        """The same on a connection of a taker."""
        moving = self._taker(v, which)
        link = None if moving is None else moving.links.get(SIDES[side])
        if link is not None and link.log_in_again(user, password):
            self.note(f"  {moving}: {user} logs in at {link.machine}")

    def do_user(self, n: int, name: str, what: str) -> None:
        """An operator removes a user of a machine, takes roles from it, or gives them back."""
        self.machines[n].change_user(name, what)

    # What must be true.

    def check(self) -> None:
        """Look at everything that can be looked at now."""
        for v in range(self.plan.vbuckets):
            active = [n for n in range(len(self.machines)) if self.machines[n].role(v) is ACTIVE]
            if len([n for n in active if (n, v) not in self.stale]) > 1:
                raise Violation(f"vbucket {v} is active on {' and '.join(str(self.machines[n]) for n in active)}")
            self._watch_last_words(v)
            for n in active:
                if n != self.owner[v] and (n, v) not in self.stale:
                    raise Violation(f"vbucket {v} is active on {self.machines[n]}, and node{self.owner[v]} owns it")
                self._watch(n, v)
            for n, machine in enumerate(self.machines):
                if machine.role(v) is not None and n not in active:
                    self._check_copy(n, v)

    def _watch_last_words(self, v: int) -> None:
        """A copy that becomes dead for a successor writes down its locks first. It receives nothing afterwards."""
        for machine in self.machines:
            if machine.role(v) is DEAD:
                copy = machine.vbucket(v)
                branch = self.truths[v].branches.get(copy.failover_log.newest.vbucket_uuid)
                if branch is not None and copy.high_seqno > branch.high_seqno:
                    self.truths[v].watch(copy, f"{machine} vb{v}", given_up=True)

    def _watch(self, n: int, v: int) -> None:
        vbucket = self.machines[n].vbucket(v)
        known = vbucket.failover_log.newest.vbucket_uuid in self.truths[v].branches
        given_up = (n, v) in self._ordered or self.owner[v] != n
        for found in self.truths[v].watch(vbucket, f"{self.machines[n]} vb{v}", given_up=given_up):
            if found.event == Event.EXPIRATION:  # which no client wrote
                self.note(f"  {self.machines[n]} vb{v}: {found}")
        if self.owner[v] == n:
            if not known and not given_up:
                self._check_locks(n, v)
            if not known and given_up and self._last_uuid[v]:
                self._give_up(v, self._last_uuid[v])
            self._last_uuid[v] = vbucket.failover_log.newest.vbucket_uuid
            if vbucket.persisted_seqno >= vbucket.high_seqno and not self.machines[n].bucket.journal.changed:
                self._ordered.discard((n, v))

    def _give_up_own(self, n: int, v: int) -> None:
        """Give up what a machine writes, or has written, that believes to be active and is not."""
        self._watch(n, v)
        self._give_up(v, self.machines[n].vbucket(v).failover_log.newest.vbucket_uuid)

    def _give_up(self, v: int, left_uuid: int) -> None:
        """Mark what the branches of the old owner hold beyond those of the new one."""
        owner = self._active(v)
        truth = self.truths[v]
        left = truth.branches.get(left_uuid)
        if left is None:
            return
        shared: dict[int, int] = {}
        newest = self._last_uuid[v] if owner is None else owner.failover_log.newest.vbucket_uuid
        branch, limit = truth.branches.get(newest), 2**64
        while branch is not None:
            shared[branch.uuid] = limit
            limit, branch = min(limit, branch.start), branch.parent
        while left is not None:
            beyond = shared.get(left.uuid, left.start)
            if beyond < 2**64:
                left.given_up_beyond = beyond if left.given_up_beyond is None else min(beyond, left.given_up_beyond)
            left = left.parent

    def _check_copy(self, n: int, v: int) -> None:
        """A copy that claims to be consistent holds exactly what was there at its seqno."""
        vbucket = self.machines[n].vbucket(v)
        claim = (
            self.machines[n].starts,
            vbucket.failover_log.newest,
            vbucket.high_seqno,
            vbucket.consistent_seqno,
            vbucket.state,
        )
        if self._checked.get((n, v)) == claim:
            return
        self._checked[n, v] = claim
        if vbucket.consistent_seqno != vbucket.high_seqno:
            return
        who, held = f"{self.machines[n]} vb{v}", contents_of(vbucket, self.keys[v])
        if vbucket.high_seqno == 0:
            if held:
                raise Violation(f"{who}: holds {describe(held)} at 0")
            return
        expected = self.truths[v].contents(vbucket.failover_log, vbucket.high_seqno)
        check_same(held, expected, f"{who}, consistent at {vbucket.high_seqno}", unheard_to=vbucket.purge_seqno)

    def _check_claim(self, follower: Follower, v: int) -> None:
        """The same for a foreign consumer."""
        holder, habits = follower.tracks[v].holder, follower.habits
        if not holder.seqno or habits.key_filter or habits.keys_only:
            return
        assert holder.log is not None
        expected = self.truths[v].contents(holder.log, holder.seqno)
        check_same(
            habits.as_told(holder.held),
            habits.as_told(expected),
            f"{follower} vb{v}, consistent at {holder.seqno}",
            unheard_to=holder.filled or holder.seqno,
        )

    # The dust settles.

    def settle(self) -> None:
        """Everything heals and all followers catch up; then all hold the same."""
        self.note("[settle]")
        for n, machine in enumerate(self.machines):
            machine.disk.trouble = 0
            self.do_start(n)
            self.do_reach(n)
            for name in REDUCED:
                machine.change_user(name, "restored")
            for link in [link for link in machine.links if link.estranged]:
                link.cut()
        self.check()
        for v in range(self.plan.vbuckets):
            self._finish_move(v)
        for n in range(len(self.machines)):
            self.do_reach(n)  # and what was left dead is of use again
            self._check_fed(n)
        for f in range(len(self.followers)):
            self.do_operator(f)
            for n in sorted(set(self.owner)):
                self._catch_up(f, n)
        for v in range(self.plan.vbuckets):
            self._check_settled(v)
        for machine in self.machines:
            machine.stop()
        for n in range(len(self.machines)):
            self.do_start(n)
        self.check()
        for v in range(self.plan.vbuckets):
            self._check_machines(v)

    def _finish_move(self, v: int) -> None:
        self._stop_doubles(v)
        for _ in range(300):
            if v not in self.moving:
                return
            self.clock.now += 0.25
            for taker in self.moving[v]:
                taker.connect()
                for link in list(taker.links.values()):
                    link.deliver_up(ALL)
                    link.produce(ALL)
                    link.deliver_down(ALL)
            for machine in self.machines:
                machine.rest()
            self._follow_moves()
            self.check()
        raise Violation(f"{', '.join(map(str, self.moving[v]))} never comes to an end")

    def _stop_doubles(self, v: int) -> None:
        """Movers of one name replace each other for ever, unless an operator stops all but one that is at work."""
        if v not in self.moving:
            return
        concerned, kept = self._concerned(v), dict[str, Taker]()
        for taker in sorted(self.moving[v], key=lambda taker: (taker.machines[SOURCE] in concerned, not taker.over)):
            if taker.name in kept:
                kept[taker.name].close()
            kept[taker.name] = taker
        self.moving[v] = list(kept.values())

    def _check_fed(self, n: int) -> None:
        """A stream that is still open brings everything, without being requested again."""
        replica = self.replicas[n]
        link = replica.link
        self._drain(len(self.consumers) + n)
        if link is None or not link.open:
            return
        for v in range(self.plan.vbuckets):
            active = self._active(v)
            if active is not None and link.machine is self.machines[self.owner[v]] and v not in replica.idle:
                self._check_equal(n, v, active, ", fed by a stream that is still open")

    def _catch_up(self, f: int, n: int) -> None:
        if f - len(self.consumers) == n:
            return
        mine = [v for v in range(self.plan.vbuckets) if self.owner[v] == n]
        self.do_cut(f)
        for _ in range(8):
            follower = self.followers[f]
            if follower.link is None:
                self.do_connect(f, n, mine)
            follower.ask_all(mine)
            self._drain(f)
            self.do_operator(f)
            if not set(mine) & set(follower.idle):
                return

    def _drain(self, f: int) -> None:
        for _ in range(2000):
            link = self._link(f)
            if link is None:
                return
            moved = [link.deliver_up(ALL), link.produce(ALL), link.deliver_down(ALL)]
            if not any(moved) and not sum(machine.rest() for machine in self.machines):
                return
            self.clock.now += 0.25
            self.check()
        raise Violation(f"{self.followers[f]} never comes to rest")

    def _check_settled(self, v: int) -> None:
        active = self._active(v)
        if active is None:
            raise Violation(f"vbucket {v} has no active copy")
        held, truth = contents_of(active, self.keys[v]), self.truths[v]
        expected = truth.contents(active.failover_log, active.high_seqno)
        check_same(held, expected, f"the active of vb{v}", unheard_to=active.purge_seqno)
        if not set(active.table.live_keys()) <= set(self.keys[v]):
            raise Violation(f"the active of vb{v} holds keys that no client wrote: {active.table.live_keys()}")
        truth.check_acknowledged(active)
        self._check_machines(v)
        for client in self.tap_clients if v == 0 else ():
            told = {key: (found.value, found.flags, found.expiry) for key, found in held.items() if found.live}
            if client.held != told:
                raise Violation(f"{client} holds {client.held}, not {told}")
        for follower in self.consumers:
            holder, habits = follower.tracks[v].holder, follower.habits
            wanted = {key: found for key, found in held.items() if habits.key_filter.encode() in key}
            check_same(
                habits.as_told(holder.held),
                habits.as_told(wanted),
                f"{follower} ({habits}) vb{v} at {holder.seqno}",
                active.purge_seqno,
                holder.filled or holder.seqno,
            )

    def _check_machines(self, v: int) -> None:
        active = self._active(v)
        assert active is not None
        for n in range(len(self.machines)):
            if n != self.owner[v]:
                self._check_equal(n, v, active)

    def _check_equal(self, n: int, v: int, active: Vbucket, circumstance: str = "") -> None:
        copy = self.machines[n].vbucket(v)
        # A copy that is still in its first snapshot, on `upr` perhaps for ever, has not heard of deletions either.
        unheard_to = copy.purge_seqno if copy.consistent_seqno else copy.high_seqno
        who = f"{self.machines[n]} vb{v} at {copy.high_seqno}{circumstance}"
        held, expected = contents_of(copy, self.keys[v]), contents_of(active, self.keys[v])
        check_same(held, expected, who, active.purge_seqno, unheard_to)
