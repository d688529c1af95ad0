"""Every exception that Upriver raises, as one tree.

::

    UpriverError
    ├── WireError                 bytes that are invalid in the dialect
    ├── PositionError             an impossible stream position, snapshot or failover log
    ├── OutOfOrder                a change out of order, or outside its snapshot
    ├── ProtocolViolation         a message that is not allowed in the state of its stream
    ├── StorageError              a file or directory cannot be used
    │   ├── DataInUse             another process holds it
    │   ├── ForeignData           it is not from this program
    │   │   └── OldLayout         an earlier version wrote it, and it must be built again
    │   ├── UnsupportedTable      a table uses features that are not supported
    │   ├── NewerFormat           a later version wrote it
    │   ├── CorruptData           it is damaged
    │   ├── UsersFileError        the users file cannot be used
    │   └── CheckpointError       a consumer's checkpoint cannot be used
    ├── NotCompiled               a compiled part of the node cannot be loaded
    ├── CannotListen              the node cannot listen on an address
    ├── UserError                 a user cannot be added, found or given a role
    ├── AddressError              an invalid address
    ├── NodeUnavailable           a node cannot be used
    │   ├── Unreachable           no connection could be opened
    │   ├── ConnectionLost        the connection broke
    │   ├── TimedOut              no response came in time
    │   └── LoginImpossible       no login mechanism is acceptable to both sides
    ├── ClusterMapError           an invalid or incomplete cluster map
    │   └── NoSuchVbucket         the bucket has no vbucket of this number
    ├── StreamRolledBack          the source rolled back, and the consumer's policy is to fail
    │   └── QueryRolledBack       the same for a query
    ├── StreamRefused             the source refuses a stream
    │   └── NoActiveCopy          no node has the active copy of some vbuckets
    ├── OptionError               an unknown option, or an invalid value
    ├── RowsRefused               a cluster refused rows
    ├── TargetRefused             a pipeline's target refused changes
    ├── TargetBehind              a pipeline's target lacks batches
    ├── TargetAhead               a pipeline's target has batches that its checkpoint does not know
    ├── TableConflict             another writer changed what a commit depends on
    │   └── FilesLost             files that a commit would add are gone
    ├── HttpRefused               an HTTP server refused a request
    ├── SearchError               an invalid search query
    ├── OffsetError               an invalid offset of a query
    ├── DataLoss                  no node has the history that a query has read
    ├── PipelineFailed            a pipeline cannot continue
    ├── SparkUnavailable          it cannot be started here
    ├── OtherBucket               a target holds the documents of another bucket
    └── StatusError               a refusal with a number: one class per status
        ├── KeyNotFound 0x01      ├── KeyExists 0x02        ├── TooBig 0x03
        ├── InvalidArguments 0x04 ├── NotStored 0x05        ├── NotANumber 0x06
        ├── NotMyVbucket 0x07     ├── NoBucket 0x08         ├── Locked 0x09
        ├── NotLocked 0x0e
        ├── AuthenticationFailed 0x20                       ├── OutOfRange 0x22
        ├── RollbackRequired 0x23 ├── AccessDenied 0x24
        ├── UnknownCommand 0x81   ├── OutOfMemory 0x82      ├── NotSupported 0x83
        ├── InternalError 0x84    ├── Busy 0x85             ├── TemporaryFailure 0x86
        └── DurabilityAmbiguous 0xa3

Exceptions keep their facts as attributes and build the sentence in ``__str__``. A status without a class of its own
becomes a plain ``StatusError`` that keeps the number.
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar


def without_password(text: str) -> str:
    """A text that may contain an address, as an error message shows it: without a password."""
    return re.sub(r"(//[^:/@]*:).*@", r"\1…@", text)


class UpriverError(Exception):
    """The root: catch this to catch everything that Upriver raises on purpose."""


class WireError(UpriverError):
    """Bytes that are invalid in the dialect: where, what was expected, and what was found."""

    def __init__(self, offset: int, expected: str, found: str) -> None:
        super().__init__(offset, expected, found)
        self.offset = offset
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return f"at byte {self.offset}: expected {self.expected}, found {self.found}"

    def shifted(self, by: int) -> "WireError":
        """The same error, seen from a buffer in which the packet starts at ``by``."""
        return WireError(self.offset + by, self.expected, self.found)


class PositionError(UpriverError, ValueError):
    """An impossible stream position, snapshot or failover log."""


class OutOfOrder(UpriverError):
    """A change arrived out of order, or outside its snapshot."""

    def __init__(self, vbucket: int, seqno: int, why: str) -> None:
        super().__init__(vbucket, seqno, why)
        self.vbucket = vbucket
        self.seqno = seqno
        self.why = why

    def __str__(self) -> str:
        return f"vbucket {self.vbucket}: change {self.seqno} refused: {self.why}"


class ProtocolViolation(UpriverError):
    """A message was received, or about to be sent, that is not allowed in the state of its stream."""

    def __init__(self, vbucket: int, event: str, state: str) -> None:
        super().__init__(vbucket, event, state)
        self.vbucket = vbucket
        self.event = event
        self.state = state

    def __str__(self) -> str:
        return f"vbucket {self.vbucket}: {self.event} is not allowed while the stream is {self.state}"


class StorageError(UpriverError):
    """A file or directory cannot be used."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class DataInUse(StorageError):
    """Another process holds the data directory."""


