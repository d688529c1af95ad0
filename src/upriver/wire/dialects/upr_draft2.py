"""The second draft (text 003): the first one with its stream part complete.

The messages of both texts are declared in `upr_draft1`; this module declares what the second text changes and adds: a
deletion has a lock time, and there is a flush.
"""

from upriver.model import Event
from upriver.wire.dialect import Dialect
from upriver.wire.dialects.upr_draft1 import (
    DecodeError,
    DialectRequest,
    FailoverLogRequest,
    Mutation,
    NotMyVbucket,
    Ok,
    RequestError,
    RollbackRequired,
    SnapshotEnd,
    SnapshotStart,
    StreamEnd,
    StreamMessageType,
    StreamRequest,
    StreamStart,
    upr_draft1,
)
from upriver.wire.fields import U32, U64, Key
from upriver.wire.framing import DRAFT
from upriver.wire.message import DraftMessage, DraftOpcode

upr_draft2 = Dialect("upr_draft2", framing=DRAFT, document="UPR, second draft", extends=upr_draft1)


@upr_draft2.message(DraftOpcode.STREAM_MESSAGE, StreamMessageType.DELETION, change=Event.DELETION)
class Deletion(DraftMessage):
    """The key was deleted."""

    cas: U64 = 0
    by_seqno: U64  #: order inside the vbucket
    rev_seqno: U64 = 1  #: how often this key has changed
    flags: U32 = 0  #: the client's own 32 bits
    expiration: U32 = 0  #: second of the deletion, as in the metadata of a deleted key
    lock_time: U32 = 0  #: seconds for which the item is still locked
    key: Key


@upr_draft2.message(DraftOpcode.STREAM_MESSAGE, StreamMessageType.EXPIRATION, change=Event.EXPIRATION)
class Expiration(Deletion):
    """The key has expired."""


@upr_draft2.message(DraftOpcode.STREAM_MESSAGE, StreamMessageType.FLUSH)
class Flush(DraftMessage):
    """Delete all data of the vbucket."""


__all__ = [
    "DecodeError",
    "Deletion",
    "DialectRequest",
    "Expiration",
    "FailoverLogRequest",
    "Flush",
    "Mutation",
    "NotMyVbucket",
    "Ok",
    "RequestError",
    "RollbackRequired",
    "SnapshotEnd",
    "SnapshotStart",
    "StreamEnd",
    "StreamRequest",
    "StreamStart",
    "upr_draft2",
]
