"""The simulation finds what it is there for: each broken rule, within some seeds."""

from itertools import chain

import pytest

from tests.simulation.mutations import MUTATIONS, broken
from tests.simulation.scenario import run, shrink

SEEDS = 1500
#: Where it was found last, to be quick; if the histories have changed since, all seeds are tried.
FOUND = {
    "ignore-snapshot-bounds": 70,
    "only-next-entry-counts": 47,
    "upper-above-high": 164,
    "ignore-purge": 119,
    "forget-unfinished-end": 1146,
    "forget-kept-start": 1146,
    "branch-at-high-seqno": 20,
    "flush-keeps-the-log": 25,
    "streams-outlive-the-deleted": 152,
    "roll-back-below-the-floor": 26,
    "purge-past-open-streams": 575,
    "compact-announced-snapshots": 35,
    "undo-without-asking": 37,
    "undo-what-was-active-since": 91,
    "movers-need-not-ask-again": 3268,
    "destination-answers-before-disk": 76,
    "mover-forgets-to-undo": 36,
    "feed-any-dead-copy": 38,
    "forget-the-successor": 56,
    "takeovers-are-never-over": 261,
    "demoted-copy-becomes-active": 857,
    "takeovers-forget-locks": 24,
    "locks-keep-the-cas-of-the-item": 24,
    "drafts-share-a-successor": 4467,
    "drafts-skip-rollback": 47,
    "drafts-trust-the-compared-log": 109,
    "tap-counts-what-was-sent": 313,
    "pending-copies-take-foreign-data": 1,
    "foreign-flushes-are-taken-for-known-ones": 4,
    "evict-what-is-not-in-blocks": 27,
    "upr-resumes-in-mid-snapshot": 3,
    "answers-are-about-any-branch": 23,
    "streams-outlive-an-interlude": 13,
    "role-changes-go-unnoticed": 13,
    "upr-first-marker-proves": 3,
}

#: What must be seen also when one of the two loses its power after a takeover: where, and in which words.
AFTERWARDS = {
    "destination-answers-before-disk": (16, "was said to be active, and comes back pending"),
    "source-does-not-await-its-dead-state": (176, "has handed over, and comes back active beside"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_found(name: str) -> None:
    with broken(name):
        seeds = chain([FOUND.get(name, 0)], range(SEEDS))
        outcome = next((outcome for outcome in map(run, seeds) if outcome.problem), None)
        assert outcome is not None, f"{name} went unnoticed in {SEEDS} seeds: the simulation is too weak"
        assert run(outcome.seed).problem == outcome.problem, "a failure must come again"


@pytest.mark.parametrize("name", AFTERWARDS)
def test_what_a_takeover_has_made_of_a_copy_its_disk_knows(name: str) -> None:
    found, words = AFTERWARDS[name]
    with broken(name):
        assert any(words in run(seed).problem for seed in chain([found], range(16, SEEDS, 20)))


def test_a_failure_becomes_short_and_can_be_read() -> None:
    with broken("skip-rollback"):
        outcome = next(outcome for outcome in map(run, range(SEEDS)) if outcome.problem)
        short = shrink(outcome)
    assert short.problem
    assert len(short.script) < len(outcome.script)
    assert f"seed {outcome.seed}: " in str(short)
    assert "[settle]" in str(short) or "!!" in str(short)
    assert not run(outcome.seed).problem, "and nothing is left broken"