class ForeignData(StorageError):
    """The directory holds something that Upriver did not write."""


class OldLayout(ForeignData):
    """An earlier version of Upriver wrote the table in a layout that is no longer used."""


class UnsupportedTable(StorageError):
    """A Delta table uses features that Upriver does not support: which, and what to do."""


class NewerFormat(StorageError):
    """A later version of Upriver wrote the directory."""


class CorruptData(StorageError):
    """The stored data is damaged."""


class UsersFileError(StorageError):
    """The users file cannot be read or written, or is not one."""


class CannotListen(UpriverError):
    """The node cannot listen: the port is in use, or the address does not belong to this machine."""

    def __init__(self, host: str, port: int, why: str) -> None:
        super().__init__(host, port, why)
        self.host = host
        self.port = port
        self.why = why

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"cannot listen on {host}:{self.port}: {self.why}"


class NotCompiled(UpriverError, ImportError):
    """A compiled part that the node needs is missing, or cannot be loaded: then ``why`` says the cause."""

    def __init__(self, module: str, why: str = "") -> None:
        super().__init__(module, why)
        self.module = module
        self.why = why

    @classmethod
    def after(cls, module: str, error: ImportError) -> "NotCompiled":
        """The error for a failed import. It names no cause if there is no such file."""
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == module
        return cls(module, "" if is_absent else str(error))

    def __str__(self) -> str:
        reinstall = "pip install --force-reinstall --no-binary upriver upriver"
        if self.why:
            return f"the node cannot load its compiled part {self.module}: {self.why}. Reinstall with {reinstall}"
        return f"the node needs its compiled part {self.module}: install a C compiler, then reinstall with {reinstall}"


class UserError(UpriverError, ValueError):
    """A user cannot be added, found or given a role."""

    def __init__(self, why: str, name: str | None = None) -> None:
        super().__init__(why, name)
        self.why = why
        self.name = name

    def __str__(self) -> str:
        return self.why if self.name is None else f"user {self.name!r} {self.why}"


class AddressError(UpriverError, ValueError):
    """An invalid address: what is wrong with it, and how to write one."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text, why)
        self.text = text
        self.why = why

    def __str__(self) -> str:
        return f"invalid address {self.text!r}: {self.why}"


class NodeUnavailable(UpriverError):
    """A node cannot be used."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(node, why)
        self.node = node
        self.why = why

    def __str__(self) -> str:
        return f"{self.node}: {self.why}"


class Unreachable(NodeUnavailable):
    """No connection could be opened to the address."""


class ConnectionLost(NodeUnavailable):
    """The connection broke; the node may have carried out the request or not."""


