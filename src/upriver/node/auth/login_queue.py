"""A queue of logins: one attempt per network at a time; and changes of users on open connections.

Theory of operation. A delay after a failure is useless if a peer can make a thousand attempts over as many connections
before the first has failed. So the attempts of one network wait in a queue, and the delay of each is computed when the
one before it has ended. A peer that disconnects loses its place, but an attempt that is already running counts.

Changes to the users file apply to open connections: roles change at once, and a user who was removed or got another
password is disconnected. So is a connection with streams whose user loses a role: streams do not outlive the roles
under which they began.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upriver.errors import UsersFileError
from upriver.node.auth.login_throttle import network_of
from upriver.node.auth.sasl import LoginOutcome, SaslStatus
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users

if TYPE_CHECKING:
    from upriver.node.session import Session
    from upriver.node.state import NodeState, Timer


@dataclass(slots=True, eq=False)
class Attempt:
    """One message of a login, from its arrival to its outcome."""

    network: str
    work: Callable[[], LoginOutcome]
    done: Callable[[LoginOutcome], object]
    timer: "Timer | None" = None
    #: It runs and can no longer be cancelled.
    running: bool = False


class LoginQueue:
    """The pending attempts, by network."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Attempt]] = {}

    def __len__(self) -> int:
        """The number of pending attempts."""
        return sum(map(len, self._lines.values()))

    def enter(
        self, node: "NodeState", peer: str, work: Callable[[], LoginOutcome], done: Callable[[LoginOutcome], object]
    ) -> Attempt:
        """Add an attempt; its work runs in a thread when it is its turn, and ``done`` gets the outcome."""
        attempt = Attempt(network_of(peer), work, done)
        line = self._lines.setdefault(attempt.network, deque())
        line.append(attempt)
        if len(line) == 1:
            self._look_at(node, attempt)
        return attempt

    def leave(self, node: "NodeState", attempt: Attempt) -> None:
        """Cancel an attempt, unless it runs."""
        line = self._lines.get(attempt.network)
        if attempt.running or line is None or attempt not in line:
            return
        first = line[0] is attempt
        if attempt.timer is not None:
            attempt.timer.cancel()
        line.remove(attempt)
        if first:
            self._next(node, attempt.network)

    def _look_at(self, node: "NodeState", attempt: Attempt) -> None:
        delay_s = node.throttle.delay_s(attempt.network, node.ticks())
        if delay_s > 0:
            attempt.timer = node.scheduler.later(delay_s, lambda: self._run(node, attempt))
        else:
            self._run(node, attempt)

    def _run(self, node: "NodeState", attempt: Attempt) -> None:
        attempt.running = True

        def guarded() -> LoginOutcome:
            try:
                return attempt.work()
            except Exception:  # an internal error must not block the queue
                node.log.exception("a login failed")
                return LoginOutcome(SaslStatus.FAILED, why="internal error")

        node.scheduler.beside(guarded, lambda outcome: self._decided(node, attempt, outcome))

    def _decided(self, node: "NodeState", attempt: Attempt, outcome: LoginOutcome) -> None:
        try:
            attempt.done(outcome)
        finally:
            self._lines[attempt.network].popleft()
            self._next(node, attempt.network)

    def _next(self, node: "NodeState", network: str) -> None:
        line = self._lines[network]
        if line:
            self._look_at(node, line[0])
        else:
            del self._lines[network]


def take_new_users(node: "NodeState", users: Users) -> None:
    """Read the users file again if it changed, and apply the changes to open connections."""
    try:
        changed = users.reload_if_changed()
    except UsersFileError as error:
        node.log.error("%s; the node keeps the users that it has", error)
        return
    if not changed:
        return
    for connection in list(node.connections):
        session = connection.session
        if session is None or session.user is None:
            continue
        before, session.user = session.user, users.get(session.user.name)
        why = _why_not(session, before)
        if why:
            session.end_stream()
            connection.dismiss(why)


def _why_not(session: "Session", before: User) -> str:
    """Why the connection has to be closed; empty if it can stay."""
    if session.user is None:
        return f"user {before.name} was removed"
    if session.user.credentials != before.credentials:
        return f"the password of user {before.name} was changed"
    roles = session.user.roles
    if session.stream is not None and before.roles not in roles:
        return f"the roles of user {before.name} were {_text(before.roles)} and are {_text(roles)} now"
    return ""


def _text(roles: Role) -> str:
    return ", ".join(roles.names)
