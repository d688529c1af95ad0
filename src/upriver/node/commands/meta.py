"""Commands that read and write items with the revision and CAS of another node."""

from typing import Any

from upriver.errors import InvalidArguments
from upriver.model import Event
from upriver.node.auth.users import Role
from upriver.node.commands.keyvalue import active_vbucket, checked_key, written
from upriver.node.commands.registry import command, success
from upriver.node.session import Answer, Session
from upriver.wire.dialects.memcached import (
    DeleteQWithMeta,
    DeleteWithMeta,
    GetMeta,
    MetaOption,
    SetQWithMeta,
    SetWithMeta,
)


@command(GetMeta, role=Role.READ)
def get_meta(session: Session, request: GetMeta) -> Answer:
    """Return the metadata of a key, deleted or not."""
    item = active_vbucket(session, request).get_meta(checked_key(request.key))
    values: dict[str, Any] = {
        "deleted": int(item.event != Event.MUTATION),
        "flags": item.flags,
        "expiration": item.expiry,
        "rev_seqno": item.rev_seqno,
        "cas": item.cas,
    }
    if request.version == 2:
        values["item_datatype"] = item.datatype
    return success(request, **values)


@command(SetWithMeta, SetQWithMeta, role=Role.WRITE)
def set_with_meta(session: Session, request: SetWithMeta) -> Answer:
    """Store a version of another node, unless conflict resolution prefers ours."""
    vbucket, options = active_vbucket(session, request), request.options or MetaOption(0)
    cas, seqno = vbucket.set_with_meta(
        checked_key(request.key),
        request.value,
        cas=_cas(session, request, options),
        rev_seqno=request.rev_seqno,
        flags=request.flags,
        expiry=request.expiration,
        datatype=request.datatype,
        expected_cas=request.cas,
        force=bool(options & MetaOption.SKIP_CONFLICT_RESOLUTION),
    )
    return written(session, request, vbucket, cas, seqno)


@command(DeleteWithMeta, DeleteQWithMeta, role=Role.WRITE)
def delete_with_meta(session: Session, request: DeleteWithMeta) -> Answer:
    """Apply a deletion of another node, unless conflict resolution prefers our version."""
    vbucket, options = active_vbucket(session, request), request.options or MetaOption(0)
    cas, seqno = vbucket.delete_with_meta(
        checked_key(request.key),
        cas=_cas(session, request, options),
        rev_seqno=request.rev_seqno,
        expiry=request.expiration,
        expected_cas=request.cas,
        force=bool(options & MetaOption.SKIP_CONFLICT_RESOLUTION),
        event=Event.EXPIRATION if options & MetaOption.DELETE_IS_EXPIRATION else Event.DELETION,
    )
    return written(session, request, vbucket, cas, seqno)


def _cas(session: Session, request: SetWithMeta | DeleteWithMeta, options: MetaOption) -> int:
    if options & MetaOption.REGENERATE_CAS:
        if not options & MetaOption.SKIP_CONFLICT_RESOLUTION:
            raise InvalidArguments("REGENERATE_CAS needs SKIP_CONFLICT_RESOLUTION")
        return session.node.bucket.ledger.next_cas(session.node.clock())
    return request.item_cas
