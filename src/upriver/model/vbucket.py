"""Vbuckets: which one a key belongs to, and the states that one can be in."""

import enum
import zlib


class VbucketState(enum.Enum):
    """Who may do what with a copy of a vbucket.

    The numbers on the wire differ from dialect to dialect (2 is *pending* in the UPR texts and *replica*
    in TAP), so the model has names only.
    """

    ACTIVE = "active"
    REPLICA = "replica"
    PENDING = "pending"
    DEAD = "dead"


#: A bucket has at most this many vbuckets, and unless told otherwise exactly this many.
VBUCKETS_MAX = 1024


def vbucket_of(key: bytes, vbuckets: int = VBUCKETS_MAX) -> int:
    """The vbucket that every client of a bucket with that many vbuckets maps the key to."""
    return ((zlib.crc32(key) >> 16) & 0x7FFF) % vbuckets
