"""What the user of a connection may do. Without a users file everything is allowed."""

from typing import Final

from upriver.errors import AccessDenied, AuthenticationFailed
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users

EVERYTHING: Final = Role.READ | Role.WRITE | Role.STREAM | Role.ADMIN
NOTHING: Final = Role(0)
LOG_IN_FIRST: Final = "Authenticate first"


def roles_of(user: User | None, users: Users | None) -> Role:
    """The roles of a connection; ``user`` is None before its login."""
    return EVERYTHING if users is None else NOTHING if user is None else user.roles


def authorize(user: User | None, users: Users | None, role: Role) -> None:
    """Refuse a user who lacks the role."""
    if users is None:
        return
    if user is None:
        raise AuthenticationFailed(LOG_IN_FIRST)
    if role not in user.roles:
        lacking = str((role if role is Role.ADMIN else role & ~user.roles).name).lower()
        raise AccessDenied(f"the user {user.name} lacks the role {lacking}")
