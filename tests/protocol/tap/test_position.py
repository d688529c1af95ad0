"""Where a client goes on, and with what, after each pair of wishes."""

import dataclasses
import itertools

import pytest

from tests.support.tap_peer import ACK, BACKFILL, DUMP, FUTURE, KEYS_ONLY, LIST, TAKEOVER, connect
from upriver.model import Snapshot, StreamPosition
from upriver.protocol.tap.connect_plan import TapPlan, plan_of
from upriver.protocol.tap.position import NEVER, TapPosition

NOW = 100.0
UUID = 7
#: How far the vbucket has come: at the first connect, and at the second.
THEN, LATER = 5, 20

#: Flags and date; then the names of those after which a client goes on where it stands instead of at 0.
FOLLOWING = {"full", "dump", "takeover", "since 9", "since 5", "what comes", "far date", "keys", "keys to come"}
WISHES = {
    "full": (BACKFILL, 0, {"full", "dump", "takeover"}),
    "since 9": (BACKFILL, 9, {"full", "dump", "takeover", "since 9", "since 5"}),
    "since 5": (BACKFILL, 5, {"full", "dump", "takeover", "since 5"}),
    "what comes": (0, 0, FOLLOWING),
    "far date": (BACKFILL, FUTURE, FOLLOWING),
    "keys": (BACKFILL | KEYS_ONLY, 0, {"full", "dump", "takeover", "keys"}),
    "keys to come": (KEYS_ONLY, 0, FOLLOWING),
    "dump": (DUMP, 0, {"dump"}),
    "takeover": (TAKEOVER | LIST, 0, set()),
}
PAIRS = list(itertools.product(WISHES, WISHES))


def plan(wish: str, flags: int = ACK, now: float = NOW) -> TapPlan:
    return plan_of(connect(b"n", WISHES[wish][0] | flags, WISHES[wish][1]), now)


def place(wish: str, seqno: int = 12, flags: int = ACK) -> TapPosition:
    """Where a client stands that has come to this seqno, and has been sent some more."""
    position = StreamPosition(UUID, seqno, Snapshot(seqno, seqno + 3))
    return dataclasses.replace(TapPosition.first(plan(wish, flags), UUID, THEN), position=position, known=seqno)


def owes(given: TapPosition, seqno: int, time: int) -> bool:
    """Is a change sent to a client at this position?"""
    return seqno > given.position.seqno and not (seqno <= given.until and time < given.since)


@pytest.mark.parametrize(
    ("wish", "start", "known", "since"),
    [("full", 0, 2, 0), ("since 9", 0, 2, 9), ("what comes", THEN, THEN, 101), ("far date", THEN, THEN, 101)],
)
def test_where_a_client_begins(wish: str, start: int, known: int, since: int) -> None:
    found = TapPosition.first(plan(wish), UUID, THEN, 2)
    assert (found.position.vbucket_uuid, found.position.seqno, found.reached) == (UUID, start, THEN)
    assert (found.known, found.since, found.until) == (known, since, THEN)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_client_goes_on_only_where_it_holds_what_it_asks_for(before: str, after: str) -> None:
    found = place(before).under(plan(after), LATER)
    assert found.position.seqno == (12 if before in WISHES[after][2] else 0)
    assert (found.position.vbucket_uuid, found.reached, found.known) == (UUID, 15, 12)
    assert (found.acks, found.keys_only, found.dumping) == (True, plan(after).keys_only, after == "dump")


@pytest.mark.parametrize("seqno", [3, 12])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_nothing_that_is_owed_is_given_up(before: str, after: str, seqno: int) -> None:
    old = place(before, seqno)
    found = old.under(plan(after), LATER)
    for change in itertools.product(range(1, 30), (1, 5, 7, 9, 50, 100)):
        if owes(old, *change):
            assert owes(found, *change)
        wanted = not plan(after).future_only and change[1] >= plan(after).since
        if wanted and found.position.seqno == 0:
            assert owes(found, *change)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_to_ask_twice_changes_nothing(before: str, after: str) -> None:
    found = place(before).under(plan(after), LATER)
    again = found.under(plan(after), LATER)
    assert again == found


def test_a_client_without_acknowledgements_says_with_the_date_what_it_has() -> None:
    old = place("since 5", 0, flags=0)
    assert (old.under(plan("since 9"), LATER).since, old.under(plan("since 9"), LATER).until) == (9, LATER)
    assert old.under(plan("what comes", 0), LATER) == old


def test_a_date_since_who_asked_for_what_comes_goes_on() -> None:
    later = plan_of(connect(b"n", BACKFILL | ACK, 101), 200)
    assert place("what comes").under(later, LATER).position.seqno == 12


def test_a_client_that_now_wants_values_has_been_sent_none_of_those_before() -> None:
    found = place("keys").under(plan("what comes"), LATER)
    assert (found.position.seqno, found.since, found.until) == (12, NEVER, 12)
    assert found.under(plan("since 5"), LATER).position.seqno == 0


def test_a_dump_that_has_come_to_its_end_begins_again() -> None:
    ended = dataclasses.replace(place("dump"), dumping=False)
    assert ended.under(plan("dump"), LATER).position.seqno == 0
    assert ended.under(plan("full"), LATER).position.seqno == 12
