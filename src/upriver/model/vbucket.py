"""The vbucket of a key, and the roles of a vbucket."""

import enum
import zlib


class VbucketState(enum.Enum):
    """The role of a copy of a vbucket.

    The numbers on the wire differ from dialect to dialect (2 is *pending* in the UPR texts and *replica*
    in TAP), so the model has names only.
    """

    ACTIVE = "active"
    REPLICA = "replica"
    PENDING = "pending"
    DEAD = "dead"


#: The maximum number of vbuckets of a bucket, and the default.
VBUCKETS_MAX = 1024


def vbucket_of(key: bytes, vbuckets: int = VBUCKETS_MAX) -> int:
    """The vbucket that every client of a bucket with that many vbuckets maps the key to."""
    return ((zlib.crc32(key) >> 16) & 0x7FFF) % vbuckets
