"""Commands that read and write items, as memcached has them."""

from typing import Any, Final

from upriver.engine import StoredItem, Vbucket, not_on_disk
from upriver.engine.table import KEY_BYTES_MAX, RELATIVE_EXPIRY_S_MAX
from upriver.errors import (
    DurabilityAmbiguous,
    InvalidArguments,
    KeyNotFound,
    StatusError,
    StorageError,
    TemporaryFailure,
)
from upriver.model import plain
from upriver.node.auth.users import Role
from upriver.node.commands.registry import command, success
from upriver.node.session import Answer, Deferred, Session, refusal
from upriver.wire import Request, Response
from upriver.wire.dialects.memcached import (
    Add,
    AddQ,
    Append,
    AppendQ,
    Decrement,
    DecrementQ,
    Delete,
    DeleteQ,
    DeleteQWithMeta,
    Feature,
    Flush,
    FlushQ,
    Gat,
    GatQ,
    Get,
    GetK,
    GetKQ,
    GetQ,
    Increment,
    IncrementQ,
    Prepend,
    PrependQ,
    Replace,
    ReplaceQ,
    Set,
    SetQ,
    SetQWithMeta,
    Touch,
)

#: The pause before a delayed flush is retried after a failed write.
FLUSH_RETRY_S: Final = 1.0
#: An increment with this expiration does not create the number.
NO_CREATE: Final = 0xFFFFFFFF
QUIET_MISS: Final = (GetQ, GetKQ, GatQ)
QUIET_SUCCESS: Final = (
    SetQ, AddQ, ReplaceQ, DeleteQ, IncrementQ, DecrementQ, AppendQ, PrependQ, FlushQ, SetQWithMeta, DeleteQWithMeta,
)  # fmt: skip


def active_vbucket(session: Session, request: Request) -> Vbucket:
    """Return the vbucket of a request; its operations check its role."""
    return session.node.bucket.vbucket(request.vbucket)


def checked_key(key: bytes) -> bytes:
    """Check the length of a key."""
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise InvalidArguments(f"a key must have 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")
    return key


def written(session: Session, request: Request, vbucket: Vbucket, cas: int, seqno: int, **values: Any) -> Answer:
    """Return the response to a write: at once, or with ``ack=disk`` when the change is on disk."""
    token: dict[str, Any] = {}
    if Feature.MUTATION_SEQNO in session.features:
        token = {"vbucket_uuid": vbucket.failover_log.newest.vbucket_uuid, "seqno": seqno}
    elif isinstance(request, Delete):
        cas = 0  # memcached's tools expect none
    if isinstance(request, Touch):
        token = {}
    answer = None if isinstance(request, QUIET_SUCCESS) else success(request, cas=cas, **token, **values)
    return when_durable(session, request, vbucket, seqno, answer)


def when_durable(
    session: Session,
    request: Request,
    vbucket: Vbucket,
    seqno: int,
    answer: Response | None,
    failure: StatusError | None = None,
) -> Answer:
    """Hold the response back until the change is as durable as ``ack`` demands.

    If the disk fails, refuse the request with ``failure``, or with the error that says what is known of the change.
    """
    bucket, soon = session.node.bucket, session.node.scheduler.from_thread
    if bucket.ack == "memory":
        return answer
    place = Deferred(session.answers)
    answers = () if answer is None else (answer,)
    bucket.acknowledge(
        vbucket,
        seqno,
        lambda: soon(lambda: place.complete(*answers)),
        lambda error: soon(lambda: place.fail(request, failure or error)),
    )
    return place


def refused_when_durable(session: Session, request: Request, key: bytes, error: StatusError) -> Answer:
    """Refuse a write because of the newest version of its key, once that is as durable as ``ack`` demands.

    A client repeats a write whose outcome it does not know, and may meet its own first attempt. If it were told at once
    that the key exists, or is gone, it would rely on a change that a crash can still undo.
    """
    vbucket = active_vbucket(session, request)
    newest = vbucket.newest(key)
    if newest is None or newest.seqno <= vbucket.persisted_seqno:
        raise error
    why = f"{error.detail or error.text}, but the newest version of the key is not on disk yet: retry later"
    return when_durable(
        session, request, vbucket, newest.seqno, refusal(request, error), TemporaryFailure(why, vbucket=vbucket.number)
    )


def when_all_durable(
    session: Session, request: Request, answer: Response | None, failure: type[StatusError] = TemporaryFailure
) -> Answer:
    """Hold the response back until all earlier changes are on disk; if the disk fails, refuse it with ``failure``."""
    place, soon = Deferred(session.answers), session.node.scheduler.from_thread
    answers = () if answer is None else (answer,)

    def failed(error: StorageError) -> None:
        soon(lambda: place.fail(request, failure(not_on_disk(error))))

    session.node.bucket.flusher.barrier(lambda: soon(lambda: place.complete(*answers)), failed)
    return place


@command(Get, GetQ, GetK, GetKQ, role=Role.READ)
def get(session: Session, request: Get) -> Answer:
    """Return a value; the quiet forms send nothing for a missing key."""
    key = checked_key(request.key)
    try:
        item = active_vbucket(session, request).get(key)
    except KeyNotFound as error:
        return _miss(request, error)
    return hit(session, request, item)


