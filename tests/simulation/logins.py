"""The users of the simulated machines, and what the operator has made of their roles."""

from typing import Final

from upriver.node.auth.login_throttle import LoginThrottle
from upriver.node.auth.permissions import NOTHING
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.session import Session
from upriver.wire.dialects.memcached import SaslAuth

STREAMER, MOVER, READER, WRITER = "streamer", "mover", "reader", "writer"
PASSWORD: Final = "secret"
ROLES: Final = {
    STREAMER: Role.STREAM,
    MOVER: Role.ADMIN,
    READER: Role.READ,
    WRITER: Role.READ | Role.WRITE,
}
#: What is left of the roles of those that lose some.
REDUCED: Final = {STREAMER: Role.READ, MOVER: Role.STREAM}
#: No simulated login waits for those that failed before.
NO_THROTTLE: Final = LoginThrottle(first_s=0, longest_s=0)


class SimulatedUsers(Users):
    """The users of one machine. They survive a restart, and the machine notices a change when it looks."""

    def __init__(self) -> None:
        super().__init__(decoy_key=bytes(32))
        self._is_changed = False
        for name, roles in ROLES.items():
            self.add(User(name, roles, {}))

    def change(self, name: str, what: str) -> None:
        """An operator has *removed* a user, *reduced* its roles, or *restored* them."""
        if what != "removed":
            self.add(User(name, REDUCED[name] if what == "reduced" else ROLES[name], {}), replace=True)
        elif name in self:
            self.remove(name)
        self._is_changed = True

    def roles_of(self, name: str) -> Role:
        """The roles that the operator has given."""
        user = self.get(name)
        return NOTHING if user is None else user.roles

    def reload_if_changed(self) -> bool:
        """Whether an operator has changed something since the last look."""
        changed, self._is_changed = self._is_changed, False
        return changed

    def verify_plain(self, name: str, password: str) -> User | None:
        """Without a hash: it would take most of the time, and decides nothing here."""
        return self.get(name) if password == PASSWORD else None


def log_in(session: Session, name: str, password: str = PASSWORD) -> None:
    """Send a login; its outcome is there when the machine has had a turn."""
    session.receive(SaslAuth(mechanism=b"PLAIN", value=f"\0{name}\0{password}".encode()).encode())
