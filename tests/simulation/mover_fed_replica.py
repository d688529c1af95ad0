"""A machine that is fed by a mover with the goal to replicate: the node consumes by itself, over a second link."""

from collections.abc import Callable, Sequence

from tests.simulation.logins import MOVER
from tests.simulation.node import ALL, Link, Machine
from tests.simulation.stream_fed_replica import unanswered
from upriver.node.streams.replica_connection import ReplicaConnection
from upriver.protocol.move import mover as steps
from upriver.protocol.move.mover import Goal, MoverSteps

SOURCE, DESTINATION = steps.Link.SOURCE, steps.Link.DESTINATION


class MoverFedReplica:
    """All vbuckets that a source owns, fed to one machine by a mover, which runs on that machine."""

    def __init__(self, machine: Machine, note: Callable[[str], None]) -> None:
        self.name = f"carried-{machine}"  # its length decides how packets are cut into pieces
        self.machine = machine
        self.note = note
        self._mover: MoverSteps | None = None
        self._links: dict[steps.Link, Link] = {}

    def __str__(self) -> str:
        return self.name

    @property
    def link(self) -> Link | None:
        """The one to the source, which the scheduler moves along; what comes over it reaches the machine at once."""
        return self._links.get(SOURCE)

    @property
    def feeding_link(self) -> Link | None:
        """The one over which the mover feeds its own machine."""
        return self._links.get(DESTINATION)

    def connect(self, source: Machine, wanted: Sequence[int] | None = None) -> None:
        """A new mover begins, under the same name."""
        self._close()
        numbers = [
            number
            for number in range(source.vbuckets)
            if source.owns(number) and not self.machine.owns(number) and (wanted is None or number in wanted)
        ]
        if not numbers:
            return
        self._mover = MoverSteps(self.name, numbers, Goal.REPLICATE, on_phase=self._on_phase)
        for side, machine in ((SOURCE, source), (DESTINATION, self.machine)):
            self._links[side] = Link(machine, self, self.name, user=MOVER)
            self._mover.connected(side)
        # What it answers later, when its disk knows or there is room again, it says by itself.
        self._links[DESTINATION].session.on_output = lambda: self.machine.errands.from_thread(self._listen)
        self._act()

    def ask_all(self, wanted: Sequence[int] | None = None) -> None:
        """The mover continues the moves that rest; a new mover starts if the source no longer owns a vbucket."""
        if self._mover is not None and self._links:
            for number, move in self._mover.moves.items():
                if move.phase is steps.Phase.RESTING:
                    self._mover.rested(number)
            self._act()
        if self.link is not None and self.idle:
            self.connect(self.link.machine, wanted)

    @property
    def idle(self) -> list[int]:
        """The vbuckets that could be fed and are not."""
        if not self.machine.up:
            return []
        moves = self._mover.moves if self._mover is not None and self._links else {}
        return [
            number
            for number in range(self.machine.vbuckets)
            if not self.machine.owns(number)
            and (number not in moves or moves[number].phase.over or moves[number].phase is steps.Phase.RESTING)
        ]

    @property
    def waiting(self) -> list[int]:
        """The vbuckets whose request is not answered."""
        beside = self._links.get(DESTINATION)
        connection = None if beside is None else beside.session.stream
        return unanswered(connection.replica.consumer) if isinstance(connection, ReplicaConnection) else []

    def receive(self, link: Link, data: bytes) -> None:
        """Bytes of one side have come."""
        side = next((side for side, found in self._links.items() if found is link), None)
        if side is not None and self._mover is not None:
            self._mover.received(side, data)
            self._act()

    def lost(self, link: Link) -> None:
        """One of the connections is gone, and the other is of no use."""
        if link in self._links.values():
            self._close()

    def _close(self) -> None:
        links, self._links, self._mover = self._links, {}, None
        for link in links.values():
            link.cut()

    def _act(self) -> None:
        """Do what the mover says, and let its own machine answer."""
        while self._mover is not None and (actions := self._mover.actions()):
            for action in actions:
                if isinstance(action, steps.Send) and action.link in self._links:
                    self._links[action.link].send(bytes(action.data))
                elif isinstance(action, steps.Disconnect):
                    self._close()
            self._listen()

    def _listen(self) -> None:
        beside = self._links.get(DESTINATION)
        while beside is not None and any((beside.deliver_up(ALL), beside.produce(ALL), beside.deliver_down(ALL))):
            pass

    def _on_phase(self, move: steps.Move) -> None:
        self.note(f"{self} vb{move.vbucket}: {move.phase.value} {move.reason}".rstrip())

    def attend(self) -> None:
        """It needs no operator."""
