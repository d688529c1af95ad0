"""Commands that observe whether changes are on disk, and stop or start persistence."""

from upriver.engine import Vbucket
from upriver.errors import InvalidArguments, KeyNotFound, NotMyVbucket, TemporaryFailure
from upriver.model import Event, VbucketState
from upriver.node.auth.users import Role
from upriver.node.commands.registry import command, success
from upriver.node.session import Answer, Deferred, Session, refusal
from upriver.wire import Response
from upriver.wire.dialects.memcached import (
    KeyObservation,
    KeyState,
    Observe,
    ObservedKey,
    ObserveFormat,
    ObserveSeqno,
    SeqnoPersistence,
    StartPersistence,
    StopPersistence,
)

#: How long a client waits for the disk before it gets a temporary failure.
PERSISTENCE_WAIT_S = 30.0
#: The maximum number of keys per request.
OBSERVED_KEYS_MAX = 500


def readable_vbucket(session: Session, number: int) -> Vbucket:
    """Return a vbucket that is not dead."""
    vbucket = session.node.bucket.vbucket(number)
    if vbucket.state is VbucketState.DEAD:
        raise NotMyVbucket(vbucket=number)
    return vbucket


@command(Observe, role=Role.READ)
def observe(session: Session, request: Observe) -> Answer:
    """Return whether keys exist and whether they are on disk."""
    if len(request.keys) > OBSERVED_KEYS_MAX:
        raise InvalidArguments(f"{len(request.keys)} keys in one request; send at most {OBSERVED_KEYS_MAX}")
    session.charge(len(request.keys))
    return success(request, keys=tuple(_observed(session, key) for key in request.keys))


def _observed(session: Session, asked: ObservedKey) -> KeyObservation:
    vbucket = readable_vbucket(session, asked.vbucket)
    state, cas = KeyState.NOT_FOUND, 0
    item = vbucket.newest(asked.key)
    if item is not None:
        persisted = item.seqno <= vbucket.persisted_seqno
        if item.event == Event.MUTATION:
            state = KeyState.PERSISTED if persisted else KeyState.FOUND
        else:
            state = KeyState.NOT_FOUND if persisted else KeyState.LOGICALLY_DELETED
        cas = item.cas
    return KeyObservation(vbucket=asked.vbucket, key=asked.key, state=state, cas=cas)


@command(ObserveSeqno, role=Role.READ)
def observe_seqno(session: Session, request: ObserveSeqno) -> Answer:
    """Return the seqnos of a vbucket and, for an older branch, its last seqno."""
    vbucket = readable_vbucket(session, request.vbucket)
    log = vbucket.failover_log
    place = log.index(request.vbucket_uuid)
    if place is None:
        raise KeyNotFound(f"the vbucket has no branch with the uuid 0x{request.vbucket_uuid:x}", vbucket=vbucket.number)
    failed_over = {
        "format": ObserveFormat.FAILED_OVER,
        "old_vbucket_uuid": request.vbucket_uuid,
        "last_seqno": log.upper(place, vbucket.high_seqno),
    }
    return success(
        request,
        vbucket=vbucket.number,
        vbucket_uuid=log.newest.vbucket_uuid,
        persisted_seqno=vbucket.persisted_seqno,
        current_seqno=vbucket.high_seqno,
        **(failed_over if place else {}),
    )


@command(SeqnoPersistence, role=Role.READ)
def seqno_persistence(session: Session, request: SeqnoPersistence) -> Answer:
    """Wait until a seqno is on disk, even one that has not arrived yet: a mover asks before the last changes."""
    vbucket, node = readable_vbucket(session, request.vbucket), session.node
    if vbucket.persisted_seqno >= request.seqno:
        return success(request)
    if session.disk_waits >= node.limits.disk_waits_max:
        raise TemporaryFailure(
            f"this connection already has {session.disk_waits} waits for the disk; wait for one to end"
        )
    place, scheduler, flusher = Deferred(session.answers), node.scheduler, node.bucket.flusher
    session.disk_waits += 1

    def end(answer: Response) -> None:
        if not place.ended:
            session.disk_waits -= 1
            timer.cancel()
            waits.pop().cancel()
            place.complete(answer)

    def refuse(why: str) -> None:
        end(refusal(request, TemporaryFailure(why, vbucket=vbucket.number)))

    def look() -> None:
        """A wait also ends when history is cut, as in a new vbucket; the seqno may still come."""
        if node.bucket.existing(vbucket.number) is not vbucket:
            end(refusal(request, NotMyVbucket(vbucket=vbucket.number)))
        elif vbucket.persisted_seqno >= request.seqno:
            end(success(request))
        elif not place.ended:
            waits[:] = [flusher.when_persisted(vbucket, request.seqno, told)]

    def told() -> None:
        scheduler.from_thread(look)

    timer = scheduler.later(PERSISTENCE_WAIT_S, lambda: refuse(f"not on disk within {PERSISTENCE_WAIT_S:g} s"))
    place.give_up = lambda: refuse("not on disk yet")
    waits = [flusher.when_persisted(vbucket, request.seqno, told)]
    return place


@command(StopPersistence, role=Role.ADMIN)
def stop_persistence(session: Session, request: StopPersistence) -> Answer:
    """Stop writing to disk; changes stay in memory."""
    flusher = session.node.bucket.flusher
    if not flusher.running:
        raise InvalidArguments("persistence is already stopped")
    flusher.stop()
    return success(request)


@command(StartPersistence, role=Role.ADMIN)
def start_persistence(session: Session, request: StartPersistence) -> Answer:
    """Write to disk again, starting with the pending changes."""
    flusher = session.node.bucket.flusher
    if flusher.running:
        raise InvalidArguments("persistence is running: stop it first")
    flusher.start()
    return success(request)
