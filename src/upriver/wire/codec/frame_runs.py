"""Inspect and change runs of frames without an object for each of them.

The engine's frames are sent on a `dcp` stream as they are, except that expirations become deletions unless the
consumer asked for them. The engine says whether a run has any; converting them takes two passes over the headers.

A consumer looks for runs of changes that it can take at once: complete frames of one stream with growing seqnos. A
relay only needs to know where they end. A client whose rows are refused by the thousand with one text decodes that
text once. The loops are compiled where possible.
"""

import struct
from typing import Final

from upriver.model import (
    BODY_LENGTH_OFFSET,
    DELETION_EXTRAS,
    EVENTS,
    EXPIRATION_EXTRAS,
    HEADER,
    MAGIC,
    OPCODES,
    SEQNO_OFFSET,
    Event,
)
from upriver.wire.framing import BODY_BYTES_MAX
from upriver.wire.layout import Buffer

_BODY_LENGTH: Final = struct.Struct(">I")
_SEQNO: Final = struct.Struct(">Q")
_OPAQUE: Final = struct.Struct(">I")
_OPAQUE_AT: Final = 12
#: Lengths of the extras of each change, in `dcp` and in `upr`.
_EXTRAS: Final = {
    True: {0x57: (31,), 0x58: (18, 21), 0x59: (20, 18)},
    False: {0x57: (30, 31), 0x58: (18,), 0x59: (18,)},
}


def plain_expired_as_deleted(frames: bytes) -> bytes:
    """The same frames, with each expiration as a deletion."""
    kept: list[bytes] = []
    at = begun = 0
    while at < len(frames):
        size = HEADER.size + _BODY_LENGTH.unpack_from(frames, at + BODY_LENGTH_OFFSET)[0]
        if frames[at + 1] == OPCODES[Event.EXPIRATION]:
            kept += (frames[begun:at], _as_deletion(frames[at : at + size]))
            begun = at + size
        at += size
    return b"".join((*kept, frames[begun:]))


def _as_deletion(frame: bytes) -> bytes:
    magic, _, key_length, extras, datatype, vbucket, body, opaque, cas = HEADER.unpack_from(frame)
    header = HEADER.pack(
        magic,
        OPCODES[Event.DELETION],
        key_length,
        DELETION_EXTRAS.size,
        datatype,
        vbucket,
        body - extras + DELETION_EXTRAS.size,
        opaque,
        cas,
    )
    by_seqno, rev_seqno, _ = EXPIRATION_EXTRAS.unpack_from(frame, HEADER.size)
    return header + DELETION_EXTRAS.pack(by_seqno, rev_seqno, 0) + frame[HEADER.size + extras :]


def plain_change_run(
    data: Buffer, at: int, after: int, upto: int, modern: bool, body_bytes_max: int = BODY_BYTES_MAX
) -> tuple[int, int, int]:
    """The run of changes that starts at ``at``: where it ends, its last seqno, and how many changes it has.

    The run has complete, well-formed frames with the vbucket and opaque of the first one. Their seqnos grow, lie above
    ``after`` and do not exceed ``upto``. ``modern`` selects the layouts of `dcp`, otherwise those of `upr`.
    """
    extras_of, count = _EXTRAS[modern], 0
    stream: tuple[int, int] | None = None
    while len(data) - at >= HEADER.size:
        magic, opcode, key, extras, _, vbucket, body, opaque, _ = HEADER.unpack_from(data, at)
        end = at + HEADER.size + body
        if magic != MAGIC or extras not in extras_of.get(opcode, ()) or body < extras + key or not key:
            break
        if body > body_bytes_max or end > len(data) or (vbucket, opaque) != (stream or (vbucket, opaque)):
            break
        (seqno,) = _SEQNO.unpack_from(data, at + SEQNO_OFFSET)
        if not after < seqno <= upto:
            break
        stream, after, count, at = (vbucket, opaque), seqno, count + 1, end
    return at, after, count


def plain_changes_end(data: Buffer, at: int) -> int:
    """The end of the changes at ``at``, of any stream; beyond the data if the last one is incomplete."""
    while len(data) - at >= HEADER.size and data[at] == MAGIC and data[at + 1] in EVENTS:
        at += HEADER.size + _BODY_LENGTH.unpack_from(data, at + BODY_LENGTH_OFFSET)[0]
    return at


def plain_alike_run(data: Buffer, at: int) -> tuple[int, list[int]]:
    """The complete packets from ``at`` on that differ only in their opaque: where they end, and their opaques."""
    opaques: list[int] = []
    if len(data) - at < HEADER.size:
        return at, opaques
    (body,) = _BODY_LENGTH.unpack_from(data, at + BODY_LENGTH_OFFSET)
    size = HEADER.size + body
    before, behind = data[at : at + _OPAQUE_AT], data[at + _OPAQUE_AT + 4 : at + size]
    while len(data) - at >= size:
        if data[at : at + _OPAQUE_AT] != before or data[at + _OPAQUE_AT + 4 : at + size] != behind:
            break
        opaques += _OPAQUE.unpack_from(data, at + _OPAQUE_AT)
        at += size
    return at, opaques


try:
    from upriver.wire.codec._frame_runs import alike_run, change_run, changes_end, expired_as_deleted
except ImportError:  # built where there was no C compiler
    alike_run, change_run, changes_end = plain_alike_run, plain_change_run, plain_changes_end
    expired_as_deleted = plain_expired_as_deleted

__all__ = ["alike_run", "change_run", "changes_end", "expired_as_deleted"]
