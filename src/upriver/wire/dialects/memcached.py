"""The memcached commands that a node answers, Couchbase's additions included.

Every stream dialect with the 24-byte header extends this one: a connection says hello, authenticates and
selects its bucket with these messages before it opens a stream. Vbucket states are 2 replica, 3 pending here,
unlike in the UPR texts.
"""

from typing import Annotated

from upriver.wire.codes import FlagSet, OpenEnum, Status
from upriver.wire.dialect import Dialect
from upriver.wire.fields import (
    IN_VALUE,
    U16,
    U32,
    U64,
    Counted,
    Key,
    Only,
    Repeat,
    UInt,
    Value,
    When,
    count_of,
)
from upriver.wire.framing import MEMCACHED
from upriver.wire.layout import record
from upriver.wire.message import Request, Response

memcached = Dialect("memcached", framing=MEMCACHED, document="memcached binary protocol")

_NOT_MINE = {Status.NOT_MY_VBUCKET: "The vbucket is not active on this node."}
_READ = {Status.KEY_ENOENT: "The key does not exist.", **_NOT_MINE}
_DISK = {
    Status.ETMPFAIL: "The disk queue is full, or the disk does not take writes: try again.",
    Status.SYNC_WRITE_AMBIGUOUS: "The change was made, but the disk failed before it was stored.",
}
_TOUCH = {
    Status.LOCKED: "Another client holds the lock on the key; without XERROR in the hello this is KEY_EEXISTS.",
    Status.ENOMEM: "The memory quota is full.",
    **_DISK,
}
_CHANGE = {Status.KEY_EEXISTS: "The CAS is not that of the item.", **_TOUCH, **_NOT_MINE}
_STORE = {**_CHANGE, Status.E2BIG: "The value exceeds the limit."}
_VERSION_GONE = {Status.KEY_ENOENT: "The request has a CAS, and the key does not exist."}
_COUNT = {**_CHANGE, Status.DELTA_BADVAL: "The value is not a number.", Status.KEY_ENOENT: "No such key."}


class VbucketState(OpenEnum):
    """Vbucket states as the memcached commands and TAP number them."""

    ACTIVE = 1
    REPLICA = 2
    PENDING = 3
    DEAD = 4


class Feature(OpenEnum):
    """What a client may ask for in its hello."""

    DATATYPE = 0x01
    TLS = 0x02
    TCP_NODELAY = 0x03
    MUTATION_SEQNO = 0x04
    TCP_DELAY = 0x05
    XATTR = 0x06
    XERROR = 0x07
    SELECT_BUCKET = 0x08
    SNAPPY = 0x0A
    JSON = 0x0B
    DUPLEX = 0x0C
    CLUSTERMAP_CHANGE_NOTIFICATION = 0x0D
    UNORDERED_EXECUTION = 0x0E
    TRACING = 0x0F
    ALT_REQUEST_SUPPORT = 0x10
    SYNC_REPLICATION = 0x11
    COLLECTIONS = 0x12
    UPRIVER = 0x5550  #: Upriver's own: the node has the settings that only Upriver nodes have


class KeyState(OpenEnum):
    """The state of a key as observe reports it."""

    FOUND = 0x00
    PERSISTED = 0x01
    NOT_FOUND = 0x80
    LOGICALLY_DELETED = 0x81


class MetaOption(FlagSet):
    """Options of the with-meta commands."""

    SKIP_CONFLICT_RESOLUTION = 0x01
    FORCE_ACCEPT = 0x02
    REGENERATE_CAS = 0x04
    DELETE_IS_EXPIRATION = 0x10


# Reading


@memcached.request(0x00, errors=_READ)
class Get(Request):
    """Read the value of a key."""

    key: Key


@memcached.response(0x00)
class GetResponse(Response):
    """The value, with the flags it was stored with."""

    flags: U32 = 0
    value: Value = b""


@memcached.request(0x09)
class GetQ(Get):
    """Get without an answer for a missing key."""


@memcached.response(0x09)
class GetQResponse(GetResponse):
    """The value."""


@memcached.request(0x0C, errors=_READ)
class GetK(Get):
    """Get with the key in the answer."""


@memcached.response(0x0C)
class GetKResponse(Response):
    """The value, with its key."""

    flags: U32 = 0
    key: Key = b""
    value: Value = b""


@memcached.request(0x0D)
class GetKQ(Get):
    """GetK without an answer for a missing key."""


