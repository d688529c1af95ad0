"""The planning of ranges: unit tests of each rule, and a model in which a sink must end with the source's contents."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.modelled_source import ModelledVbucket, failover_log
from upriver.errors import DataLoss, QueryRolledBack
from upriver.spark.batch_planner import (
    Policy,
    Range,
    RangeRollback,
    Rules,
    SourceState,
    answered_with_rollback,
    backlog_rows,
    end_seqno,
    next_offset,
    proven,
    ranges,
    resume_offset,
)
from upriver.spark.offsets import Offset, VbucketOffset

EMIT, REWIND = Rules("emit"), Rules("rewind")


# Each rule alone


def test_nothing_new_gives_the_same_offset() -> None:
    start = Offset([VbucketOffset(0, 7, 5, 2)])
    assert next_offset(start, {0: SourceState(failover_log((7, 0)), 5)}, EMIT) == start


def test_no_batch_ends_where_deletions_are_forgotten_however_few_rows_it_may_have() -> None:
    """It would start over with the next one, and end there again: a copy that was moved knows none up to its end."""
    states = {0: SourceState(failover_log((7, 0)), 2000, purge_seqno=1500), 1: SourceState(failover_log((8, 0)), 2000)}
    start, ends = Offset([VbucketOffset(0), VbucketOffset(1)]), []
    while (end := next_offset(start, states, Rules(), rows_max=1000)) != start:
        ends.append([place.seqno for place in end])
        start = end
    assert ends == [[1500, 500], [1750, 1250], [2000, 2000]]


def test_a_start_at_0_takes_the_branch_that_there_is() -> None:
    end = next_offset(Offset([VbucketOffset(0)]), {0: SourceState(failover_log((7, 0)), 5)}, Rules())
    assert end == Offset([VbucketOffset(0, 7, 5)])
    assert list(ranges(Offset([VbucketOffset(0)]), end)) == [Range(VbucketOffset(0, 7), 5)]


def test_a_high_seqno_that_has_not_moved_proves_the_place_whole() -> None:
    assert proven(VbucketOffset(0, 7, 5, 2), SourceState(failover_log((7, 0)), 5)) == VbucketOffset(0, 7, 5, 5, 0, 5)
    assert proven(VbucketOffset(0, 7, 5, 2), SourceState(failover_log((7, 0)), 6)) == VbucketOffset(0, 7, 5, 2)
    assert proven(VbucketOffset(0, 7, 5, 2), SourceState(failover_log((8, 5), (7, 0)), 5)) == VbucketOffset(0, 7, 5, 2)


def test_exact_ranges_prove_the_place_whole_if_all_versions_since_are_kept() -> None:
    assert proven(VbucketOffset(0, 7, 5, 2), SourceState(failover_log((7, 0)), 9, exact_from=2)) == VbucketOffset(
        0, 7, 5, 5, 0, 5
    )
    assert proven(VbucketOffset(0, 7, 5, 2), SourceState(failover_log((7, 0)), 9, exact_from=3)) == VbucketOffset(
        0, 7, 5, 2
    )


def test_after_a_failover_it_goes_on_only_from_what_is_whole_and_shared() -> None:
    state = SourceState(failover_log((8, 5), (7, 0)), 6)
    assert resume_offset(VbucketOffset(0, 7, 5, 5, 0, 5), state, Rules()) == VbucketOffset(0, 8, 5, 5, 0, 5)
    assert resume_offset(VbucketOffset(0, 7, 5, 3, 0, 3), state, EMIT) == VbucketOffset(0, 8, 3, 3, 1, 3)
    assert resume_offset(VbucketOffset(0, 7, 6, 6, 0, 3), state, EMIT) == VbucketOffset(0, 8, 5, 5, 1, 3)


def test_below_what_was_first_whole_everything_starts_over() -> None:
    state = SourceState(failover_log((8, 5), (7, 0)), 6)
    assert resume_offset(VbucketOffset(0, 7, 9, 9, 0, 6), state, EMIT) == VbucketOffset(0, 8, 0, 0, 1)
    assert resume_offset(VbucketOffset(0, 7, 9, 0, 0, 0), state, EMIT) == VbucketOffset(0, 8, 0, 0, 1)
    assert resume_offset(VbucketOffset(0, 7, 6, 6, 0, 3), state, REWIND) == VbucketOffset(0, 8, 0, 0, 1)


def test_forgotten_deletions_start_over() -> None:
    state = SourceState(failover_log((7, 0)), 20, purge_seqno=10)
    assert resume_offset(VbucketOffset(0, 7, 9, 9, 2, 1), state, EMIT) == VbucketOffset(0, 7, 0, 0, 3)
    assert resume_offset(VbucketOffset(0, 7, 10, 10, 2, 1), state, EMIT) == VbucketOffset(0, 7, 10, 10, 2, 1)


def test_the_policy_fail_names_the_positions() -> None:
    with pytest.raises(QueryRolledBack, match=r"vbucket 3: .* must roll back from .* to seqno 5 of uuid 0x8"):
        resume_offset(VbucketOffset(3, 7, 6, 6, 0, 3), SourceState(failover_log((8, 5), (7, 0)), 6), Rules())


def test_a_replaced_history_is_data_loss() -> None:
    state = SourceState(failover_log((9, 0)), 4)
    with pytest.raises(DataLoss, match="uuid 0x7, read up to 5, is unknown"):
        resume_offset(VbucketOffset(0, 7, 5, 5), state, EMIT)
    assert resume_offset(VbucketOffset(0, 7, 5, 5), state, Rules("emit", fail_on_data_loss=False)) == VbucketOffset(
        0, 9, 0, 0, 1
    )


def test_a_vbucket_that_is_gone_is_data_loss() -> None:
    start = Offset([VbucketOffset(0, 7, 5, 5)])
    with pytest.raises(DataLoss, match="no node has it"):
        next_offset(start, {}, EMIT)
    assert next_offset(start, {}, Rules("emit", fail_on_data_loss=False)) == start


def test_going_back_is_told_by_the_offsets_alone() -> None:
    start, end = Offset([VbucketOffset(0, 7, 9, 4, 0, 2)]), Offset([VbucketOffset(0, 8, 6, 4, 1, 2)])
    assert list(ranges(start, end)) == [Range(VbucketOffset(0, 8, 4, 4, 1, 2), 6, RangeRollback(4, 7, 8))]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.integers(1, 500))
def test_limits_hold_and_everybody_gets_there(highs: list[int], rows_max: int) -> None:
    states = {n: SourceState(failover_log((7, 0)), high) for n, high in enumerate(highs)}
    offset = Offset(VbucketOffset(n) for n in states)
    for _ in range(sum(highs) // rows_max + len(highs) + 2):
        following = next_offset(offset, states, Rules(), rows_max=rows_max)
        assert 0 <= backlog_rows(offset, states) - backlog_rows(following, states) <= rows_max
        offset = following
    assert [place.seqno for place in offset] == highs


def test_a_target_is_not_exceeded() -> None:
    states = {0: SourceState(failover_log((7, 0)), 10), 1: SourceState(failover_log((7, 0)), 3)}
    end = next_offset(Offset([VbucketOffset(0), VbucketOffset(1)]), states, Rules(), target={0: 4, 1: 9})
    assert [place.seqno for place in end] == [4, 3]


def test_an_end_on_a_branch_that_was_left() -> None:
    state = SourceState(failover_log((9, 4), (7, 0)), 20)
    assert [end_seqno(VbucketOffset(0, 9, n, n), state, Rules()) for n in (0, 15, 30)] == [0, 15, 20]
    assert end_seqno(VbucketOffset(0, 7, 4, 4), state, Rules()) == 4
    with pytest.raises(QueryRolledBack, match="left after 4"):
        end_seqno(VbucketOffset(0, 7, 5, 5), state, Rules())
    assert end_seqno(VbucketOffset(0, 7, 5, 5), state, EMIT) == 4
    with pytest.raises(DataLoss):
        end_seqno(VbucketOffset(0, 8, 5, 5), state, EMIT)
    assert end_seqno(VbucketOffset(0, 8, 5, 5), state, Rules(fail_on_data_loss=False)) == 5


def test_a_range_that_is_answered_with_a_rollback() -> None:
    asked = Range(VbucketOffset(0, 7, 5, 5, 1, 2), 9)
    same, other = failover_log((7, 0)), failover_log((8, 3), (7, 0))
    again = answered_with_rollback(asked, 3, same, EMIT)
    assert again == Range(VbucketOffset(0, 7, 3, 3, 1, 2), 9, RangeRollback(3, 7, 7))
    assert answered_with_rollback(asked, 3, other, EMIT) == Range(
        VbucketOffset(0, 8, 3, 3, 1, 2), 3, RangeRollback(3, 7, 8)
    )
    assert answered_with_rollback(asked, 1, same, EMIT) == Range(
        VbucketOffset(0, 7, 0, 0, 1, 2), 9, RangeRollback(0, 7, 7)
    )
    with pytest.raises(QueryRolledBack):
        answered_with_rollback(asked, 3, other, Rules())


@pytest.mark.parametrize("policy", ["fail", "rewind", "emit"])
def test_a_range_whose_history_was_replaced_is_data_loss_too(policy: Policy) -> None:
    asked, replaced = Range(VbucketOffset(0, 7, 5, 5, 1, 2), 9), failover_log((8, 0))
    with pytest.raises(DataLoss, match="history was replaced"):
        answered_with_rollback(asked, 0, replaced, Rules(policy))
    instead = answered_with_rollback(asked, 0, replaced, Rules(policy, fail_on_data_loss=False))
    assert instead == Range(VbucketOffset(0, 8, 0, 0, 1, 2), 0, RangeRollback(0, 7, 8))


# A source, a query and a sink


@dataclass
class Sink:
    """Keeps seqno and value of each key, and repairs what a rollback has touched."""

    held: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    def rollback(self, back: RangeRollback, source: ModelledVbucket) -> None:
        if back.seqno == 0:
            self.held.clear()
            return
        current = {key: (seqno, value) for seqno, key, value in source.versions}
        for key, (seqno, _) in list(self.held.items()):
            if seqno > back.seqno:
                self.held[key] = current.get(key, (source.high, None))

    def apply(self, rows: list[tuple[int, str, int | None]]) -> None:
        for seqno, key, value in rows:
            self.held[key] = (seqno, value)

    @property
    def contents(self) -> dict[str, int]:
        return {key: value for key, (_, value) in self.held.items() if value is not None}


def run_range(asked: Range, source: ModelledVbucket, rules: Rules, sink: Sink) -> None:
    """What a task and the sink do with a range."""
    if (seqno := source.rollback_for(asked.start)) is not None:
        asked = answered_with_rollback(asked, seqno, source.log, rules)
    if asked.rollback is not None:
        sink.rollback(asked.rollback, source)
    sink.apply(source.read(asked.start.seqno, asked.end_seqno))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("policy", ["emit", "rewind"])
@given(seed=st.integers(0, 2**32))
def test_the_sink_ends_with_the_sources_contents(policy: Policy, exact: bool, seed: int) -> None:
    choose = random.Random(seed)
    source, sink, rules = ModelledVbucket(exact=exact), Sink(), Rules(policy)
    offset = Offset([VbucketOffset(0)])

    def disturb(times: int) -> None:
        for _ in range(choose.randrange(times)):
            match choose.randrange(12):
                case 0:
                    source.fail_over(choose.randrange(4))
                case 1 if not exact:  # what is purged is no longer there to be read exactly
                    source.purge()
                case _:
                    source.write(choose.choice("abcd"), delete=choose.random() < 0.3)

    for _ in range(choose.randrange(1, 12)):
        disturb(8)
        end = next_offset(offset, {0: source.state}, rules, rows_max=choose.choice((None, 1, 3)))
        for _ in range(choose.choice((1, 1, 2))):  # a batch may be run again
            disturb(4)
            for asked in ranges(offset, end):
                run_range(asked, source, rules, sink)
        offset = end
    for _ in range(3):  # one to go back, one to read, one to see that there is no more
        end = next_offset(offset, {0: source.state}, rules)
        for asked in ranges(offset, end):
            run_range(asked, source, rules, sink)
        offset = end
    assert next_offset(offset, {0: source.state}, rules) == offset
    assert sink.contents == source.contents
