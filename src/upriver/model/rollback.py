"""Whether a consumer may continue from its position: the producer's rules (docs/semantics.md), as pure functions.

The first two return None for "continue", or the seqno to roll back to. A consumer that starts at 0 never rolls back;
one below the purge seqno may have missed deletions and starts again from 0.
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
    if position.seqno in (start, end):  # not begun, or complete: no snapshot is partly received
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
    with_errors: bool,
) -> int | None:
    """The rule of `upr` and the drafts, whose requests name an entry of the failover log.

    `upr` has errors: an unknown uuid is KEY_ENOENT, and a start beyond everything the newest branch holds is ERANGE.
    The drafts have no answer for them but a rollback: to 0, and to the high seqno.
    """
    if start_seqno == 0:
        return None
    place = log.index(entry.vbucket_uuid)
    if place is None and with_errors:
        raise KeyNotFound(f"the vbucket uuid 0x{entry.vbucket_uuid:x} is not in the failover log")
    if start_seqno < purge_seqno or place is None or log.entries[place] != entry:
        return 0
    upper = log.upper(place, high_seqno)
    if start_seqno <= upper:
        return None
    if place == 0 and with_errors:
        raise OutOfRange(f"start seqno {start_seqno} is above the high seqno {high_seqno}")
    return upper


def resume_by_entry(position: StreamPosition, ours: FailoverLog, theirs: FailoverLog) -> tuple[FailoverEntry, int]:
    """Where a consumer of `upr` or a draft may resume, and the entry of the failover log that it names.

    Its requests have no snapshot bounds, so it compares the logs itself. It resumes at its seqno only if its branch is
    still the producer's newest, otherwise at its last consistent seqno, and never above the end of a shared branch.
    """
    shared = next((entry for entry in ours if theirs.index(entry.vbucket_uuid) is not None), None)
    if position.seqno == 0 or shared is None:
        # The text (Failover Log Request): the entry with the highest seqno, and from the beginning.
        return max(theirs, key=lambda entry: entry.seqno), 0
    if shared != ours.newest:
        place = ours.index(shared.vbucket_uuid)
        assert place is not None
        return shared, min(ours.upper(place, position.seqno), position.consistent_seqno)
    if shared.vbucket_uuid != theirs.newest.vbucket_uuid:
        return shared, position.consistent_seqno
    return shared, position.seqno
