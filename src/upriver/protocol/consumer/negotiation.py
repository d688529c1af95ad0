"""How a consumer gets a stream: its first request, and the next one after each answer.

Theory of operation. `dcp` requests carry the bounds of the consumer's snapshot, so the producer decides where it may
resume. The consumer rolls back as required and asks again. A producer that refuses 48 bytes of extras (EINVAL) is
asked in `upr`, with 40.

`upr` requests carry no bounds. The producer alone cannot make a resume inside a snapshot safe after a failover, so the
consumer compares the failover logs before it asks (docs/semantics.md). It resumes at its position only if its branch is
still the producer's newest, otherwise at its last consistent point.

A pending copy waits for the rest of its takeover. Its source may be dead, so there may be no other copy of what it has.
It rolls back only for a producer whose failover log contains its branch, and asks for that log first.
"""

from collections.abc import Sequence
from typing import Final

from upriver.errors import InvalidArguments, RollbackRequired, StatusError, TemporaryFailure
from upriver.model import NO_END, FailoverEntry, FailoverLog, VbucketState, resume_by_entry
from upriver.protocol.consumer.sink import SinkVbucket
from upriver.wire import Request, Response, Status, dcp, memcached, upr

#: The dialects that a consumer tries, in this order, by default.
DIALECTS: Final = ("dcp", "upr")


class Negotiation:
    """The negotiation of one stream."""

    def __init__(
        self,
        copy: SinkVbucket,
        opaque: int,
        *,
        flags: int = 0,
        end_seqno: int = NO_END,
        dialects: Sequence[str] = DIALECTS,
    ) -> None:
        self.copy = copy
        self.opaque = opaque
        self.flags = flags
        self.end_seqno = end_seqno
        #: Whether it speaks `dcp` now, not `upr`.
        self.speaks_dcp = dialects[0] == "dcp"
        self._may_fall_back = self.speaks_dcp and "upr" in dialects
        self._entry = FailoverEntry(0, 0)
        #: The producer's newest entry when the logs were compared.
        self._compared: FailoverEntry | None = None
        #: The opcode of the last request.
        self._asked = upr.FailoverLogRequest.declaration.opcode
        #: The seqno to which a pending copy rolls back once the producer's log is known.
        self._back_to: int | None = None
        #: The position of the copy at the last request.
        self._asked_at = copy.position

    def first(self) -> Request:
        """The first request."""
        return self._ask() if self.speaks_dcp else self._ask_for_log()

    def answered(self, answer: Response) -> Request | FailoverLog:
        """The next request, or the producer's log if it has accepted. Raises the refusal if nothing is left to try."""
        self._check_unmoved()
        if answer.code != self._asked:
            raise InvalidArguments("the answer does not match the last request", vbucket=self.copy.number)
        match answer:
            case upr.FailoverLogResponse():
                return self._heard_log(failover_log(answer.log))
            case upr.StreamRequestResponse():
                return self._accepted(failover_log(answer.log))
            case upr.RollbackRequired() | dcp.RollbackRequired():
                return self._back(answer.seqno)
        if self.speaks_dcp and self._may_fall_back and answer.status is Status.EINVAL:
            self.speaks_dcp = False
            return self._ask_for_log()
        if not self.speaks_dcp and answer.status is Status.ERANGE and self.end_seqno != NO_END:
            # Perhaps only the state at the end seqno is gone. Ask without an end; the consumer stops by itself.
            self.end_seqno = NO_END
            return self._ask()
        unknown_here = not self.speaks_dcp and answer.status in (Status.KEY_ENOENT, Status.ERANGE)
        if unknown_here and answer.code == upr.StreamRequest.declaration.opcode:
            return self._back(0)
        text = getattr(answer, "text", "")
        raise StatusError.of(int(answer.status), text, vbucket=self.copy.number)

    def _check_unmoved(self) -> None:
        """A copy that was active meanwhile has begun a branch. No answer to an earlier request applies to it, not even
        a rollback: if it was flushed, its own writes may lie below. A dead copy keeps what it has."""
        if self.copy.state is VbucketState.DEAD:
            raise TemporaryFailure("the copy became dead and receives nothing", vbucket=self.copy.number)
        if self.copy.position != self._asked_at:
            raise TemporaryFailure(
                "the copy was active meanwhile and has a branch of its own: ask again", vbucket=self.copy.number
            )

    def _accepted(self, theirs: FailoverLog) -> FailoverLog:
        """A position inside a snapshot is safe only under the log that was compared: there may have been a failover."""
        position = self.copy.position
        if not self.speaks_dcp and theirs.newest != self._compared and position.consistent_seqno != position.seqno:
            raise TemporaryFailure(
                "the failover log has changed since it was compared: ask again", vbucket=self.copy.number
            )
        return theirs

    def _ask_for_log(self) -> Request:
        self._asked = upr.FailoverLogRequest.declaration.opcode
        return upr.FailoverLogRequest(vbucket=self.copy.number, opaque=self.opaque)

    def _ask(self) -> Request:
        self._asked = upr.StreamRequest.declaration.opcode  # and that of `dcp`
        position = self._asked_at = self.copy.position
        if not self.speaks_dcp:
            return upr.StreamRequest(
                flags=upr.StreamFlag(self.flags & upr.StreamFlag.TAKEOVER),
                start_seqno=position.seqno,
                end_seqno=self.end_seqno,
                vbucket_uuid=self._entry.vbucket_uuid,
                high_seqno=self._entry.seqno,
                vbucket=self.copy.number,
                opaque=self.opaque,
            )
        return dcp.StreamRequest(
            flags=dcp.StreamFlag(self.flags),
            start_seqno=position.seqno,
            end_seqno=self.end_seqno,
            vbucket_uuid=position.vbucket_uuid,
            snapshot_start=position.snapshot.start,
            snapshot_end=position.snapshot.end,
            vbucket=self.copy.number,
            opaque=self.opaque,
        )

    def _back(self, seqno: int) -> Request:
        """Roll back as told and ask again. Each round ends at a lower seqno, so this terminates."""
        before = self.copy.position.seqno
        if before == 0:
            raise RollbackRequired("the producer asks for a rollback below 0", vbucket=self.copy.number)
        if self.copy.state is VbucketState.PENDING and self._back_to is None:
            self._back_to = seqno
            return self._ask_for_log()
        self._back_to = None
        if self.copy.roll_back(min(seqno, before)) >= before:
            self.copy.roll_back(0)
        return self._ask()

    def _heard_log(self, theirs: FailoverLog) -> Request:
        self.copy.check_failover_log(theirs)
        return self._compare(theirs) if self._back_to is None else self._back(self._back_to)

    def _compare(self, theirs: FailoverLog) -> Request:
        """Choose where to resume, and the entry of our log to send."""
        self._compared = theirs.newest
        self._entry, seqno = resume_by_entry(self.copy.position, self.copy.failover_log, theirs)
        if seqno < self.copy.position.seqno:
            self.copy.roll_back(seqno)
        return self._ask()


def failover_log(entries: Sequence[memcached.FailoverEntry]) -> FailoverLog:
    """The log that a producer has sent; raises a PositionError if it is invalid."""
    return FailoverLog.received(FailoverEntry(entry.vbucket_uuid, entry.seqno) for entry in entries)