class TimedOut(NodeUnavailable):
    """No response came in time; the node may have carried out the request or not."""


class LoginImpossible(NodeUnavailable):
    """No login mechanism is acceptable to both sides, or the node could not prove that it knows the password."""


class ClusterMapError(UpriverError):
    """A cluster map is invalid, or has no node for a vbucket."""


class NoSuchVbucket(ClusterMapError):
    """The bucket has no vbucket of this number, and never will."""


class StreamRolledBack(UpriverError):
    """The source rolled back to a seqno before a consumer's position, and the consumer's policy is to fail.

    The source has lost everything between ``seqno`` and ``position``.
    """

    def __init__(self, vbucket: int, seqno: int, position: object) -> None:
        super().__init__(vbucket, seqno, position)
        self.vbucket = vbucket
        self.seqno = seqno
        self.position = position

    def __str__(self) -> str:
        return (
            f"vbucket {self.vbucket}: the source rolled back to seqno {self.seqno}, before {self.position}. "
            "Start over, or use the policy 'rewind' or 'emit'"
        )


class QueryRolledBack(StreamRolledBack):
    """The source of a query rolled back, and the query's policy is to fail."""

    def __init__(self, vbucket: int, seqno: int, position: object, new_uuid: int, why: str) -> None:
        super().__init__(vbucket, seqno, position)
        self.args = (vbucket, seqno, position, new_uuid, why)
        self.new_uuid = new_uuid
        self.why = why

    def __str__(self) -> str:
        return (
            f"vbucket {self.vbucket}: {self.why}, so the query must roll back from {self.position} to seqno "
            f"{self.seqno} of uuid {self.new_uuid:#x}. "
            "Set onRollback to rewind to read the vbucket again, or to emit to get a row"
        )


class OptionError(UpriverError, ValueError):
    """An unknown option, or an invalid value: which one, the value, and what to write instead."""

    def __init__(self, name: str, value: str, why: str) -> None:
        super().__init__(name, value, why)
        self.name = name
        self.value = value
        self.why = why

    def __str__(self) -> str:
        return f"option {self.name} = {self.value!r}: {self.why}"


class RowsRefused(UpriverError):
    """A cluster refused rows: how many, and the first of them."""

    def __init__(self, count: int, samples: list[str]) -> None:
        super().__init__(count, samples)
        self.count = count
        self.samples = samples

    def __str__(self) -> str:
        return (
            f"{self.count} rows were refused, for example {'; '.join(self.samples)}. "
            "Set errorsAs to ignore, or to deadletter with a deadLetterPath, to continue without them"
        )


class TargetRefused(UpriverError):
    """A pipeline's target refused changes, and another attempt would not help: some of them, with the reason."""

    def __init__(self, where: str, count: int, samples: list[str]) -> None:
        super().__init__(where, count, samples)
        self.where = where
        self.count = count
        self.samples = samples

    def __str__(self) -> str:
        return f"{self.where}: {self.count} refused: {'; '.join(self.samples)}"


class TargetBehind(UpriverError):
    """A target lacks batches that the query has completed, so they will not come again."""

    def __init__(self, held: int, done: int) -> None:
        super().__init__(held, done)
        self.held = held
        self.done = done

    def __str__(self) -> str:
        held = "no batch" if self.held < 0 else f"only batches up to {self.held}"
        return (
            f"the checkpoint has completed batches up to {self.done}, but the target holds {held}. "
            "Restore the target, or use a new checkpoint to fill it again"
        )


class TargetAhead(UpriverError):
    """A target has batches that the checkpoint does not know, so other batches would get their numbers."""

    def __init__(self, held: int, logged: int) -> None:
        super().__init__(held, logged)
        self.held = held
        self.logged = logged

    def __str__(self) -> str:
        return (
            f"the target holds batches up to {self.held}, but the checkpoint ends with batch {self.logged}: "
            "it is an old copy. Use a new checkpoint to fill the target again"
        )


