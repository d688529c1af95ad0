"""May a consumer go on from where it stands? The producer's rules (docs/semantics.md), as pure functions.

Both answer None for "go on" or the seqno to roll back to. A consumer that starts at 0 never rolls back; one
that stands below the purge seqno may have missed deletions and starts over.
"""

from upriver.errors import KeyNotFound, OutOfRange
from upriver.model.failover import FailoverEntry, FailoverLog
from upriver.model.position import StreamPosition


def rollback_by_snapshot(log: FailoverLog, high_seqno: int, purge_seqno: int, position: StreamPosition) -> int | None:
    """The rule of `dcp`, whose requests carry the bounds of the consumer's snapshot."""
    if position.seqno == 0:
        return None
    place = log.index(position.vbucket_uuid)
    if position.seqno < purge_seqno or place is None:
        return 0
    start, end = position.snapshot.start, position.snapshot.end
    if position.seqno in (start, end):  # not begun, or completed: nothing is half received
        start = end = position.seqno
    upper = log.upper(place, high_seqno)
    return None if end <= upper else min(upper, start)


def rollback_by_entry(
    log: FailoverLog,
    high_seqno: int,
    purge_seqno: int,
    start_seqno: int,
    entry: FailoverEntry,
    *,
    unknown_is_error: bool,
) -> int | None:
    """The rule of `upr` and the drafts, whose requests name an entry of the failover log.

    An unknown uuid is KEY_ENOENT in `upr` and a rollback to 0 in the drafts; a start beyond everything the
    newest branch holds is ERANGE in both, as the texts say.
    """
    if start_seqno == 0:
        return None
    place = log.index(entry.vbucket_uuid)
    if place is None and unknown_is_error:
        raise KeyNotFound(f"the vbucket uuid 0x{entry.vbucket_uuid:x} is not in the failover log")
    if start_seqno < purge_seqno or place is None or log.entries[place] != entry:
        return 0
    upper = log.upper(place, high_seqno)
    if start_seqno <= upper:
        return None
    if place == 0:
        raise OutOfRange(f"start seqno {start_seqno} is above the high seqno {high_seqno}")
    return upper
