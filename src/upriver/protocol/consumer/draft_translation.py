"""Translates the three drafts for a consumer that speaks `upr`.

Theory of operation. The drafts frame a snapshot with a start and an end where `upr` sends a marker, accept a request
without sending the failover log, and have no settings. Otherwise the messages mean the same, so one consumer serves all
of them. `upr` has no message for the start of a stream and the end of a snapshot; the third draft's messages are used.
Without the end, a consumer would not know that it is consistent before the next snapshot begins, and would roll back
further than it must. A draft's deletion carries flags, an expiration and a lock time, for which `upr` has no room; they
are kept beside it for the code that decodes the deletion.

A consumer compares failover logs to decide where it may resume. The producer's log may change before the request
arrives, and the answer does not show that. So the translator requests the log again right behind each stream request,
and holds the stream back until it is here. If the log has changed, it is unknown under which of the two the stream was
accepted; and since the drafts cannot close a stream, the connection is given up.

A log may be empty (001: "zero or more" pairs). Then nothing proves that the consumer shares history with the producer,
so it starts at 0. The consumer gets a branch that no other connection knows, and the producer gets none.
"""

from typing import Any, Final

from upriver.errors import NotMyVbucket, WireError
from upriver.wire import (
    AnyResponse,
    DraftMessage,
    Message,
    Request,
    Status,
    memcached,
    upr,
    upr_draft1,
    upr_draft2,
    upr_draft3,
)

_ASKED_FOR_LOG = upr.FailoverLogRequest.declaration.opcode
_ASKED_FOR_STREAM = upr.StreamRequest.declaration.opcode
#: Set in the opaque of the second request for a log; a consumer never counts that far.
_AGAIN: Final = 0x8000_0000
#: The maximum size of held-back messages.
HELD_BYTES_MAX: Final = 16 * 1024 * 1024