class TableConflict(UpriverError):
    """Another writer changed what a commit of a table depends on: read the table again, and try again.

    ``commits`` are those since the version that the edit was computed from; the table's snapshot includes them.
    """

    def __init__(self, where: str, why: str, commits: Sequence[Any] = ()) -> None:
        super().__init__(where, why, commits)
        self.where = where
        self.why = why
        self.commits = commits

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class FilesLost(TableConflict):
    """Files that a commit would add to a table were deleted meanwhile: write them again."""


class HttpRefused(UpriverError):
    """An HTTP server refused a request, and another attempt would not help."""

    def __init__(self, where: str, method: str, path: str, status: int, answer: str) -> None:
        super().__init__(where, method, path, status, answer)
        self.where = where
        self.method = method
        self.path = path
        self.status = status
        self.answer = answer

    def __str__(self) -> str:
        return f"{self.where}: {self.method} {self.path or '/'} returned status {self.status}: {self.answer}"


class SearchError(UpriverError, ValueError):
    """An invalid search query."""

    def __init__(self, query: str, why: str) -> None:
        super().__init__(query, why)
        self.query = query
        self.why = why

    def __str__(self) -> str:
        return f"invalid query {self.query!r}: {self.why}"


class OffsetError(UpriverError, ValueError):
    """An invalid offset of a query."""


class DataLoss(UpriverError):
    """No node has the history of a vbucket that a query has read."""

    def __init__(self, vbucket: int, why: str) -> None:
        super().__init__(vbucket, why)
        self.vbucket = vbucket
        self.why = why

    def __str__(self) -> str:
        return f"vbucket {self.vbucket}: {self.why}. Changes may be lost; set failOnDataLoss to false to continue"


class PipelineFailed(UpriverError):
    """A pipeline cannot continue: in which stage, where, and why. Its checkpoint is unchanged."""

    def __init__(self, pipeline: str, stage: str, where: str, why: str, checkpoint: str) -> None:
        super().__init__(pipeline, stage, where, why, checkpoint)
        self.pipeline = pipeline
        self.stage = stage
        self.where = where
        self.why = why
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return (
            f"{self.pipeline} failed in the stage {self.stage!r}, {self.where}: {self.why}. "
            f"Start it again to resume from the checkpoint {self.checkpoint}"
        )


class SparkUnavailable(UpriverError):
    """Spark cannot be started here."""


class OtherBucket(UpriverError):
    """A target holds the documents of another bucket than the source."""

    def __init__(self, target: str, held: str, found: str) -> None:
        super().__init__(target, held, found)
        self.target = target
        self.held = held
        self.found = found

    def __str__(self) -> str:
        return (
            f"{self.target} holds the documents of the bucket with uuid {self.held}, but the source has the uuid "
            f"{self.found}. Use another target, or --adopt to replace what it holds"
        )


class StreamRefused(UpriverError):
    """The source refuses a stream, and retries would not help or have not helped."""

    def __init__(self, vbucket: int, why: str) -> None:
        super().__init__(vbucket, why)
        self.vbucket = vbucket
        self.why = why

    def __str__(self) -> str:
        return f"vbucket {self.vbucket}: {self.why}"


class NoActiveCopy(StreamRefused):
    """No node has the active copy of these vbuckets, so reading the rest would leave their documents out.

    If replicas were asked for too, no node has a copy that can be read.
    """

    def __init__(self, vbuckets: Sequence[int], *, active_only: bool = True) -> None:
        super().__init__(vbuckets[0], "no node has its active copy" if active_only else "no node has a copy to read")
        self.vbuckets = tuple(vbuckets)
        self.active_only = active_only

    def __str__(self) -> str:
        if not self.active_only:
            return (
                f"no node has an active copy, a replica or a pending copy of vbucket {_ranges(self.vbuckets)};"
                " make a copy active or a replica (upriver vbucket set), or name the vbuckets to read"
            )
        return (
            f"no node has the active copy of vbucket {_ranges(self.vbuckets)};"
            " read replicas instead (--replicas, active_only=False), or name the vbuckets to read"
        )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in the form ``0-3,7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


class CheckpointError(StorageError):
    """A checkpoint cannot be read or written, or belongs to another source."""


