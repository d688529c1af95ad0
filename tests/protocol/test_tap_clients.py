"""Names, and how long they are remembered."""

import pytest

from upriver.errors import TemporaryFailure
from upriver.model import StreamPosition
from upriver.protocol import tap_clients
from upriver.protocol.tap_clients import TapClient, TapClients

PLACE = {3: StreamPosition.at(7, 5)}


def enter(
    clients: TapClients, name: str = "n", now: float = 0.0, date: int | None = None, registered: bool = False
) -> TapClient:
    return clients.connected(name, 1, date, now, registered=registered)


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
    clients.left(enter(clients, date=5), PLACE, 100, done=False)
    assert enter(clients, date=5, now=101).positions == PLACE
    assert enter(clients, date=None, now=101).positions == PLACE
    assert enter(clients, date=0, now=101).positions == {}


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
    with pytest.raises(TemporaryFailure, match="deregister"):
        enter(clients, "e", 10, registered=True)
