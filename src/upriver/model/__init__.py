"""The vocabulary of change streams, without bytes or I/O.

The engine, the wire with its six dialects, the client and Spark exchange these types and no others.
"""

from upriver.model.batch import CHANGES, change_batch, changes_in
from upriver.model.change import Change, Event
from upriver.model.comparison import Difference, differences
from upriver.model.compression import (
    INFLATED_BYTES_MAX,
    INFLATION_MAX,
    SNAPPY,
    inflated,
    inflated_batch,
    inflated_size,
    plain,
)
from upriver.model.failover import UUID_BITS, FailoverEntry, FailoverLog
from upriver.model.position import NO_END, SEQNO_MAX, Snapshot, StreamPosition
from upriver.model.record import (
    BODY_LENGTH_OFFSET,
    DELETION_EXTRAS,
    EVENTS,
    EXPIRATION_EXTRAS,
    HEADER,
    MAGIC,
    MUTATION_EXTRAS,
    OPAQUE_OFFSET,
    OPCODES,
    PREFIX,
    SEQNO_OFFSET,
    TTL_MAX,
    Record,
    aligned,
    pack,
    size_at,
    unpack,
)
from upriver.model.rollback import resume_by_entry, rollback_by_entry, rollback_by_snapshot
from upriver.model.vbucket import VBUCKETS_MAX, VbucketState, vbucket_of

__all__ = [
    "BODY_LENGTH_OFFSET",
    "CHANGES",
    "DELETION_EXTRAS",
    "EVENTS",
    "EXPIRATION_EXTRAS",
    "HEADER",
    "INFLATED_BYTES_MAX",
    "INFLATION_MAX",
    "MAGIC",
    "MUTATION_EXTRAS",
    "NO_END",
    "OPAQUE_OFFSET",
    "OPCODES",
    "PREFIX",
    "SEQNO_MAX",
    "SEQNO_OFFSET",
    "SNAPPY",
    "TTL_MAX",
    "UUID_BITS",
    "VBUCKETS_MAX",
    "Change",
    "Difference",
    "Event",
    "FailoverEntry",
    "FailoverLog",
    "Record",
    "Snapshot",
    "StreamPosition",
    "VbucketState",
    "aligned",
    "change_batch",
    "changes_in",
    "differences",
    "inflated",
    "inflated_batch",
    "inflated_size",
    "pack",
    "plain",
    "resume_by_entry",
    "rollback_by_entry",
    "rollback_by_snapshot",
    "size_at",
    "unpack",
    "vbucket_of",
]