def hit(session: Session, request: Request, item: StoredItem) -> Response:
    """Return the response with an item, decompressed unless the client has agreed on compression."""
    values: dict[str, Any] = {
        "flags": item.flags,
        "value": plain(item.value, item.datatype & ~session.datatypes),
        "cas": item.cas,
        "datatype": item.datatype & session.datatypes,
    }
    if isinstance(request, GetK | GetKQ):
        values["key"] = request.key
    return success(request, **values)


def _miss(request: Request, error: StatusError) -> Answer:
    if isinstance(request, QUIET_MISS):
        return None
    answer = refusal(request, error)
    if isinstance(request, GetK):
        answer.key = request.key
    return answer


@command(Set, SetQ, Replace, ReplaceQ, role=Role.WRITE)
def set_(session: Session, request: Set) -> Answer:
    """Store a value, or replace one; with a CAS only that version."""
    vbucket = active_vbucket(session, request)
    operation = vbucket.replace if isinstance(request, Replace | ReplaceQ) else vbucket.set
    cas, seqno = operation(
        checked_key(request.key),
        request.value,
        request.flags,
        request.expiration,
        request.cas,
        request.datatype,
    )
    return written(session, request, vbucket, cas, seqno)


@command(Add, AddQ, role=Role.WRITE)
def add(session: Session, request: Add) -> Answer:
    """Store a value if the key does not exist; with a CAS it replaces that version, as in memcached."""
    if request.cas:
        return set_(session, request)
    vbucket = active_vbucket(session, request)
    cas, seqno = vbucket.add(
        checked_key(request.key),
        request.value,
        request.flags,
        request.expiration,
        request.datatype,
    )
    return written(session, request, vbucket, cas, seqno)


@command(Delete, DeleteQ, role=Role.WRITE)
def delete(session: Session, request: Delete) -> Answer:
    """Delete a key; with a CAS only that version."""
    vbucket = active_vbucket(session, request)
    cas, seqno = vbucket.delete(checked_key(request.key), request.cas)
    return written(session, request, vbucket, cas, seqno)


@command(Increment, IncrementQ, Decrement, DecrementQ, role=Role.WRITE)
def count(session: Session, request: Increment) -> Answer:
    """Increment or decrement a number; create it unless the request forbids that."""
    vbucket = active_vbucket(session, request)
    operation = vbucket.decrement if isinstance(request, Decrement | DecrementQ) else vbucket.increment
    initial, expiry = (None, 0) if request.expiration == NO_CREATE else (request.initial, request.expiration)
    number, cas, seqno = operation(checked_key(request.key), request.delta, initial, expiry, request.cas)
    return written(session, request, vbucket, cas, seqno, number=number)


@command(Append, AppendQ, Prepend, PrependQ, role=Role.WRITE)
def join(session: Session, request: Append) -> Answer:
    """Append bytes to a value or prepend them."""
    vbucket = active_vbucket(session, request)
    operation = vbucket.prepend if isinstance(request, Prepend | PrependQ) else vbucket.append
    cas, seqno = operation(checked_key(request.key), request.value, request.cas)
    return written(session, request, vbucket, cas, seqno)


@command(Touch, role=Role.WRITE)
def touch(session: Session, request: Touch) -> Answer:
    """Set the expiry of an item."""
    vbucket = active_vbucket(session, request)
    flags, cas, seqno = vbucket.touch(checked_key(request.key), request.expiration)
    return written(session, request, vbucket, cas, seqno, flags=flags)


@command(Gat, GatQ, role=Role.READ | Role.WRITE)
def get_and_touch(session: Session, request: Gat) -> Answer:
    """Read an item and set its expiry."""
    vbucket = active_vbucket(session, request)
    try:
        item = vbucket.get_and_touch(checked_key(request.key), request.expiration)
    except KeyNotFound as error:
        return _miss(request, error)
    return when_durable(session, request, vbucket, item.seqno, hit(session, request, item))


@command(Flush, FlushQ, role=Role.ADMIN)
def flush(session: Session, request: Flush) -> Answer:
    """Flush the bucket, now or later; a new request replaces a delayed flush, as in memcached."""
    node = session.node
    if node.flush_timer is not None:
        node.flush_timer.cancel()
        node.flush_timer = None

    def run() -> None:
        node.flush_timer = None
        node.bucket.flush()
        node.counters.flushes += 1

    def run_later() -> None:
        try:
            run()
        except TemporaryFailure as error:  # the client was already told that it succeeds
            node.log.warning("retrying a delayed flush: %s", error)
            node.flush_timer = node.scheduler.later(FLUSH_RETRY_S, run_later)

    answer = None if isinstance(request, FlushQ) else success(request)
    wait_s: float = request.expiration or 0
    if wait_s > RELATIVE_EXPIRY_S_MAX:
        wait_s -= node.clock()
        if wait_s <= 0:
            return answer  # memcached drops items older than that second; here only the delayed flush is cancelled
    if wait_s:
        node.flush_timer = node.scheduler.later(wait_s, run_later)
        return answer
    session.charge(len(node.bucket))
    run()
    if node.bucket.ack == "memory":
        return answer
    return when_all_durable(session, request, answer, DurabilityAmbiguous)  # a second flush would delete later writes
