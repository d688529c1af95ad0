"""The failover log: newest first, bounded, and how far a holder of an entry is with us."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import PositionError
from upriver.model import FailoverEntry, FailoverLog
from upriver.model.failover import ENTRIES_MAX, UUID_BITS

SEQNOS = st.integers(0, 2**64 - 1)
ENTRIES = st.builds(FailoverEntry, st.integers(1, 2**48 - 1), SEQNOS)
LOGS = st.lists(ENTRIES, min_size=1, max_size=8, unique_by=lambda e: e.vbucket_uuid).map(
    lambda e: FailoverLog(tuple(e))
)


def test_the_limits_are_those_of_the_design() -> None:
    assert (ENTRIES_MAX, UUID_BITS) == (25, 48)


def test_a_log_is_never_empty() -> None:
    with pytest.raises(PositionError, match="at least one entry"):
        FailoverLog(())


def test_a_fresh_log_begins_at_zero() -> None:
    assert list(FailoverLog.fresh(7)) == [FailoverEntry(7, 0)]


@given(LOGS, st.integers(2**48, 2**49), SEQNOS)
def test_a_branch_is_the_newest_entry_and_leaves_the_old_log_alone(log: FailoverLog, uuid: int, seqno: int) -> None:
    before = tuple(log)
    branched = log.branch(uuid, seqno)
    assert branched.newest == FailoverEntry(uuid, seqno)
    assert tuple(branched)[1:] == before
    assert tuple(log) == before
    assert len(branched) == len(before) + 1


def test_the_oldest_entries_are_forgotten() -> None:
    log = FailoverLog.fresh(1)
    for uuid in range(2, 40):
        log = log.branch(uuid, uuid * 10)
    assert [entry.vbucket_uuid for entry in log] == list(range(39, 14, -1))
    assert log.index(14) is None


@given(LOGS)
def test_every_entry_is_found_at_its_place(log: FailoverLog) -> None:
    assert [log.index(entry.vbucket_uuid) for entry in log] == list(range(len(log)))
    assert log.index(0) is None


@given(LOGS, SEQNOS)
def test_a_holder_of_the_newest_entry_shares_all_that_we_hold(log: FailoverLog, high: int) -> None:
    assert log.upper(0, high) == high


@given(LOGS, SEQNOS)
def test_an_older_entry_never_shares_more_than_a_newer_one(log: FailoverLog, high: int) -> None:
    uppers = [log.upper(place, high) for place in range(len(log))]
    assert uppers == sorted(uppers, reverse=True)
    assert all(upper <= high for upper in uppers)


def test_the_smallest_of_all_newer_branches_counts_not_the_next_one() -> None:
    log = FailoverLog((FailoverEntry(3, 5), FailoverEntry(2, 10), FailoverEntry(1, 0)))
    assert [log.upper(place, 20) for place in range(3)] == [20, 5, 5]
    assert log.upper(2, 4) == 4


def test_a_log_that_a_peer_tells_is_cut_to_what_is_kept() -> None:
    told = [FailoverEntry(uuid, 0) for uuid in range(1, 100)]
    assert FailoverLog.received(told).entries == tuple(told[:ENTRIES_MAX])


@pytest.mark.parametrize("entry", [FailoverEntry(0, 5), FailoverEntry(1, 2**63)])
def test_a_log_that_can_be_none_is_refused(entry: FailoverEntry) -> None:
    with pytest.raises(PositionError):
        FailoverLog.received([FailoverEntry(7, 1), entry])
    with pytest.raises(PositionError):
        FailoverLog.received([])
