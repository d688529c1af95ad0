"""The first draft (text 002): a 12-byte header, and a stream part that is marked as in progress.

The text has no key length, so a receiver could not separate key and value of a mutation: the key length goes into the
header's reserved bytes 2-3. Its failover log request names no vbucket: one may follow the type. Its opcodes 5, 6 and 7
have no body: they get one here. A request of our own asks which of the two drafts is spoken. The stream messages that
the text only lists are framed as in the second draft; its deletion lists no lock time, and it has no flush.
"""

from typing import Annotated, ClassVar

from upriver.model import Event
from upriver.wire.codes import OpenEnum, Sender, Status
from upriver.wire.dialect import Dialect
from upriver.wire.dialects.memcached import FailoverEntry
from upriver.wire.dialects.upr import EndReason
from upriver.wire.fields import U8, U16, U32, U64, Key, Only, Repeat, Reserved, UInt, Value
from upriver.wire.framing import DRAFT
from upriver.wire.message import DraftMessage, DraftOpcode

upr_draft1 = Dialect("upr_draft1", framing=DRAFT, document="UPR, first draft")


class RequestType(OpenEnum):
    """What a request asks for."""

    STREAM = 1
    FAILOVER_LOG = 2
    DIALECT = 3  #: not in the text


class ResponseType(OpenEnum):
    """How a request ended."""

    OK = 1
    NOT_MY_VBUCKET = 2
    ROLLBACK = 3


class StreamMessageType(OpenEnum):
    """The kinds of stream messages."""

    SNAPSHOT_START = 1
    SNAPSHOT_END = 2
    MUTATION = 3
    DELETION = 4
    EXPIRATION = 5
    FLUSH = 6  #: only in the second draft


@upr_draft1.message(DraftOpcode.REQUEST, RequestType.STREAM, sender=Sender.CONSUMER)
class StreamRequest(DraftMessage):
    """Ask for the changes of a vbucket after a seqno."""

    reserved: ClassVar[Reserved] = Reserved(1)
    vbucket: U16
    start_seqno: U64 = 0  #: the last seqno that the consumer has received
    end_seqno: U64 = 2**64 - 1  #: the stream ends after this seqno
    vbucket_uuid: U64 = 0  #: the branch of history that the consumer follows
    high_seqno: U64 = 0  #: the high seqno when that branch began
    group_id: Value = b""  #: a name for the stream


@upr_draft1.message(DraftOpcode.REQUEST, RequestType.FAILOVER_LOG, sender=Sender.CONSUMER, lengths=(0, 3))
class FailoverLogRequest(DraftMessage):
    """Ask for the failover log of a vbucket; the default is the vbucket of the last stream request."""

    reserved: Annotated[int, UInt(1), Only(3)] = 0
    vbucket: Annotated[int | None, UInt(2), Only(3)] = None


@upr_draft1.message(
    DraftOpcode.REQUEST,
    RequestType.DIALECT,
    sender=Sender.CONSUMER,
    errors={Status.EINVAL: "the other draft is spoken here"},
)
class DialectRequest(DraftMessage):
    """Ask whether this draft is spoken. The texts have no such request, but a receiver cannot tell the two drafts
    apart: their deletions differ by four bytes before the key."""

    draft: U8  #: 1 or 2


@upr_draft1.message(DraftOpcode.RESPONSE, ResponseType.OK)
class Ok(DraftMessage):
    """Accepted. The response to a failover log request has the log, newest entry first."""

    log: Annotated[tuple[FailoverEntry, ...], Repeat(FailoverEntry)] = ()


@upr_draft1.message(DraftOpcode.RESPONSE, ResponseType.NOT_MY_VBUCKET)
class NotMyVbucket(DraftMessage):
    """Refused: the vbucket does not exist."""


@upr_draft1.message(DraftOpcode.RESPONSE, ResponseType.ROLLBACK)
class RollbackRequired(DraftMessage):
    """Refused: roll back first."""

    seqno: U64  #: where to roll back to


@upr_draft1.message(DraftOpcode.STREAM_START)
class StreamStart(DraftMessage):
    """The first message of a stream."""


@upr_draft1.message(DraftOpcode.STREAM_END)
class StreamEnd(DraftMessage):
    """The stream has ended. The text defines no body; the reasons are those of the third draft."""

    reason: Annotated[EndReason, UInt(4)] = EndReason.OK


@upr_draft1.message(DraftOpcode.REQUEST_ERROR)
class RequestError(DraftMessage):
    """The request was decoded and refused. The text defines no body."""

    status: Annotated[Status, UInt(2)]
    text: Value = b""


@upr_draft1.message(DraftOpcode.DECODE_ERROR)
class DecodeError(DraftMessage):
    """The bytes could not be decoded; the connection is closed. The text defines no body."""

    offset: U32  #: offset of the error in the connection
    text: Value = b""


@upr_draft1.message(DraftOpcode.STREAM_MESSAGE, StreamMessageType.SNAPSHOT_START)
class SnapshotStart(DraftMessage):
    """A snapshot begins: no key appears twice until its end."""


@upr_draft1.message(DraftOpcode.STREAM_MESSAGE, StreamMessageType.SNAPSHOT_END)
class SnapshotEnd(DraftMessage):
    """The snapshot is complete."""


@upr_draft1.message(DraftOpcode.STREAM_MESSAGE, StreamMessageType.MUTATION, change=Event.MUTATION)
class Mutation(DraftMessage):
    """The key now holds this value."""

    cas: U64 = 0
    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    flags: U32 = 0  #: the client's own 32 bits
    expiration: U32 = 0  #: second of the epoch, 0 for never
    lock_time: U32 = 0  #: seconds for which the item is still locked
    key: Key
    value: Value = b""


@upr_draft1.message(DraftOpcode.STREAM_MESSAGE, StreamMessageType.DELETION, change=Event.DELETION)
class Deletion(DraftMessage):
    """The key was deleted."""

    cas: U64 = 0
    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    flags: U32 = 0  #: the client's own 32 bits
    expiration: U32 = 0  #: second of the deletion, as in the metadata of a deleted key
    key: Key


@upr_draft1.message(DraftOpcode.STREAM_MESSAGE, StreamMessageType.EXPIRATION, change=Event.EXPIRATION)
class Expiration(Deletion):
    """The key has expired."""
