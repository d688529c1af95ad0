"""Users for tests, whose passwords are quick to check, and how they log in."""

from pathlib import Path

import pytest
from scramp import ScramClient

from upriver.node.auth.sasl import LoginOutcome, SaslExchange, SaslStatus
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.scram import ITERATIONS_MIN

ALICE = User.create("alice", "wonder land", Role.READ | Role.WRITE, iterations=ITERATIONS_MIN)


def users_with(*members: User) -> Users:
    users = Users()
    for member in members:
        users.add(member)
    return users


@pytest.fixture
def users() -> Users:
    """Alice alone."""
    return users_with(ALICE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where they can be kept."""
    return tmp_path / "users.json"


def log_in(users: Users, mechanism: str, name: str, password: str, spelled: str | None = None) -> LoginOutcome:
    """A whole SCRAM exchange with scramp's client, which also checks the server's proof."""
    client = ScramClient([mechanism], name, password)
    exchange = SaslExchange(users)
    first = exchange.start((spelled or mechanism).encode(), client.get_client_first().encode())
    assert (first.status, first.user) == (SaslStatus.CONTINUE, None)
    client.set_server_first(first.challenge.decode())
    final = exchange.step(client.get_client_final().encode())
    if final.status is SaslStatus.SUCCESS:
        client.set_server_final(final.challenge.decode())
    return final
