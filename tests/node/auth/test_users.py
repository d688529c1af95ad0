"""Users and roles."""

import pytest

from tests.support.sample_users import ALICE, users_with
from upriver.errors import UserError
from upriver.node.auth.users import NAME_BYTES_MAX, PASSWORD_BYTES_MAX, Role, User, prepared_name


def test_roles() -> None:
    assert all(role in Role.ADMIN for role in (Role.READ, Role.WRITE, Role.STREAM, Role.ADMIN))
    assert Role.ADMIN not in Role.READ | Role.WRITE | Role.STREAM
    assert Role.WRITE not in Role.READ | Role.STREAM
    assert Role.named(["stream", "read"]) == Role.READ | Role.STREAM
    assert Role.named(["stream", "read"]).names == ["read", "stream"]
    assert Role.named(["read", "admin"]).names == ["admin"]


@pytest.mark.parametrize("names", [["root"], ["read", "Write"], [""], []])
def test_unknown_roles(names: list[str]) -> None:
    with pytest.raises(UserError, match="choose from read, write, stream, admin"):
        Role.named(names)


def test_a_user_keeps_no_password_and_prints_no_keys() -> None:
    assert repr(ALICE) == "User(name='alice', roles=<Role.READ|WRITE: 3>)"
    kept = ALICE.credentials.values()
    assert len({credential.salt for credential in kept}) == 3
    assert not any(b"wonder" in part for c in kept for part in (c.salt, c.stored_key, c.server_key))


@pytest.mark.parametrize(
    ("name", "password", "why"),
    [
        ("", "secret", "not empty"),
        ("\u00ad", "secret", "not empty"),
        ("bob\n", "secret", "control characters"),
        ("n" * (NAME_BYTES_MAX + 1), "secret", "more than 128 bytes"),
        ("bob", "", "password that is not empty"),
        ("bob", "se\0cret", "cannot have this password: control characters"),
        ("bob", "\udc80", "cannot have this password: surrogate"),
        ("bob", "p" * (PASSWORD_BYTES_MAX + 1), "more than 1024 bytes"),
    ],
)
def test_users_that_cannot_be(name: str, password: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as raised:
        User.create(name, password, Role.READ)
    assert "secret" not in str(raised.value)


def test_a_name_has_one_form() -> None:
    """RFC 4013, section 3: compatibility forms and soft hyphens are mapped away."""
    assert prepared_name("I\u00adX") == prepared_name("\u2168") == "IX"
    users = users_with(User("IX", Role.READ, ALICE.credentials))
    assert "\u2168" in users
    users.remove("I\u00adX")
    assert len(users) == 0
