"""A node that is killed in the middle of a takeover: one owner in the end, and no write that was on disk is missing."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.test_consumer_failures import Killed
from tests.node.peer import SocketPeer
from upriver.client.mover import MoverShell
from upriver.model import VbucketState
from upriver.protocol.mover import Goal, Link, Move, Mover, Phase
from upriver.wire import memcached, upr
from upriver.wire.codes import Status

DEADLINE_S = 60.0
VBUCKET = 1

MOMENTS: dict[str, Callable[[Move], bool]] = {
    "streaming": lambda move: move.phase is Phase.STREAMING,
    "pending": lambda move: move.told is upr.VbucketState.PENDING,
    "active": lambda move: move.told is upr.VbucketState.ACTIVE or move.phase is Phase.ENDING,
    "ending": lambda move: move.phase in (Phase.ENDING, Phase.MOVED),
}


class Writer(threading.Thread):
    """Writes to the source until it is told that somebody else owns the vbucket; remembers what was answered."""

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


def state_of(node: Killed) -> VbucketState:
    with SocketPeer("127.0.0.1", node.port) as peer:
        (answer,) = peer.send(memcached.GetVbucket(vbucket=VBUCKET))
    assert isinstance(answer, memcached.GetVbucketResponse), answer
    return VbucketState[answer.state.name]


def value_of(peer: SocketPeer, key: bytes) -> bytes | None:
    (answer,) = peer.send(memcached.Get(vbucket=VBUCKET, key=key))
    return answer.value if isinstance(answer, memcached.GetResponse) else None


@pytest.mark.parametrize("victim", list(Link), ids=lambda link: str(link.value))
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_kill_in_the_middle_of_a_takeover(tmp_path: Path, victim: Link, moment: str) -> None:
    nodes = {link: Killed(tmp_path / link.value, ack="disk") for link in Link}
    with SocketPeer("127.0.0.1", nodes[Link.DESTINATION].port) as peer:
        dead = memcached.SetVbucket(vbucket=VBUCKET, state=memcached.VbucketState.DEAD)
        (answer,) = peer.send(dead)
        assert answer.status is Status.SUCCESS
    mover = Mover("test", [VBUCKET])
    shell = MoverShell(mover, {link: ("127.0.0.1", node.port) for link, node in nodes.items()})
    writer = Writer(nodes[Link.SOURCE].port)
    writer.start()
    try:
        reached = MOMENTS[moment]
        assert shell.run(DEADLINE_S, lambda: reached(mover.moves[VBUCKET]) and len(writer.acknowledged) > 20)
        nodes[victim].kill()
        nodes[victim].start()
        assert shell.run(DEADLINE_S)
        writer.halt.set()
        writer.join(DEADLINE_S)
        assert mover.moves[VBUCKET].phase is Phase.MOVED, mover.moves[VBUCKET].reason
        assert state_of(nodes[Link.SOURCE]) is VbucketState.DEAD
        assert state_of(nodes[Link.DESTINATION]) is VbucketState.ACTIVE
        with SocketPeer("127.0.0.1", nodes[Link.DESTINATION].port) as peer:
            for key, value in writer.acknowledged.items():
                found = value_of(peer, key)
                assert found is not None, key
                assert int(found) >= int(value)  # a write may have counted whose answer was lost
    finally:
        writer.halt.set()
        shell.close()
        for node in nodes.values():
            node.served.__exit__()


class OwnerWatch(threading.Thread):
    """Asks both nodes again and again who they are, as long as it runs.

    Nothing here takes the vbucket from the destination again: once that was active, the source may not be.
    """

    def __init__(self, nodes: dict[Link, Killed]) -> None:
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


def take_over(nodes: dict[Link, Killed], goal: Goal, stop_at: float) -> Mover:
    """Run a mover until it is done, or until some moment."""
    mover = Mover("test", [VBUCKET], goal)
    shell = MoverShell(mover, {link: ("127.0.0.1", node.port) for link, node in nodes.items()})
    shell.run(DEADLINE_S, lambda: time.monotonic() >= stop_at)
    shell.close()
    return mover


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_moment_of_a_takeover(tmp_path: Path, seed: int) -> None:
    """The mover itself is gone each time too: another one goes on, or takes it back and begins again."""
    rng = random.Random(seed)
    nodes = {link: Killed(tmp_path / link.value, ack="disk") for link in Link}
    with SocketPeer("127.0.0.1", nodes[Link.DESTINATION].port) as peer:
        peer.send(memcached.SetVbucket(vbucket=VBUCKET, state=memcached.VbucketState.DEAD))
    writer = Writer(nodes[Link.SOURCE].port)
    writer.start()
    try:
        with OwnerWatch(nodes) as watch:
            for _ in range(2):
                goal = Goal.UNDO if rng.random() < 0.3 else Goal.TAKE_OVER
                # An undisturbed takeover of so little takes some tens of milliseconds.
                take_over(nodes, goal, time.monotonic() + rng.uniform(0, 0.15))
                for victim in rng.sample(list(Link), rng.choice((1, 1, 2))):
                    nodes[victim].kill()
                    nodes[victim].start()
            mover = take_over(nodes, Goal.TAKE_OVER, time.monotonic() + DEADLINE_S)
            writer.halt.set()
            writer.join(DEADLINE_S)
            rounds = watch.rounds
            assert wait_for(lambda: watch.rounds > rounds + 1)
        assert mover.moves[VBUCKET].phase is Phase.MOVED, mover.moves[VBUCKET].reason
        assert not watch.two_owners
        assert VbucketState.ACTIVE in watch.seen[Link.DESTINATION]
        assert state_of(nodes[Link.SOURCE]) is VbucketState.DEAD
        assert writer.acknowledged
        with SocketPeer("127.0.0.1", nodes[Link.DESTINATION].port) as peer:
            for key, value in writer.acknowledged.items():
                found = value_of(peer, key)
                assert found is not None, key
                assert int(found) >= int(value)
    finally:
        writer.halt.set()
        for node in nodes.values():
            node.served.__exit__()


def wait_for(condition: Callable[[], bool]) -> bool:
    """Look again until it is so; False if it never is."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() >= deadline:
            return False
        pause.wait(0.005)
    return True
