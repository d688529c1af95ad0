"""The simulation finds what it is there for: each broken rule, within some seeds."""

import pytest

from tests.simulation.mutations import MUTATIONS, broken
from tests.simulation.scenario import run, shrink

SEEDS = 700


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_found(name: str) -> None:
    with broken(name):
        outcome = next((outcome for outcome in map(run, range(SEEDS)) if outcome.problem), None)
        assert outcome is not None, f"{name} went unnoticed in {SEEDS} seeds: the simulation is too weak"
        assert run(outcome.seed).problem == outcome.problem, "a failure must come again"


def test_a_failure_becomes_short_and_can_be_read() -> None:
    with broken("skip-rollback"):
        outcome = next(outcome for outcome in map(run, range(SEEDS)) if outcome.problem)
        short = shrink(outcome)
    assert short.problem
    assert len(short.script) < len(outcome.script)
    assert f"seed {outcome.seed}: " in str(short)
    assert "[settle]" in str(short) or "!!" in str(short)
    assert not run(outcome.seed).problem, "and nothing is left broken"
