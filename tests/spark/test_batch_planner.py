"""The planning of ranges: unit tests of each rule, and a model in which a sink must end with the source's contents."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.modelled_source import ModelledVbucket, failover_log
from upriver.errors import DataLoss, QueryRolledBack
from upriver.spark.batch_planner import (
    Policy,
    Range,
    RangeEnd,
    RangeRollback,
    Rules,
    SourceState,
    answered_with_rollback,
    backlog_rows,
    batch_ranges,
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
    start = Offset([VbucketOffset(0, 7, 5, 5, 0, 5), VbucketOffset(1), VbucketOffset(2, 9)])
    states = {0: SourceState(failover_log((7, 0)), 5)} | {n: SourceState(failover_log((8, 0)), 0) for n in (1, 2)}
    assert next_offset(start, states, EMIT) == start


def test_a_proof_alone_is_stored_once() -> None:
    state = SourceState(failover_log((7, 0)), 5)
    proof = next_offset(Offset([VbucketOffset(0, 7, 5, 2, 0, 2)]), {0: state}, Rules())
    assert proof == Offset([VbucketOffset(0, 7, 5, 5, 0, 2)])
    assert next_offset(proof, {0: state}, Rules()) == proof
    assert list(ranges(Offset([VbucketOffset(0, 7, 5, 2, 0, 2)]), proof)) == []


def test_a_new_branch_alone_is_stored_once() -> None:
    """So that the next crash finds the branch in the log too, which has 25 entries."""
    start, state = Offset([VbucketOffset(0, 7, 5, 5, 0, 5)]), SourceState(failover_log((8, 5), (7, 0)), 5)
    adopted = next_offset(start, {0: state}, Rules())
    assert adopted == Offset([VbucketOffset(0, 8, 5, 5, 0, 5)])
    assert next_offset(adopted, {0: state}, Rules()) == adopted
    assert list(ranges(start, adopted)) == []


def test_tap_stores_neither() -> None:
    for start in (VbucketOffset(0, 7, 5, 2), VbucketOffset(0, 8, 5, 5, 0, 5)):
        state = SourceState(failover_log((7, 5), (8, 0)), 5)
        assert next_offset(Offset([start]), {0: state}, Rules(has_ranges=False)) == Offset([start])


def test_no_batch_ends_where_deletions_are_forgotten_however_few_rows_it_may_have() -> None:
    """It would start over with the next one, and end there again: a copy that was moved knows none up to its end."""
    states = {0: SourceState(failover_log((7, 0)), 2000, purge_seqno=1500), 1: SourceState(failover_log((8, 0)), 2000)}
    start, ends = Offset([VbucketOffset(0), VbucketOffset(1)]), []
    while (end := next_offset(start, states, Rules(), rows_max=1000)) != start:
        ends.append([place.seqno for place in end])
        start = end
    assert ends == [[1500, 500], [1750, 1250], [2000, 2000], [2000, 2000]]  # the last one stores the proof


def test_a_start_at_0_takes_the_branch_that_there_is() -> None:
    end = next_offset(Offset([VbucketOffset(0)]), {0: SourceState(failover_log((7, 0)), 5)}, Rules())
    assert end == Offset([VbucketOffset(0, 7, 5, at_high=1)])
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


def test_an_exact_end_at_the_high_seqno_needs_no_earlier_proof() -> None:
    """Every version that was current when the end was chosen had been current in all reads before."""
    log = failover_log((7, 0))
    proof = VbucketOffset(0, 7, 5, 5, 0, 5)
    assert proven(VbucketOffset(0, 7, 5, 2, at_high=1), SourceState(log, 9, exact_from=5)) == proof
    assert proven(VbucketOffset(0, 7, 5, 2), SourceState(log, 9, exact_from=5)) == VbucketOffset(0, 7, 5, 2)
    late = VbucketOffset(0, 7, 5, 2, at_high=1)
    assert proven(late, SourceState(log, 9, exact_from=6)) == late


def test_after_a_failover_it_goes_on_only_from_what_is_whole_and_shared() -> None:
    state = SourceState(failover_log((8, 5), (7, 0)), 6)
    assert resume_offset(VbucketOffset(0, 7, 5, 5, 0, 5), state, Rules()) == VbucketOffset(0, 8, 5, 5, 0, 5)
    assert resume_offset(VbucketOffset(0, 7, 6, 6, 0, 3), state, EMIT) == VbucketOffset(0, 8, 5, 5, 1, 3, repairing=1)
    assert resume_offset(VbucketOffset(0, 7, 6, 3, 0, 3), state, EMIT) == VbucketOffset(0, 8, 3, 3, 1, 3, repairing=1)


@pytest.mark.parametrize("policy", ["fail", "rewind", "emit"])
def test_what_may_have_been_missed_is_read_again_if_nothing_is_lost(policy: Policy) -> None:
    start, rules = Offset([VbucketOffset(0, 7, 5, 3, 0, 3)]), Rules(policy)
    for high in (5, 9):
        state = SourceState(failover_log((8, 5), (7, 0)), high)
        end = next_offset(start, {0: state}, rules)
        assert end == Offset([VbucketOffset(0, 8, high, 3, 0, 3, at_high=1)])
        assert list(ranges(start, end)) == [Range(VbucketOffset(0, 8, 3, 3, 0, 3), high)]
        (proof,) = next_offset(end, {0: state}, rules)
        assert proof == VbucketOffset(0, 8, high, high, 0, 3)


@pytest.mark.parametrize(
    ("start", "purge_seqno", "rules"),
    [
        (VbucketOffset(0, 7, 5, 0, 0, 0), 0, EMIT),
        (VbucketOffset(0, 7, 5, 3, 0, 3), 4, EMIT),
        (VbucketOffset(0, 7, 5, 3, 0, 3), 0, Rules("rewind", has_ranges=False)),
    ],
)
def test_deletions_that_would_not_come_again_start_over(start: VbucketOffset, purge_seqno: int, rules: Rules) -> None:
    state = SourceState(failover_log((8, 5), (7, 0)), 6, purge_seqno)
    assert resume_offset(start, state, rules) == VbucketOffset(0, 8, 0, 0, 1)


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


class Counter:
    """Knows the keys of each vbucket in the order of their changes."""

    def __init__(self, keys: dict[int, str]) -> None:
        self.keys = keys

    def item_counts(self) -> dict[int, int]:
        return {number: len(set(keys)) for number, keys in self.keys.items()}

    def visible_ends(self, asked: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        found = {}
        for number, (after, most) in asked.items():
            keys = self.keys[number]
            end = max(end for end in range(after, len(keys) + 1) if len(set(keys[after:end])) <= most)
            found[number] = end, len(set(keys[after:end]))
        return found


@given(st.lists(st.text("abcde", max_size=40), min_size=1, max_size=6), st.integers(1, 12))
def test_a_limit_counts_the_changes_that_are_delivered(keys: list[str], rows_max: int) -> None:
    counter = Counter(dict(enumerate(keys)))
    states = {number: SourceState(failover_log((7, 0)), len(each)) for number, each in enumerate(keys)}
    offset, batches = Offset(VbucketOffset(number) for number in states), 0
    while any(offset.vbuckets[number].seqno < len(each) for number, each in enumerate(keys)):
        following = next_offset(offset, states, Rules(), rows_max=rows_max, counter=counter)
        delivered = [
            len(set(keys[after.vbucket][before.seqno : after.seqno]))
            for before, after in zip(offset, following, strict=True)
        ]
        assert 0 < sum(delivered) <= rows_max
        offset, batches = following, batches + 1
    if sum(len(set(each)) for each in keys) <= rows_max:
        assert batches <= 1


def test_a_node_counts_only_where_versions_are_superseded() -> None:
    class Asked(Counter):
        numbers: Collection[int] = ()

        def visible_ends(self, asked: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
            self.numbers = list(asked)
            return super().visible_ends(asked)

    states = {number: SourceState(failover_log((7, 0)), 26) for number in (0, 1)}
    counter = Asked({0: ascii_lowercase, 1: "ab" * 13})
    end = next_offset(Offset(map(VbucketOffset, states)), states, Rules(), rows_max=13, counter=counter)
    assert list(counter.numbers) == [1]
    assert next(iter(end)).seqno == 12


def test_vbuckets_without_a_count_are_limited_by_their_seqnos() -> None:
    class Silent(Counter):
        def visible_ends(self, asked: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
            return {number: found for number, found in super().visible_ends(asked).items() if number == 0}

    states = {number: SourceState(failover_log((7, 0)), 10) for number in (0, 1)}
    start = Offset([VbucketOffset(0), VbucketOffset(1)])
    end = next_offset(start, states, Rules(), rows_max=2, counter=Silent({0: "aaaaaaaabc", 1: "aaaaaaaabc"}))
    assert [place.seqno for place in end] == [8, 1]


def test_a_target_is_not_exceeded() -> None:
    states = {0: SourceState(failover_log((7, 0)), 10), 1: SourceState(failover_log((7, 0)), 3)}
    end = next_offset(Offset([VbucketOffset(0), VbucketOffset(1)]), states, Rules(), target={0: 4, 1: 9})
    assert [place.seqno for place in end] == [4, 3]


def test_a_batch_is_open_unless_it_has_an_end() -> None:
    log = failover_log((7, 0))
    states = {0: SourceState(log, 10), 1: SourceState(log, 3), 2: SourceState(log, 0), 3: SourceState(log, 8)}
    start = Offset([VbucketOffset(0), VbucketOffset(1, 7, 2, 2), VbucketOffset(2), VbucketOffset(3, 7, 5, 5)])
    assert list(batch_ranges(start, states, Rules(), {0: 6, 3: 5})) == [
        Range(VbucketOffset(0, 7), 6, end=RangeEnd.EXACT),
        Range(VbucketOffset(1, 7, 2, 2), 3, end=RangeEnd.OPEN),
        Range(VbucketOffset(2), 0, end=RangeEnd.OPEN),
    ]
    with pytest.raises(DataLoss, match="no node has it"):
        list(batch_ranges(start, {}, Rules(), {}))
    assert list(batch_ranges(start, {}, Rules(fail_on_data_loss=False), {})) == []


def test_a_batch_reports_a_rollback_of_its_start() -> None:
    states = {0: SourceState(failover_log((8, 5), (7, 0)), 9)}
    (lost,) = batch_ranges(Offset([VbucketOffset(0, 7, 6, 6, 0, 2)]), states, EMIT, {})
    assert (lost.start.seqno, lost.end_seqno, lost.rollback) == (5, 9, RangeRollback(5, 7, 8))
    (missed,) = batch_ranges(Offset([VbucketOffset(0, 7, 5, 3, 0, 2)]), states, Rules(), {})
    assert (missed.start.seqno, missed.start.vbucket_uuid, missed.rollback) == (3, 8, None)


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
                    source.fail_over(choose.randrange(4), received=choose.random() < 0.3)
                case 2 if exact:
                    source.forget()
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
    for _ in range(3):  # one to go back, one to read, one to store the proof
        end = next_offset(offset, {0: source.state}, rules)
        for asked in ranges(offset, end):
            run_range(asked, source, rules, sink)
        offset = end
    assert next_offset(offset, {0: source.state}, rules) == offset
    assert sink.contents == source.contents


def test_a_replaced_history_is_a_reset_where_flushes_are_expected() -> None:
    offset = VbucketOffset.consistent_at(3, 0x55, 10)
    state = SourceState(failover_log((0x77, 0)), 4)
    with pytest.raises(DataLoss, match="its history was replaced"):
        resume_offset(offset, state, Rules("emit"))
    assert resume_offset(offset, state, Rules("emit", flush_resets=True)) == VbucketOffset(3, 0x77, branch=1)
