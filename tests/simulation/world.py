"""The cluster, its consumers and its operator: what can happen, and what must be true whenever something has.

Every event is a tuple (name, arguments). One that makes no sense in the state that it meets is skipped, so any part of
a script is a script again; that is how a failing one is made short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.carried import Carried
from tests.simulation.copies import Copies
from tests.simulation.follower import Follower, Habits
from tests.simulation.holders import Holder, Policy
from tests.simulation.moves import DESTINATION, SOURCE, Moving
from tests.simulation.node import ALL, Clock, Duty, Link, Machine
from tests.simulation.tap_client import TapClient
from tests.simulation.truth import (
    Contents,
    Truth,
    Violation,
    check_same,
    contents_of,
    describe,
    of_item,
    without_values,
)
from upriver.engine import Vbucket
from upriver.errors import StatusError
from upriver.model import Event, VbucketState
from upriver.protocol.consumer import ConsumerOptions
from upriver.protocol.mover import Goal, Phase

Action = tuple[Any, ...]
Script = Sequence[Action]
SIDES: Final = {"source": SOURCE, "destination": DESTINATION}
ACTIVE, REPLICA, DEAD = VbucketState.ACTIVE, VbucketState.REPLICA, VbucketState.DEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who takes part."""

    machines: int = 3
    vbuckets: int = 1
    keys: int = 3
    replica_dialect: str = "dcp"
    replica_window_bytes: int = 0
    #: A mover carries to each replica what it shall hold.
    carried: bool = False
    #: Somebody follows the first vbucket by TAP.
    tap: bool = False
    #: Policy and habits of each foreign consumer.
    consumers: tuple[tuple[Policy, Habits], ...] = ()


