"""From a seed to a history: the machines, what happens to them, and the outcome."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tests.simulation.chance import chance
from tests.simulation.follower import DRAFTS, Habits
from tests.simulation.holders import Policy
from tests.simulation.logins import PASSWORD, READER, REDUCED, STREAMER
from tests.simulation.mover_fed_replica import MoverFedReplica
from tests.simulation.moves import DESTINATION, SOURCE
from tests.simulation.node import ALL
from tests.simulation.stream_fed_replica import StreamFedReplica
from tests.simulation.truth import Violation
from tests.simulation.world import Action, Plan, Script, World
from upriver.model import VbucketState

#: What goes wrong, and how likely it is compared with the others.
WEIGHTS: Final = {
    "takeover": 4,
    "promote": 4,
    "crash": 3,
    "purge": 3,
    "cut": 2,
    "stop": 1,
    "flush": 1,
    "compact": 1,
    "trouble": 1,
    "reach": 1,
    "close_checkpoint": 1,
    "expire": 1,
    "evict": 1,
    "time": 1,
}
#: What clients do, and what they do with locks: take one, release it, write under it.
WRITES: Final = ("set", "set", "set", "delete", "delete", "append", "touch", "meta", "get")
LOCKING: Final = ("lock", "lock", "lock", "unlock", "held")
POLICIES: Final[tuple[Policy, ...]] = ("rewind", "emit", "emit", "fail")
#: How a connection logs in again: with other roles, in vain, and as before.
LOGINS: Final = ((READER, PASSWORD), (STREAMER, "wrong"), (STREAMER, PASSWORD))
PIECES: Final = (1, 7, 24, 60, 200, ALL, ALL, ALL)


@dataclass(slots=True)
class Outcome:
    """What a seed came to."""

    seed: int
    plan: Plan
    script: list[Action] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    #: What is wrong; empty if nothing is.
    problem: str = ""

    def __str__(self) -> str:
        consumers = ", ".join(f"{policy} {habits}" for policy, habits in self.plan.consumers)
        plan = self.plan
        replicas = "fed by movers" if plan.fed_by_mover else f"on {plan.replica_dialect}"
        lines = [
            f"seed {self.seed}: {self.problem or 'all hold the same'}",
            f"  {plan.machines} machines, {plan.vbuckets} vbuckets, replicas {replicas}, "
            f"consumers: {consumers or 'none'}",
        ]
        return "\n".join([*lines, *(f"  {line}" for line in self.history)])


def plan_of(rng: random.Random, seed: int) -> Plan:
    """The machines, consumers and vbuckets of a seed."""
    plan = Plan(
        machines=rng.choice((2, 3, 3)),
        vbuckets=rng.choice((1, 1, 1, 2)),
        keys=rng.choice((2, 2, 3, 4)),
        replica_dialect=rng.choice(("dcp", "dcp", "dcp", "upr", "upr")),
        replica_window_bytes=rng.choice((0, 1, 200)),
        fed_by_mover=rng.random() < 0.1,
        tap=rng.random() < 0.15,
        consumers=tuple(_consumer(rng) for _ in range(rng.choice((0, 1, 1, 2)))),
    )
    if seed % 20 == 14:
        return replace(plan, replicate_locks=True)
    if seed % 20 == 5:
        return replace(plan, users=True, fed_by_mover=seed % 60 == 5)
    if seed % 20 == 18:
        return replace(plan, machines=3, fed_by_mover=True)
    return replace(plan, machines=3, leaves_dead=True) if seed % 10 == 1 else plan


def _consumer(rng: random.Random) -> tuple[Policy, Habits]:
    policy = rng.choice(POLICIES)
    habits = Habits(
        dialect=rng.choice(("dcp", "dcp", "dcp", "dcp", "upr", "upr", "upr", *DRAFTS)),
        keys_only=rng.random() < 0.05,
        persisted_only=rng.random() < 0.1,
        history=rng.random() < 0.05,
        key_filter=rng.choice(("", "", "", "", "", "0")),
        stride=rng.choice((0, 0, 0, 1, 3)),
    )
    if habits.dialect == "dcp":
        habits.window_bytes = rng.choice((0, 1, 100, 1000))
        habits.delete_times = rng.random() < 0.2
    if habits.draft is not None:  # which know no settings
        habits.keys_only = habits.persisted_only = habits.history = False
        habits.key_filter = ""
    return policy, habits


class Author:
    """Makes up a history, one event at a time, looking at what came of it so far."""

    def __init__(self, rng: random.Random, world: World, seed: int) -> None:
        self.rng = rng
        self.seed = seed
        self.world = world
        self.faults = rng.sample(list(WEIGHTS), rng.randrange(2, 6), counts=list(WEIGHTS.values()))
        self.rush = rng.choice((2, 3, 5))
        self.habit = rng.choice((0.1, 0.3, 0.6))
        self.patience = rng.choice((0.1, 0.3, 0.8))
        self.loyalty = rng.choice((0.4, 0.7, 0.9))
        self.expiring = rng.random() < 0.3
        self.length = rng.randrange(6, 40)
        self.logins = random.Random(seed)
        #: The copies that were pending after the last event: machine and vbucket.
        self.pending: set[tuple[int, int]] = set()
        if seed % 10 == 2:  # not drawn with the others, for the histories of all other seeds stay what they were
            self.faults.append("delete")
        elif seed % 10 == 1:
            self.faults += ["takeover", "again"]
        elif seed % 10 == 3:
            self.faults.append("interlude")
        elif seed % 10 == 4:
            self.faults += ["takeover", "takeover"]
        self.kinds = (*WRITES, *LOCKING) if seed % 10 == 4 else WRITES

    def events(self) -> Iterator[Action]:
        """All events. Those of foreign TAP peers and of logins are not drawn with the others, so that the histories of
        all other seeds stay what they were."""
        for action in self._events():
            yield action
            yield from self._foreign()
            if self.world.plan.users and self.logins.random() < 0.15:
                yield from self._other_roles()
        plan = self.world.plan
        # In others a flush would hide what was lost before; and it empties all vbuckets of a machine.
        if plan.tap and plan.vbuckets == 1 and self.seed % 4 == 0:
            yield ("tap_flush", 0)
            yield from self._writes()

    def _foreign(self) -> Iterator[Action]:
        """A foreign peer writes to each copy that has become pending."""
        machines, vbuckets = self.world.machines, range(self.world.plan.vbuckets)
        pending = {(n, v) for n, m in enumerate(machines) for v in vbuckets if m.role(v) is VbucketState.PENDING}
        for n, v in sorted(pending - self.pending):
            yield ("foreign", n, v)
        self.pending = pending

    def _other_roles(self) -> Iterator[Action]:
        """A connection logs in again, or a user loses roles, while there is something to stream."""
        rng, world = self.logins, self.world
        f, v = rng.randrange(len(world.followers)), rng.randrange(world.plan.vbuckets)
        what = rng.choice(("login", "login", "mover", "user", "user"))
        if what == "login":
            if rng.random() < 0.3:  # before what it asks for arrives
                yield ("connect", f, world.owner[v])
            yield ("login", f, *rng.choice(LOGINS))
            yield from self._heard(f, v, rng)
            yield ("cut", f)
        elif what == "mover" and world.moving:
            v, takers = rng.choice(sorted(world.moving.items()))
            which, side = rng.randrange(len(takers)), rng.choice(("source", "destination"))
            yield ("mover_login", v, which, side, *rng.choice(LOGINS))
            yield ("write", world.owner[v], v, "set", rng.randrange(world.plan.keys))
            for end in ("source", "destination") * 2:
                yield ("relay", v, which, end, ALL, ALL, ALL)
            yield ("mover", v, which, side)
        elif what == "user":
            n, name = rng.randrange(len(world.machines)), rng.choice(list(REDUCED))
            yield ("user", n, name, rng.choice(("removed", "reduced")))
            yield from self._heard(f, v, rng)
            if rng.random() < 0.7:
                yield ("user", n, name, "restored")

    def _heard(self, f: int, v: int, rng: random.Random) -> Iterator[Action]:
        """There is something to stream, and a follower listens."""
        for _ in range(rng.randint(1, 2)):
            yield ("write", self.world.owner[v], v, "set", rng.randrange(self.world.plan.keys))
            yield ("move", f, ALL, ALL, ALL)

    def _events(self) -> Iterator[Action]:
        if self.seed % 20 == 7:
            yield from self._branch_under_chain()
        elif self.seed % 20 == 9:
            yield from self._log_in_between()
        elif self.seed % 20 == 12:
            yield from self._deleted_under_streams()
        elif self.seed % 20 == 3:
            yield from self._past()
            yield from self._interlude(0)
        elif self.seed % 20 == 18:
            yield from self._given_up_feeds_the_dead()
        elif self.seed % 10 == 1:
            yield from self._old_moves()
        elif self.seed % 20 == 16:
            yield from self._power_fails_after_takeover()
        if self.rng.random() < 0.7:
            yield from self._past()
        if self.rng.random() < 0.3:
            coincidences = (
                self._torn_chain,
                self._torn_resume,
                self._second_failover,
                self._dead_before_disk,
                self._rivals,
                self._back_alone,
                self._overruled,
            )
            yield from self.rng.choice(coincidences)()
        for _ in range(self.length):
            turn = self.rng.random()
            if turn < 0.33:
                yield from self._writes()
            elif turn < 0.72:
                yield from self._relays() if self.world.moving and self.rng.random() < 0.6 else self._streams()
            else:
                yield from self._fault()
        if self.seed % 20 == 13:
            yield from self._silent_interlude(self._vbucket())

    def _past(self) -> Iterator[Action]:
        """A common past: what follows happens to copies that are consistent and not empty."""
        world = self.world
        for v in range(world.plan.vbuckets):
            for key in range(world.plan.keys):
                yield ("write", world.owner[v], v, "set", key)
        for f in range(len(world.followers)):
            yield ("connect", f, world.owner[0])
            yield ("move", f, ALL, ALL, ALL)
            yield ("move", f, ALL, ALL, ALL)
            if isinstance(world.followers[f], StreamFedReplica | MoverFedReplica) and self.rng.random() < 0.5:
                yield ("disk", f - len(world.consumers))
        if self.rng.random() < 0.7:
            yield ("disk", world.owner[0])

    def _machine(self, v: int) -> int:
        """Mostly the owner."""
        return self.world.owner[v] if self.rng.random() < 0.6 else self.rng.randrange(len(self.world.machines))

    def _vbucket(self) -> int:
        return self.rng.randrange(self.world.plan.vbuckets)

    def _writes(self) -> Iterator[Action]:
        rng, v = self.rng, self._vbucket()
        stale = sorted(n for n, number in self.world.stale if number == v)
        n = rng.choice(stale) if stale and rng.random() < 0.4 else self.world.owner[v]
        if not self.world.machines[n].up:
            yield ("start", n)
        for _ in range(rng.randint(1, self.rush)):
            kind = rng.choice(self.kinds)
            expiry = rng.choice((0, 1, 100)) if self.expiring else 0
            yield ("write", n, v, kind, rng.randrange(self.world.plan.keys), expiry)
            if rng.random() < self.habit:
                yield ("disk", n)
            if rng.random() < self.habit / 2:
                yield ("close_checkpoint", n, v)

    def _streams(self) -> Iterator[Action]:
        rng, world = self.rng, self.world
        f, v = rng.randrange(len(world.followers)), self._vbucket()
        follower = world.followers[f]
        if follower.link is None or rng.random() < 0.1:
            yield ("connect", f, world.owner[v] if rng.random() < self.loyalty else rng.randrange(len(world.machines)))
            yield ("move", f, ALL, 0, ALL)
            yield ("move", f, ALL, rng.choice((1, 1, ALL)), ALL)
        elif follower.idle:
            yield ("ask", f)
        if rng.random() < 0.2:
            yield ("operator", f)
        for _ in range(rng.randint(1, 4)):
            yield ("move", f, rng.choice(PIECES), rng.choice((0, 1, 1, 1, 100, ALL)), rng.choice(PIECES))
            if isinstance(follower, StreamFedReplica | MoverFedReplica) and rng.random() < self.habit:
                yield ("disk", f - len(world.consumers))
        if rng.random() < self.patience:
            yield ("cut", f)
            if rng.random() < 0.4:  # and goes on somewhere
                yield ("connect", f, rng.randrange(len(world.machines)))
                yield ("move", f, ALL, ALL, ALL)
                yield ("move", f, ALL, 1, ALL)

    def _relays(self) -> Iterator[Action]:
        """A mover gets somewhere, perhaps not far."""
        rng, world = self.rng, self.world
        for _ in range(rng.choice((2, 6, 12, 20))):
            if not world.moving:
                return
            v, takers = rng.choice(sorted(world.moving.items()))
            which = rng.randrange(len(takers))
            moving, side = takers[which], rng.choice(("source", "destination"))
            yield ("relay", v, which, side, ALL, rng.choice((1, ALL)), rng.choice((30, ALL)))
            if rng.random() < 0.3:
                yield ("disk", world.machines.index(rng.choice(list(moving.machines.values()))))
            if len(moving.links) < 2 and rng.random() < 0.5:
                yield ("mover", v, which, "connect")
            if rng.random() < 0.05 * self.patience:
                what = ("source", "destination", "undo", "replaced", "replaced to undo")
                yield ("mover", v, which, rng.choice(what))
            if rng.random() < 0.1:
                yield ("write", world.owner[v], v, "set", rng.randrange(world.plan.keys))
            if "interlude" in self.faults and rng.random() < 0.1:
                n = world.machines.index(moving.machines[DESTINATION])
                blinks = rng.random() < 0.7
                yield ("blink", n, v, rng.randrange(world.plan.keys)) if blinks else ("demote", n, v)

    # Coincidences that chance alone seldom brings about.

    def _some(self, n: int, count: int, v: int = 0) -> Iterator[Action]:
        """Writes that overwrite each other."""
        for _ in range(count):
            kind = self.rng.choice(("set", "set", "set", "delete"))
            yield ("write", n, v, kind, self.rng.randrange(self.world.plan.keys))

    def _fed(self, f: int, n: int, packets: int) -> Iterator[Action]:
        """A follower asks a machine, and gets about this many packets."""
        yield ("connect", f, n)
        consumers = self.world.plan.consumers
        dialect = consumers[f][1].dialect if f < len(consumers) else self.world.plan.replica_dialect
        for _ in range(min(packets + (1 if dialect == "dcp" else 2), 9)):
            yield ("move", f, ALL, 1 if packets < ALL else ALL, ALL)

    def _overwritten(self, n: int) -> Iterator[Action]:
        """All keys are written, the end of a checkpoint, and the first of them once more."""
        first = self.rng.randrange(self.world.plan.keys)
        for key in range(self.world.plan.keys):
            yield ("write", n, 0, "set", (first + key) % self.world.plan.keys)
        yield ("close_checkpoint", n, 0)
        yield from self._caught_up
        yield ("write", n, 0, self.rng.choice(("set", "delete")), first)

    _caught_up: Sequence[Action] = ()

    def _torn_chain(self) -> Iterator[Action]:
        """Torn off one snapshot, a follower goes on at a replica that is torn itself, further on."""
        rng, world = self.rng, self.world
        owner, consumers = world.owner[0], len(world.consumers)
        replica = rng.choice([n for n in range(len(world.machines)) if n != owner])
        others = [f for f in range(consumers + len(world.machines)) if f - consumers not in (owner, replica)]
        if not others:
            return
        f = rng.choice((others[-1], rng.choice(others)))  # the last is a machine's copy
        yield ("write", owner, 0, "set", 0)
        yield from self._fed(f, owner, ALL)
        yield ("cut", f)
        yield from self._fed(consumers + replica, owner, ALL)
        self._caught_up = list(self._fed(consumers + replica, owner, ALL))
        yield from self._overwritten(owner)
        yield from self._fed(f, owner, rng.choice((1, 1, 2)))
        yield ("cut", f)
        yield from self._some(owner, rng.randint(2, 3))
        for _ in range(rng.randint(2, 3)):
            yield ("move", consumers + replica, ALL, 1, ALL)
        yield from self._fed(f, replica, rng.randint(3, 8))
        for _ in range(3):
            yield ("move", consumers + replica, ALL, ALL, ALL)
        for _ in range(rng.randint(1, 4)):
            yield ("move", f, ALL, 1, ALL)

    def _torn_resume(self) -> Iterator[Action]:
        """Torn off a snapshot that reaches over the end of a checkpoint, a follower goes on."""
        rng, world = self.rng, self.world
        owner, consumers = world.owner[0], len(world.consumers)
        others = [f for f in range(consumers + len(world.machines)) if f - len(world.consumers) != owner]
        f, self._caught_up = rng.choice(others), ()
        yield from self._overwritten(owner)
        yield from self._fed(f, owner, rng.choice((1, 1, 2)))
        yield ("cut", f)
        yield from self._fed(f, owner, rng.randint(4, 8))

    def _branch_under_chain(self) -> Iterator[Action]:
        """The owner starts a new branch while a follower hangs on a replica of the old one."""
        world = self.world
        owner, consumers = world.owner[0], len(world.consumers)
        replica = (owner + 1) % len(world.machines)
        others = [f for f in range(consumers + len(world.machines)) if f - consumers not in (owner, replica)]
        if not others:
            return
        yield ("write", owner, 0, "set", 0)
        yield from self._fed(consumers + replica, owner, ALL)
        yield from self._fed(others[-1], replica, ALL)
        yield ("disk", owner)
        yield ("crash", owner)
        yield ("start", owner)
        yield from self._fed(consumers + replica, owner, ALL)
        yield ("write", owner, 0, "set", 1)
        for f in (consumers + replica, others[-1]):
            for _ in range(3):
                yield ("move", f, ALL, ALL, ALL)

    def _log_in_between(self) -> Iterator[Action]:
        """The owner's log changes after a follower has asked for it, and before its request arrives."""
        rng, world = self.rng, self.world
        owner, others = world.owner[0], [n for n in range(len(world.machines)) if n != world.owner[0]]
        for f, (_, habits) in enumerate(world.plan.consumers):
            if habits.dialect == "dcp":
                continue
            yield from self._some(owner, rng.randint(0, 3))
            yield ("connect", f, owner)
            yield ("move", f, ALL, 1, ALL)
            if rng.random() < 0.5:
                yield ("flush", 0)
            else:  # it is away for a moment, and active again
                yield ("promote", 0, rng.choice(others), "told")
                yield ("promote", 0, owner, "told")
            yield from self._some(owner, rng.randint(1, 3))
            for _ in range(4):
                yield ("move", f, ALL, rng.choice((1, ALL)), ALL)

    def _deleted_under_streams(self) -> Iterator[Action]:
        """A dead copy is deleted while others read from it."""
        rng, world = self.rng, self.world
        owner, consumers = world.owner[0], len(world.consumers)
        dead = (owner + 1) % len(world.machines)
        others = [f for f in range(consumers + len(world.machines)) if f - consumers not in (owner, dead)]
        yield from self._some(owner, rng.randint(2, 4))
        yield from self._fed(consumers + dead, owner, ALL)
        yield ("disk", owner)
        yield ("retire", dead, 0)
        for f in others:
            yield from self._fed(f, dead, rng.randint(1, 3))
        yield ("delete", dead, 0)
        for f in others:
            for _ in range(rng.randint(1, 4)):
                yield ("move", f, ALL, rng.choice((1, ALL)), ALL)

    def _interlude(self, v: int) -> Iterator[Action]:
        """A copy has another role for a moment while its stream request, or its request for a log, is not answered."""
        rng, world = self.rng, self.world
        consumers, owner = len(world.consumers), world.owner[v]
        others = [n for n in range(len(world.machines)) if n != owner]
        waiting = [n for n in others if v in world.replicas[n].waiting]
        n = rng.choice(waiting or others)
        f = consumers + n
        if not waiting:
            if rng.random() < 0.5:
                yield from self._fed(f, owner, ALL)
            yield from self._some(owner, rng.randint(0, 2), v)
            yield ("connect", f, owner if rng.random() < self.loyalty else rng.randrange(len(world.machines)))
            if rng.random() < 0.3:  # on `upr` the log is known, and the request is next
                yield ("move", f, ALL, 1, ALL)
        # It is on its way still, or was read, or answered.
        yield ("move", f, rng.choice((0, 30, ALL)), rng.choice((0, 1)), 0)
        for _ in range(rng.choice((1, 1, 2))):
            yield from rng.choice((self._usurped, self._usurped, self._replaced, self._given_away))(n, v)
            if rng.random() < 0.3:
                yield ("turn", n)
        for _ in range(rng.randint(1, 4)):
            yield ("move", f, ALL, rng.choice((1, ALL)), rng.choice(PIECES))

    def _silent_interlude(self, v: int) -> Iterator[Action]:
        """The same under an open stream, and then all writes stop: no source says that the stream is useless."""
        owner = self.world.owner[v]
        n = self.rng.choice([n for n in range(len(self.world.machines)) if n != owner])
        yield from self._fed(len(self.world.consumers) + n, owner, ALL)
        yield from self.rng.choice((self._usurped, self._replaced))(n, v)

    def _own_writes(self, n: int, v: int) -> Iterator[Action]:
        """What an active copy does: nothing, or a branch of its own, which its disk may know and the others may not."""
        rng = self.rng
        if rng.random() < 0.2:
            yield ("turn", n)
        yield from self._some(n, rng.randint(0, 3), v)
        if rng.random() < 0.3:
            yield from self._some(self.world.owner[v], rng.randint(1, 3), v)
        if rng.random() < 0.3:
            yield ("disk", n)

    def _usurped(self, n: int, v: int) -> Iterator[Action]:
        """It is active beside the owner."""
        yield ("usurp", n, v)
        yield from self._own_writes(n, v)
        if self.rng.random() < 0.2:
            yield ("flush", v, n)
            yield from self._own_writes(n, v)
        yield ("reach", n)

    def _given_away(self, n: int, v: int) -> Iterator[Action]:
        """It is active instead of the owner, which is told, and then the owner is active again."""
        owner = self.world.owner[v]
        yield ("promote", v, n, "told", "kept")
        yield from self._own_writes(n, v)
        yield ("promote", v, owner, "told", "kept")

    def _replaced(self, n: int, v: int) -> Iterator[Action]:
        """It is dead, perhaps for ever: then an empty copy takes its place."""
        yield ("retire", n, v)
        if self.rng.random() < 0.6:
            yield ("disk", self.world.owner[v])
            yield ("delete", n, v)
        yield ("reach", n)

    def _deletion(self, v: int) -> Iterator[Action]:
        """A replica, or the source of a takeover that is nearly over, is of no use any more."""
        rng, world = self.rng, self.world
        source = world.owner[v]
        others = [m for m in range(len(world.machines)) if m != source]
        if rng.random() < 0.5:
            n = rng.choice(others)
            yield ("retire", n, v)
            if rng.random() < 0.7:
                yield from self._streams()
        else:
            n = source
            yield ("takeover", v, rng.choice(others), self._taker())
            for turn in range(60):
                if v not in world.moving or world.owner[v] != source:
                    break
                yield ("relay", v, 0, ("source", "destination")[turn % 2], ALL, ALL, ALL)
                yield ("disk", (source, others[0], others[-1])[turn % 3])
        yield ("disk", world.owner[v])
        yield ("delete", n, v)

    def _second_failover(self) -> Iterator[Action]:
        """Two failovers, the second in mid-snapshot and before the first; then a consumer from before both."""
        rng, world = self.rng, self.world
        if len(world.machines) < 3 or world.moving:
            return
        owner, consumers = world.owner[0], len(world.consumers)
        first, second = rng.sample([n for n in range(3) if n != owner], 2)
        yield from self._some(owner, rng.randint(2, 3))
        yield from self._fed(consumers + second, owner, ALL)
        yield ("cut", consumers + second)
        yield from self._some(owner, rng.randint(1, 3))
        for f in range(consumers):
            yield from self._fed(f, owner, ALL)
            yield ("cut", f)
        yield from self._some(owner, rng.randint(0, 2))
        yield from self._fed(consumers + first, owner, ALL)
        yield ("promote", 0, first, rng.choice(("down", "told")))
        yield from self._some(first, rng.randint(2, 4))
        yield from self._fed(consumers + second, first, rng.randint(1, 3))
        yield ("promote", 0, second, rng.choice(("down", "told")))
        for f in range(consumers):
            yield from self._fed(f, second, ALL)

    def _dead_before_disk(self) -> Iterator[Action]:
        """A source becomes dead for a takeover, and loses its power before or after its disk knows that."""
        rng, world = self.rng, self.world
        source = world.owner[0]
        destination = rng.choice([n for n in range(len(world.machines)) if n != source])
        yield from self._some(source, rng.randint(0, 2))
        yield ("takeover", 0, destination)
        left = rng.randint(1, 4)
        for turn in range(60):
            if 0 not in world.moving or not left:
                break
            if world.machines[source].role(0) is VbucketState.DEAD:
                left -= 1
                if rng.random() < 0.1:
                    yield ("disk", source)
            yield ("relay", 0, 0, ("source", "destination")[turn % 2], ALL, ALL, ALL)
            yield ("disk", destination)  # its answers wait for nothing else
        yield ("crash", source)
        yield ("start", source)
        yield from self._some(source, rng.randint(0, 2))

    def _power_fails_after_takeover(self) -> Iterator[Action]:
        """A takeover is over, or undone, and one of the two loses its power before its disk hears anything else."""
        rng, world = self.rng, self.world
        source = world.owner[0]
        destination = rng.choice([n for n in range(len(world.machines)) if n != source])
        yield from self._some(source, rng.randint(0, 3))
        yield ("disk", source)
        yield ("takeover", 0, destination, self._taker())
        undone = rng.random() < 0.3
        for turn in range(200):
            if 0 not in world.moving:
                break
            dead = world.machines[source].role(0) is VbucketState.DEAD
            if undone and dead and turn % 2:
                yield ("mover", 0, 0, "undo")
                undone = False
            if not dead or rng.random() < 0.05:
                yield ("disk", destination)
            if rng.random() < 0.2:
                yield ("disk", source)
            yield ("mover", 0, 0, "connect")
            yield ("relay", 0, 0, ("source", "destination")[turn % 2], ALL, ALL, ALL)
            yield ("turn", destination)
        for n in rng.sample((source, destination), rng.randint(1, 2)):
            yield ("crash", n)
            yield ("start", n, self._news())
            yield from self._some(n, rng.randint(0, 2))

    def _old_moves(self) -> Iterator[Action]:
        """A vbucket moves on and on and leaves dead copies behind; then an old move is typed again, or undone, perhaps
        while another to the same machine is on its way, and one of the dead feeds that, or its dead copy is gone."""
        rng, world = self.rng, self.world
        a = world.owner[0]
        b, c = rng.sample([n for n in range(len(world.machines)) if n != a], 2)
        for n in rng.choice(((b, c), (b, c, a), (b, c, a, b), (b, a, c), (b, a, c), (b, a, b, c))):
            yield from self._some(world.owner[0], rng.randint(0, 2))
            yield ("takeover", 0, n)
            yield from self._relayed(60)
        left = [n for n, machine in enumerate(world.machines) if machine.role(0) is VbucketState.DEAD]
        old = [which for which, (source, _) in enumerate(world.typed[0]) if source in left]
        if not old:
            return
        which = rng.choice(old)
        source, destination = world.typed[0][which]
        yield from self._some(world.owner[0], rng.randint(0, 2))
        yield ("disk", world.owner[0])
        meanwhile = rng.choice(("", "", "delete", "takeover", "takeover"))
        if meanwhile == "delete":
            yield ("delete", destination, 0, "gone")
        elif meanwhile == "takeover":
            yield ("takeover", 0, destination)
            further = rng.randint(0, 12)
            for action in self._relayed(60):
                yield action
                further -= world.machines[destination].role(0) is VbucketState.PENDING
                if further < 0:
                    break
            yield from self._some(world.owner[0], rng.randint(0, 1))
            if rng.random() < 0.5:
                yield ("mover", 0, 0, rng.choice(("source", "destination")))
                yield from self._fed(len(world.consumers) + destination, source, ALL)
        yield from self._again(0, which)
        yield from self._relayed(rng.randint(4, 40))

    def _relayed(self, turns: int) -> Iterator[Action]:
        """All that take over the first vbucket get on, and all that they write is on disk at once."""
        for action in self._some_relays(turns):
            yield action
            if action[0] == "relay":
                yield from (("disk", n) for n in range(len(self.world.machines)))

    def _again(self, v: int, which: int) -> Iterator[Action]:
        """An operator repeats an old move; how far it gets before the others continue is open."""
        yield ("again", v, which, self.rng.choice(("take over", "undo")))
        for turn in range(self.rng.choice((0, 6, 12, 30))):
            takers = self.world.moving.get(v)
            if not takers:
                return
            yield ("relay", v, len(takers) - 1, ("source", "destination")[turn % 2], ALL, ALL, ALL)
            yield from (("disk", n) for n in range(len(self.world.machines)))

    def _taker(self) -> str:
        return self.rng.choice(("mover", "mover", "mover", "draft"))

    def _news(self) -> str:
        """Does a machine that comes back hear at once what has become of its vbuckets?"""
        return self.rng.choice(("told", "told", "alone"))

    def _some_relays(self, turns: int) -> Iterator[Action]:
        """All that take over the first vbucket get on, in turn."""
        world = self.world
        for turn in range(turns):
            takers = world.moving.get(0)
            if not takers:
                return
            which = turn // 2 % len(takers)
            yield ("mover", 0, which, "connect")
            yield ("relay", 0, which, ("source", "destination")[turn % 2], ALL, ALL, ALL)
            if turn % 3 == 0:
                yield ("disk", world.machines.index(takers[which].machines[DESTINATION]))
            if self.rng.random() < 0.3:
                yield ("disk", world.machines.index(takers[which].machines[SOURCE]))

    def _rivals(self) -> Iterator[Action]:
        """Two take over the same vbucket at once, to two machines or to one; one of them is cut, or wants it undone."""
        rng, world = self.rng, self.world
        source = world.owner[0]
        others = [n for n in range(len(world.machines)) if n != source]
        yield from self._some(source, rng.randint(0, 2))
        yield ("takeover", 0, rng.choice(others), self._taker())
        yield from self._some_relays(rng.randint(0, 30))
        yield ("takeover", 0, rng.choice(others), self._taker())
        yield from self._some_relays(rng.randint(0, 30))
        what = ("source", "destination", "replaced", "replaced to undo", "undo")
        yield ("mover", 0, rng.randrange(2), rng.choice(what))
        yield from self._some(source, rng.randint(0, 1))
        yield from self._some_relays(rng.randint(0, 40))

    def _back_alone(self) -> Iterator[Action]:
        """A machine is given up and comes back as what it was, with writes of its own, while another is active."""
        rng, world = self.rng, self.world
        old, consumers = world.owner[0], len(world.consumers)
        new = rng.choice([n for n in range(len(world.machines)) if n != old])
        yield from self._some(old, rng.randint(1, 3))
        yield from self._fed(consumers + new, old, rng.choice((1, 2, ALL)))
        yield ("disk", old)
        yield ("promote", 0, new, "down")
        yield from self._some(new, rng.randint(0, 3))
        yield ("start", old, "alone")
        for f in rng.sample(range(len(world.followers)), rng.randint(0, len(world.followers))):
            yield from self._fed(f, rng.choice((old, new)), rng.choice((1, ALL)))
        yield from self._some(old, rng.randint(0, 3))
        for f in range(len(world.followers)):
            yield ("move", f, ALL, rng.choice((0, 1, ALL)), ALL)
        yield ("reach", old)

    def _given_up_feeds_the_dead(self) -> Iterator[Action]:
        """A machine that was given up comes back unaware and is moved to its promoted replica, which is dead by then:
        the successor of that one does not have everything yet."""
        rng, world = self.rng, self.world
        old, consumers = world.owner[0], len(world.consumers)
        promoted, successor = rng.sample([n for n in range(len(world.machines)) if n != old], 2)
        yield from self._some(old, rng.randint(1, 3))
        yield from self._fed(consumers + promoted, old, ALL)
        yield ("disk", old)
        yield ("promote", 0, promoted, "down")
        yield ("takeover", 0, successor)
        for turn in range(60):
            if 0 not in world.moving or world.machines[promoted].role(0) is VbucketState.DEAD:
                break
            if world.machines[successor].role(0) is VbucketState.PENDING:
                yield from self._some(promoted, rng.randint(0, 2))
            yield ("disk", promoted)
            yield ("relay", 0, 0, ("source", "destination")[turn % 2], ALL, ALL, ALL)
            yield ("disk", successor)
        if rng.random() < 0.8:
            yield ("mover", 0, 0, "source")
        yield ("start", old, "alone")
        yield from self._some(old, rng.randint(0, 2))
        yield ("connect", consumers + promoted, old)
        for _ in range(rng.randint(3, 9)):
            yield ("move", consumers + promoted, ALL, ALL, ALL)
            yield ("disk", promoted)
            yield ("turn", promoted)

    def _overruled(self) -> Iterator[Action]:
        """In the middle of a takeover its source is lost, or given up, and an operator makes another copy active."""
        rng, world = self.rng, self.world
        source = world.owner[0]
        others = [n for n in range(len(world.machines)) if n != source]
        yield from self._some(source, rng.randint(0, 2))
        yield ("takeover", 0, rng.choice(others), self._taker())
        left = rng.randint(0, 16)
        for action in self._some_relays(60):
            yield action
            left -= world.machines[source].role(0) is VbucketState.DEAD
            if left < 0:
                break
        yield ("promote", 0, rng.choice(others), rng.choice(("down", "told", "stale")))
        yield ("start", source, self._news())
        yield from self._some(world.owner[0], rng.randint(0, 2))
        yield from self._some(source, rng.randint(0, 2))

    def _fault(self) -> Iterator[Action]:
        rng, world = self.rng, self.world
        v, fault = self._vbucket(), rng.choice(self.faults)
        n = self._machine(v)
        match fault:
            case "crash" | "stop":
                yield (fault, n)
                if rng.random() < 0.7:
                    yield ("start", n, self._news())
            case "promote":
                others = [m for m in range(len(world.machines)) if m != world.owner[v]]
                yield ("promote", v, rng.choice(others), rng.choice(("down", "told", "stale")))
            case "takeover":
                yield ("takeover", v, rng.randrange(len(world.machines)), self._taker())
                yield from self._relays()
            case "again":
                if rng.random() < 0.3:
                    yield ("delete", n, v, "gone")
                yield from self._again(v, rng.randrange(8))
            case "flush":
                yield ("flush", v)
            case "delete":
                yield from self._deletion(v)
            case "interlude":
                yield from self._interlude(v)
            case "purge" | "compact" | "evict":
                if rng.random() < 0.8:
                    yield ("checkpoint", n)
                yield ("maintain", n, fault, rng.choice((1, 2, 9)))
                if rng.random() < 0.4:
                    yield ("compact_disk", n)
            case "expire":
                yield ("maintain", n, fault, 9)
            case "cut":
                yield ("cut", rng.randrange(len(world.followers)))
            case "trouble":
                yield ("trouble", n, rng.choice((1, 2, 3)))
                yield ("disk", n)
                if rng.random() < 0.7:
                    yield ("start", n)
            case "reach":
                yield ("reach", n)
            case "close_checkpoint":
                yield ("close_checkpoint", n, v)
            case _:
                yield ("time", rng.choice((1, 60, 1000)))