class DraftTranslator:
    """One connection to a producer of a draft."""

    def __init__(self, dialect: str, unknown_uuid: int = 1) -> None:
        """``unknown_uuid`` stands for an empty log: a number that no log contains, and another connection has not."""
        #: The first two drafts have the 12-byte header, with a request id and without a vbucket.
        self.short = dialect in ("upr_draft1", "upr_draft2")
        self._vbuckets: dict[int, int] = {}
        self._logs: dict[int, tuple[memcached.FailoverEntry, ...]] = {}
        self._asked: dict[int, int] = {}
        #: Messages of accepted streams whose log is not confirmed yet.
        self._held: dict[int, list[tuple[Message, int]]] = {}
        self._held_bytes = 0
        self._left_over: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._unknown_uuid = unknown_uuid

    def outgoing(self, message: Message) -> bytes:
        """The bytes to send for a message of an `upr` consumer; empty if the draft has no such message."""
        match message:
            case upr.FailoverLogRequest():
                self._note(message, _ASKED_FOR_LOG)
                return self._log_request(message.opaque, message.vbucket)
            case upr.StreamRequest():
                self._note(message, _ASKED_FOR_STREAM)
                is_unknown = message.vbucket_uuid == self._unknown_uuid
                fields: dict[str, Any] = {
                    "vbucket": message.vbucket,
                    "start_seqno": message.start_seqno,
                    "end_seqno": message.end_seqno,
                    "vbucket_uuid": 0 if is_unknown else message.vbucket_uuid,
                    "high_seqno": message.high_seqno,
                }
                request: Message = (
                    upr_draft1.StreamRequest(request_id=message.opaque, **fields)
                    if self.short
                    else upr_draft3.StreamRequest(opaque=message.opaque, **fields)
                )
                return request.encode() + self._log_request(message.opaque | _AGAIN, message.vbucket)
        return b""

    def _log_request(self, opaque: int, vbucket: int) -> bytes:
        if self.short:
            return upr_draft1.FailoverLogRequest(request_id=opaque, vbucket=vbucket).encode()
        return upr_draft3.FailoverLogRequest(opaque=opaque, vbucket=vbucket).encode()

    def _note(self, message: Request, asked: int) -> None:
        self._vbuckets[message.opaque] = message.vbucket
        self._asked[message.opaque] = asked

    def incoming(self, message: Message, size_bytes: int = 0) -> list[Message]:
        """The messages for the `upr` consumer; none if there is nothing to tell, or not yet.

        A WireError ends the connection.
        """
        given: Any = message
        opaque = int(given.request_id if isinstance(message, DraftMessage) else given.opaque)
        if opaque & _AGAIN:
            return self._confirmed(message, opaque & ~_AGAIN)
        held = self._held.get(opaque)
        if held is not None:
            self._hold(held, message, size_bytes)
            return []
        said = self._translated(message, opaque) if opaque in self._vbuckets else None
        if isinstance(said, upr.StreamRequestResponse):
            self._hold(self._held.setdefault(opaque, []), message, size_bytes)
            return []
        return [] if said is None else [said]

    def _hold(self, held: list[tuple[Message, int]], message: Message, size_bytes: int) -> None:
        held.append((message, size_bytes))
        self._held_bytes += size_bytes
        if self._held_bytes > HELD_BYTES_MAX:
            raise WireError(0, "the failover log that was requested", f"{self._held_bytes} bytes without it")

    def _confirmed(self, answer: Message, opaque: int) -> list[Message]:
        """The second answer with the log is here. Pass on what was held, if the stream was accepted."""
        held = self._held.pop(opaque, None)
        if held is None:
            return []
        log = answer.log if isinstance(answer, upr_draft1.Ok | upr_draft3.FailoverLogResponse) else ()
        if log != self._logs.get(opaque):
            raise WireError(0, "the failover log that the request was made for", "another one, or none")
        self._held_bytes -= sum(size_bytes for _, size_bytes in held)
        translated = (self._translated(message, opaque) for message, _ in held)
        return [message for message in translated if message is not None]

    def _translated(self, message: Message, opaque: int) -> Message | None:
        where: dict[str, Any] = {"opaque": opaque, "vbucket": self._vbuckets[opaque]}
        match message:
            case upr_draft1.Mutation() | upr_draft3.Mutation():
                return upr.Mutation(
                    by_seqno=message.by_seqno,
                    rev_seqno=message.rev_seqno,
                    flags=message.flags,
                    expiration=message.expiration,
                    lock_time=message.lock_time,
                    key=message.key,
                    value=message.value,
                    cas=message.cas,
                    datatype=getattr(message, "datatype", 0),
                    **where,
                )
            case upr_draft1.Expiration() | upr_draft2.Expiration() | upr_draft3.Expiration():
                return upr.Expiration(**self._deletion(message, where["vbucket"]), **where)
            case upr_draft1.Deletion() | upr_draft2.Deletion() | upr_draft3.Deletion():
                return upr.Deletion(**self._deletion(message, where["vbucket"]), **where)
            case upr_draft1.SnapshotStart() | upr_draft3.SnapshotStart():
                return upr.SnapshotMarker(**where)
            case upr_draft1.SnapshotEnd() | upr_draft3.SnapshotEnd():
                return upr_draft3.SnapshotEnd(**where)
            case upr_draft1.StreamStart() | upr_draft3.StreamStart():
                return upr_draft3.StreamStart(**where)
            case upr_draft1.StreamEnd() | upr_draft3.StreamEnd():
                return upr.StreamEnd(reason=message.reason, **where)
            case upr_draft2.Flush() | upr_draft3.Flush():
                return upr.Flush(**where)
        return self._answer(message, opaque)

    def take_left_over(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Flags, expiration and lock time of deletions since the last call, by vbucket and seqno."""
        taken, self._left_over = self._left_over, {}
        return taken

    def _deletion(self, message: Any, vbucket: int) -> dict[str, Any]:
        left_over = message.flags, message.expiration, getattr(message, "lock_time", 0)
        if any(left_over):
            self._left_over[vbucket, message.by_seqno] = left_over
        return {
            "by_seqno": message.by_seqno,
            "rev_seqno": message.rev_seqno,
            "key": message.key,
            "cas": message.cas,
            "datatype": getattr(message, "datatype", 0),
        }

    def _answer(self, message: Message, opaque: int) -> Message | None:
        asked = self._asked[opaque]
        match message:
            case upr_draft1.Ok() | upr_draft3.FailoverLogResponse() if asked == _ASKED_FOR_LOG:
                self._logs[opaque] = message.log
                return upr.FailoverLogResponse(opaque=opaque, log=self._log_of(opaque))
            case upr_draft1.RollbackRequired() | upr_draft3.RollbackRequired():
                return upr.RollbackRequired(opaque=opaque, seqno=message.seqno)
            case upr_draft1.NotMyVbucket() | upr_draft3.NotMyVbucket():
                return AnyResponse(opcode=asked, opaque=opaque, status=Status.NOT_MY_VBUCKET, value=_NOT_MINE)
            case upr_draft1.RequestError():
                return AnyResponse(opcode=asked, opaque=opaque, status=message.status, value=message.text)
            case upr_draft1.DecodeError():
                raise WireError(message.offset, "what the node expects", message.text.decode(errors="replace"))
            case AnyResponse() if message.status:
                return AnyResponse(opcode=asked, opaque=opaque, status=message.status, value=message.value)
            case upr_draft1.Ok() | AnyResponse():
                # The log of the answer before: this answer carries none.
                return upr.StreamRequestResponse(opaque=opaque, log=self._log_of(opaque))
        return None

    def _log_of(self, opaque: int) -> tuple[memcached.FailoverEntry, ...]:
        return self._logs.get(opaque) or (memcached.FailoverEntry(vbucket_uuid=self._unknown_uuid, seqno=0),)


_NOT_MINE = NotMyVbucket.text.encode()