@memcached.response(0x0D)
class GetKQResponse(GetKResponse):
    """The value, with its key."""


# Writing


@memcached.request(0x01, errors={**_STORE, **_VERSION_GONE})
class Set(Request):
    """Store a value, replacing any other; with a CAS only if it is that of the item."""

    flags: U32 = 0
    expiration: U32 = 0
    key: Key
    value: Value = b""


@memcached.response(0x01, extras=(0, 16))
class SetResponse(Response):
    """Stored. The answer has the branch and seqno if MUTATION_SEQNO was negotiated."""

    vbucket_uuid: Annotated[int | None, UInt(8), Only(16)] = None
    seqno: Annotated[int | None, UInt(8), Only(16)] = None


@memcached.request(0x02, errors={**_STORE, **_VERSION_GONE, Status.KEY_EEXISTS: "The key exists already."})
class Add(Set):
    """Store a value if the key does not exist."""


@memcached.response(0x02, extras=(0, 16))
class AddResponse(SetResponse):
    """Stored."""


@memcached.request(0x03, errors={**_STORE, Status.KEY_ENOENT: "The key does not exist."})
class Replace(Set):
    """Store a value if the key exists."""


@memcached.response(0x03, extras=(0, 16))
class ReplaceResponse(SetResponse):
    """Stored."""


@memcached.request(0x04, errors={**_CHANGE, Status.KEY_ENOENT: "The key does not exist."})
class Delete(Request):
    """Delete a key."""

    key: Key


@memcached.response(0x04, extras=(0, 16))
class DeleteResponse(SetResponse):
    """Deleted."""


@memcached.request(0x05, errors=_COUNT)
class Increment(Request):
    """Add to a number; an expiration of 0xffffffff means that a missing key is not created."""

    delta: U64 = 1
    initial: U64 = 0
    expiration: U32 = 0
    key: Key


@memcached.response(0x05, extras=(0, 16))
class IncrementResponse(Response):
    """The new number."""

    vbucket_uuid: Annotated[int | None, UInt(8), Only(16)] = None
    seqno: Annotated[int | None, UInt(8), Only(16)] = None
    number: Annotated[U64, IN_VALUE]


@memcached.request(0x06, errors=_COUNT)
class Decrement(Increment):
    """Subtract from a number; it stops at 0."""


@memcached.response(0x06, extras=(0, 16))
class DecrementResponse(IncrementResponse):
    """The new number."""


@memcached.request(0x0E, errors={**_STORE, Status.NOT_STORED: "The key does not exist."})
class Append(Request):
    """Append bytes to the value."""

    key: Key
    value: Value = b""


@memcached.response(0x0E, extras=(0, 16))
class AppendResponse(SetResponse):
    """Stored."""


@memcached.request(0x0F, errors={**_STORE, Status.NOT_STORED: "The key does not exist."})
class Prepend(Append):
    """Prepend bytes to the value."""


@memcached.response(0x0F, extras=(0, 16))
class PrependResponse(SetResponse):
    """Stored."""


@memcached.request(0x11)
class SetQ(Set):
    """Set, silent on success."""


@memcached.request(0x12)
class AddQ(Set):
    """Add, silent on success."""


@memcached.request(0x13)
class ReplaceQ(Set):
    """Replace, silent on success."""


@memcached.request(0x14)
class DeleteQ(Delete):
    """Delete, silent on success."""


@memcached.request(0x15)
class IncrementQ(Increment):
    """Increment, silent on success."""


@memcached.request(0x16)
class DecrementQ(Increment):
    """Decrement, silent on success."""


@memcached.request(0x19)
class AppendQ(Append):
    """Append, silent on success."""


@memcached.request(0x1A)
class PrependQ(Append):
    """Prepend, silent on success."""


@memcached.request(0x1C, errors={**_READ, **_TOUCH})
class Touch(Request):
    """Set a new expiration."""

    expiration: U32 = 0
    key: Key


@memcached.response(0x1C, extras=(0, 4))
class TouchResponse(Response):
    """Touched. Memcached sends the flags of the item, other servers send none."""

    flags: Annotated[int | None, UInt(4), Only(4)] = None


@memcached.request(0x1D, errors={**_READ, **_TOUCH})
class Gat(Touch):
    """Read a value and set a new expiration."""


@memcached.response(0x1D)
class GatResponse(GetResponse):
    """The value."""


@memcached.request(0x1E)
class GatQ(Touch):
    """Gat without an answer for a missing key."""


