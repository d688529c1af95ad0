"""The table of a takeover's states in docs/semantics.md: the mover does what each row says."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest

from tests.support.played_nodes import DESTINATION, SOURCE, PlayedNodes
from upriver.model import VbucketState
from upriver.protocol.move.mover import Goal, Phase
from upriver.wire import Status

PAGE = Path(__file__).parents[2] / "docs" / "semantics.md"
STATES: dict[str, VbucketState | None] = {state.value: state for state in VbucketState} | {"none": None}
ACTIVE, REPLICA = "destination active", "destination replica"
MAP = "map"


@dataclass(frozen=True)
class Expected:
    """What the mover makes the nodes do, and how it goes on; the roles stay as they are unless it says otherwise."""

    phase: Phase
    did: tuple[str, ...] = ()


REFUSED = Expected(Phase.FAILED)
STREAM = Expected(Phase.STREAMING, ("takeover stream",))
REPLICA_FIRST = Expected(Phase.STREAMING, (REPLICA, "takeover stream"))
#: What the cells mean: for each condition that the cell or its row names, what is expected.
MEANINGS: dict[str, dict[str, Expected]] = {
    "destination becomes replica, then stream": {"": REPLICA_FIRST},
    "stream, then destination pending": {"": STREAM},
    "stream, then source dead": {"": STREAM},
    "if the source holds all of the dead copy: destination becomes replica, then stream; else refused": {
        "": REPLICA_FIRST,
        "not shared": REFUSED,
    },
    "the successor's mover resumes; others are refused": {"": STREAM, "another successor": REFUSED},
    "the successor's mover makes the source active, then the destination replica; others are refused": {
        "": Expected(Phase.UNDONE, ("source active", REPLICA)),
        "another successor": REFUSED,
    },
    "confirm the source: undone": {"": Expected(Phase.UNDONE, ("source active",))},
    "confirm the source, destination becomes replica: undone": {"": Expected(Phase.UNDONE, ("source active", REPLICA))},
    "confirm the destination, push the map, tell the source that it is over": {
        "": Expected(Phase.MOVED, (ACTIVE, MAP, "source dead"))
    },
    "confirm the destination, push the map": {"": Expected(Phase.MOVED, (ACTIVE, MAP))},
    "refused": {"": REFUSED},
    "refused: an operator decides": {"": REFUSED},
    "refused: the source does not own the vbucket": {"": REFUSED},
}
#: How the nodes are set for a condition.
CONDITIONS: dict[str, Callable[[PlayedNodes], None]] = {
    "": lambda nodes: None,
    "on a branch the source knows": lambda nodes: None,
    "on another branch": lambda nodes: nodes.uuids.update({DESTINATION: [8, 7]}),
    "not shared": lambda nodes: nodes.high_seqnos.update({DESTINATION: 6}),
    "taken over": lambda nodes: refuse(nodes),
    "another successor": lambda nodes: refuse(nodes),
}


def refuse(nodes: PlayedNodes) -> None:
    """What a node does with a mover that may neither resume nor undo a takeover."""
    nodes.source_refuses, nodes.add_stream = True, Status.NOT_MY_VBUCKET


@dataclass(frozen=True)
class Case:
    """One combination of roles and conditions of one row, with a goal."""

    source: str
    destination: str
    goal: Goal
    expected: Expected
    conditions: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.goal.value}: {self.source} to {self.destination} {' '.join(self.conditions)}".rstrip()


def rows() -> list[list[str]]:
    table = PAGE.read_text().split("### States and events")[1].split("\n\n")[2]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def roles(cell: str) -> tuple[list[str], str]:
    """The roles that a cell names, and their condition."""
    named, condition = cell, ""
    for each in CONDITIONS:
        if each and cell.endswith(f", {each}"):
            named, condition = cell.removesuffix(f", {each}"), each
    if named == "not active":
        return [name for name in STATES if name != "active"], condition
    return re.split(r", | or ", named), condition


def cases() -> Iterator[Case]:
    for source_cell, destination_cell, _, move, undo, _ in rows():
        sources, source_condition = roles(source_cell)
        destinations, destination_condition = roles(destination_cell)
        for goal, cell in ((Goal.TAKE_OVER, move), (Goal.UNDO, move if undo.startswith("the same") else undo)):
            for source, destination in product(sources, destinations):
                for condition, expected in MEANINGS[cell].items():
                    conditions = (source_condition, destination_condition, condition)
                    yield Case(source, destination, goal, expected, tuple(filter(None, conditions)))


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in cases()])
def test_the_mover_does_what_the_table_says(case: Case) -> None:
    nodes = PlayedNodes(STATES[case.source], STATES[case.destination], case.goal)
    for condition in case.conditions:
        CONDITIONS[condition](nodes)
    before = dict(nodes.states)
    nodes.run()
    assert nodes.move.phase is case.expected.phase
    if case.expected is REFUSED:
        assert nodes.states == before
    else:
        assert nodes.did == [step for step in case.expected.did if step != MAP]
    pushed = int(MAP in case.expected.did)
    assert nodes.maps_pushed == {SOURCE: pushed, DESTINATION: pushed}


def test_the_table_has_a_row_for_every_pair_of_roles() -> None:
    found = {(case.source, case.destination) for case in cases() if "taken over" not in case.conditions}
    assert found == set(product(STATES, STATES))
