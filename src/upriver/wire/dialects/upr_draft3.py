"""The third draft (text 001): UPR on the memcached header, with its own opcodes and no open.

The text prints an extras length of 36 for 28 bytes of fields: 28 is sent. It prints set vbucket state with the magic of
a response: either magic is accepted.
"""

from typing import Annotated, ClassVar

from upriver.model import Event
from upriver.wire.codes import Sender, Status
from upriver.wire.dialect import Dialect
from upriver.wire.dialects.memcached import FailoverEntry, memcached
from upriver.wire.dialects.upr import EndReason, StreamFlag, VbucketState
from upriver.wire.fields import IN_VALUE, U32, U64, Key, Repeat, Reserved, UInt, Value
from upriver.wire.framing import MEMCACHED
from upriver.wire.message import Request, Response

upr_draft3 = Dialect("upr_draft3", framing=MEMCACHED, document="UPR, third draft", extends=memcached)


@upr_draft3.request(
    0x50,
    sender=Sender.CONSUMER,
    errors={
        Status.NOT_MY_VBUCKET: "The vbucket does not exist here.",
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
    group_id: Key = b""  #: a name for the stream


@upr_draft3.response(0x50, status=(Status.NOT_MY_VBUCKET, Status.KEY_ENOENT))
class NotMyVbucket(Response):
    """Refused: the vbucket does not exist. Printed with status 1, listed as 7; we send 7."""

    text: Value = b""


@upr_draft3.response(0x50, status=Status.ROLLBACK, either=True)
class RollbackRequired(Response):
    """Refused: roll back first."""

    seqno: Annotated[U64, IN_VALUE]  #: where to roll back to


@upr_draft3.request(0x51, sender=Sender.CONSUMER, errors={Status.NOT_MY_VBUCKET: "The vbucket does not exist here."})
class FailoverLogRequest(Request):
    """Ask for the failover log of a vbucket."""


@upr_draft3.response(0x51)
class FailoverLogResponse(Response):
    """The failover log, newest entry first."""

    log: Annotated[tuple[FailoverEntry, ...], Repeat(FailoverEntry)] = ()


@upr_draft3.request(0x52, sender=Sender.PRODUCER, answered=False)
class StreamStart(Request):
    """The producer begins to stream."""


@upr_draft3.request(0x53, sender=Sender.PRODUCER, answered=False)
class StreamEnd(Request):
    """The producer has no more messages for this stream."""

    reason: Annotated[EndReason, UInt(4)] = EndReason.OK


@upr_draft3.request(0x54, sender=Sender.PRODUCER, answered=False)
class SnapshotStart(Request):
    """A snapshot begins: no key appears twice until its end."""


@upr_draft3.request(0x55, sender=Sender.PRODUCER, answered=False)
class SnapshotEnd(Request):
    """The snapshot is complete."""


@upr_draft3.request(0x56, sender=Sender.PRODUCER, change=Event.MUTATION, answered=False)
class Mutation(Request):
    """The key now holds this value."""

    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    flags: U32 = 0  #: the client's own 32 bits
    expiration: U32 = 0  #: second of the epoch, 0 for never
    lock_time: U32 = 0  #: seconds for which the item is still locked
    key: Key
    value: Value = b""


@upr_draft3.request(0x57, sender=Sender.PRODUCER, change=Event.DELETION, answered=False)
class Deletion(Request):
    """The key was deleted."""

    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    flags: U32 = 0  #: the client's own 32 bits
    expiration: U32 = 0  #: second of the deletion, as in the metadata of a deleted key
    lock_time: U32 = 0  #: seconds for which the item is still locked
    key: Key


@upr_draft3.request(0x58, sender=Sender.PRODUCER, change=Event.EXPIRATION, answered=False)
class Expiration(Deletion):
    """The key has expired."""


@upr_draft3.request(0x59, sender=Sender.PRODUCER, answered=False)
class Flush(Request):
    """Delete all data of the vbucket."""


@upr_draft3.request(0x5A, sender=Sender.PRODUCER, any_magic=True)
class SetVbucketState(Request):
    """Change the state of the consumer's vbucket, as part of a takeover."""

    state: Annotated[VbucketState, UInt(1)]