@memcached.response(0x1E)
class GatQResponse(GetResponse):
    """The value."""


@memcached.request(0x08, extras=(0, 4), errors=_DISK)
class Flush(Request):
    """Empty the bucket, now or at a given time."""

    expiration: Annotated[int | None, UInt(4), Only(4)] = None


@memcached.request(0x18, extras=(0, 4))
class FlushQ(Flush):
    """Flush, silent on success."""


# Locks


_LOCK = {
    **_READ,
    Status.LOCKED: "The key is locked already.",
    Status.ETMPFAIL: "The same, for a client without XERROR in its hello.",
}
_UNLOCK = {
    **_READ,
    Status.LOCKED: "The CAS is not that of the lock.",
    Status.NOT_LOCKED: "The key is not locked.",
    Status.ETMPFAIL: "Either, for a client without XERROR in its hello.",
}


@memcached.request(0x94, extras=(0, 4), errors=_LOCK)
class GetLocked(Request):
    """Read a value and lock it against changes for some seconds."""

    lock_time: Annotated[int | None, UInt(4), Only(4)] = None
    key: Key


@memcached.response(0x94)
class GetLockedResponse(GetResponse):
    """The value; its CAS releases the lock."""


@memcached.request(0x95, errors=_UNLOCK)
class Unlock(Request):
    """Release a lock early; the CAS must be the one from the lock's answer."""

    key: Key


# The connection


@memcached.request(0x0A)
class Noop(Request):
    """No operation; answered in order."""


@memcached.request(0x0B)
class Version(Request):
    """Ask for the version of the server."""


@memcached.response(0x0B)
class VersionResponse(Response):
    """The version, beginning with a digit."""

    version: Value = b""


@memcached.request(0x10, errors={Status.KEY_ENOENT: "The group of statistics is unknown."})
class Stat(Request):
    """Ask for a group of statistics; the response is one packet per statistic and an empty one at the end."""

    key: Key = b""


@memcached.response(0x10)
class StatResponse(Response):
    """One statistic; the last has neither key nor value."""

    key: Key = b""
    value: Value = b""


@memcached.request(0x07)
class Quit(Request):
    """Close the connection after a response."""


@memcached.request(0x17)
class QuitQ(Request):
    """Close the connection without a response."""


@memcached.request(0x1B)
class Verbosity(Request):
    """Set how much the server logs."""

    level: U32 = 0


@memcached.request(0x1F)
class Hello(Request):
    """Introduce the client and request features."""

    agent: Key = b""
    features: Annotated[tuple[Feature, ...], Repeat(UInt(2), code=Feature)] = ()


@memcached.response(0x1F)
class HelloResponse(Response):
    """The granted features."""

    features: Annotated[tuple[Feature, ...], Repeat(UInt(2), code=Feature)] = ()


# Authentication


@memcached.request(0x20)
class SaslListMechanisms(Request):
    """Ask for the authentication mechanisms."""


@memcached.response(0x20)
class SaslListMechanismsResponse(Response):
    """The mechanisms, separated by spaces."""

    mechanisms: Value = b""


_LOGIN = {Status.AUTH_ERROR: "Wrong name or password.", Status.AUTH_CONTINUE: "A further step is needed."}


@memcached.request(0x21, errors=_LOGIN)
class SaslAuth(Request):
    """Start to authenticate."""

    mechanism: Key
    value: Value = b""


@memcached.request(0x22, errors={Status.AUTH_ERROR: _LOGIN[Status.AUTH_ERROR]})
class SaslStep(SaslAuth):
    """Continue to authenticate."""


@memcached.response(0x21, status=(Status.SUCCESS, Status.AUTH_CONTINUE))
class SaslAuthResponse(Response):
    """Authenticated, or the challenge for the next step."""

    value: Value = b""


@memcached.response(0x22, status=(Status.SUCCESS, Status.AUTH_CONTINUE))
class SaslStepResponse(SaslAuthResponse):
    """Authenticated, or the challenge for the next step."""


# Vbuckets


_UNSTORED = {Status.ETMPFAIL: "The disk failed before the change was stored: try again."}


@memcached.request(
    0x3D,
    either=True,
    errors={
        Status.EINVAL: "The state is unknown.",
        Status.NOT_MY_VBUCKET: "The bucket has no vbucket of this number.",
        **_UNSTORED,
    },
)
class SetVbucket(Request):
    """Create a vbucket or change its state."""

    state: Annotated[VbucketState, UInt(4)]


