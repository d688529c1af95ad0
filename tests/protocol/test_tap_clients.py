"""Names, and how long they are remembered."""

import itertools

import pytest

from tests.protocol.tap_stage import ACK, BACKFILL, DUMP, FUTURE, KEYS_ONLY, LIST, REGISTERED, TAKEOVER, connect
from upriver.errors import TemporaryFailure
from upriver.model import StreamPosition
from upriver.protocol import tap_clients
from upriver.protocol.tap_clients import TapClient, TapClients
from upriver.protocol.tap_plan import plan_of

PLACE = {3: StreamPosition.at(7, 5)}


def enter(
    clients: TapClients, name: str = "n", now: float = 0.0, date: int | None = None, registered: bool = False
) -> TapClient:
    flags = (BACKFILL if date is not None else 0) | (REGISTERED if registered else 0)
    return clients.connected(name, plan_of(connect(b"n", flags, date or 0), now), now)


def test_a_client_that_comes_back_in_time_has_its_place() -> None:
    clients = TapClients(keep_alive_s=10)
    client = enter(clients)
    clients.left(client, PLACE, 100, done=False)
    assert not client.connected
    again = enter(clients, now=109)
    assert (again is client, again.positions, again.reconnects, again.connected) == (True, PLACE, 1, True)


def test_who_stays_away_is_forgotten_and_who_registered_is_not() -> None:
    clients = TapClients(keep_alive_s=10)
    for name, registered in (("short", False), ("long", True)):
        clients.left(enter(clients, name, registered=registered), PLACE, 100, done=False)
    clients.expire(110)
    assert [client.name for client in clients] == ["long"]
    assert enter(clients, "short", 111).positions == {}
    assert clients.deregister("long") is not None
    assert clients.deregister("long") is None
    assert clients.deregister("short") is None
    assert clients.get("long") is None


def test_who_has_got_everything_starts_anew() -> None:
    clients = TapClients(keep_alive_s=10)
    clients.left(enter(clients), PLACE, 100, done=True)
    assert len(clients) == 0


def test_without_keep_alive_nothing_is_remembered() -> None:
    clients = TapClients(keep_alive_s=0)
    clients.left(enter(clients), PLACE, 100, done=False)
    assert len(clients) == 0


def test_another_date_is_another_wish() -> None:
    clients = TapClients(keep_alive_s=10)
    clients.left(enter(clients, date=5, now=100), PLACE, 100, done=False)
    assert enter(clients, date=5, now=101).positions == PLACE
    assert enter(clients, date=None, now=101).positions == PLACE
    assert enter(clients, date=0, now=101).positions == {}


WISHES_ALL = (
    "full",
    "since 9",
    "since 5",
    "what comes",
    "far date",
    "keys",
    "keys to come",
    "dump",
    "takeover",
)
#: Flags and date; then the names of those after which a client may go on instead of beginning.
WISHES = {
    "full": (BACKFILL, 0, {"full", "dump", "takeover"}),
    "since 9": (BACKFILL, 9, {"full", "dump", "takeover", "since 9", "since 5"}),
    "since 5": (BACKFILL, 5, {"full", "dump", "takeover", "since 5"}),
    "what comes": (0, 0, {"full", "dump", "takeover", "since 9", "since 5", "what comes", "far date"}),
    "far date": (BACKFILL, FUTURE, {"full", "dump", "takeover", "since 9", "since 5", "what comes", "far date"}),
    "keys": (BACKFILL | KEYS_ONLY, 0, {"full", "dump", "takeover", "keys"}),
    "keys to come": (KEYS_ONLY, 0, set(WISHES_ALL)),
    "dump": (DUMP, 0, {"dump"}),
    "takeover": (TAKEOVER | LIST, 0, set()),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(WISHES, WISHES)))
def test_a_client_goes_on_only_where_it_holds_what_it_asks_for(before: str, after: str) -> None:
    clients = TapClients(keep_alive_s=10)
    plans = [plan_of(connect(b"n", WISHES[each][0] | ACK, WISHES[each][1]), 100) for each in (before, after)]
    clients.left(clients.connected("n", plans[0], 100), PLACE, 100, done=False)
    goes_on = before in WISHES[after][2]
    assert clients.connected("n", plans[1], 101).positions == (PLACE if goes_on else {})


@pytest.mark.parametrize(("before", "after"), list(itertools.product(WISHES, WISHES)))
def test_who_goes_on_is_still_owed_what_it_asked_for_before(before: str, after: str) -> None:
    clients = TapClients(keep_alive_s=10)
    plans = [plan_of(connect(b"n", WISHES[each][0] | ACK, WISHES[each][1]), 100) for each in (before, after)]
    clients.left(clients.connected("n", plans[0], 100), PLACE, 100, done=False)
    found = clients.connected("n", plans[1], 101).plan
    owed = plans[0] if before in WISHES[after][2] and not plans[1].future_only else plans[1]
    assert found is not None
    assert (found.full, found.since) == (owed.full, owed.since)


def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap_clients, "CLIENTS_MAX", 3)
    clients = TapClients(keep_alive_s=1000)
    enter(clients, "registered", registered=True)
    for place, name in enumerate(("a", "b")):
        clients.left(enter(clients, name), PLACE, place, done=False)
    enter(clients, "c", 10)
    assert {client.name for client in clients} == {"registered", "b", "c"}
    enter(clients, "d", 10, registered=True)
    assert {client.name for client in clients} == {"registered", "c", "d"}
    enter(clients, "e", 10, registered=True)
    for name in ("c", "f"):  # nor does one get round it by being known already
        with pytest.raises(TemporaryFailure, match="deregister"):
            enter(clients, name, 10, registered=True)
