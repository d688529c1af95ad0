"""The table of commands and the decorator that fills it."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from upriver.node.auth.users import Role
from upriver.node.session import Command
from upriver.wire import AnyResponse, Request, Response, memcached

#: The function of each type of request and the role that it needs; None if it needs no login.
COMMANDS: Final[dict[type[Request], tuple[Command, Role | None]]] = {}

#: For commands that need a login but no role.
ANY_USER: Final = Role(0)

C = TypeVar("C", bound=Callable[..., Any])

#: The declared success response of each request: ``GetKResponse`` for ``GetK``.
_ANSWERS: Final[dict[type, type[Response]]] = {
    message: getattr(memcached, f"{message.__name__}Response")
    for message in memcached.memcached.messages
    if issubclass(message, Request) and hasattr(memcached, f"{message.__name__}Response")
}


def command(*requests: type[Request], role: Role | None) -> Callable[[C], C]:
    """Run the decorated function for these requests."""

    def register(function: C) -> C:
        for request in requests:
            assert request not in COMMANDS, f"{request.__name__} already has a command"
            COMMANDS[request] = (function, role)
        return function

    return register


def success(request: Request, **values: Any) -> Response:
    """Return the success response to a request; its declaration says which values it may have."""
    answer = _ANSWERS.get(type(request))
    if answer is None:
        return AnyResponse(opcode=request.code, opaque=request.opaque, **values)
    return answer(opaque=request.opaque, **values)
