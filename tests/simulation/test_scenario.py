"""Some hundred seeds with each run of the tests; `make simulate` runs any number."""

import os
import subprocess
import sys
from hashlib import sha256

import pytest

from tests.simulation.scenario import Outcome, replay, run, shrink

SEEDS = 500
CHUNK = 50


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_everybody_ends_with_the_contents_of_the_active(first: int) -> None:
    for seed in range(first, first + CHUNK):
        outcome = run(seed)
        if outcome.problem:
            pytest.fail(f"{shrink(outcome)}\n\nall of it: make simulate SEED={seed} VERBOSE=1")


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
    for words in ("rolls back", "accepted", "state_changed", "[crash", "[promote", "-k", "!k", "[flush", "[maintain"):
        assert any(words in line for line in lines), f"no seed says {words!r}"
