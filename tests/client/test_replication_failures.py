"""Replicas between node processes: sources that are killed, replicas that are promoted, roles that change under load.

Whatever happens, the copy goes back to where it shares the new history, no further than it must, and ends equal.
"""

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.command_peers import SocketPeer
from tests.support.faulty_proxy import Proxy
from tests.support.restartable_node import RestartableNode
from upriver.client import Mover
from upriver.protocol.move.mover import Goal
from upriver.wire import Framer, Message, Request, Response, dcp, memcached, upr
from upriver.wire.codes import Status
from upriver.wire.framing import MEMCACHED

HOST = "127.0.0.1"
DEADLINE_S = 60.0
VBUCKET = 1
Contents = dict[bytes, tuple[bytes, int, int, int]]


class Overheard:
    """How streams were asked for, and what was answered."""

    def __init__(self) -> None:
        self.requests: list[dcp.StreamRequest] = []
        #: Each rollback, with the request that was answered so.
        self.rollbacks: list[tuple[dcp.StreamRequest, int]] = []
        self._framers: dict[asyncio.StreamWriter, Framer] = {}

    def __call__(self, direction: asyncio.StreamWriter, data: bytes) -> None:
        framer = self._framers.setdefault(direction, Framer(MEMCACHED))
        framer.feed(data)
        while packet := framer.next_packet():
            if packet[1] == dcp.StreamRequest.declaration.opcode:
                self._note(dcp.dcp.decode(packet))

    def _note(self, message: Message) -> None:
        if isinstance(message, dcp.StreamRequest):
            self.requests.append(message)
        elif isinstance(message, dcp.RollbackRequired | upr.RollbackRequired):
            self.rollbacks.append((self.requests[-1], message.seqno))


class Replication:
    """One node fed by another, in a thread, until the block is left. A stream that has ended is begun again."""

    def __init__(self, source: RestartableNode, destination: RestartableNode) -> None:
        self._ports = source.port, destination.port
        self._overheard = Overheard()
        self._loop = asyncio.new_event_loop()
        self._halt = asyncio.Event()
        self._mover: Mover | None = None
        #: How often it began.
        self.beginnings = 0
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    def __enter__(self) -> "Replication":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._loop.close()

    def _stop(self) -> None:
        self._halt.set()
        if self._mover is not None:
            self._mover.stop()

    async def _run(self) -> None:
        source, destination = self._ports
        async with Proxy(source, seed=1) as proxy:
            proxy.overhear = self._overheard
            while not self._halt.is_set():
                addresses = f"{HOST}:{proxy.port}", f"{HOST}:{destination}"
                self._mover = Mover(*addresses, [VBUCKET], Goal.REPLICATE, patience_s=DEADLINE_S)
                self.beginnings += 1
                await self._mover.carry_out()

    @property
    def rollbacks(self) -> list[tuple[dcp.StreamRequest, int]]:
        return self._overheard.rollbacks

    @property
    def requests(self) -> list[dcp.StreamRequest]:
        return self._overheard.requests

    def has_rolled_back(self) -> bool:
        """Whether the copy was told to go back, and has asked again since."""
        return bool(self.rollbacks) and self.requests[-1] is not self.rollbacks[-1][0]


class Writer(threading.Thread):
    """Writes and deletes on a node until it is halted, whatever becomes of the node."""

    def __init__(self, node: RestartableNode, prefix: bytes = b"k") -> None:
        super().__init__(daemon=True)
        self.node = node
        self.prefix = prefix
        self.written = 0
        self._halted = threading.Event()

    def __enter__(self) -> "Writer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halted.set()
        self.join(DEADLINE_S)
        assert not self.is_alive()

    def run(self) -> None:
        while not self._halted.is_set():
            with contextlib.suppress(OSError, AssertionError, ValueError), SocketPeer(HOST, self.node.port) as peer:
                while not self._halted.is_set():
                    self._write(peer)

    def _write(self, peer: SocketPeer) -> None:
        keys = [b"%s%d" % (self.prefix, (self.written + number) % 300) for number in range(20)]
        sets = [memcached.Set(vbucket=VBUCKET, key=key, value=b"%d" % self.written) for key in keys]
        answers = peer.send(*sets, memcached.Delete(vbucket=VBUCKET, key=keys[0]))
        self.written += sum(answer.status is Status.SUCCESS for answer in answers)


