"""The messages of each dialect: five descriptions for one producer.

A description holds the message for each thing that a producer says, or None where the dialect has none: the drafts
frame a snapshot with a start and an end where `upr` and `dcp` send one marker, the first draft has no flush, and only
the memcached header can change a vbucket's role. Gaps in the texts are filled as the errata say.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from upriver.errors import NotMyVbucket, RollbackRequired, StatusError
from upriver.model import FailoverLog, Snapshot, VbucketState
from upriver.wire import (
    MEMCACHED,
    AnyResponse,
    Dialect,
    DraftMessage,
    Magic,
    Message,
    Status,
    dcp,
    memcached,
    upr,
    upr_draft1,
    upr_draft2,
    upr_draft3,
)

#: The end reason of a stream whose history could not be read.
FAILED: Final = "failed"

_WireLog = tuple[memcached.FailoverEntry, ...]
#: Returns the packet that announces a snapshot; the second argument returns the flags, for messages that have some.
MarkerWriter = Callable[[Snapshot, Callable[[], int]], bytes]

_DCP_REASONS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "ok": dcp.EndReason.OK,
        "closed": dcp.EndReason.CLOSED,
        "state changed": dcp.EndReason.STATE_CHANGED,
        "flushed": dcp.EndReason.STATE_CHANGED,
        "rolled back": dcp.EndReason.ROLLBACK,
        "too slow": dcp.EndReason.TOO_SLOW,
        "disconnected": dcp.EndReason.DISCONNECTED,
        FAILED: dcp.EndReason.BACKFILL_FAILED,
    }
)
#: The texts have only two.
_UPR_REASONS: Final[Mapping[str, int]] = MappingProxyType(
    {reason: upr.EndReason.OK if reason == "ok" else upr.EndReason.STATE_CHANGED for reason in _DCP_REASONS}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDialect:
    """The messages of a producer in one dialect."""

    wire: Dialect
    #: The request for a stream.
    request: type[Message]
    failover_log_request: type[Message]
    #: The answers: accepted (a whole packet), the failover log, roll back to this seqno, and any other refusal (see
    #: ``refusal``).
    accepted: Callable[[FailoverLog, int], bytes]
    failover_log: Callable[[_WireLog], Message]
    rollback: Callable[[int], Message]
    refused: Callable[[Message, StatusError], Message]
    #: The first message of a stream.
    start: Callable[[], Message] | None = None
    #: A snapshot begins: returns the writer of markers for the stream of a vbucket with an opaque.
    marker: Callable[[int, int], MarkerWriter]
    snapshot_end: Callable[[], Message] | None = None
    #: The last changes of a snapshot did not pass a filter.
    advanced: Callable[[int], Message] | None = None
    flush: Callable[[], Message] | None
    end: Callable[[int], Message]
    end_reasons: Mapping[str, int]
    #: Change the role of the consumer's copy; without it there are no takeovers.
    set_state: Callable[[VbucketState], Message] | None
    #: The request carries the bounds of the consumer's snapshot; in other dialects an entry of the failover log.
    by_snapshot: bool = False
    #: An unknown uuid and a start beyond the high seqno are errors; in the drafts they are rollbacks.
    rollback_errors: bool = False
    #: Changes are sent byte for byte as the store holds them.
    sends_records: bool = False
    #: A change carries its data type; without it, compressed values are inflated.
    tells_datatype: bool = True
    #: Expirations are sent as such even if the consumer has not asked for them.
    always_expires: bool = True
    #: The stream ends after its end seqno, not with the snapshot that contains it.
    exact_end: bool = True
    #: In a takeover each marker is answered, with this opcode.
    marker_answer: int | None = None
    #: A consumer can ask for a stream end when it closes a stream.
    tells_close: bool = False
    #: Only the request id says which stream a message belongs to.
    by_request_id: bool = False

    @property
    def name(self) -> str:
        """The name of the dialect."""
        return self.wire.name

    def refusal(self, request: Message, error: StatusError) -> Message:
        """The answer to a request that failed: a rollback with its seqno, or a status."""
        return self.rollback(error.seqno) if isinstance(error, RollbackRequired) else self.refused(request, error)

    def addressed(self, message: Message, vbucket: int, opaque: int) -> bytes:
        """The packet of a message of this stream."""
        return _addressed(message, vbucket, opaque)


def _addressed(message: Message, vbucket: int, opaque: int) -> bytes:
    put_opaque(message, opaque)
    if not isinstance(message, DraftMessage):
        message.vbucket = vbucket  # type: ignore[attr-defined]
    return message.encode()


def opaque_of(message: Message) -> int:
    """The opaque or request id of a message."""
    given: Any = message
    return int(given.request_id if isinstance(message, DraftMessage) else given.opaque)


def put_opaque(message: Message, opaque: int) -> None:
    """Set the opaque or request id of a message."""
    if isinstance(message, DraftMessage):
        message.request_id = opaque
    else:
        message.opaque = opaque  # type: ignore[attr-defined]


def wire_log(log: FailoverLog) -> _WireLog:
    """A failover log as answers carry it."""
    return tuple(memcached.FailoverEntry(vbucket_uuid=entry.vbucket_uuid, seqno=entry.seqno) for entry in log)


def text_of(error: StatusError) -> bytes:
    """The text of a refusal."""
    return (error.detail or error.text).encode()


def _memcached_refusal(request: Message, error: StatusError) -> Message:
    return AnyResponse(opcode=request.code, status=Status(error.status), value=text_of(error))


def _draft_refusal(_: Message, error: StatusError) -> Message:
    """The two drafts have a separate answer for one refusal, and a general error for all others."""
    if isinstance(error, NotMyVbucket):
        return upr_draft1.NotMyVbucket()
    return upr_draft1.RequestError(status=Status(error.status), text=text_of(error))


def _draft3_refusal(request: Message, error: StatusError) -> Message:
    """As drawn, *not my vbucket* has no body."""
    if isinstance(error, NotMyVbucket):
        return AnyResponse(opcode=request.code, status=Status.NOT_MY_VBUCKET)
    return _memcached_refusal(request, error)


# A connection may request a thousand streams at once, and each live change may be a snapshot of its own. So these two
# packets are packed here; a test compares them with the declared messages.

_MARKER_BODY: Final = dcp.SnapshotMarker.layout.parts[20].struct
_DRAFT3_REQUEST: Final = upr_draft3.StreamRequest.declaration.opcode
_LOG_ENTRY: Final = struct.Struct(">QQ")


def _dcp_marker(vbucket: int, opaque: int) -> MarkerWriter:
    code, size = dcp.SnapshotMarker.declaration.opcode, _MARKER_BODY.size
    head = MEMCACHED.header.pack(Magic.REQUEST, code, 0, size, 0, vbucket, size, opaque, 0)
    return lambda snapshot, flags: head + _MARKER_BODY.pack(snapshot.start, snapshot.end, flags())


def _always(make: Callable[[], Message]) -> Callable[[int, int], MarkerWriter]:
    """A marker without bounds."""

    def marker(vbucket: int, opaque: int) -> MarkerWriter:
        packet = _addressed(make(), vbucket, opaque)
        return lambda _, __: packet

    return marker


def _accepted_with_log(log: FailoverLog, opaque: int) -> bytes:
    entries = [_LOG_ENTRY.pack(entry.vbucket_uuid, entry.seqno) for entry in log]
    code, size = upr.StreamRequestResponse.declaration.opcode, _LOG_ENTRY.size * len(entries)
    return b"".join((MEMCACHED.header.pack(Magic.RESPONSE, code, 0, 0, 0, 0, size, opaque, 0), *entries))


def _upr_state(state: VbucketState) -> upr.VbucketState:
    return upr.VbucketState[state.name]


DCP: Final = StreamDialect(
    wire=dcp.dcp,
    request=dcp.StreamRequest,
    failover_log_request=upr.FailoverLogRequest,
    accepted=_accepted_with_log,
    failover_log=lambda log: upr.FailoverLogResponse(log=log),
    rollback=lambda seqno: dcp.RollbackRequired(seqno=seqno),
    refused=_memcached_refusal,
    marker=_dcp_marker,
    advanced=lambda seqno: dcp.SeqnoAdvanced(by_seqno=seqno),
    flush=upr.Flush,
    end=lambda reason: dcp.StreamEnd(reason=dcp.EndReason(reason)),
    end_reasons=_DCP_REASONS,
    set_state=lambda state: upr.SetVbucketState(state=_upr_state(state)),
    by_snapshot=True,
    sends_records=True,
    always_expires=False,
    exact_end=False,
    marker_answer=dcp.SnapshotMarker.declaration.opcode,
    tells_close=True,
)

UPR: Final = StreamDialect(
    wire=upr.upr,
    request=upr.StreamRequest,
    failover_log_request=upr.FailoverLogRequest,
    accepted=_accepted_with_log,
    failover_log=DCP.failover_log,
    rollback=lambda seqno: upr.RollbackRequired(seqno=seqno),
    refused=_memcached_refusal,
    marker=_always(upr.SnapshotMarker),
    flush=upr.Flush,
    end=lambda reason: upr.StreamEnd(reason=upr.EndReason(reason)),
    end_reasons=_UPR_REASONS,
    set_state=DCP.set_state,
    rollback_errors=True,
)

DRAFT3: Final = StreamDialect(
    wire=upr_draft3.upr_draft3,
    request=upr_draft3.StreamRequest,
    failover_log_request=upr_draft3.FailoverLogRequest,
    # As drawn in the text: only the status. The log has a request of its own.
    accepted=lambda _, opaque: AnyResponse(opcode=_DRAFT3_REQUEST, opaque=opaque).encode(),
    failover_log=lambda log: upr_draft3.FailoverLogResponse(log=log),
    rollback=lambda seqno: upr_draft3.RollbackRequired(seqno=seqno),
    refused=_draft3_refusal,
    start=upr_draft3.StreamStart,
    marker=_always(upr_draft3.SnapshotStart),
    snapshot_end=upr_draft3.SnapshotEnd,
    flush=upr_draft3.Flush,
    end=lambda reason: upr_draft3.StreamEnd(reason=upr.EndReason(reason)),
    end_reasons=_UPR_REASONS,
    set_state=lambda state: upr_draft3.SetVbucketState(state=_upr_state(state)),
)

DRAFT1: Final = StreamDialect(
    wire=upr_draft1.upr_draft1,
    tells_datatype=False,
    request=upr_draft1.StreamRequest,
    failover_log_request=upr_draft1.FailoverLogRequest,
    accepted=lambda _, opaque: upr_draft1.Ok(request_id=opaque).encode(),
    failover_log=lambda log: upr_draft1.Ok(log=log),
    rollback=lambda seqno: upr_draft1.RollbackRequired(seqno=seqno),
    refused=_draft_refusal,
    start=upr_draft1.StreamStart,
    marker=_always(upr_draft1.SnapshotStart),
    snapshot_end=upr_draft1.SnapshotEnd,
    flush=None,
    end=lambda reason: upr_draft1.StreamEnd(reason=upr.EndReason(reason)),
    end_reasons=_UPR_REASONS,
    set_state=None,
    by_request_id=True,
)

DRAFT2: Final = StreamDialect(
    wire=upr_draft2.upr_draft2,
    tells_datatype=False,
    request=DRAFT1.request,
    failover_log_request=DRAFT1.failover_log_request,
    accepted=DRAFT1.accepted,
    failover_log=DRAFT1.failover_log,
    rollback=DRAFT1.rollback,
    refused=DRAFT1.refused,
    start=DRAFT1.start,
    marker=DRAFT1.marker,
    snapshot_end=DRAFT1.snapshot_end,
    flush=upr_draft2.Flush,
    end=DRAFT1.end,
    end_reasons=_UPR_REASONS,
    set_state=None,
    by_request_id=True,
)

#: Every description by the name of its dialect.
STREAM_DIALECTS: Final[Mapping[str, StreamDialect]] = MappingProxyType(
    {dialect.name: dialect for dialect in (DRAFT1, DRAFT2, DRAFT3, UPR, DCP)}
)
#: The dialects of an opened connection; each stream request decides between them.
OPENED: Final = (UPR, DCP)
