"""Convert runs of the engine's records into the messages of a TAP connection.

A record is a prefix (time of the change, remaining hops) and a `dcp` frame. A TAP message has other extras, the
revision as engine-private data, and a message number in the opaque. The loop is compiled where possible; both versions
write the same bytes.

TAP cannot negotiate data types, so a receiver could not recognise a compressed value: values are inflated first.
"""

import struct
from typing import Final, NamedTuple

from upriver.model import HEADER, MAGIC, MUTATION_EXTRAS, OPCODES, PREFIX, SNAPPY, Event, plain

MUTATION: Final = 0x41
DELETE: Final = 0x42
#: Flags of a message (see ``tap.TapFlag``).
ACK: Final = 0x01
NO_VALUE: Final = 0x02
NETWORK_BYTE_ORDER: Final = 0x04
#: A deletion has its hops and flags at the same offsets as a mutation: after the length of the private part.
FLAGS_OFFSET: Final = HEADER.size + 2

#: private length, flags, time to live, item flags, expiration, revision, nru.
_MUTATION_PART: Final = struct.Struct(">HHB3xIIQB")
_MUTATION_EXTRAS_SIZE: Final = 16
#: private length, flags, time to live, revision.
_DELETE_PART: Final = struct.Struct(">HHB3xQ")
_DELETE_EXTRAS_SIZE: Final = 8
_REV_SIZE: Final = 8
_SEQNOS: Final = struct.Struct(">QQ")


class Laid(NamedTuple):
    """The result of converting a run of records."""

    messages: bytes
    sent: int
    #: Offset of the next run in the records.
    at: int
    #: The seqno of the last record that was processed, sent or not; 0 if there was none.
    seqno: int
    #: Number of records omitted because they have no hops left.
    tired: int
    #: Some values are compressed: nothing is converted before they are inflated.
    compressed: bool = False


def plain_lay_out(
    records: bytes,
    at: int,
    opaque: int,
    count_max: int,
    flags: int,
    since: int,
    since_upto: int,
    ttl_min: int,
    ack: int,
) -> Laid:
    """Messages for the records from ``at`` on, at most ``count_max``, numbered from ``opaque`` on.

    ``flags`` are the flags of every mutation. Changes older than the second ``since`` are omitted up to the seqno
    ``since_upto``. A change without hops left is omitted too, unless ``ttl_min`` grants it one. ``ack`` requests an
    acknowledgement of the last message: 1 if ``count_max`` was reached, 2 also at the end of the records.
    """
    out: list[bytearray] = []
    begin, seqno, tired = at, 0, 0
    while at < len(records) and len(out) < count_max:
        _, time, ttl = PREFIX.unpack_from(records, at)
        frame = at + PREFIX.size
        _, opcode, key_length, extras, datatype, vbucket, body, _, cas = HEADER.unpack_from(records, frame)
        fields, end = frame + HEADER.size, frame + HEADER.size + body
        seqno, rev_seqno = _SEQNOS.unpack_from(records, fields)
        at = end
        ttl = max(ttl, ttl_min)
        if (time < since and seqno <= since_upto) or not ttl:
            tired += not ttl
            continue
        rest = records[fields + extras : end]
        if opcode == OPCODES[Event.MUTATION]:
            if datatype & SNAPPY:
                return Laid(b"", 0, begin, 0, 0, compressed=True)
            _, _, item_flags, expiration, _, _, nru = MUTATION_EXTRAS.unpack_from(records, fields)
            part = _MUTATION_PART.pack(_REV_SIZE + 1, flags, ttl, item_flags, expiration, rev_seqno, nru)
            extras, code = _MUTATION_EXTRAS_SIZE, MUTATION
        else:
            rest, datatype = rest[:key_length], 0
            part = _DELETE_PART.pack(_REV_SIZE, 0, ttl, rev_seqno)
            extras, code = _DELETE_EXTRAS_SIZE, DELETE
        number = (opaque + len(out)) & 0xFFFFFFFF
        header = HEADER.pack(MAGIC, code, key_length, extras, datatype, vbucket, len(part) + len(rest), number, cas)
        out.append(bytearray(header + part + rest))
    full, ended = len(out) == count_max, at >= len(records)
    if out and ((ack & 1 and full) or (ack & 2 and ended)):
        out[-1][FLAGS_OFFSET + 1] |= ACK
    return Laid(b"".join(out), len(out), at, seqno, tired)


def inflated_records(records: bytes) -> bytes:
    """The same records with inflated values."""
    out, at = [], 0
    while at < len(records):
        body = HEADER.unpack_from(records, at + PREFIX.size)[6]
        end = at + PREFIX.size + HEADER.size + body
        out.append(_inflated(records[at:end]))
        at = end
    return b"".join(out)


def _inflated(record: bytes) -> bytes:
    magic, opcode, key_length, extras, datatype, vbucket, _, opaque, cas = HEADER.unpack_from(record, PREFIX.size)
    if not datatype & SNAPPY or opcode != OPCODES[Event.MUTATION]:
        return record
    fields = PREFIX.size + HEADER.size
    value = fields + extras + key_length
    found = plain(record[value:])
    body = extras + key_length + len(found)
    header = HEADER.pack(magic, opcode, key_length, extras, datatype & ~SNAPPY, vbucket, body, opaque, cas)
    return record[: PREFIX.size] + header + record[fields:value] + found


try:
    from upriver.wire.codec import _tap_records
except ImportError:  # built where there was no C compiler
    lay_out = plain_lay_out
else:

    def lay_out(
        records: bytes,
        at: int,
        opaque: int,
        count_max: int,
        flags: int,
        since: int,
        since_upto: int,
        ttl_min: int,
        ack: int,
    ) -> Laid:
        """The compiled twin of ``plain_lay_out``."""
        return Laid(*_tap_records.lay_out(records, at, opaque, count_max, flags, since, since_upto, ttl_min, ack))


__all__ = ["Laid", "inflated_records", "lay_out", "plain_lay_out"]
