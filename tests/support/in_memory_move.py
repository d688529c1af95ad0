"""Two nodes without sockets and a mover between them; connections can be cut, and nodes be out of reach."""

import json
from collections import deque
from collections.abc import Callable

from tests.support.in_memory_node import InMemoryNode, Peer
from upriver.model import VbucketState
from upriver.protocol.move.mover import (
    Action,
    Announce,
    Connect,
    Disconnect,
    Goal,
    Link,
    Move,
    MoverSteps,
    Phase,
    Rest,
    Send,
    moved_map,
)


class Wire:
    """One connection of the mover: a session and what is on its way."""

    def __init__(self, node: InMemoryNode) -> None:
        self.peer = Peer(node, "mover")
        self.to_node = bytearray()
        #: What the node has sent and the mover has not received.
        self.from_node = bytearray()

    def take(self, size: int | None = None) -> bytes:
        """What comes next from the node, at most this many bytes of it."""
        if not self.from_node:
            self.from_node += self._produced()
        data = bytes(self.from_node[:size])
        del self.from_node[:size]
        return data

    def _produced(self) -> bytes:
        session = self.peer.session
        if session.stalled and not session.blocked:
            session.resume()
        data = session.data_to_send()
        if session.stream is not None:
            data += session.stream.produce()
        return data

    def deliver(self) -> None:
        data, self.to_node = bytes(self.to_node), bytearray()
        if data and not self.peer.session.closing:
            self.peer.session.receive(data)

    def cut(self) -> None:
        session = self.peer.session
        if session.stream is not None:
            session.stream.lose()
        session.end()


class InMemoryMove:
    """What a mover meets."""

    def __init__(self, goal: Goal = Goal.TAKE_OVER, vbuckets: tuple[int, ...] = (0,)) -> None:
        self.nodes = {Link.SOURCE: InMemoryNode(vbuckets=4), Link.DESTINATION: InMemoryNode(vbuckets=4)}
        for vbucket in vbuckets:
            self.source.bucket.create_vbucket(vbucket)
        self.wires: dict[Link, Wire] = {}
        self.reachable = {Link.SOURCE: True, Link.DESTINATION: True}
        self.phases: list[Phase] = []
        self.pushed: list[Link] = []
        self.most_active = 0
        self.on_announce: Callable[[Announce], object] = lambda _: None
        #: How many bytes come at once, of the two connections in turn; None for all that there are, of the first that
        #: has some.
        self.piece_bytes: int | None = None
        self._turn = 0
        self._pending: deque[Action] = deque()
        config = json.loads(self.source.state.cluster.encoded())
        config["vBucketServerMap"]["serverList"] = ["a:1", "b:1"]
        config["vBucketServerMap"]["vBucketMap"] = [[0]] * 4
        self.config = config
        self.mover = MoverSteps("a->b", vbuckets, goal, new_map=self._new_map, on_phase=self._note)
        self.mover.start()

    @property
    def source(self) -> InMemoryNode:
        return self.nodes[Link.SOURCE]

    @property
    def destination(self) -> InMemoryNode:
        return self.nodes[Link.DESTINATION]

    @property
    def move(self) -> Move:
        return self.mover.moves[0]

    def _note(self, move: Move) -> None:
        self.phases.append(move.phase)

    def _new_map(self, vbucket: int) -> bytes:
        self.config = moved_map(self.config, vbucket, 1)
        return json.dumps(self.config).encode()

    def states(self, vbucket: int = 0) -> tuple[VbucketState | None, VbucketState | None]:
        source, destination = (node.bucket.existing(vbucket) for node in self.nodes.values())
        return (source.state if source else None), (destination.state if destination else None)

    # Steps, one at a time, so that something may happen between any two

    def step(self) -> bool:
        """Do one thing that can be done; False if there is none."""
        self.most_active = max(self.most_active, sum(state is VbucketState.ACTIVE for state in self.states()))
        self._pending += self.mover.actions()
        if self._pending:
            self._act(self._pending.popleft())
            return True
        wires = list(self.wires.items())
        if self.piece_bytes is not None and wires:
            self._turn += 1
            wires = wires[self._turn % len(wires) :] + wires[: self._turn % len(wires)]
        for link, wire in wires:
            if wire.to_node and not (self.piece_bytes and wire.from_node):
                wire.deliver()
                return True
            if data := wire.take(self.piece_bytes):
                self.mover.received(link, data)
                return True
            if wire.peer.session.finished:
                self.cut(link)
                return True
        return any(
            # What waited for the disk is called back even if nothing had to be written.
            node.scheduler.step() or (node.disk_works and node.bucket.flusher.step()) or node.scheduler.step()
            for node in self.nodes.values()
        )

    def _act(self, action: Action) -> None:
        match action:
            case Announce():
                self.on_announce(action)
            case Connect(link):
                if self.reachable[link]:
                    self.wires[link] = Wire(self.nodes[link])
                    self.mover.connected(link)
            case Disconnect(link):
                self._drop(link)
            case Rest(vbucket):
                self.mover.rested(vbucket)
            case Send(link, data):
                if link in self.wires:
                    self.wires[link].to_node += data

    def _drop(self, link: Link) -> None:
        if link in self.wires:
            self.wires.pop(link).cut()

    def kill(self) -> None:
        """The mover is no more, nor are its connections."""
        for link in list(self.wires):
            self._drop(link)

    def cut(self, link: Link) -> None:
        """The connection breaks; what was on its way is lost."""
        if link in self.wires:
            self._drop(link)
            self._pending = deque(
                action for action in self._pending if not isinstance(action, Send) or action.link is not link
            )
            self.mover.lost(link, "cut")

    def settle(self, steps_max: int = 5000) -> None:
        """Go on until nothing happens any more."""
        for _ in range(steps_max):
            if not self.step():
                return
        raise AssertionError(f"no end: {self.phases[-10:]}")

    def come_back(self) -> None:
        """Both nodes can be reached again."""
        self.reachable = dict.fromkeys(Link, True)
        for link in Link:
            if link not in self.wires:
                self._pending.append(Connect(link))

    def contents(self, link: Link, vbucket: int = 0) -> dict[bytes, bytes]:
        table = self.nodes[link].bucket.vbucket(vbucket).table
        return {key: item.value for key in table.live_keys() if (item := table.find(key)) is not None}
