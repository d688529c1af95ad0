"""TAP (text 004), the predecessor: one connect message, then the server streams until either side disconnects.

The extras of every message from the server start with the same eight bytes. Engine-private data may follow between
extras and key: the revision of the item, a control code, a vbucket state, a checkpoint. The header's extras length does
not count that part; its own length is in the first two bytes of the extras. Every engine defines its own: a part that
is shorter or longer than ours is accepted, and what we do not know of it is skipped.
"""

from typing import Annotated, ClassVar, Final

from upriver.model import Event
from upriver.wire.codes import FlagSet, OpenEnum, Sender, Status
from upriver.wire.dialect import Dialect
from upriver.wire.dialects.memcached import VbucketState, memcached
from upriver.wire.fields import U8, U16, U32, U64, Counted, Key, Only, Repeat, Reserved, UInt, Value, When, count_of
from upriver.wire.framing import MEMCACHED
from upriver.wire.layout import record
from upriver.wire.message import Request

tap = Dialect("tap", framing=MEMCACHED, document="TAP", extends=memcached)

#: The backfill date -1, which is always in the future: no existing item is sent.
FUTURE: Final = 2**64 - 1


class ConnectFlag(FlagSet):
    """What a client requests. The last two flags are not in the text; real clients send them."""

    BACKFILL = 0x01
    DUMP = 0x02
    LIST_VBUCKETS = 0x04
    TAKEOVER_VBUCKETS = 0x08
    SUPPORT_ACK = 0x10
    REQUEST_KEYS_ONLY = 0x20
    CHECKPOINT = 0x40
    REGISTERED_CLIENT = 0x80
    FIX_FLAG_BYTEORDER = 0x100


class TapFlag(FlagSet):
    """Flags of a single message."""

    ACK = 0x01
    NO_VALUE = 0x02
    NETWORK_BYTE_ORDER = 0x04


class Control(OpenEnum):
    """What an opaque message reports about the stream."""

    ENABLE_AUTO_NACK = 0
    INITIAL_VBUCKET_STREAM = 1
    ENABLE_CHECKPOINT_SYNC = 2
    OPEN_CHECKPOINT = 3
    START_ONLINEUPDATE = 4
    STOP_ONLINEUPDATE = 5
    REVERT_ONLINEUPDATE = 6
    CLOSE_TAP_STREAM = 7
    CLOSE_BACKFILL = 8


@record
class VbucketCheckpoint:
    """The last checkpoint that a client has of a vbucket."""

    vbucket: U16
    checkpoint: U64


@tap.request(
    0x40,
    sender=Sender.CONSUMER,
    extras=(4, 0),
    errors={
        Status.EINVAL: "The value does not match the flags.",
        Status.NOT_MY_VBUCKET: "The bucket has no vbucket of a listed number.",
        Status.KEY_EEXISTS: "The connection streams already, or the name belongs to another client.",
    },
)
class Connect(Request):
    """Start a stream. The values of options follow the name, in the order of the flags."""

    flags: Annotated[ConnectFlag, UInt(4), Only(4)] = ConnectFlag(0)
    name: Key = b""  #: identifies the client across reconnects
    backfill_date: Annotated[int | None, UInt(8), When("flags", ConnectFlag.BACKFILL)] = None
    vbuckets: Annotated[
        tuple[int, ...] | None, Repeat(UInt(2), count_size=2), When("flags", ConnectFlag.LIST_VBUCKETS)
    ] = None
    #: A client without any may omit their number too.
    checkpoints: Annotated[
        tuple[VbucketCheckpoint, ...] | None,
        Repeat(VbucketCheckpoint, count_size=2),
        When("flags", ConnectFlag.CHECKPOINT, optional=True),
    ] = None
    #: Not in the text: 1 means that the client needs nothing of the open checkpoint.
    closed_only: Annotated[int | None, UInt(1), When("flags", ConnectFlag.REGISTERED_CLIENT, optional=True)] = None


_TAKEN = {Status.ETMPFAIL: "Send it again later.", Status.EINVAL: "The message has no hops left."}
_TAKEN_BY_OWNER = {**_TAKEN, Status.NOT_MY_VBUCKET: "The consumer does not own the vbucket."}
_CHANGE_TAKEN = {
    **_TAKEN_BY_OWNER,
    Status.ENOMEM: "The consumer's memory is full: send it again later.",
    Status.KEY_EEXISTS: "The vbucket is active at the consumer, which has refused to make it a copy of the sender's.",
}


