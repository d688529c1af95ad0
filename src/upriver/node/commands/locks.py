"""Commands that lock items."""

from upriver.engine import LOCK_TIME_S
from upriver.errors import Locked, NotLocked, TemporaryFailure
from upriver.node.auth.users import Role
from upriver.node.commands.keyvalue import active_vbucket, checked_key, hit
from upriver.node.commands.registry import command, success
from upriver.node.session import Answer, Session
from upriver.wire.dialects.memcached import Feature, GetLocked, Unlock


@command(GetLocked, role=Role.READ | Role.WRITE)
def get_locked(session: Session, request: GetLocked) -> Answer:
    """Read an item and lock it against changes for a while."""
    vbucket = active_vbucket(session, request)
    try:
        item = vbucket.get_and_lock(checked_key(request.key), request.lock_time or LOCK_TIME_S)
    except Locked as error:
        raise _told(session, error) from None
    return hit(session, request, item)


@command(Unlock, role=Role.WRITE)
def unlock(session: Session, request: Unlock) -> Answer:
    """Release a lock before it expires."""
    vbucket = active_vbucket(session, request)
    try:
        vbucket.unlock(checked_key(request.key), request.cas)
    except (Locked, NotLocked) as error:
        raise _told(session, error) from None
    return success(request)


def _told(session: Session, error: Locked | NotLocked) -> Locked | NotLocked | TemporaryFailure:
    """Return the error, or a temporary failure for clients without extended errors."""
    return error if Feature.XERROR in session.features else TemporaryFailure(error.text)