class StatusError(UpriverError):
    """A refusal with a status number on the wire."""

    status: int = 0
    #: The body of the response when there is no detail; never empty.
    text: ClassVar[str] = "Refused"
    _by_status: ClassVar[dict[int, type["StatusError"]]] = {}

    def __init_subclass__(cls, *, status: int, text: str) -> None:
        super().__init_subclass__()
        taken = StatusError._by_status.setdefault(status, cls)
        assert taken is cls, f"status 0x{status:02x} belongs to {taken.__name__} already"
        cls.status = status
        cls.text = text

    def __init__(self, detail: str = "", *, vbucket: int | None = None, status: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.vbucket = vbucket
        if status is not None:
            self.status = status

    def __str__(self) -> str:
        where = "" if self.vbucket is None else f"vbucket {self.vbucket}: "
        return f"{where}{self.detail or self.text} (status 0x{self.status:02x})"

    @staticmethod
    def of(status: int, detail: str = "", *, vbucket: int | None = None) -> "StatusError":
        """The exception for a status; one without a class of its own keeps its number."""
        kind = StatusError._by_status.get(status, StatusError)
        return kind(detail, vbucket=vbucket, status=status)


class KeyNotFound(StatusError, status=0x01, text="Not found"):
    """There is no such key."""


class KeyExists(StatusError, status=0x02, text="Data exists for key"):
    """The key exists already, or its CAS differs."""


class TooBig(StatusError, status=0x03, text="Too large"):
    """The value exceeds the limit."""


class InvalidArguments(StatusError, status=0x04, text="Invalid arguments"):
    """The request is well-formed but invalid."""


class NotStored(StatusError, status=0x05, text="Not stored"):
    """Append or prepend to a key that does not exist."""


class NotANumber(StatusError, status=0x06, text="Non-numeric server-side value for incr or decr"):
    """Increment or decrement of a value that is not a number."""


class NotMyVbucket(StatusError, status=0x07, text="Not my vbucket"):
    """This node does not own the vbucket."""


class NoBucket(StatusError, status=0x08, text="No bucket selected"):
    """The connection has not selected a bucket."""


class Locked(StatusError, status=0x09, text="Locked"):
    """Another client holds the lock on the key."""


class NotLocked(StatusError, status=0x0E, text="Not locked"):
    """Unlock of a key that is not locked."""


class AuthenticationFailed(StatusError, status=0x20, text="Auth failure"):
    """Wrong name or password, or none given."""


class OutOfRange(StatusError, status=0x22, text="Outside of range"):
    """A sequence number that the vbucket cannot serve."""


class RollbackRequired(StatusError, status=0x23, text="Rollback required"):
    """The consumer is on a lost branch and must roll back to ``seqno`` first."""

    def __init__(
        self,
        detail: str = "",
        *,
        vbucket: int | None = None,
        status: int | None = None,
        seqno: int = 0,
    ) -> None:
        super().__init__(detail, vbucket=vbucket, status=status)
        self.seqno = seqno


class AccessDenied(StatusError, status=0x24, text="No access"):
    """The user lacks the role."""


class UnknownCommand(StatusError, status=0x81, text="Unknown command"):
    """The node does not know the opcode."""


class OutOfMemory(StatusError, status=0x82, text="Out of memory"):
    """The memory quota is full and nothing can be evicted."""


class NotSupported(StatusError, status=0x83, text="Not supported"):
    """The command is known, but not possible here."""


class InternalError(StatusError, status=0x84, text="Internal error"):
    """The node failed because of a bug."""


class Busy(StatusError, status=0x85, text="Busy"):
    """Try again later: the node is busy."""


class TemporaryFailure(StatusError, status=0x86, text="Temporary failure"):
    """Try again: the disk queue is full, or the vbucket is not ready. Nothing was changed."""


class DurabilityAmbiguous(StatusError, status=0xA3, text="The change was made, but it is not known to be on disk"):
    """The node made the change but cannot say whether it lasts. A retry may make the change a second time."""