@tap.request(
    0x41,
    sender=Sender.PRODUCER,
    private="private_length",
    extras=(16, 24, 25),
    change=Event.MUTATION,
    errors=_CHANGE_TAKEN,
)
class Mutation(Request):
    """The key now holds this value."""

    private_length: U16 = count_of("rev_seqno", "nru")
    tap_flags: Annotated[TapFlag, UInt(2)] = TapFlag(0)
    ttl: U8 = 255  #: hops left
    reserved: ClassVar[Reserved] = Reserved(3)
    flags: U32 = 0  #: the client's own 32 bits
    expiration: U32 = 0  #: second of the epoch, 0 for never
    rev_seqno: Annotated[int | None, UInt(8), Only(24, 25)] = None  #: how often this key has changed
    nru: Annotated[int | None, UInt(1), Only(25)] = None  #: how recently the item was used
    key: Key
    value: Value = b""


@tap.request(
    0x42,
    sender=Sender.PRODUCER,
    private="private_length",
    extras=(8, 16),
    change=Event.DELETION,
    errors=_CHANGE_TAKEN,
)
class Delete(Request):
    """The key was deleted."""

    private_length: U16 = count_of("rev_seqno")
    tap_flags: Annotated[TapFlag, UInt(2)] = TapFlag(0)
    ttl: U8 = 255  #: hops left
    reserved: ClassVar[Reserved] = Reserved(3)
    rev_seqno: Annotated[int | None, UInt(8), Only(16)] = None  #: how often this key has changed
    key: Key
    value: Value = b""  #: real servers send the last value of an item deleted during a backfill


@tap.request(0x43, sender=Sender.PRODUCER, errors=_TAKEN)
class Flush(Request):
    """Delete all data."""

    private_length: U16 = count_of("private")
    tap_flags: Annotated[TapFlag, UInt(2)] = TapFlag(0)
    ttl: U8 = 255  #: hops left
    reserved: ClassVar[Reserved] = Reserved(3)
    private: Counted = b""  #: engine-specific data, ignored


@tap.request(0x44, sender=Sender.EITHER, private="private_length", extras=(8, 12), errors=_TAKEN_BY_OWNER)
class Opaque(Request):
    """Tell the other engine about the state of the stream."""

    private_length: U16 = count_of("control")
    tap_flags: Annotated[TapFlag, UInt(2)] = TapFlag(0)
    ttl: U8 = 255  #: hops left
    reserved: ClassVar[Reserved] = Reserved(3)
    control: Annotated[Control | None, UInt(4), Only(12)] = None  #: unknown ones are ignored


@tap.request(
    0x45,
    sender=Sender.PRODUCER,
    private="private_length",
    extras=(12,),
    errors={**_TAKEN_BY_OWNER, Status.KEY_EEXISTS: "The vbucket is active at the consumer, and stays so."},
)
class SetVbucket(Request):
    """Change the state of the consumer's vbucket, as part of a takeover."""

    private_length: U16 = count_of("state")
    tap_flags: Annotated[TapFlag, UInt(2)] = TapFlag(0)
    ttl: U8 = 255  #: hops left
    reserved: ClassVar[Reserved] = Reserved(3)
    state: Annotated[VbucketState, UInt(4)]


@tap.request(0x46, sender=Sender.PRODUCER, private="private_length", extras=(8, 16), errors=_TAKEN)
class CheckpointStart(Request):
    """A new checkpoint begins. The text prints 4 as the length of an id of 8 bytes; we send 8."""

    private_length: U16 = count_of("checkpoint")
    tap_flags: Annotated[TapFlag, UInt(2)] = TapFlag(0)
    ttl: U8 = 255  #: hops left
    reserved: ClassVar[Reserved] = Reserved(3)
    checkpoint: Annotated[int | None, UInt(8), Only(16)] = None


@tap.request(0x47, sender=Sender.PRODUCER, private="private_length", extras=(8, 16), errors=_TAKEN)
class CheckpointEnd(CheckpointStart):
    """A checkpoint is complete."""


@tap.request(0x46, sender=Sender.PRODUCER, private="private_length", extras=(16, 24))
class NamedCheckpointStart(Request):
    """A new checkpoint begins, in the form of the 3.0 servers, with the layout of a mutation; accepted, never sent."""

    private_length: U16 = count_of("rev_seqno")
    tap_flags: Annotated[TapFlag, UInt(2)] = TapFlag(0)
    ttl: U8 = 255  #: hops left
    reserved: ClassVar[Reserved] = Reserved(3)
    flags: U32 = 0
    expiration: U32 = 0
    rev_seqno: Annotated[int | None, UInt(8), Only(24)] = None
    name: Key = b"checkpoint_start"
    checkpoint: U64


@tap.request(0x47, sender=Sender.PRODUCER, private="private_length", extras=(16, 24))
class NamedCheckpointEnd(NamedCheckpointStart):
    """A checkpoint is complete, in the form of the 3.0 servers; accepted, never sent."""
