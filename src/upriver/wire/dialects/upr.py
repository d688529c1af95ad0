"""UPR as the transport specification describes it (text 000).

Where the text contradicts its own diagrams, or the first builds differed from it, the comment at the field
says what Upriver does. State codes are 2 pending, 3 replica here, unlike in TAP and the memcached commands.
"""

from typing import Annotated, ClassVar

from upriver.model import Event
from upriver.wire.codes import FlagSet, OpenEnum, Sender, Status
from upriver.wire.dialect import Dialect
from upriver.wire.dialects.memcached import FailoverEntry, memcached
from upriver.wire.fields import U16, U32, U64, Counted, Key, Only, Repeat, Reserved, UInt, Value, count_of
from upriver.wire.framing import MEMCACHED
from upriver.wire.message import Request, Response

upr = Dialect("upr", framing=MEMCACHED, document="UPR transport specification", extends=memcached)


class VbucketState(OpenEnum):
    """Vbucket states as the UPR texts number them."""

    ACTIVE = 1
    PENDING = 2
    REPLICA = 3
    DEAD = 4


class EndReason(OpenEnum):
    """Why a stream has ended. The text says 1 for a changed state; early builds sent 2, and `dcp` still does."""

    OK = 0
    STATE_CHANGED = 1
    STATE_CHANGED_EARLY = 2


class OpenFlag(FlagSet):
    """What the connection is for; without a flag the receiver becomes a consumer."""

    CONSUMER = 0
    PRODUCER = 1


class AddStreamFlag(FlagSet):
    """How to add a stream."""

    TAKEOVER = 1


class StreamFlag(FlagSet):
    """How to stream."""

    TAKEOVER = 1


@upr.request(
    0x50,
    sender=Sender.EITHER,
    errors={Status.EINVAL: "The name is empty."},
)
class Open(Request):
    """Create a named connection to a producer or a consumer. It replaces an open connection of the same name."""

    seqno: U32 = 0
    flags: Annotated[OpenFlag, UInt(4)] = OpenFlag(0)
    name: Key


@upr.request(
    0x51,
    sender=Sender.MIGRATOR,
    errors={
        Status.KEY_EEXISTS: "The consumer already has a stream for this vbucket.",
        Status.NOT_MY_VBUCKET: "The vbucket does not exist on the consumer.",
        Status.ROLLBACK: "The consumer must roll back first.",
    },
)
class AddStream(Request):
    """Tell a consumer to ask the producer for a stream."""

    flags: Annotated[AddStreamFlag, UInt(4)] = AddStreamFlag(0)


@upr.response(0x51)
class AddStreamResponse(Response):
    """The producer has accepted. The text also mentions a vbucket in the extras; only the opaque is sent."""

    stream_opaque: U32  #: the opaque of the stream's messages


@upr.request(
    0x52,
    sender=Sender.MIGRATOR,
    errors={Status.KEY_ENOENT: "There is no stream for this vbucket."},
)
class CloseStream(Request):
    """Stop the stream of a vbucket as soon as possible."""


@upr.request(
    0x53,
    sender=Sender.CONSUMER,
    errors={
        Status.KEY_ENOENT: "The producer does not know the vbucket uuid: roll back to 0.",
        Status.KEY_EEXISTS: "This connection already has a stream for this vbucket.",
        Status.NOT_MY_VBUCKET: "The vbucket does not exist here.",
        Status.ERANGE: "The start is beyond the end or beyond the high seqno.",
        Status.ROLLBACK: "The consumer must first roll back to the seqno in the response.",
    },
)
class StreamRequest(Request):
    """Ask for the changes of a vbucket after a seqno."""

    flags: Annotated[StreamFlag, UInt(4)] = StreamFlag(0)
    reserved: ClassVar[Reserved] = Reserved(4)
    start_seqno: U64 = 0  #: the last seqno that the consumer has received
    end_seqno: U64 = 2**64 - 1  #: the stream ends after this seqno
    vbucket_uuid: U64 = 0  #: the branch of history that the consumer follows
    high_seqno: U64 = 0  #: the high seqno when that branch began


@upr.response(0x53)
class StreamRequestResponse(Response):
    """Accepted; the failover log of the producer, newest entry first."""

    log: Annotated[tuple[FailoverEntry, ...], Repeat(FailoverEntry)] = ()


@upr.response(0x53, status=Status.ROLLBACK, either=True)
class RollbackRequired(Response):
    """Refused: roll back first. The text forbids extras but draws them; they are sent as drawn."""

    seqno: U64  #: where to roll back to


@upr.request(
    0x54,
    sender=Sender.CONSUMER,
    errors={Status.NOT_MY_VBUCKET: "The vbucket does not exist here."},
)
class FailoverLogRequest(Request):
    """Ask for the failover log of a vbucket."""


@upr.response(0x54)
class FailoverLogResponse(Response):
    """The failover log, newest entry first."""

    log: Annotated[tuple[FailoverEntry, ...], Repeat(FailoverEntry)] = ()


@upr.request(0x55, sender=Sender.PRODUCER, answered=False)
class StreamEnd(Request):
    """The producer has no more messages for this stream."""

    reason: Annotated[EndReason, UInt(4)] = EndReason.OK


@upr.request(0x56, sender=Sender.PRODUCER, answered=False)
class SnapshotMarker(Request):
    """A new snapshot begins: no key appears twice until the next marker."""


@upr.request(0x57, sender=Sender.PRODUCER, extras=(30, 31), change=Event.MUTATION, answered=False)
class Mutation(Request):
    """The key now holds this value."""

    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    flags: U32 = 0  #: the client's own 32 bits
    expiration: U32 = 0  #: second of the epoch, 0 for never
    lock_time: U32 = 0  #: seconds for which the item is still locked
    nmeta: U16 = count_of("meta")
    nru: Annotated[int | None, UInt(1), Only(31)] = None  #: sent by early builds, not in the text
    key: Key
    value: Value = b""
    meta: Counted = b""


@upr.request(0x58, sender=Sender.PRODUCER, change=Event.DELETION, answered=False)
class Deletion(Request):
    """The key was deleted."""

    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    nmeta: U16 = count_of("meta")
    key: Key
    meta: Counted = b""


@upr.request(0x59, sender=Sender.PRODUCER, change=Event.EXPIRATION, answered=False)
class Expiration(Deletion):
    """The key has expired."""


@upr.request(0x5A, sender=Sender.PRODUCER, answered=False)
class Flush(Request):
    """Delete all data of the vbucket."""


@upr.request(
    0x5B,
    sender=Sender.PRODUCER,
    errors={
        Status.KEY_ENOENT: "There is no such stream.",
        Status.EINVAL: "The stream is not a takeover, the state is unknown, or another client has changed the role.",
    },
)
class SetVbucketState(Request):
    """Change the state of the consumer's vbucket, as part of a takeover. It is answered, unlike in the text."""

    state: Annotated[VbucketState, UInt(1)]
