"""The table of commands and the decorator that fills it."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from upriver.node.auth.users import Role
from upriver.node.session import Command
from upriver.wire import AnyResponse, Request, Response, memcached

#: What runs for each type of request, and the role that it needs; None for what everybody may do.
COMMANDS: Final[dict[type[Request], tuple[Command, Role | None]]] = {}

#: For what every user may do, whatever his roles are, once he has authenticated.
ANY_USER: Final = Role(0)

C = TypeVar("C", bound=Callable[..., Any])

#: The declared success answer of each request: ``GetKResponse`` for ``GetK``.
_ANSWERS: Final[dict[type, type[Response]]] = {
    message: getattr(memcached, f"{message.__name__}Response")
    for message in memcached.memcached.messages
    if issubclass(message, Request) and hasattr(memcached, f"{message.__name__}Response")
}


def command(*requests: type[Request], role: Role | None) -> Callable[[C], C]:
    """Run the decorated function for these requests."""

    def register(function: C) -> C:
        for request in requests:
            assert request not in COMMANDS, f"{request.__name__} has a command already"
            COMMANDS[request] = (function, role)
        return function

    return register


def success(request: Request, **values: Any) -> Response:
    """The answer to a request that succeeded; what it may hold follows from the declaration."""
    answer = _ANSWERS.get(type(request))
    if answer is None:
        return AnyResponse(opcode=request.code, opaque=request.opaque, **values)
    return answer(opaque=request.opaque, **values)