@memcached.request(0x3E, errors=_NOT_MINE)
class GetVbucket(Request):
    """Ask for the state of a vbucket."""


@memcached.response(0x3E, either=True)
class GetVbucketResponse(Response):
    """The state."""

    state: Annotated[VbucketState, UInt(4), IN_VALUE]


@memcached.request(0x3F, errors={**_NOT_MINE, Status.EINVAL: "The vbucket must be dead first.", **_UNSTORED})
class DeleteVbucket(Request):
    """Delete a vbucket and its contents."""

    argument: Value = b""


@record
class VbucketSeqno:
    """The high seqno of one vbucket."""

    vbucket: U16
    seqno: U64


@memcached.request(0x48, extras=(0, 4))
class GetAllVbucketSeqnos(Request):
    """Ask for the high seqnos of all vbuckets, or of those in one state."""

    state: Annotated[VbucketState | None, UInt(4), Only(4)] = None


@memcached.response(0x48)
class GetAllVbucketSeqnosResponse(Response):
    """The high seqnos."""

    seqnos: Annotated[tuple[VbucketSeqno, ...], Repeat(VbucketSeqno)] = ()


@record
class FailoverEntry:
    """A branch: changes after this seqno were written under this uuid."""

    vbucket_uuid: U64
    seqno: U64


@memcached.request(0x96, errors=_NOT_MINE)
class GetFailoverLog(Request):
    """Ask for the failover log of a vbucket, without opening a stream."""


@memcached.response(0x96)
class GetFailoverLogResponse(Response):
    """The failover log, newest entry first."""

    log: Annotated[tuple[FailoverEntry, ...], Repeat(FailoverEntry)] = ()


@memcached.request(0x97, errors=_NOT_MINE)
class LastClosedCheckpoint(Request):
    """Ask for the id of the newest closed checkpoint."""


@memcached.response(0x97)
class LastClosedCheckpointResponse(Response):
    """The id."""

    checkpoint: Annotated[U64, IN_VALUE]


@memcached.request(0xAA, errors=_NOT_MINE)
class CreateCheckpoint(Request):
    """Close the open checkpoint and open another."""


@memcached.response(0xAA)
class CreateCheckpointResponse(Response):
    """The open checkpoint and the newest one that is on disk."""

    checkpoint: Annotated[U64, IN_VALUE]
    persisted_checkpoint: U64


@memcached.request(0x9E, errors={Status.KEY_ENOENT: "No TAP client is registered under this name."})
class DeregisterTapClient(Request):
    """Forget a registered TAP client."""

    name: Key


# Persistence


@memcached.request(0x80, errors={Status.EINVAL: "Persistence is already stopped."})
class StopPersistence(Request):
    """Stop writing to disk."""


@memcached.request(0x81, errors={Status.EINVAL: "Persistence is not stopped."})
class StartPersistence(Request):
    """Resume writing to disk."""


@memcached.request(0xB7, either=True, errors={Status.ETMPFAIL: "The seqno was not on disk in time.", **_NOT_MINE})
class SeqnoPersistence(Request):
    """Wait until a seqno is on disk."""

    seqno: U64


@memcached.request(0x91, errors={**_NOT_MINE, Status.KEY_ENOENT: "The vbucket has no such branch."})
class ObserveSeqno(Request):
    """Ask which seqnos of a branch are in memory and on disk."""

    vbucket_uuid: Annotated[U64, IN_VALUE]


class ObserveFormat(FlagSet):
    """The form of the answer."""

    FAILED_OVER = 1


@memcached.response(0x91)
class ObserveSeqnoResponse(Response):
    """The seqnos in memory and on disk; after a failover also the last seqno of the requested branch."""

    format: Annotated[ObserveFormat, UInt(1), IN_VALUE] = ObserveFormat(0)
    vbucket: U16
    vbucket_uuid: U64
    persisted_seqno: U64
    current_seqno: U64
    old_vbucket_uuid: Annotated[int | None, UInt(8), When("format", ObserveFormat.FAILED_OVER)] = None
    last_seqno: Annotated[int | None, UInt(8), When("format", ObserveFormat.FAILED_OVER)] = None


@record
class ObservedKey:
    """A key to observe."""

    vbucket: U16
    key_length: U16 = count_of("key")
    key: Counted


