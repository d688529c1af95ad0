"""A node that is killed in the middle of a takeover: one owner in the end, and no write that was on disk is missing."""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.command_peers import SocketPeer
from tests.support.depth import slow_except
from tests.support.restartable_node import RestartableNode
from upriver.client.mover import Mover, Step
from upriver.model import VbucketState
from upriver.protocol.move.mover import Goal, Link, Phase
from upriver.wire import memcached
from upriver.wire.codes import Status

DEADLINE_S = 60.0
VBUCKET = 1

#: The steps of a takeover at which a node may be killed.
MOMENTS: dict[str, Callable[[Step], bool]] = {
    "asking": lambda step: step.phase is Phase.ASKING,
    "preparing": lambda step: step.phase is Phase.PREPARING,
    "streaming": lambda step: step.phase is Phase.STREAMING,
    "pending": lambda step: step.told == "pending",
    "active": lambda step: step.told == "active",
    "announcing": lambda step: step.phase is Phase.ANNOUNCING,
    "ending": lambda step: step.phase is Phase.ENDING,
    "moved": lambda step: step.phase is Phase.MOVED,
}


class Writer(threading.Thread):
    """Writes to the source until it answers that another node owns the vbucket; remembers what was answered."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.acknowledged: dict[bytes, bytes] = {}
        self.halt = threading.Event()

    def run(self) -> None:
        number = 0
        while not self.halt.is_set():
            with contextlib.suppress(OSError, AssertionError, ValueError), SocketPeer("127.0.0.1", self.port) as peer:
                while not self.halt.is_set():
                    number += 1
                    key, value = b"k%d" % (number % 200), b"%d" % number
                    (answer,) = peer.send(memcached.Set(vbucket=VBUCKET, key=key, value=value))
                    if answer.status is Status.SUCCESS:
                        self.acknowledged[key] = value

    def stop(self) -> None:
        """Write no more."""
        self.halt.set()
        self.join(DEADLINE_S)


def state_of(node: RestartableNode) -> VbucketState:
    with SocketPeer("127.0.0.1", node.port) as peer:
        (answer,) = peer.send(memcached.GetVbucket(vbucket=VBUCKET))
    assert isinstance(answer, memcached.GetVbucketResponse), answer
    return VbucketState[answer.state.name]


def value_of(peer: SocketPeer, key: bytes) -> bytes | None:
    (answer,) = peer.send(memcached.Get(vbucket=VBUCKET, key=key))
    return answer.value if isinstance(answer, memcached.GetResponse) else None


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[Link, RestartableNode]]:
    """Two node processes that keep everything on disk; the second has the vbucket dead."""
    made = {link: RestartableNode(tmp_path / link.value, ack="disk") for link in Link}
    try:
        with SocketPeer("127.0.0.1", made[Link.DESTINATION].port) as peer:
            (answer,) = peer.send(memcached.SetVbucket(vbucket=VBUCKET, state=memcached.VbucketState.DEAD))
            assert answer.status is Status.SUCCESS
        yield made
    finally:
        for node in made.values():
            node.process.__exit__()


@pytest.fixture
def writer(nodes: dict[Link, RestartableNode]) -> Iterator[Writer]:
    """Has written a little, and goes on."""
    found = Writer(nodes[Link.SOURCE].port)
    found.start()
    try:
        assert wait_for(lambda: len(found.acknowledged) > 20)
        yield found
    finally:
        found.stop()


def take_over(
    nodes: dict[Link, RestartableNode],
    goal: Goal = Goal.TAKE_OVER,
    *,
    on_step: Callable[[Step], object] | None = None,
    time_s: float = DEADLINE_S,
) -> Step | None:
    """Run a mover until it is done; None if it was stopped before, as when its process ends."""

    async def carry_out() -> Step:
        source, destination = nodes[Link.SOURCE].address, nodes[Link.DESTINATION].address
        mover = Mover(source, destination, [VBUCKET], goal, patience_s=DEADLINE_S, on_step=on_step)
        try:
            async with asyncio.timeout(time_s):
                (step,) = await mover.carry_out()
        finally:
            await mover.close()
        return step

    try:
        return asyncio.run(carry_out())
    except TimeoutError:
        return None


def check(nodes: dict[Link, RestartableNode], writer: Writer, step: Step | None) -> None:
    """It has moved, there is one owner, and whatever was answered is there."""
    writer.stop()
    assert step is not None
    assert step.phase is Phase.MOVED, step
    assert state_of(nodes[Link.SOURCE]) is VbucketState.DEAD
    assert state_of(nodes[Link.DESTINATION]) is VbucketState.ACTIVE
    assert writer.acknowledged
    with SocketPeer("127.0.0.1", nodes[Link.DESTINATION].port) as peer:
        for key, value in writer.acknowledged.items():
            found = value_of(peer, key)
            assert found is not None, key
            assert int(found) >= int(value)  # a write may have counted whose answer was lost


@pytest.mark.parametrize(
    ("moment", "victim"),
    # At each moment one of the two, in turns.
    slow_except(zip(MOMENTS, itertools.cycle(Link), strict=False), itertools.product(MOMENTS, Link)),
)
def test_a_kill_at_every_step_of_a_takeover(
    nodes: dict[Link, RestartableNode], writer: Writer, victim: Link, moment: str
) -> None:
    struck: list[Step] = []

    def strike(step: Step) -> None:
        if MOMENTS[moment](step) and not struck:
            struck.append(step)
            nodes[victim].kill()
            nodes[victim].start()

    step = take_over(nodes, on_step=strike)
    assert struck
    check(nodes, writer, step)


@pytest.mark.parametrize("moment", slow_except(["active"], ["pending", "active", "announcing"]))
def test_a_mover_and_both_nodes_killed_while_the_vbucket_changes_hands(
    nodes: dict[Link, RestartableNode], writer: Writer, moment: str
) -> None:
    """Only what is on disk is remembered: another mover continues."""

    class Gone(Exception):
        pass

    def strike(step: Step) -> None:
        if MOMENTS[moment](step):
            for node in nodes.values():
                node.kill()
            raise Gone

    with pytest.raises(Gone):
        take_over(nodes, on_step=strike)
    for node in nodes.values():
        node.start()
    check(nodes, writer, take_over(nodes))


class OwnerWatch(threading.Thread):
    """Asks both nodes again and again who they are, as long as it runs.

    Nothing here takes the vbucket from the destination again: once that was active, the source may not be.
    """

    def __init__(self, nodes: dict[Link, RestartableNode]) -> None:
        super().__init__(daemon=True)
        self.nodes = nodes
        self.seen: dict[Link, set[VbucketState]] = {link: set() for link in Link}
        self.rounds = 0
        self.two_owners = False
        self._halt = threading.Event()

    def __enter__(self) -> "OwnerWatch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt.set()
        self.join(DEADLINE_S)

    def run(self) -> None:
        while not self._halt.is_set():
            for link in (Link.DESTINATION, Link.SOURCE):  # in this order, or a handover in between looks like two
                with contextlib.suppress(OSError, AssertionError, ValueError):
                    state = state_of(self.nodes[link])
                    self.seen[link].add(state)
                    taken = VbucketState.ACTIVE in self.seen[Link.DESTINATION]
                    self.two_owners |= taken and link is Link.SOURCE and state is VbucketState.ACTIVE
            self.rounds += 1


@pytest.mark.shows("open_issues:ownership")
@pytest.mark.parametrize("seed", slow_except([0], range(3)))
def test_kills_at_any_moment_of_a_takeover(nodes: dict[Link, RestartableNode], writer: Writer, seed: int) -> None:
    """The mover itself is gone each time too: another one goes on, or takes it back and begins again."""
    rng = random.Random(seed)
    with OwnerWatch(nodes) as watch:
        for _ in range(2):
            goal = Goal.UNDO if rng.random() < 0.3 else Goal.TAKE_OVER
            # An undisturbed takeover of so little takes some tens of milliseconds.
            take_over(nodes, goal, time_s=rng.uniform(0, 0.15))
            for victim in rng.sample(list(Link), rng.choice((1, 1, 2))):
                nodes[victim].kill()
                nodes[victim].start()
        step = take_over(nodes)
        rounds = watch.rounds
        assert wait_for(lambda: watch.rounds > rounds + 1)
    assert not watch.two_owners
    assert VbucketState.ACTIVE in watch.seen[Link.DESTINATION]
    check(nodes, writer, step)


def wait_for(condition: Callable[[], bool]) -> bool:
    """Look again until it is so; False if it never is."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() >= deadline:
            return False
        pause.wait(0.005)
    return True
