"""Commands for the connection: hello, login, noop, quit."""

import json
from collections.abc import Callable
from typing import Final

from upriver.errors import AuthenticationFailed, KeyNotFound, StatusError
from upriver.node.auth.login_queue import take_new_users
from upriver.node.auth.sasl import MECHANISMS, LoginOutcome, SaslExchange, SaslStatus
from upriver.node.auth.users import User
from upriver.node.commands.registry import ANY_USER, command, success
from upriver.node.session import Answer, Deferred, Session, refusal
from upriver.wire import Response, Status
from upriver.wire.dialects.memcached import (
    Feature,
    GetErrorMap,
    Hello,
    Noop,
    Quit,
    QuitQ,
    SaslAuth,
    SaslListMechanisms,
    SaslStep,
    Verbosity,
    Version,
)

#: The features that the node implements.
GRANTED: Final = frozenset(
    {Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON, Feature.MUTATION_SEQNO, Feature.UPRIVER}
)
ERROR_MAP_VERSION: Final = 1
#: The attributes of each status in the error map.
_ATTRIBUTES: Final = {
    Status.KEY_ENOENT: ("item-only",),
    Status.KEY_EEXISTS: ("item-only",),
    Status.E2BIG: ("item-only", "invalid-input"),
    Status.EINVAL: ("invalid-input", "internal"),
    Status.NOT_STORED: ("item-only",),
    Status.DELTA_BADVAL: ("item-only", "invalid-input"),
    Status.NOT_MY_VBUCKET: ("fetch-config",),
    Status.NO_BUCKET: ("conn-state-invalidated",),
    Status.LOCKED: ("item-only", "item-locked", "retry-later"),
    Status.NOT_LOCKED: ("item-only",),
    Status.AUTH_ERROR: ("auth", "conn-state-invalidated"),
    Status.AUTH_CONTINUE: ("auth", "special-handling"),
    Status.ERANGE: ("invalid-input", "dcp"),
    Status.ROLLBACK: ("dcp", "special-handling"),
    Status.EACCESS: ("support", "auth"),
    Status.UNKNOWN_COMMAND: ("support",),
    Status.ENOMEM: ("temp", "retry-later"),
    Status.NOT_SUPPORTED: ("support",),
    Status.EINTERNAL: ("internal",),
    Status.EBUSY: ("temp", "retry-later"),
    Status.ETMPFAIL: ("temp", "retry-later"),
    Status.SYNC_WRITE_AMBIGUOUS: ("item-only",),
}


@command(Hello, role=None)
def hello(session: Session, request: Hello) -> Answer:
    """Grant the implemented features, each once, in the order of the request."""
    session.agent = request.agent.decode(errors="replace")[:250]
    wanted = dict.fromkeys(feature for feature in request.features if feature in GRANTED)
    session.features = frozenset(wanted)
    return success(request, features=tuple(wanted))


@command(Noop, role=ANY_USER)
def noop(session: Session, request: Noop) -> Answer:  # noqa: ARG001
    """Respond in order, so that a client knows that earlier requests are done."""
    return success(request)


@command(Version, role=ANY_USER)
def version(session: Session, request: Version) -> Answer:
    """Return the version of Upriver."""
    return success(request, version=session.node.version.encode())


@command(Verbosity, role=ANY_USER)
def verbosity(session: Session, request: Verbosity) -> Answer:  # noqa: ARG001
    """Accept and ignore: clients cannot change the node's log."""
    return success(request)


@command(Quit, role=None)
def quit_(session: Session, request: Quit) -> Answer:
    """Respond, then close."""
    session.closing = True
    return success(request)


@command(QuitQ, role=None)
def quit_quietly(session: Session, request: QuitQ) -> Answer:  # noqa: ARG001
    """Close without a response."""
    session.closing = True
    return None


@command(SaslListMechanisms, role=None)
def sasl_list_mechanisms(session: Session, request: SaslListMechanisms) -> Answer:
    """Return the login mechanisms."""
    # Without users any login succeeds, and SCRAM would have nothing to prove.
    return success(request, mechanisms=b"PLAIN" if session.node.users is None else MECHANISMS.encode())


@command(SaslAuth, role=None)
def sasl_auth(session: Session, request: SaslAuth) -> Answer:
    """Start a login; an earlier login of the connection ends, and with it what runs under its roles."""
    node = session.node
    if node.users is None:
        return success(request)  # no login is needed here
    take_new_users(node, node.users)
    session.log_out()
    exchange = session.exchange = SaslExchange(node.users)
    return _attempt(session, request, lambda: exchange.start(request.mechanism, request.value))


@command(SaslStep, role=None)
def sasl_step(session: Session, request: SaslStep) -> Answer:
    """Continue the login of the connection."""
    exchange = session.exchange
    if exchange is None:
        raise AuthenticationFailed("no login is in progress")
    return _attempt(session, request, lambda: exchange.step(request.value))


def _attempt(session: Session, request: SaslAuth, work: Callable[[], LoginOutcome]) -> Answer:
    """Run a step of a login in its turn, after the delay for earlier failures, and before later requests.

    It runs in a thread, because hashing a password takes milliseconds.
    """
    node, place = session.node, Deferred(session.answers)
    session.logging_in = True

    def finished(outcome: LoginOutcome) -> None:
        _count(session, outcome)  # even if the peer is gone: a guess counts
        if not place.ended:
            session.logging_in = False
            place.complete(_outcome(session, request, outcome))

    def give_up() -> None:
        node.logins.leave(node, attempt)
        session.logging_in, session.exchange = False, None
        place.fail(request, AuthenticationFailed("the connection is being closed"))

    place.give_up = give_up
    attempt = node.logins.enter(node, _host(session), work, finished)
    return place


def _count(session: Session, outcome: LoginOutcome) -> None:
    node = session.node
    if outcome.status is SaslStatus.SUCCESS:
        node.throttle.succeeded(_host(session))
    elif outcome.status is SaslStatus.FAILED:
        node.counters.logins_failed += 1
        node.throttle.failed(_host(session), node.ticks())
        session.log.warning("login of %r failed: %s", outcome.name, outcome.why)


def _outcome(session: Session, request: SaslAuth, outcome: LoginOutcome) -> Response:
    if outcome.status is SaslStatus.CONTINUE:
        return success(request, status=Status.AUTH_CONTINUE, value=outcome.challenge)
    session.exchange = None
    user = None if outcome.user is None else _as_of_now(session, outcome.user)
    if user is None:
        return refusal(request, AuthenticationFailed())
    session.user = user
    return success(request, value=outcome.challenge)


def _as_of_now(session: Session, verified: User) -> User | None:
    """The user that was verified in a thread, as the users file has it now; None if it was removed or changed."""
    users = session.node.users
    user = None if users is None else users.get(verified.name)
    return None if user is None or user.credentials != verified.credentials else user


def _host(session: Session) -> str:
    return session.peer.rpartition(":")[0]


@command(GetErrorMap, role=None)
def get_error_map(session: Session, request: GetErrorMap) -> Answer:  # noqa: ARG001
    """Return the meaning of each status and whether a retry helps."""
    if request.version < ERROR_MAP_VERSION:
        raise KeyNotFound(f"the error map has no version {request.version}; request {ERROR_MAP_VERSION} or later")
    errors = {
        f"{int(status):x}": {
            "name": status.name,
            "desc": StatusError.of(status).text,
            "attrs": _ATTRIBUTES[status],
        }
        for status in Status
        if status is not Status.SUCCESS
    }
    encoded = json.dumps({"version": ERROR_MAP_VERSION, "revision": 1, "errors": errors})
    return success(request, error_map=encoded.encode())
