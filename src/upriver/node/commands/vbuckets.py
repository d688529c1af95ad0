"""Commands for vbuckets: roles, seqnos, failover logs, checkpoints, and registered TAP clients."""

from upriver.engine import Vbucket
from upriver.errors import InvalidArguments, KeyExists, KeyNotFound, NotMyVbucket, StatusError
from upriver.model import VbucketState
from upriver.node.auth.users import Role
from upriver.node.commands.keyvalue import when_all_durable
from upriver.node.commands.registry import ANY_USER, command, success
from upriver.node.session import Answer, Deferred, Session, refusal
from upriver.node.streams.replica_connection import ReplicaConnection
from upriver.protocol import checked_name
from upriver.wire import memcached
from upriver.wire.dialects.memcached import (
    CreateCheckpoint,
    DeleteVbucket,
    DeregisterTapClient,
    FailoverEntry,
    GetAllVbucketSeqnos,
    GetFailoverLog,
    GetVbucket,
    LastClosedCheckpoint,
    SetVbucket,
    VbucketSeqno,
)


def model_state(state: memcached.VbucketState) -> VbucketState:
    """The role for the number in a memcached command."""
    if not state.known:
        raise InvalidArguments(f"unknown vbucket state {int(state)}")
    return VbucketState[state.name]


def wire_state(state: VbucketState) -> memcached.VbucketState:
    """The number of a role in memcached commands."""
    return memcached.VbucketState[state.name]


@command(SetVbucket, role=Role.ADMIN)
def set_vbucket(session: Session, request: SetVbucket) -> Answer:
    """Set the role of a vbucket and respond when it is on disk: a mover relies on a dead vbucket staying dead."""
    node, state = session.node, model_state(request.state)
    vbucket = node.bucket.existing(request.vbucket)
    producer = getattr(session.stream, "producer", None)
    _check_mover(session, vbucket, state)
    if vbucket is None:
        node.bucket.create_vbucket(request.vbucket, state)
    else:
        vbucket.set_state(state)
        if producer is not None and state is VbucketState.DEAD:
            vbucket.confirm_takeover(producer.successor)
    return when_all_durable(session, request, success(request))


def _check_mover(session: Session, vbucket: Vbucket | None, state: VbucketState) -> None:
    """Refuse a role change of a mover that has become wrong.

    A mover's view may be stale, and several movers may work on one vbucket. At the source, a mover may activate only a
    dead copy that was handed over under its own name, and not a copy that replaced a deleted source: the successor has
    everything. It may confirm that a dead source stays dead. At the destination it may confirm an active copy, and
    turn an abandoned pending copy into a replica; any other change belongs to another mover. An operator, whose
    connection was not opened for streams, may do everything.
    """
    stream, now = session.stream, None if vbucket is None else vbucket.state
    producer, activates = getattr(stream, "producer", None), state is VbucketState.ACTIVE
    allowed = True
    if producer is not None and activates:
        allowed = now in (VbucketState.DEAD, VbucketState.ACTIVE)
        if vbucket is not None and not vbucket.may_hand_over_to(producer.successor):
            raise KeyExists(
                f"vbucket {vbucket.number} was already handed over to {vbucket.successor!r}, which may be active now"
            )
    elif producer is not None and state is VbucketState.DEAD:
        allowed = now is VbucketState.DEAD
    elif isinstance(stream, ReplicaConnection):
        allowed = activates is (now is VbucketState.ACTIVE)
    if not allowed:
        why = f"the copy is {now.value if now else 'missing'}, so a mover cannot make it {state.value}"
        raise KeyExists(f"{why}; an operator can, on a connection that was not opened for streams")


@command(DeleteVbucket, role=Role.ADMIN)
def delete_vbucket(session: Session, request: DeleteVbucket) -> Answer:
    """Delete a dead vbucket and its data."""
    vbucket = session.node.bucket.vbucket(request.vbucket)
    if vbucket.state is not VbucketState.DEAD:
        raise InvalidArguments(f"the vbucket is {vbucket.state.value}; make it dead first", vbucket=vbucket.number)
    session.node.bucket.delete_vbucket(request.vbucket)
    return when_all_durable(session, request, success(request))


@command(GetVbucket, role=ANY_USER)
def get_vbucket(session: Session, request: GetVbucket) -> Answer:
    """Return the role of a vbucket."""
    return success(request, state=wire_state(session.node.bucket.vbucket(request.vbucket).state))


@command(GetAllVbucketSeqnos, role=Role.STREAM)
def get_all_vbucket_seqnos(session: Session, request: GetAllVbucketSeqnos) -> Answer:
    """Return the high seqnos of all vbuckets, or of those with one role."""
    session.charge(len(session.node.bucket))
    wanted = None if not request.state else model_state(request.state)
    seqnos = tuple(
        VbucketSeqno(vbucket=vbucket.number, seqno=vbucket.high_seqno)
        for vbucket in session.node.bucket
        if (vbucket.state is wanted if wanted else vbucket.state is not VbucketState.DEAD)
    )
    return success(request, seqnos=seqnos)


@command(GetFailoverLog, role=Role.STREAM)
def get_failover_log(session: Session, request: GetFailoverLog) -> Answer:
    """Return the failover log of a vbucket."""
    log = session.node.bucket.vbucket(request.vbucket).failover_log
    entries = tuple(FailoverEntry(vbucket_uuid=entry.vbucket_uuid, seqno=entry.seqno) for entry in log)
    return success(request, log=entries)


@command(LastClosedCheckpoint, role=Role.STREAM)
def last_closed_checkpoint(session: Session, request: LastClosedCheckpoint) -> Answer:
    """Return the id of the newest closed checkpoint."""
    vbucket = session.node.bucket.vbucket(request.vbucket)
    return success(request, checkpoint=vbucket.checkpoints.last_closed_id)


@command(CreateCheckpoint, role=Role.ADMIN)
def create_checkpoint(session: Session, request: CreateCheckpoint) -> Answer:
    """Close the open checkpoint and open the next."""
    vbucket = session.node.bucket.vbucket(request.vbucket)
    if vbucket.state is not VbucketState.ACTIVE:  # other copies follow their producer
        raise NotMyVbucket(vbucket=vbucket.number)
    opened = vbucket.checkpoints.create()
    return success(request, checkpoint=opened, persisted_checkpoint=vbucket.checkpoints.persisted_id)


@command(DeregisterTapClient, role=Role.STREAM)
def deregister_tap_client(session: Session, request: DeregisterTapClient) -> Answer:
    """Deregister a TAP client."""
    name = checked_name(request.name)
    if session.node.tap is None:
        raise KeyNotFound(f"no TAP client is registered as {name!r}")
    place = Deferred(session.answers)

    def done(error: StatusError | None) -> None:
        place.complete(success(request) if error is None else refusal(request, error))

    session.node.tap.deregister(name, done)
    return place
