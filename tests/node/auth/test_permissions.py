"""What a connection may do depends on its user, unless the node has no users."""

import pytest

from upriver.errors import AccessDenied, AuthenticationFailed
from upriver.node.auth.permissions import EVERYTHING, NOTHING, authorize, roles_of
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users

READER = User("reader", Role.READ, {})


def test_without_users_everything_is_allowed() -> None:
    assert roles_of(None, None) == EVERYTHING
    authorize(None, None, Role.ADMIN)


def test_before_the_login_nothing_is_allowed() -> None:
    assert roles_of(None, Users()) == NOTHING
    with pytest.raises(AuthenticationFailed, match="Authenticate first"):
        authorize(None, Users(), Role.READ)


@pytest.mark.parametrize(
    ("role", "lacking"), [(Role.WRITE, "write"), (Role.READ | Role.STREAM, "stream"), (Role.ADMIN, "admin")]
)
def test_a_user_has_its_roles_and_no_others(role: Role, lacking: str) -> None:
    assert roles_of(READER, Users()) == Role.READ
    authorize(READER, Users(), Role.READ)
    with pytest.raises(AccessDenied, match=f"the user reader lacks the role {lacking}"):
        authorize(READER, Users(), role)