class World:
    """Everything there is, in one thread."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = Clock()
        self.history: list[str] = []
        self.machines = [Machine(f"node{n}", self.clock, plan.vbuckets) for n in range(plan.machines)]
        self.keys = [[f"k{v}{number}".encode() for number in range(plan.keys)] for v in range(plan.vbuckets)]
        self.truths = [Truth(v, self.keys[v]) for v in range(plan.vbuckets)]
        #: Who the operator says is active, by vbucket.
        self.owner = [v % plan.machines for v in range(plan.vbuckets)]
        #: Machines that were replaced while nobody could reach them, and still think that they are active.
        self.stale: set[tuple[int, int]] = set()
        #: Promotions that the operator ordered and that were not seen to be durable: what they lose is given up.
        self._ordered: set[tuple[int, int]] = set()
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
        self.followers: list[Follower | Copies | Carried | TapClient] = [
            *self.consumers,
            *self.replicas,
            *self.tap_clients,
        ]
        #: Takeovers that are not over, by vbucket.
        self.moving: dict[int, Moving] = {}
        self.check()

    def _consumer(self, number: int, policy: Policy, habits: Habits) -> Follower:
        holders = {v: Holder(policy, self._reader(v)) for v in range(self.plan.vbuckets)}
        follower = Follower(f"{policy}{number}", habits, holders, self.note)
        follower.on_whole = lambda v: self._check_claim(follower, v)
        return follower

    def _replica(self, machine: Machine) -> Copies | Carried:
        if self.plan.carried:
            return Carried(machine, self.note)
        options = ConsumerOptions(
            window_bytes=self.plan.replica_window_bytes, noop_interval_s=0, dialects=(self.plan.replica_dialect,)
        )
        return Copies(machine, options, self.note)

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
                    _, seqno = vbucket.touch(name, expiry)
                case "meta":
                    cas = self.machines[n].bucket.ledger.next_cas(self.clock())
                    _, seqno = vbucket.set_with_meta(name, value, cas=cas, rev_seqno=self._values + 5, flags=3)
                case "get":
                    vbucket.get(name)
                    return
                case _:
                    _, seqno = vbucket.set(name, value, self._values % 7, expiry)
        except StatusError as error:
            self.note(f"  refused: {type(error).__name__}")
            return
        self._acknowledge(machine, v, seqno)

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
        if isinstance(follower, Copies | Carried):
            number = f - len(self.consumers)
            if number == n or not self.machines[number].up:
                return
        follower.connect(machine, wanted)

    def do_ask(self, f: int) -> None:
        """A follower asks again for what ended."""
        self.followers[f].ask_all()

    def _link(self, f: int) -> Link | None:
        return self.followers[f].link

    def do_move(self, f: int, up: int, pump: int, down: int) -> None:
        """Bytes move on a follower's link: so many to the machine, out of its history, and back."""
        if (link := self._link(f)) is not None and up:
            link.deliver_up(up)
        if (link := self._link(f)) is not None and pump:
            link.pump(pump)
        if (link := self._link(f)) is not None and down:
            link.deliver_down(down)

    def do_cut(self, f: int) -> None:
        """A connection is lost."""
        link = self._link(f)
        if link is not None:
            link.cut()

    def do_operator(self, f: int) -> None:
        """Somebody looks after a consumer that stopped at a rollback."""
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
            machine.state.checkpoints.create(machine.vbucket(v))

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

    def do_start(self, n: int) -> None:
        """A machine comes back; the operator tells it what it is before anybody can ask."""
        machine = self.machines[n]
        if machine.up:
            return
        machine.start()
        if not machine.up:
            return
        for v in range(self.plan.vbuckets):
            self.stale.discard((n, v))
            if v in self.moving and machine in self.moving[v].machines.values():
                continue  # what the disk says counts until the mover has finished
            if self.owner[v] == n:
                if machine.role(v) is not ACTIVE:
                    self._ordered.add((n, v))
                    machine.vbucket(v).set_state(ACTIVE)
            else:  # active once, or dead since a takeover: nobody waits for it any more
                if machine.role(v) is ACTIVE:
                    self._watch(n, v)
                machine.vbucket(v).set_state(REPLICA)

    def do_promote(self, v: int, n: int, old: str) -> None:
        """An operator gives a vbucket to another copy; the old one is *down*, *told*, or *stale*: goes on unaware."""
        machine, before = self.machines[n], self.owner[v]
        if not machine.up or n == before or machine.role(v) is ACTIVE or v in self.moving:
            return
        left = self._last_uuid[v]
        if old == "down":
            self.do_crash(before)
        elif self.machines[before].up:
            if old == "told" or self.machines[before].role(v) is not ACTIVE:
                self.machines[before].vbucket(v).set_state(REPLICA)
            else:
                self.stale.add((before, v))
        self.owner[v] = n
        self._ordered.add((n, v))
        self._lose_receiver(n)
        machine.vbucket(v).set_state(ACTIVE)
        self._watch(n, v)
        self._give_up(v, left)

    def do_takeover(self, v: int, n: int) -> None:
        """An operator lets a mover carry a vbucket to another machine; ordinary replication to it stops."""
        machines = {SOURCE: self.machines[self.owner[v]], DESTINATION: self.machines[n]}
        for machine in set(machines.values()):  # who was told something has it on disk before anything is moved
            if machine.up:
                machine.write()
        settled = all(machine.up and not machine.bucket.journal.changed for machine in machines.values())
        if settled and v not in self.moving and n != self.owner[v] and not any(number == v for _, number in self.stale):
            self._lose_receiver(n)
            self.moving[v] = Moving(v, machines, self.note)
            self.moving[v].connect()

    def do_relay(self, v: int, side: str, up: int, pump: int, down: int) -> None:
        """Bytes move on one of a mover's links."""
        moving = self.moving.get(v)
        if moving is None:
            return
        for work, size in (("deliver_up", up), ("pump", pump), ("deliver_down", down)):
            link = moving.links.get(SIDES[side])
            if link is not None and size:
                getattr(link, work)(size)

    def do_mover(self, v: int, what: str) -> None:
        """Something happens to a mover: it connects, loses a side, changes its mind, or dies and is replaced."""
        moving = self.moving.get(v)
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
        """Who is active now is the owner; a mover that is done has no more to do."""
        for v, moving in list(self.moving.items()):
            destination = moving.machines[DESTINATION]
            if destination.role(v) is ACTIVE:
                self.owner[v] = self.machines.index(destination)
            if moving.phase.over and all(machine.up for machine in moving.machines.values()):
                del self.moving[v]
                moving.close()
                self._after_move(v, moving)

    def _after_move(self, v: int, moving: Moving) -> None:
        """Both sides can be reached and no mover is at work: the operator knows what to make of it."""
        source, destination = moving.machines[SOURCE], moving.machines[DESTINATION]
        if destination.role(v) is ACTIVE:
            source.vbucket(v).set_state(REPLICA)
            return
        # It may have been active for a moment, before its power failed and nothing of that was on its disk.
        self.owner[v] = self.machines.index(source)
        destination.vbucket(v).set_state(REPLICA)
        if source.role(v) is not ACTIVE:
            if moving.phase is Phase.MOVED:
                raise Violation(f"{moving} says moved, but {destination} is not active")
            source.vbucket(v).set_state(ACTIVE)

    def do_reach(self, n: int) -> None:
        """A machine that was replaced unawares is reached and told."""
        for v in range(self.plan.vbuckets):
            if (n, v) in self.stale and self.machines[n].up:
                self._watch(n, v)
                self.stale.discard((n, v))
                self.machines[n].vbucket(v).set_state(REPLICA)

    def do_flush(self, v: int) -> None:
        """Everything is deleted at once."""
        active = self._active(v)
        if active is not None:
            self._watch(self.owner[v], v)
            self.truths[v].flushed(active)
            active.flush()

    # What must be true.

    def check(self) -> None:
        """Look at everything that can be looked at now."""
        for v in range(self.plan.vbuckets):
            active = [n for n in range(len(self.machines)) if self.machines[n].role(v) is ACTIVE]
            if len([n for n in active if (n, v) not in self.stale]) > 1:
                raise Violation(f"vbucket {v} is active on {' and '.join(str(self.machines[n]) for n in active)}")
            for n in active:
                self._watch(n, v)
            for n, machine in enumerate(self.machines):
                if machine.up and n not in active:
                    self._check_copy(n, v)

    def _watch(self, n: int, v: int) -> None:
        vbucket = self.machines[n].vbucket(v)
        known = vbucket.failover_log.newest.vbucket_uuid in self.truths[v].branches
        given_up = (n, v) in self._ordered or self.owner[v] != n
        for found in self.truths[v].watch(vbucket, f"{self.machines[n]} vb{v}", given_up=given_up):
            if found.event == Event.EXPIRATION:  # what nobody wrote
                self.note(f"  {self.machines[n]} vb{v}: {found}")
        if self.owner[v] == n:
            if not known and given_up and self._last_uuid[v]:
                self._give_up(v, self._last_uuid[v])
            self._last_uuid[v] = vbucket.failover_log.newest.vbucket_uuid
            if vbucket.persisted_seqno >= vbucket.high_seqno and not self.machines[n].bucket.journal.changed:
                self._ordered.discard((n, v))

    def _give_up(self, v: int, left_uuid: int) -> None:
        """Mark what the branches of the old owner hold beyond those of the new one."""
        owner = self._active(v)
        truth = self.truths[v]
        left = truth.branches.get(left_uuid)
        if owner is None or left is None:
            return
        shared: dict[int, int] = {}
        branch, limit = truth.branches.get(owner.failover_log.newest.vbucket_uuid), 2**64
        while branch is not None:
            shared[branch.uuid] = limit
            limit, branch = min(limit, branch.start), branch.parent
        while left is not None:
            beyond = shared.get(left.uuid, left.start)
            if beyond < 2**64:
                left.given_up_beyond = beyond if left.given_up_beyond is None else min(beyond, left.given_up_beyond)
            left = left.parent

    def _check_copy(self, n: int, v: int) -> None:
        """A copy that says it is whole holds what was there at its place."""
        vbucket = self.machines[n].vbucket(v)
        claim = (
            self.machines[n].starts,
            vbucket.failover_log.newest,
            vbucket.high_seqno,
            vbucket.whole_seqno,
            vbucket.state,
        )
        if self._checked.get((n, v)) == claim:
            return
        self._checked[n, v] = claim
        if vbucket.whole_seqno != vbucket.high_seqno:
            return
        who, held = f"{self.machines[n]} vb{v}", contents_of(vbucket, self.keys[v])
        if vbucket.high_seqno == 0:
            if held:
                raise Violation(f"{who}: holds {describe(held)} at 0")
            return
        expected = self.truths[v].contents(vbucket.failover_log, vbucket.high_seqno)
        check_same(held, expected, f"{who}, whole at {vbucket.high_seqno}", unheard_to=vbucket.purge_seqno)

    def _check_claim(self, follower: Follower, v: int) -> None:
        """The same for a foreign consumer."""
        holder, habits = follower.tracks[v].holder, follower.habits
        if not holder.seqno or habits.key_filter or habits.keys_only:
            return
        assert holder.log is not None
        expected = self.truths[v].contents(holder.log, holder.seqno)
        check_same(
            holder.held,
            expected,
            f"{follower} vb{v}, whole at {holder.seqno}",
            unheard_to=holder.filled or holder.seqno,
        )

    # The dust settles.

    def settle(self) -> None:
        """Everything heals and everybody catches up; then all hold the same."""
        self.note("[settle]")
        for n, machine in enumerate(self.machines):
            machine.disk.trouble = 0
            self.do_start(n)
            self.do_reach(n)
        self.check()
        for v in range(self.plan.vbuckets):
            self._finish_move(v)
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
        for _ in range(300):
            if v not in self.moving:
                return
            self.clock.now += 0.25
            self.moving[v].connect()
            for link in list(self.moving[v].links.values()):
                link.deliver_up(ALL)
                link.pump(ALL)
                link.deliver_down(ALL)
            for machine in self.machines:
                machine.rest()
            self._follow_moves()
            self.check()
        raise Violation(f"{self.moving[v]} never comes to an end: {self.moving[v].phase.value}")

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
            moved = [link.deliver_up(ALL), link.pump(ALL), link.deliver_down(ALL)]
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
            raise Violation(f"the active of vb{v} holds keys that nobody wrote: {active.table.live_keys()}")
        truth.check_acknowledged(active)
        self._check_machines(v)
        for client in self.tap_clients if v == 0 else ():
            told = {key: (found.value, found.flags, found.expiry) for key, found in held.items() if found.live}
            if client.held != told:
                raise Violation(f"{client} holds {client.held}, not {told}")
        for follower in self.consumers:
            holder, habits = follower.tracks[v].holder, follower.habits
            wanted = {key: found for key, found in held.items() if habits.key_filter.encode() in key}
            got = holder.held
            if habits.keys_only:
                wanted, got = without_values(wanted), without_values(got)
            check_same(
                got,
                wanted,
                f"{follower} ({habits}) vb{v} at {holder.seqno}",
                active.purge_seqno,
                holder.filled or holder.seqno,
            )

    def _check_machines(self, v: int) -> None:
        active = self._active(v)
        assert active is not None
        held = contents_of(active, self.keys[v])
        for n, machine in enumerate(self.machines):
            if n != self.owner[v]:
                copy = machine.vbucket(v)
                # Who is still in its first snapshot, on `upr` perhaps for ever, has not heard of deletions either.
                unheard_to = copy.purge_seqno if copy.whole_seqno else copy.high_seqno
                who = f"{machine} vb{v} at {copy.high_seqno}"
                check_same(contents_of(copy, self.keys[v]), held, who, active.purge_seqno, unheard_to)
