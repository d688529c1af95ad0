"""Names, and how long they are remembered."""

import pytest

from tests.support.tap_peer import BACKFILL, REGISTERED, connect
from upriver.errors import TemporaryFailure
from upriver.protocol.tap.clients import TapClient, TapClients
from upriver.protocol.tap.connect_plan import plan_of
from upriver.protocol.tap.position import TapPosition

PLACE = {3: TapPosition.first(plan_of(connect(b"n"), 0.0), 7, 5)}


def enter(
    clients: TapClients, name: str = "n", now: float = 0.0, date: int | None = None, registered: bool = False
) -> TapClient:
    flags = (BACKFILL if date is not None else 0) | (REGISTERED if registered else 0)
    return clients.connected(name, plan_of(connect(b"n", flags, date or 0), now), now)


def test_a_client_that_comes_back_in_time_has_its_place() -> None:
    clients = TapClients(keep_alive_s=10)
    client = enter(clients)
    clients.left(client, lambda: PLACE, 100, done=False)
    assert not client.connected
    again = enter(clients, now=109)
    assert (again is client, dict(again.positions), again.reconnects, again.connected) == (True, PLACE, 1, True)


def test_a_client_that_stays_away_is_forgotten_and_a_registered_one_is_not() -> None:
    clients = TapClients(keep_alive_s=10)
    for name, registered in (("short", False), ("long", True)):
        clients.left(enter(clients, name, registered=registered), lambda: PLACE, 100, done=False)
    clients.expire(110)
    assert [client.name for client in clients] == ["long"]
    assert enter(clients, "short", 111).positions == {}
    assert clients.deregister("long") is not None
    assert clients.deregister("long") is None
    assert clients.deregister("short") is None
    assert clients.get("long") is None


def test_a_client_that_has_received_everything_starts_over() -> None:
    clients = TapClients(keep_alive_s=10)
    clients.left(enter(clients), lambda: PLACE, 100, done=True)
    assert len(clients) == 0


def test_without_keep_alive_nothing_is_remembered() -> None:
    clients = TapClients(keep_alive_s=0)
    clients.left(enter(clients), lambda: PLACE, 100, done=False)
    assert len(clients) == 0


def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.protocol.tap.clients.CLIENTS_MAX", 3)
    clients = TapClients(keep_alive_s=1000)
    enter(clients, "registered", registered=True)
    for place, name in enumerate(("a", "b")):
        clients.left(enter(clients, name), lambda: PLACE, place, done=False)
    enter(clients, "c", 10)
    assert {client.name for client in clients} == {"registered", "b", "c"}
    enter(clients, "d", 10, registered=True)
    assert {client.name for client in clients} == {"registered", "c", "d"}
    enter(clients, "e", 10, registered=True)
    for name in ("c", "f"):  # nor does one get round it by being known already
        with pytest.raises(TemporaryFailure, match="deregister"):
            enter(clients, name, 10, registered=True)
