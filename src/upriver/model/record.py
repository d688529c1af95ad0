"""The record: one layout for a change in memory, on disk and on a `dcp` wire.

A record is a prefix of our own, in the machine's byte order, followed by the exact `dcp` frame of the change with
opaque 0, in network byte order. Streaming `dcp` is then a copy and a patch of the opaque; other dialects convert the
fixed part. The prefix holds the fields that a frame does not have: the time of the change and TAP's remaining time to
live.

The numbers are repeated here because the engine may not import the wire; a test compares them with the declared
messages of `dcp`.
"""

import struct
from dataclasses import dataclass
from typing import Final

from upriver.model.change import Change, Event

#: superseded_by u64 (0 while current), time u32 (second of the change), TAP time to live u8, marks u8, 2
#: bytes unused. Only the engine's memory sets marks.
PREFIX: Final = struct.Struct("=QIB3x")
SUPERSEDED_BY_OFFSET: Final = 0
TIME_OFFSET: Final = 8
TTL_OFFSET: Final = 12
#: Records in memory and on disk start at multiples of this many bytes.
ALIGNMENT: Final = 8

#: magic, opcode, key length, extras length, datatype, vbucket, body length, opaque, CAS.
HEADER: Final = struct.Struct(">BBHBBHIIQ")
#: by_seqno, rev_seqno, flags, expiration, lock time, nmeta, nru.
MUTATION_EXTRAS: Final = struct.Struct(">QQIIIHB")
#: by_seqno, rev_seqno, nmeta. The second of the deletion is the prefix's time.
DELETION_EXTRAS: Final = struct.Struct(">QQH")
#: by_seqno, rev_seqno, delete time.
EXPIRATION_EXTRAS: Final = struct.Struct(">QQI")

MAGIC: Final = 0x80
OPCODES: Final = {Event.MUTATION: 0x57, Event.DELETION: 0x58, Event.EXPIRATION: 0x59}
EVENTS: Final = {opcode: event for event, opcode in OPCODES.items()}

#: Offsets from the start of the frame that every kind of change shares.
BODY_LENGTH_OFFSET: Final = 8
OPAQUE_OFFSET: Final = 12
CAS_OFFSET: Final = 16
SEQNO_OFFSET: Final = 24
REV_SEQNO_OFFSET: Final = 32

#: A TAP message starts with this many hops to live.
TTL_MAX: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A change together with the fields of its prefix."""

    change: Change
    superseded_by: int = 0
    time: int = 0
    ttl: int = TTL_MAX


def pack(record: Record) -> bytes:
    """The bytes of a record."""
    change = record.change
    common = change.seqno, change.rev_seqno
    match change.event:
        case Event.MUTATION:
            extras = MUTATION_EXTRAS.pack(*common, change.flags, change.expiry, change.lock_time, 0, 0)
        case Event.DELETION:
            extras = DELETION_EXTRAS.pack(*common, 0)
        case Event.EXPIRATION:
            extras = EXPIRATION_EXTRAS.pack(*common, change.expiry)
        case _:
            raise ValueError(f"a {change.event.name.lower()} is not a change of a key")
    header = HEADER.pack(
        MAGIC,
        OPCODES[change.event],
        len(change.key),
        len(extras),
        change.datatype,
        change.vbucket,
        len(extras) + len(change.key) + len(change.value),
        0,
        change.cas,
    )
    prefix = PREFIX.pack(record.superseded_by, record.time, record.ttl)
    return b"".join((prefix, header, extras, change.key, change.value))


def size_at(data: bytes | memoryview, offset: int) -> int:
    """The size of the record that starts at ``offset``, prefix included."""
    frame = offset + PREFIX.size
    (body,) = struct.unpack_from(">I", data, frame + BODY_LENGTH_OFFSET)
    return PREFIX.size + HEADER.size + int(body)


def aligned(size: int) -> int:
    """The room that a record of this size takes in memory and on disk."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def unpack(data: bytes | memoryview, offset: int = 0) -> Record:
    """The record that starts at ``offset``."""
    superseded_by, time, ttl = PREFIX.unpack_from(data, offset)
    frame = offset + PREFIX.size
    _, opcode, key_length, extras_length, datatype, vbucket, body, _, cas = HEADER.unpack_from(data, frame)
    event = EVENTS[opcode]
    extras, flags, expiry, lock_time = frame + HEADER.size, 0, 0, 0
    if event is Event.MUTATION:
        seqno, rev_seqno, flags, expiry, lock_time, _, _ = MUTATION_EXTRAS.unpack_from(data, extras)
    elif event is Event.DELETION:
        seqno, rev_seqno, _ = DELETION_EXTRAS.unpack_from(data, extras)
        expiry = time
    else:
        seqno, rev_seqno, expiry = EXPIRATION_EXTRAS.unpack_from(data, extras)
    key = extras + extras_length
    value, end = key + key_length, frame + HEADER.size + body
    return Record(
        superseded_by=superseded_by,
        time=time,
        ttl=ttl,
        change=Change(
            vbucket=vbucket,
            event=event,
            seqno=seqno,
            rev_seqno=rev_seqno,
            cas=cas,
            flags=flags,
            expiry=expiry,
            lock_time=lock_time,
            datatype=datatype,
            key=bytes(data[key:value]),
            value=bytes(data[value:end]),
        ),
    )