def run(seed: int) -> Outcome:
    """Make up the history of a seed and see what comes of it."""
    rng = random.Random(seed)
    plan = plan_of(rng, seed)
    outcome = Outcome(seed, plan)
    with chance(seed):
        world: World | None = None
        try:
            world = World(plan)
            for action in Author(rng, world, seed).events():
                outcome.script.append(action)
                world.apply(action)
            world.settle()
        except Exception as error:
            outcome.problem = problem_of(error)
            if world is not None:
                world.note(f"!! {outcome.problem}")
        if world is not None:
            outcome.history = world.history
    return outcome


def replay(seed: int, plan: Plan, script: Script) -> Outcome:
    """Let exactly these events happen."""
    outcome = Outcome(seed, plan, list(script))
    with chance(seed):
        world = World(plan)
        try:
            for action in script:
                world.apply(action)
            world.settle()
        except Exception as error:
            outcome.problem = problem_of(error)
            world.note(f"!! {outcome.problem}")
        outcome.history = world.history
    return outcome


def problem_of(error: Exception) -> str:
    """One line; what is not a violation is a failure of the program, and says where."""
    if isinstance(error, Violation):
        return str(error)
    trace: Any = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{type(error).__name__} in {code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} {code.co_name}: {error}"


def shrink(outcome: Outcome) -> Outcome:
    """The same trouble with as few events as deleting some can bring."""
    script, smallest = list(outcome.script), outcome
    size = max(1, len(script) // 2)
    while True:
        at, smaller = 0, False
        while at < len(script):
            tried = replay(outcome.seed, outcome.plan, script[:at] + script[at + size :])
            if tried.problem:
                script, smallest, smaller = tried.script, tried, True
            else:
                at += size
        if size > 1:
            size //= 2
        elif not smaller:
            return smallest
