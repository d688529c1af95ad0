"""Some hundred seeds with each run of the tests; `make simulate` runs any number."""

import os
import subprocess
import sys
from hashlib import sha256

import pytest

from tests.simulation.follower import Habits
from tests.simulation.node import ALL
from tests.simulation.scenario import Outcome, replay, run, shrink
from tests.simulation.world import Action, Plan, Script

SEEDS = 500
CHUNK = 50

#: The first of those that take over the first vbucket, to the second machine, gets on.
TAKING_OVER: list[Action] = [
    ("relay", 0, 0, "source", ALL, ALL, ALL),
    ("disk", 0),
    ("relay", 0, 0, "destination", ALL, ALL, ALL),
    ("disk", 1),
]

#: Histories that once ended badly, made short: what a seed means changes whenever its author learns something.
ONCE_WRONG: dict[str, tuple[Plan, Script]] = {
    # Seed 3041: a copy without room depends on no other machine, and tries again.
    "disk refuses before the first change": (
        Plan(machines=2, keys=4, replica_dialect="upr"),
        [
            ("connect", 1, 0),
            ("move", 1, ALL, ALL, ALL),
            ("move", 1, ALL, ALL, ALL),
            ("trouble", 1, 1),
            ("disk", 1),
            ("write", 0, 0, "meta", 2, 0),
        ],
    ),
    # Seed 3992: the same, with a window.
    "disk refuses while the first change is on its way": (
        Plan(machines=2, keys=2, replica_dialect="upr", replica_window_bytes=200),
        [
            ("connect", 1, 0),
            ("move", 1, ALL, ALL, ALL),
            ("trouble", 1, 1),
            ("write", 0, 0, "set", 0, 0),
            ("move", 1, ALL, 1, ALL),
            ("disk", 1),
        ],
    ),
    # Seed 100921: the drafts accept without a log, and the one that was compared may be another by then.
    "flush between a draft's question and its request": (
        Plan(machines=3, keys=2, consumers=(("emit", Habits(dialect="upr_draft1", stride=1)),)),
        [
            ("connect", 0, 0),
            ("move", 0, 24, 1, ALL),
            ("flush", 0),
            ("write", 0, 0, "meta", 0, 0),
            ("move", 0, ALL, ALL, 7),
            ("move", 0, 60, 1, 60),
            ("move", 0, 60, 1, 60),
        ],
    ),
    # A mover that wants to undo asks, and by the time it acts the destination is active, for somebody else.
    "undo of what another has taken over meanwhile": (
        Plan(machines=2, keys=2),
        [
            ("takeover", 0, 1, "draft"),
            ("relay", 0, 0, "source", ALL, ALL, ALL),
            ("takeover", 0, 1, "mover"),
            ("mover", 0, 1, "replaced to undo"),
        ],
    ),
    # Seed 7213: a mover that wants to undo has heard that the source is dead. By the time it acts the source has an
    # empty copy, because another mover was quicker and an operator deleted the dead one.
    "undo at a source that was deleted meanwhile": (
        Plan(machines=3, keys=2),
        [
            ("connect", 2, 0),
            ("move", 2, ALL, ALL, ALL),
            ("takeover", 0, 1, "mover"),
            ("takeover", 0, 2, "mover"),
            *TAKING_OVER * 8,
            ("mover", 0, 1, "replaced to undo"),
            ("mover", 0, 1, "connect"),
            ("relay", 0, 1, "source", ALL, ALL, ALL),
            ("relay", 0, 1, "source", ALL, ALL, ALL),
            ("relay", 0, 1, "destination", ALL, ALL, ALL),
            ("relay", 0, 1, "destination", ALL, ALL, ALL),
            ("relay", 0, 1, "source", ALL, ALL, ALL),
            ("delete", 0, 0),
        ],
    ),
    # The first machine is given up and comes back unaware, while its successor is dead for a machine that lacks its
    # last write: a mover that still feeds the second from the first must not roll that write back.
    "a dead copy is fed by the machine that it replaced": (
        Plan(machines=3, keys=2, fed_by_mover=True),
        [
            ("write", 0, 0, "set", 0),
            ("connect", 1, 0),
            *[("move", 1, ALL, ALL, ALL)] * 3,
            ("disk", 0),
            ("promote", 0, 1, "down"),
            ("takeover", 0, 2, "mover"),
            *[
                ("relay", 0, 0, "source", ALL, ALL, ALL),
                ("disk", 1),
                ("relay", 0, 0, "destination", ALL, ALL, ALL),
                ("disk", 2),
            ]
            * 6,
            ("write", 1, 0, "set", 1),
            ("disk", 1),
            ("relay", 0, 0, "source", ALL, ALL, ALL),
            ("disk", 1),
            ("mover", 0, 0, "source"),
            ("start", 0, "alone"),
            ("connect", 1, 0),
            *[("move", 1, ALL, ALL, ALL), ("disk", 1), ("turn", 1)] * 4,
        ],
    ),
}


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_all_copies_end_with_the_contents_of_the_active(first: int) -> None:
    for seed in range(first, first + CHUNK):
        outcome = run(seed)
        if outcome.problem:
            pytest.fail(f"{shrink(outcome)}\n\nall of it: make simulate SEED={seed} VERBOSE=1")


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_was_once_wrong_is_right(name: str) -> None:
    outcome = replay(0, *ONCE_WRONG[name])
    assert not outcome.problem, str(outcome)


def digest(outcome: Outcome) -> str:
    return sha256("\n".join(outcome.history).encode()).hexdigest()


def test_a_seed_says_everything() -> None:
    """The same history in another process, whatever order its dictionaries of bytes have."""
    seeds = range(20)
    program = (
        "from tests.simulation.scenario import run; from tests.simulation.test_scenario import digest; "
        f"print(*(digest(run(seed)) for seed in {seeds!r}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [digest(run(seed)) for seed in seeds]


def test_a_script_is_replayed_exactly() -> None:
    for seed in range(10):
        outcome = run(seed)
        assert replay(seed, outcome.plan, outcome.script).history == outcome.history


def test_histories_are_worth_looking_at() -> None:
    """Were most events skipped, nothing would be tested: count what happened in some seeds."""
    lines = [line for seed in range(60) for line in run(seed).history]
    happened = (
        "rolls back",
        "accepted",
        "state_changed",
        "[crash",
        "[promote",
        "-k",
        "!k",
        "[flush",
        "[maintain",
        "[usurp",
        "[again",
        " logs in at ",
        "[user",
    )
    taken = (
        " alone]",
        ": moved",
        ": undone",
        ": failed",
        " is deleted",
        "draft takeover of vb0 from node0 by node1: the stream ends, ok",
    )
    for words in (*happened, *taken):
        assert any(words in line for line in lines), f"no seed says {words!r}"
