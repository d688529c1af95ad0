"""DCP as deployed servers speak it: what differs from the transport specification, and what is new.

Everything else is inherited from `upr`, so a stream request of the text's 40 bytes decodes here too, as
`upr.StreamRequest`. A stream speaks the dialect of its request.
"""

from typing import Annotated, ClassVar

from upriver.model import Event
from upriver.wire.codes import FlagSet, OpenEnum, Sender, Status
from upriver.wire.dialect import Dialect
from upriver.wire.dialects.upr import (
    AddStream,
    AddStreamFlag,
    AddStreamResponse,
    CloseStream,
    FailoverLogRequest,
    FailoverLogResponse,
    Flush,
    SetVbucketState,
    StreamRequestResponse,
    VbucketState,
    upr,
)
from upriver.wire.fields import (
    IN_VALUE,
    U8,
    U16,
    U32,
    U64,
    Counted,
    Key,
    Only,
    Reserved,
    UInt,
    Value,
    count_of,
)
from upriver.wire.framing import MEMCACHED
from upriver.wire.message import Request, Response

dcp = Dialect("dcp", framing=MEMCACHED, document="DCP as deployed servers speak it", extends=upr)


class EndReason(OpenEnum):
    """Why a stream has ended."""

    OK = 0
    CLOSED = 1
    STATE_CHANGED = 2
    DISCONNECTED = 3
    TOO_SLOW = 4
    BACKFILL_FAILED = 5
    ROLLBACK = 6


class OpenFlag(FlagSet):
    """What the connection is for; without *producer* the receiver becomes a consumer."""

    CONSUMER = 0x00
    PRODUCER = 0x01
    NOTIFIER = 0x02
    XATTRS = 0x04
    NO_VALUE = 0x08
    DELETE_TIMES = 0x20


class StreamFlag(FlagSet):
    """How to stream."""

    TAKEOVER = 0x01
    DISK_ONLY = 0x02
    TO_LATEST = 0x04
    ACTIVE_ONLY = 0x10
    STRICT_UUID = 0x20


class MarkerFlag(FlagSet):
    """Where a snapshot comes from and what it may hold."""

    MEMORY = 0x01
    DISK = 0x02
    CHECKPOINT = 0x04
    ACK = 0x08
    HISTORY = 0x10
    MAY_DUPLICATE_KEYS = 0x20


@dcp.request(0x50, sender=Sender.EITHER, errors={Status.EINVAL: "The name is empty."})
class Open(Request):
    """Create a named connection to a producer or a consumer. It replaces an open connection of the same name."""

    seqno: U32 = 0
    flags: Annotated[OpenFlag, UInt(4)] = OpenFlag(0)
    name: Key


@dcp.request(
    0x53,
    sender=Sender.CONSUMER,
    errors={
        Status.KEY_EEXISTS: "This connection already has a stream for this vbucket.",
        Status.NOT_MY_VBUCKET: "The vbucket does not exist here.",
        Status.ERANGE: "The start is beyond the end or outside its snapshot.",
        Status.ROLLBACK: "The consumer must first roll back to the seqno in the response.",
        Status.ETMPFAIL: "This copy of the vbucket has nothing to stream yet.",
    },
)
class StreamRequest(Request):
    """Ask for the changes of a vbucket after a seqno."""

    flags: Annotated[StreamFlag, UInt(4)] = StreamFlag(0)
    reserved: ClassVar[Reserved] = Reserved(4)
    start_seqno: U64 = 0  #: the last seqno that the consumer has received
    end_seqno: U64 = 2**64 - 1  #: the stream ends with the snapshot that contains this seqno
    vbucket_uuid: U64 = 0  #: the branch of history that the consumer follows
    snapshot_start: U64 = 0  #: the snapshot in which the consumer was interrupted
    snapshot_end: U64 = 0


@dcp.response(0x53, status=Status.ROLLBACK, either=True)
class RollbackRequired(Response):
    """Refused: roll back first."""

    seqno: Annotated[U64, IN_VALUE]  #: where to roll back to


@dcp.request(0x55, sender=Sender.PRODUCER, answered=False)
class StreamEnd(Request):
    """The producer has no more messages for this stream."""

    reason: Annotated[EndReason, UInt(4)] = EndReason.OK


@dcp.request(0x56, sender=Sender.PRODUCER, answered=False)
class SnapshotMarker(Request):
    """A new snapshot begins."""

    start_seqno: U64  #: the last seqno before the snapshot (deployed servers: the first one in it)
    end_seqno: U64  #: the last seqno in the snapshot
    flags: Annotated[MarkerFlag, UInt(4)] = MarkerFlag.MEMORY


@dcp.request(0x57, sender=Sender.PRODUCER, change=Event.MUTATION, answered=False)
class Mutation(Request):
    """The key now holds this value."""

    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    flags: U32 = 0  #: the client's own 32 bits
    expiration: U32 = 0  #: second of the epoch, 0 for never
    lock_time: U32 = 0  #: seconds for which the item is still locked
    nmeta: U16 = count_of("meta")
    nru: U8 = 0  #: how recently the item was used
    key: Key
    value: Value = b""
    meta: Counted = b""


@dcp.request(0x58, sender=Sender.PRODUCER, extras=(18, 21), change=Event.DELETION, answered=False)
class Deletion(Request):
    """The key was deleted; with the open flag *delete times* it says when."""

    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    nmeta: Annotated[U16, Only(18)] = count_of("meta")
    delete_time: Annotated[int | None, UInt(4), Only(21)] = None  #: second of the epoch
    unused: Annotated[int, UInt(1), Only(21)] = 0
    key: Key
    value: Value = b""
    meta: Counted = b""


@dcp.request(0x59, sender=Sender.PRODUCER, extras=(20, 18), change=Event.EXPIRATION, answered=False)
class Expiration(Request):
    """The key has expired. Sent only after the control `enable_expiry_opcode`."""

    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    nmeta: Annotated[U16, Only(18)] = count_of("meta")
    delete_time: Annotated[int | None, UInt(4), Only(20)] = None  #: second of the epoch
    key: Key
    value: Value = b""
    meta: Counted = b""


@dcp.request(0x5C, sender=Sender.PRODUCER)
class Noop(Request):
    """Check that the peer responds. It answers with the same opaque."""


@dcp.request(0x5D, sender=Sender.CONSUMER, either=True, answered=False)
class BufferAck(Request):
    """The number of bytes that the consumer has processed. Not answered. Early builds sent the number as value."""

    bytes_processed: U32


@dcp.request(0x5E, sender=Sender.CONSUMER, errors={Status.EINVAL: "The setting or its value is unknown."})
class Control(Request):
    """Change a setting of the connection."""

    key: Key
    value: Value = b""


@dcp.request(0x64, sender=Sender.PRODUCER, answered=False)
class SeqnoAdvanced(Request):
    """The filter rejected the snapshot's last changes; the consumer's position advances to this seqno."""

    by_seqno: U64


__all__ = [
    "AddStream",
    "AddStreamFlag",
    "AddStreamResponse",
    "BufferAck",
    "CloseStream",
    "Control",
    "Deletion",
    "EndReason",
    "Expiration",
    "FailoverLogRequest",
    "FailoverLogResponse",
    "Flush",
    "MarkerFlag",
    "Mutation",
    "Noop",
    "Open",
    "OpenFlag",
    "RollbackRequired",
    "SeqnoAdvanced",
    "SetVbucketState",
    "SnapshotMarker",
    "StreamEnd",
    "StreamFlag",
    "StreamRequest",
    "StreamRequestResponse",
    "VbucketState",
    "dcp",
]
