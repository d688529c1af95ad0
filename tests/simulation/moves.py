"""A vbucket on its way to another machine: the project's mover, over two links that can fail at any byte."""

from collections.abc import Callable

from tests.simulation.logins import MOVER
from tests.simulation.node import Link, Machine
from upriver.protocol.move import mover as steps
from upriver.protocol.move.mover import Goal, MoverSteps

SOURCE, DESTINATION = steps.Link.SOURCE, steps.Link.DESTINATION


class Moving:
    """One mover and its connections; it may crash and be replaced by one that knows nothing but the goal."""

    def __init__(
        self,
        v: int,
        machines: dict[steps.Link, Machine],
        note: Callable[[str], None],
        goal: Goal = Goal.TAKE_OVER,
    ) -> None:
        self.v = v
        self.machines = machines
        self.note = note
        self.links: dict[steps.Link, Link] = {}
        self._wanted: list[steps.Link] = []
        self._rests = False
        self.begin(goal)

    def __str__(self) -> str:
        return f"mover of vb{self.v} from {self.machines[SOURCE]} to {self.machines[DESTINATION]}"

    @property
    def name(self) -> str:
        """All movers of a vbucket to the same node have the same name, as the client's movers do."""
        return f"upriver-mover:{self.v}:{self.machines[DESTINATION]}"

    @property
    def over(self) -> bool:
        """Nothing is left to do."""
        return self.mover.over

    @property
    def moved(self) -> bool:
        """It claims that the destination owns the vbucket."""
        return self.mover.moves[self.v].phase is steps.Phase.MOVED

    @property
    def undone(self) -> bool:
        """It claims that the source owns the vbucket."""
        return self.mover.moves[self.v].phase is steps.Phase.UNDONE

    def begin(self, goal: Goal) -> None:
        """A new mover replaces one that crashed, under the same name."""
        self.close()
        self.mover = MoverSteps(self.name, [self.v], goal, on_phase=self._on_phase)
        self.mover.start()
        self._act()

    def close(self) -> None:
        """Let go of both connections."""
        links, self.links, self._wanted = self.links, {}, []
        for link in links.values():
            link.cut()

    def undo(self) -> None:
        """The operator wants the vbucket back."""
        self.mover.undo(self.v)
        self._act()

    def connect(self) -> None:
        """Those connections that are wanted come about, if their machine is there; and a rest is over."""
        if self._rests:
            self._rests = False
            self.mover.rested(self.v)
        wanted, self._wanted = self._wanted, []
        for side in wanted:
            if self.machines[side].up:
                self.links[side] = Link(self.machines[side], self, f"{self}", user=MOVER)
                self.mover.connected(side)
            else:
                self._wanted.append(side)
        self._act()

    def receive(self, link: Link, data: bytes) -> None:
        """Bytes of one side have come."""
        if link not in self.links.values():
            return
        self.mover.received(self._side(link), data)
        self._act()

    def lost(self, link: Link) -> None:
        """One of the connections is gone."""
        if link in self.links.values():
            side = self._side(link)
            del self.links[side]
            self.mover.lost(side)
            self._act()

    def _side(self, link: Link) -> steps.Link:
        return next(side for side, found in self.links.items() if found is link)

    def _act(self) -> None:
        while actions := self.mover.actions():
            for action in actions:
                assert not isinstance(action, steps.Announce)  # there are no other nodes
                if isinstance(action, steps.Rest):
                    self._rests = True
                    continue
                link = self.links.get(action.link)
                if isinstance(action, steps.Connect):
                    if action.link not in self._wanted:
                        self._wanted.append(action.link)
                elif link is None:
                    continue
                elif isinstance(action, steps.Disconnect):
                    del self.links[action.link]
                    link.cut()
                else:
                    link.send(bytes(action.data))

    def _on_phase(self, move: steps.Move) -> None:
        self.note(f"{self}: {move.phase.value} {move.reason}".rstrip())
