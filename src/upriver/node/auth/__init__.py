"""Authentication: users and their roles, the users file, SASL logins, their queue and their throttle."""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.node.auth.users import Role, User, prepared_name
    from upriver.node.auth.users_file import Users

__all__ = [
    "Role",
    "User",
    "Users",
    "prepared_name",
]

__getattr__ = late_imports(
    __name__,
    users="Role User prepared_name",
    users_file="Users",
)
