"""Users: names, roles and credentials.

The node does not store passwords, only what a SCRAM server needs to check one (RFC 5802, section 3): a salt, an
iteration count and two keys for each hash. PLAIN is checked against the same keys.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from upriver.errors import UserError
from upriver.scram import SCRAM, Credential, ScramError, saslprep

#: Couchbase's default. More would slow down every connect, because clients derive the key each time.
ITERATIONS: Final = 15_000
NAME_BYTES_MAX: Final = 128
PASSWORD_BYTES_MAX: Final = 1024


class Role(enum.Flag):
    """What a user may do: ``Role.READ in user.roles``."""

    READ = 1
    WRITE = 2
    STREAM = 4
    #: Its own bit and all others: an administrator may do everything.
    ADMIN = 15

    @classmethod
    def named(cls, names: Iterable[str]) -> "Role":
        """Combine the roles of these names; at least one is needed."""
        roles = cls(0)
        for name in names:
            if name not in _ROLES:
                raise UserError(f"unknown role {name!r}: choose from {', '.join(_ROLES)}")
            roles |= _ROLES[name]
        if not roles:
            raise UserError(f"no role given: choose from {', '.join(_ROLES)}")
        return roles

    @property
    def names(self) -> list[str]:
        """The names that ``named`` takes."""
        if Role.ADMIN in self:
            return ["admin"]
        return [name for name, role in _ROLES.items() if role in self]


_ROLES = {"read": Role.READ, "write": Role.WRITE, "stream": Role.STREAM, "admin": Role.ADMIN}


@dataclass(frozen=True, slots=True)
class User:
    """A name, its roles, and the credentials that check its password."""

    name: str
    roles: Role
    #: By the RFC name of the mechanism.
    credentials: Mapping[str, Credential] = field(repr=False)

    @classmethod
    def create(
        cls, name: str, password: str, roles: Role, *, iterations: int = ITERATIONS, salt: bytes | None = None
    ) -> "User":
        """Create a user; every mechanism gets its own random salt unless one is given."""
        name = prepared_name(name)
        if not password:
            raise UserError("needs a password that is not empty", name)
        if len(password.encode(errors="surrogatepass")) > PASSWORD_BYTES_MAX:
            raise UserError(f"has a password of more than {PASSWORD_BYTES_MAX} bytes", name)
        try:
            made = {mechanism: Credential.create(mechanism, password, iterations, salt) for mechanism in SCRAM}
        except ScramError as error:
            raise UserError(f"cannot have this password: {error}", name) from None
        return cls(name, roles, made)


def prepared_name(name: str) -> str:
    """Return the one form of a name that has several in Unicode (RFC 4013)."""
    try:
        prepared = saslprep(name)
    except ScramError as error:
        raise UserError(f"cannot have this name: {error}", name) from None
    if not prepared:
        raise UserError("needs a name that is not empty", name)
    if len(prepared.encode()) > NAME_BYTES_MAX:
        raise UserError(f"has a name of more than {NAME_BYTES_MAX} bytes", name[:NAME_BYTES_MAX])
    return prepared