@record
class KeyObservation:
    """The state of a key."""

    vbucket: U16
    key_length: U16 = count_of("key")
    key: Counted
    state: Annotated[KeyState, UInt(1)]
    cas: U64


@memcached.request(0x92, errors=_NOT_MINE)
class Observe(Request):
    """Ask whether keys are in memory and on disk."""

    keys: Annotated[tuple[ObservedKey, ...], Repeat(ObservedKey)] = ()


@memcached.response(0x92)
class ObserveResponse(Response):
    """The state of each key; the CAS field has the mean times of persistence and replication."""

    keys: Annotated[tuple[KeyObservation, ...], Repeat(KeyObservation)] = ()


# Meta data


@memcached.request(0xA0, extras=(0, 1), errors=_READ)
class GetMeta(Request):
    """Read the metadata of a key, even if it is deleted."""

    version: Annotated[int | None, UInt(1), Only(1)] = None
    key: Key


@memcached.response(0xA0, extras=(20, 21))
class GetMetaResponse(Response):
    """The metadata; the CAS is in the header."""

    deleted: U32 = 0
    flags: U32 = 0
    expiration: U32 = 0
    rev_seqno: U64 = 0
    item_datatype: Annotated[int | None, UInt(1), Only(21)] = None


_META = {
    **_CHANGE,
    **_VERSION_GONE,
    Status.KEY_EEXISTS: "Conflict resolution keeps the stored version.",
    Status.EINVAL: "The revision or the CAS is 0.",
}


@memcached.request(0xA2, extras=(24, 26, 28, 30), errors={**_META, Status.E2BIG: _STORE[Status.E2BIG]})
class SetWithMeta(Request):
    """Store a value with the revision and CAS that it has elsewhere."""

    flags: U32 = 0
    expiration: U32 = 0
    rev_seqno: U64 = 0
    item_cas: U64 = 0
    options: Annotated[MetaOption | None, UInt(4), Only(28, 30)] = None
    nmeta: Annotated[U16, Only(26, 30)] = count_of("meta")
    key: Key
    value: Value = b""
    meta: Counted = b""


@memcached.response(0xA2, extras=(0, 16))
class SetWithMetaResponse(SetResponse):
    """Stored."""


@memcached.request(0xA3, extras=(24, 26, 28, 30))
class SetQWithMeta(SetWithMeta):
    """Set with meta, silent on success."""


@memcached.request(0xA8, extras=(24, 26, 28, 30), errors=_META)
class DeleteWithMeta(SetWithMeta):
    """Delete a key with the revision and CAS that the deletion has elsewhere."""


@memcached.response(0xA8, extras=(0, 16))
class DeleteWithMetaResponse(SetResponse):
    """Deleted."""


@memcached.request(0xA9, extras=(24, 26, 28, 30))
class DeleteQWithMeta(DeleteWithMeta):
    """Delete with meta, silent on success."""


# Buckets and the cluster


@memcached.request(0x87)
class ListBuckets(Request):
    """Ask for the names of the buckets."""


@memcached.response(0x87)
class ListBucketsResponse(Response):
    """The names, separated by spaces."""

    names: Value = b""


@memcached.request(0x89, errors={Status.KEY_ENOENT: "The bucket does not exist."})
class SelectBucket(Request):
    """Use this bucket from now on."""

    name: Key


@memcached.request(0xB4, extras=(0, 16), errors={Status.EINVAL: "The map is not JSON, or has no revision."})
class SetClusterConfig(Request):
    """Give the node a new cluster map."""

    rev_epoch: Annotated[int | None, UInt(8), Only(16)] = None
    rev: Annotated[int | None, UInt(8), Only(16)] = None
    bucket: Key = b""
    config: Value = b""


@memcached.request(0xB5, extras=(0, 16))
class GetClusterConfig(Request):
    """Ask for the cluster map if it is newer than this revision."""

    rev_epoch: Annotated[int | None, UInt(8), Only(16)] = None
    rev: Annotated[int | None, UInt(8), Only(16)] = None


@memcached.response(0xB5)
class GetClusterConfigResponse(Response):
    """The cluster map as JSON."""

    config: Value = b""


@memcached.request(0xFE, errors={Status.KEY_ENOENT: "The version is unknown."})
class GetErrorMap(Request):
    """Ask what the statuses mean."""

    version: Annotated[U16, IN_VALUE]


@memcached.response(0xFE)
class GetErrorMapResponse(Response):
    """The meanings as JSON."""

    error_map: Value = b""
