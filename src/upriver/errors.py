"""Every exception that Upriver raises, as one tree.

::

    UpriverError
    ├── WireError                 bytes that the dialect does not allow
    ├── PositionError             a stream position or snapshot that cannot be right
    ├── OutOfOrder                a change that its stream does not allow here
    ├── ProtocolViolation         a message that the state of its stream does not allow
    ├── StorageError              the data directory cannot be used
    │   ├── DataInUse             another process holds it
    │   ├── ForeignData           it holds something else
    │   ├── NewerFormat           a later version wrote it
    │   ├── CorruptData           it is damaged
    │   ├── UsersFileError        the file of users cannot be used
    │   └── CheckpointError       a consumer's checkpoint cannot be used
    ├── NotCompiled               a compiled part of the node is missing
    ├── CannotListen              an address that the node cannot have
    ├── UserError                 a user who cannot be added, found or given that role
    ├── AddressError              an address that is none
    ├── NodeUnavailable           a node that cannot be reached or spoken to
    │   ├── Unreachable           nobody answers there
    │   ├── ConnectionLost        it was there and is gone
    │   ├── TimedOut              it does not answer in time
    │   └── LoginImpossible       no way to log in that both sides allow
    ├── ClusterMapError           a cluster map that makes no sense
    │   └── NoSuchVbucket         a number that no vbucket of the bucket has
    ├── StreamRolledBack          the source went back behind where a consumer stands, which may not follow
    │   └── QueryRolledBack       the same for a query
    ├── StreamRefused             a stream that the source does not give
    ├── OptionError               an option of a query that is unknown or makes no sense
    ├── RowsRefused               rows that a cluster does not take
    ├── TargetRefused             what a pipeline's target does not take
    ├── TargetBehind              what a pipeline's target should hold and does not
    ├── HttpRefused               a request that a server answers with an error
    ├── SearchError               a query that an index does not understand
    ├── OffsetError               an offset of a query that cannot be read
    ├── DataLoss                  what a query has read is known to nobody any more
    ├── PipelineFailed            a pipeline cannot go on: in which stage, vbucket and batch, and why
    └── StatusError               a refusal with a number: one class per status
        ├── KeyNotFound 0x01      ├── KeyExists 0x02        ├── TooBig 0x03
        ├── InvalidArguments 0x04 ├── NotStored 0x05        ├── NotANumber 0x06
        ├── NotMyVbucket 0x07     ├── NoBucket 0x08         ├── Locked 0x09
        ├── NotLocked 0x0e
        ├── AuthenticationFailed 0x20                       ├── OutOfRange 0x22
        ├── RollbackRequired 0x23 ├── AccessDenied 0x24
        ├── UnknownCommand 0x81   ├── OutOfMemory 0x82      ├── NotSupported 0x83
        └── InternalError 0x84    ├── Busy 0x85             └── TemporaryFailure 0x86

Exceptions keep what they know as attributes and build the sentence when it is asked for. A status that
has no class of its own becomes a plain ``StatusError`` that keeps the number.
"""

import re
from typing import ClassVar


def without_password(text: str) -> str:
    """A text that may contain an address, as an error message shows it: without a password."""
    return re.sub(r"(//[^:/@]*:).*@", r"\1…@", text)


class UpriverError(Exception):
    """The root: catch this to catch everything that Upriver raises on purpose."""


class WireError(UpriverError):
    """Bytes that the dialect does not allow: where, what should stand there and what does."""

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
    """A stream position, snapshot or failover log that cannot be right."""


class OutOfOrder(UpriverError):
    """A change arrived that its stream does not allow here: wrong order, or outside its snapshot."""

    def __init__(self, vbucket: int, seqno: int, why: str) -> None:
        super().__init__(vbucket, seqno, why)
        self.vbucket = vbucket
        self.seqno = seqno
        self.why = why

    def __str__(self) -> str:
        return f"vbucket {self.vbucket}: change {self.seqno} refused: {self.why}"


class ProtocolViolation(UpriverError):
    """A message came, or was about to be sent, that the state of its stream does not allow."""

    def __init__(self, vbucket: int, event: str, state: str) -> None:
        super().__init__(vbucket, event, state)
        self.vbucket = vbucket
        self.event = event
        self.state = state

    def __str__(self) -> str:
        return f"vbucket {self.vbucket}: no {self.event} is allowed while the stream is {self.state}"


class StorageError(UpriverError):
    """The data directory cannot be used."""

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


class NewerFormat(StorageError):
    """A later version of Upriver wrote the directory."""


class CorruptData(StorageError):
    """The stored data is damaged."""


