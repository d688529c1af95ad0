"""A change: a mutation, deletion or expiration of a key."""

import enum
from dataclasses import dataclass


class Event(enum.IntEnum):
    """The kind of a row in a batch of changes.

    The first three are changes of a key. The others concern the vbucket and have neither key nor value: *flush* empties
    it, *rollback* discards the changes after ``seqno``, *reset* is a rollback to 0.
    """

    MUTATION = 1
    DELETION = 2
    EXPIRATION = 3
    FLUSH = 4
    ROLLBACK = 5
    RESET = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one key, as every dialect and the engine understand it."""

    vbucket: int
    event: Event
    seqno: int
    #: How often this key has changed.
    rev_seqno: int = 0
    cas: int = 0
    #: The client's own 32 bits, kept and never interpreted.
    flags: int = 0
    #: Second of the epoch at which the item expires, 0 for never; of a deletion, when it was deleted.
    expiry: int = 0
    #: Seconds for which the item is still locked.
    lock_time: int = 0
    datatype: int = 0
    key: bytes
    #: Empty if there is no value; None if the consumer fetches keys only.
    value: bytes = b""
