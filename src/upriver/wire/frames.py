"""Runs of `dcp` frames as the store holds them: what must be looked at, or changed, on their way out.

A store's frames are what a `dcp` stream sends, but for two things. Expirations go out as deletions unless the consumer
has asked for them, and a stream must know the last seqno that it sent. Both are a walk over the headers, compiled where
that is possible; frames without an expiration, nearly all of them, are handed back as they are.
"""

import struct
from typing import Final

from upriver.model import Event
from upriver.model.record import BODY_LENGTH_OFFSET, DELETION_EXTRAS, EXPIRATION_EXTRAS, HEADER, OPCODES, SEQNO_OFFSET

_BODY_LENGTH: Final = struct.Struct(">I")
_SEQNO: Final = struct.Struct(">Q")


def plain_expirations_as_deletions(frames: bytes) -> bytes:
    """The same frames with a deletion in the place of each expiration."""
    kept: list[bytes] = []
    at = begun = 0
    while at < len(frames):
        size = HEADER.size + _BODY_LENGTH.unpack_from(frames, at + BODY_LENGTH_OFFSET)[0]
        if frames[at + 1] == OPCODES[Event.EXPIRATION]:
            kept += (frames[begun:at], _as_deletion(frames[at : at + size]))
            begun = at + size
        at += size
    return b"".join((*kept, frames[begun:])) if kept else frames


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


def plain_last_seqno(frames: bytes) -> int:
    """The seqno of the last frame; 0 if there is none."""
    at, last = 0, 0
    while at < len(frames):
        (last,) = _SEQNO.unpack_from(frames, at + SEQNO_OFFSET)
        at += HEADER.size + _BODY_LENGTH.unpack_from(frames, at + BODY_LENGTH_OFFSET)[0]
    return last


try:
    from upriver.wire._frames import expirations_as_deletions, last_seqno
except ImportError:  # built where there was no C compiler
    expirations_as_deletions, last_seqno = plain_expirations_as_deletions, plain_last_seqno

__all__ = ["expirations_as_deletions", "last_seqno"]