class UsersFileError(StorageError):
    """The file of users cannot be read or written, or holds something else."""


class CannotListen(UpriverError):
    """The node cannot listen where it should: the port is taken, or the address is not this machine's."""

    def __init__(self, host: str, port: int, why: str) -> None:
        super().__init__(host, port, why)
        self.host = host
        self.port = port
        self.why = why

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"cannot listen on {host}:{self.port}: {self.why}"


class NotCompiled(UpriverError, ImportError):
    """A compiled part that the node needs is missing."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module

    def __str__(self) -> str:
        return (
            f"the node needs its compiled part {self.module}: install a C compiler, "
            "then reinstall with pip install --force-reinstall --no-binary upriver upriver"
        )


class UserError(UpriverError, ValueError):
    """A user who cannot be added, found or given that role."""

    def __init__(self, why: str, name: str | None = None) -> None:
        super().__init__(why, name)
        self.why = why
        self.name = name

    def __str__(self) -> str:
        return self.why if self.name is None else f"user {self.name!r} {self.why}"


class AddressError(UpriverError, ValueError):
    """An address that is none: what is wrong with it, and how one looks."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text, why)
        self.text = text
        self.why = why

    def __str__(self) -> str:
        return f"{self.text!r} is no address: {self.why}"


class NodeUnavailable(UpriverError):
    """A node that cannot be reached or spoken to."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(node, why)
        self.node = node
        self.why = why

    def __str__(self) -> str:
        return f"{self.node}: {self.why}"


class Unreachable(NodeUnavailable):
    """Nobody answers at the address."""


class ConnectionLost(NodeUnavailable):
    """The connection was there and is gone; what was asked for may have been done or not."""


class TimedOut(NodeUnavailable):
    """The node does not answer in time; what was asked for may have been done or not."""


class LoginImpossible(NodeUnavailable):
    """There is no way to log in that both sides allow, or the node could not prove that it knows the password."""


class ClusterMapError(UpriverError):
    """A cluster map that makes no sense, or has no node for what is wanted."""


class NoSuchVbucket(ClusterMapError):
    """A number that no vbucket of the bucket has, nor ever will."""


class StreamRolledBack(UpriverError):
    """The source went back behind where a consumer stands, and the consumer was told not to follow.

    ``position`` is where it stands; everything after ``seqno`` is gone at the source.
    """

    def __init__(self, vbucket: int, seqno: int, position: object) -> None:
        super().__init__(vbucket, seqno, position)
        self.vbucket = vbucket
        self.seqno = seqno
        self.position = position

    def __str__(self) -> str:
        return (
            f"vbucket {self.vbucket}: the source went back to {self.seqno}, behind {self.position}; "
            "start over, or choose the policy 'rewind' or 'emit'"
        )


class QueryRolledBack(StreamRolledBack):
    """The source of a query went back, and the query's policy is to fail."""

    def __init__(self, vbucket: int, seqno: int, position: object, new_uuid: int, why: str) -> None:
        super().__init__(vbucket, seqno, position)
        self.args = (vbucket, seqno, position, new_uuid, why)
        self.new_uuid = new_uuid
        self.why = why

    def __str__(self) -> str:
        return (
            f"vbucket {self.vbucket}: {self.why}, so what was read up to {self.position} must go back to {self.seqno} "
            f"under uuid {self.new_uuid:#x}. Set onRollback to rewind, to read the vbucket anew, or to emit, to be told"
        )


class OptionError(UpriverError, ValueError):
    """An option that is unknown or makes no sense: which, what was given, what may be."""

    def __init__(self, name: str, value: str, why: str) -> None:
        super().__init__(name, value, why)
        self.name = name
        self.value = value
        self.why = why

    def __str__(self) -> str:
        return f"option {self.name} = {self.value!r}: {self.why}"


class RowsRefused(UpriverError):
    """A cluster does not take some rows: how many, and the first of them."""

    def __init__(self, count: int, samples: list[str]) -> None:
        super().__init__(count, samples)
        self.count = count
        self.samples = samples

    def __str__(self) -> str:
        return (
            f"{self.count} rows were refused, among them {'; '.join(self.samples)}. "
            "Set errorsAs to ignore, or to deadletter with a deadLetterPath, to go on without them"
        )


class TargetRefused(UpriverError):
    """What a pipeline's target does not take, whatever is tried: some of it by name, with the reason."""

    def __init__(self, where: str, count: int, samples: list[str]) -> None:
        super().__init__(where, count, samples)
        self.where = where
        self.count = count
        self.samples = samples

    def __str__(self) -> str:
        return f"{self.where}: {self.count} refused: {'; '.join(self.samples)}"