def wait_for(condition: Callable[[], bool]) -> None:
    """Ask again and again until it is so."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")


def ask(node: RestartableNode, request: Request) -> Message:
    with SocketPeer(HOST, node.port) as peer:
        return peer.ask(request)


def set_state(node: RestartableNode, state: memcached.VbucketState) -> None:
    answer = ask(node, memcached.SetVbucket(vbucket=VBUCKET, state=state))
    assert isinstance(answer, Response)
    assert answer.status is Status.SUCCESS


def log_of(node: RestartableNode) -> list[tuple[int, int]]:
    answer = ask(node, memcached.GetFailoverLog(vbucket=VBUCKET))
    assert isinstance(answer, memcached.GetFailoverLogResponse), answer
    return [(entry.vbucket_uuid, entry.seqno) for entry in answer.log]


def high_seqno(node: RestartableNode) -> int:
    answer = ask(node, memcached.GetAllVbucketSeqnos())
    assert isinstance(answer, memcached.GetAllVbucketSeqnosResponse), answer
    return next((entry.seqno for entry in answer.seqnos if entry.vbucket == VBUCKET), 0)


def contents(node: RestartableNode) -> Contents:
    """Everything that a stream from the beginning brings: by key its value, CAS, revision and seqno."""
    found: Contents = {}
    with socket.create_connection((HOST, node.port), DEADLINE_S) as peer:
        peer.sendall(dcp.Open(name=b"contents", flags=dcp.OpenFlag.PRODUCER).encode())
        peer.sendall(dcp.StreamRequest(vbucket=VBUCKET, flags=dcp.StreamFlag.TO_LATEST, opaque=1).encode())
        framer = Framer(MEMCACHED)
        while True:
            while (packet := framer.next_packet()) is None:
                data = peer.recv(1 << 18)
                assert data, "the node has closed the connection"
                framer.feed(data)
            message = dcp.dcp.decode(packet)
            match message:
                case dcp.StreamEnd() | upr.StreamEnd():
                    return found
                case dcp.Mutation():
                    found[message.key] = message.value, message.cas, message.rev_seqno, message.by_seqno
                case dcp.Deletion() | dcp.Expiration():
                    found.pop(message.key, None)
                case Response():
                    assert message.status is Status.SUCCESS, message


def equal(source: RestartableNode, copy: RestartableNode) -> bool:
    return high_seqno(source) == high_seqno(copy) and log_of(source) == log_of(copy)


def assert_rolled_back_rightly(replication: Replication, branch_seqno: int) -> None:
    """To the branch, or to where the snapshot began that reaches over it; and the copy went on from there."""
    request, seqno = replication.rollbacks[-1]
    assert seqno == min(branch_seqno, request.snapshot_start)
    assert request.start_seqno > branch_seqno
    after = replication.requests[replication.requests.index(request) + 1]
    assert after.start_seqno <= seqno


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[str], RestartableNode]]:
    """Makes node processes."""
    made: list[RestartableNode] = []

    def make(name: str, ack: str = "memory") -> RestartableNode:
        made.append(RestartableNode(tmp_path / name, ack))
        return made[-1]

    yield make
    for node in made:
        node.process.__exit__()


def replica(make: Callable[[str], RestartableNode], name: str) -> RestartableNode:
    node = make(name)
    set_state(node, memcached.VbucketState.REPLICA)
    return node


def persist(node: RestartableNode) -> int:
    """Wait until all that is there now is on disk; where that was."""
    seqno = high_seqno(node)
    ask(node, memcached.SeqnoPersistence(vbucket=VBUCKET, seqno=seqno))
    return seqno


def test_a_source_that_is_killed_under_load_and_comes_back(nodes: Callable[[str], RestartableNode]) -> None:
    """It had told its replica more than was on its disk: the replica goes back to what the two share."""
    source, copy = nodes("source"), replica(nodes, "copy")
    with Replication(source, copy) as replication:
        with Writer(source) as writer:
            wait_for(lambda: writer.written > 500)
            on_disk = persist(source)
            source.stop_persistence()
            wait_for(lambda: high_seqno(copy) > on_disk + 500)
            source.kill()
            source.start()
            before = writer.written
            wait_for(lambda: replication.has_rolled_back() and writer.written > before + 200)
        wait_for(lambda: equal(source, copy))
        assert contents(source) == contents(copy)
        (_, branch_seqno), *older = log_of(source)
        assert branch_seqno >= on_disk
        assert older
        assert_rolled_back_rightly(replication, branch_seqno)


def test_a_promoted_replica_and_who_followed_the_old_owner(nodes: Callable[[str], RestartableNode]) -> None:
    """Of three copies the one behind is promoted: the other goes back to where it branched.

    The old owner comes back from its crash on a branch of its own, which no other node knows, so it starts over.
    """
    owner, behind, ahead = nodes("owner"), replica(nodes, "behind"), replica(nodes, "ahead")
    with Replication(owner, ahead) as replication, Writer(owner) as writer:
        with Replication(owner, behind):
            wait_for(lambda: high_seqno(behind) > 300)
        shared = high_seqno(behind)
        wait_for(lambda: high_seqno(ahead) > shared + 300 and writer.written > 1000)
        persist(owner)
        owner.kill()
        set_state(behind, memcached.VbucketState.ACTIVE)
    assert not replication.rollbacks
    branch_seqno = log_of(behind)[0][1]
    assert 0 < branch_seqno <= shared
    owner.start()
    set_state(owner, memcached.VbucketState.REPLICA)
    for follower in (ahead, owner):
        with Writer(behind, b"new"), Replication(behind, follower) as replication:
            wait_for(replication.has_rolled_back)
        with Replication(behind, follower):
            wait_for(lambda: equal(behind, follower))  # noqa: B023
        assert contents(behind) == contents(follower)
        if follower is ahead:
            assert_rolled_back_rightly(replication, branch_seqno)
        else:
            assert replication.rollbacks[-1][1] == 0


def test_roles_that_change_under_write_load(nodes: Callable[[str], RestartableNode]) -> None:
    """The source loses and regains its role, and the copy is promoted by mistake, writes, and is a replica again."""
    source, copy = nodes("source"), replica(nodes, "copy")
    rng = random.Random(11)
    states = memcached.VbucketState
    with Replication(source, copy) as replication:
        with Writer(source) as writer:
            for turn in range(12):
                before, seen = writer.written, high_seqno(copy)
                wait_for(lambda: writer.written > before + 50 and high_seqno(copy) > seen)  # noqa: B023
                if rng.random() < 0.6:
                    set_state(source, rng.choice((states.DEAD, states.REPLICA, states.PENDING)))
                    set_state(source, states.ACTIVE)
                else:
                    set_state(copy, states.ACTIVE)
                    ask(copy, memcached.Set(vbucket=VBUCKET, key=b"mistake", value=b"%d" % turn))
                    set_state(copy, states.REPLICA)
        wait_for(lambda: equal(source, copy))
    assert contents(source) == contents(copy)
    assert b"mistake" not in contents(copy)
    assert len(replication.requests) > 12  # a stream that ended was asked for again each time
