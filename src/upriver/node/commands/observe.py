"""Is a change replicated, is it on disk? And persistence itself."""

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

#: How long a client may wait for the disk before it is told to try again.
PERSISTENCE_WAIT_S = 30.0
#: How many keys one request may ask for.
OBSERVED_KEYS_MAX = 500


def living_vbucket(session: Session, number: int) -> Vbucket:
    """A vbucket that can be looked at: active or a copy, but not dead."""
    vbucket = session.node.bucket.vbucket(number)
    if vbucket.state is VbucketState.DEAD:
        raise NotMyVbucket(vbucket=number)
    return vbucket


@command(Observe, role=Role.READ)
def observe(session: Session, request: Observe) -> Answer:
    """Whether keys are here, and whether they are on disk."""
    if len(request.keys) > OBSERVED_KEYS_MAX:
        raise InvalidArguments(f"{len(request.keys)} keys: ask for at most {OBSERVED_KEYS_MAX} at once")
    session.charge(len(request.keys))
    return success(request, keys=tuple(_observed(session, key) for key in request.keys))


def _observed(session: Session, asked: ObservedKey) -> KeyObservation:
    vbucket = living_vbucket(session, asked.vbucket)
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
    """How far the vbucket is; for a branch that was left, also how far that went."""
    vbucket = living_vbucket(session, request.vbucket)
    log = vbucket.failover_log
    place = log.index(request.vbucket_uuid)
    if place is None:
        raise KeyNotFound(f"no branch has the uuid 0x{request.vbucket_uuid:x}", vbucket=vbucket.number)
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
    """Wait also for what is not here yet: whoever moves a vbucket asks before the last changes have arrived."""
    vbucket, node = living_vbucket(session, request.vbucket), session.node
    if vbucket.persisted_seqno >= request.seqno:
        return success(request)
    if session.disk_waits >= node.limits.disk_waits_max:
        raise TemporaryFailure(f"{session.disk_waits} waits for the disk are under way on this connection")
    place, scheduler, flusher = Deferred(session), node.scheduler, node.bucket.flusher
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
        """A wait ends also when the history is cut, as a new vbucket's is at first: the seqno is then still to come."""
        if node.bucket.existing(vbucket.number) is not vbucket:
            end(refusal(request, NotMyVbucket(vbucket=vbucket.number)))
        elif vbucket.persisted_seqno >= request.seqno:
            end(success(request))
        elif not place.ended:
            waits[:] = [flusher.when_persisted(vbucket, request.seqno, told)]

    def told() -> None:
        scheduler.from_thread(look)

    timer = scheduler.later(PERSISTENCE_WAIT_S, lambda: refuse("not on disk in time"))
    place.give_up = lambda: refuse("not on disk yet")
    waits = [flusher.when_persisted(vbucket, request.seqno, told)]
    return place


@command(StopPersistence, role=Role.ADMIN)
def stop_persistence(session: Session, request: StopPersistence) -> Answer:
    """Keep changes in memory until told otherwise."""
    flusher = session.node.bucket.flusher
    if not flusher.running:
        raise InvalidArguments("persistence is stopped already")
    flusher.stop()
    return success(request)


@command(StartPersistence, role=Role.ADMIN)
def start_persistence(session: Session, request: StartPersistence) -> Answer:
    """Write to disk again, first what has gathered."""
    flusher = session.node.bucket.flusher
    if flusher.running:
        raise InvalidArguments("persistence is not stopped")
    flusher.start()
    return success(request)