class TargetBehind(UpriverError):
    """A target lacks batches that will not come again, because the query has them behind it."""

    def __init__(self, held: int, done: int) -> None:
        super().__init__(held, done)
        self.held = held
        self.done = done

    def __str__(self) -> str:
        held = "none of them" if self.held < 0 else f"those up to {self.held}"
        return (
            f"the checkpoint has the batches up to {self.done} behind it, and the target holds {held}: it was removed, "
            "put back or filled by another. Bring it back, or name a new checkpoint, with which it is filled again"
        )


class HttpRefused(UpriverError):
    """A request that a server answers with an error which another attempt would not change."""

    def __init__(self, where: str, method: str, path: str, status: int, answer: str) -> None:
        super().__init__(where, method, path, status, answer)
        self.where = where
        self.method = method
        self.path = path
        self.status = status
        self.answer = answer

    def __str__(self) -> str:
        return f"{self.where}: {self.method} {self.path or '/'} was answered with {self.status}: {self.answer}"


class SearchError(UpriverError, ValueError):
    """A query that an index does not understand."""

    def __init__(self, query: str, why: str) -> None:
        super().__init__(query, why)
        self.query = query
        self.why = why

    def __str__(self) -> str:
        return f"the query {self.query!r} is not understood: {self.why}"


class OffsetError(UpriverError, ValueError):
    """An offset of a query cannot be read."""


class DataLoss(UpriverError):
    """What a query has read of a vbucket is known to nobody any more."""

    def __init__(self, vbucket: int, why: str) -> None:
        super().__init__(vbucket, why)
        self.vbucket = vbucket
        self.why = why

    def __str__(self) -> str:
        return f"vbucket {self.vbucket}: {self.why}. Changes may be lost: set failOnDataLoss to false to go on"


class PipelineFailed(UpriverError):
    """A pipeline cannot go on: what it was doing, where, and why. Its checkpoint stays as it is."""

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
            f"Start it again to go on from the checkpoint {self.checkpoint}"
        )


class StreamRefused(UpriverError):
    """The source does not give a stream, and asking again would not help, or did not for long enough."""

    def __init__(self, vbucket: int, why: str) -> None:
        super().__init__(vbucket, why)
        self.vbucket = vbucket
        self.why = why

    def __str__(self) -> str:
        return f"vbucket {self.vbucket}: {self.why}"


class CheckpointError(StorageError):
    """A checkpoint that cannot be read or written, or belongs to something else."""


class StatusError(UpriverError):
    """A refusal that has a number on the wire."""

    status: int = 0
    #: What the reply's body says when nobody said anything better: never empty.
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
    """The key exists already, or its CAS is another."""


class TooBig(StatusError, status=0x03, text="Too large"):
    """The value exceeds the limit."""


class InvalidArguments(StatusError, status=0x04, text="Invalid arguments"):
    """The request is well-formed but makes no sense."""


class NotStored(StatusError, status=0x05, text="Not stored"):
    """Append or prepend to a key that is not there."""


class NotANumber(StatusError, status=0x06, text="Non-numeric server-side value for incr or decr"):
    """Increment or decrement of a value that is no number."""


class NotMyVbucket(StatusError, status=0x07, text="Not my vbucket"):
    """This node does not own the vbucket."""


class NoBucket(StatusError, status=0x08, text="No bucket selected"):
    """The connection has selected no bucket."""


class Locked(StatusError, status=0x09, text="Locked"):
    """Somebody else holds the lock on the key."""


class NotLocked(StatusError, status=0x0E, text="Not locked"):
    """Unlock of a key that is not locked."""


class AuthenticationFailed(StatusError, status=0x20, text="Auth failure"):
    """Wrong name or password, or none given."""


class OutOfRange(StatusError, status=0x22, text="Outside of range"):
    """A sequence number that the vbucket cannot serve."""


class RollbackRequired(StatusError, status=0x23, text="Rollback required"):
    """The consumer is on a lost branch and must go back to ``seqno`` first."""

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
    """The opcode is not one that the node knows."""


class OutOfMemory(StatusError, status=0x82, text="Out of memory"):
    """The memory quota is full and nothing can be evicted."""


class NotSupported(StatusError, status=0x83, text="Not supported"):
    """Known, but not possible here."""


class InternalError(StatusError, status=0x84, text="Internal error"):
    """A failure of ours."""


class Busy(StatusError, status=0x85, text="Busy"):
    """Try again later: too much is going on."""


class TemporaryFailure(StatusError, status=0x86, text="Temporary failure"):
    """Try again: the disk queue is full, or the vbucket is not ready."""
