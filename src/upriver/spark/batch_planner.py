"""Plans micro-batches by the rules of docs/semantics.md, without any I/O.

Theory of operation. The end E of a range is chosen before the range is read. A key that changes in between moves beyond
E, and then the changes up to E do not add up to a state that the source ever had. The next range corrects that, unless
the source fails over first: then the newer version may be lost, and no node would send the older one again. So an
offset also holds W, the last *proven* consistent point.

An observation after the read, under the same uuid, proves that E is consistent. Either the high seqno of the source is
still E, so nothing has moved. Or the source gave exact ends: it retains every version from W on, or from E on if E was
its high seqno when the range was planned. (A version that was current then had been current in all earlier reads, so
none of them missed it.) Spark logs an end before the range is read and never changes it. So a proof is stored in the
offset of the next batch, and if there is nothing else to read, in a batch without rows.

After a failover there are three cases. If the source still has everything up to E, nothing that was read is lost: a
query continues from E if E is proven, and otherwise reads the changes after W again, because it may have missed some of
them. If the source has lost a part of it, the query rolls back to W, or to the last seqno that both share. After a
rollback a sink repairs its state with current versions, which may lie beyond E. So until a later batch has ended at the
high seqno of the source, another failover is always a rollback.

A rollback is data. The offset's branch is increased by one, and the batch starts with a row that reports a *rollback*
to a seqno, or a *reset* if no earlier state can be kept. Rollbacks and repeated reads follow from the two offsets of a
batch alone, so a batch that Spark runs again reports the same.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, Protocol

from upriver.errors import DataLoss, QueryRolledBack
from upriver.model import FailoverLog
from upriver.spark.offsets import Offset, VbucketOffset

Policy = Literal["fail", "rewind", "emit"]
POLICIES: Final[tuple[Policy, ...]] = ("fail", "rewind", "emit")
#: A range that is limited may deliver less than its limit by one part in this many.
SUPERSEDED_MAX: Final = 16


class SourceState(NamedTuple):
    """The state of a vbucket at its source."""

    failover_log: FailoverLog
    high_seqno: int
    purge_seqno: int = 0
    #: From here on the source retains every version; None if it does not support exact ends.
    exact_from: int | None = None

    @property
    def vbucket_uuid(self) -> int:
        """The current branch."""
        return self.failover_log.newest.vbucket_uuid


class RangeRollback(NamedTuple):
    """The start of a range: changes read after ``seqno`` belong to a lost branch; 0 is a reset."""

    seqno: int
    old_uuid: int
    new_uuid: int


class RangeEnd(enum.Enum):
    """How a range ends."""

    #: With the state at the end if the source retains it, otherwise with the current one: the next range corrects it.
    PLANNED = "planned"
    #: With the state at the end, or not at all.
    EXACT = "exact"
    #: With the state when the range is read. ``end_seqno`` is the high seqno when it was planned.
    OPEN = "open"


class Range(NamedTuple):
    """The changes of one vbucket after ``start`` up to ``end_seqno``."""

    start: VbucketOffset
    end_seqno: int
    rollback: RangeRollback | None = None
    end: RangeEnd = RangeEnd.PLANNED


class ChangeCounter(Protocol):
    """Tells how many changes ranges deliver: fewer than seqnos, because a range has each key once.

    Vbuckets of nodes that cannot tell are missing in its answers; their seqnos are counted instead.
    """

    def item_counts(self) -> Mapping[int, int]:
        """The number of keys of each vbucket, deleted ones included."""

    def visible_ends(self, asked: Mapping[int, tuple[int, int]]) -> Mapping[int, tuple[int, int]]:
        """For each start and limit the last end within the limit, and the number of changes up to there."""


class Rules(NamedTuple):
    """What to do when the source has lost changes."""

    on_rollback: Policy = "fail"
    fail_on_data_loss: bool = True
    #: A replaced history, as after a flush, is a reset and not data loss.
    flush_resets: bool = False
    #: Whether ranges can be read again and end where they were planned to end; False for TAP.
    has_ranges: bool = True


def proven(offset: VbucketOffset, state: SourceState) -> VbucketOffset:
    """The offset with its proven consistent point, given the state of the source after the read."""
    if offset.vbucket_uuid != state.vbucket_uuid or not offset.seqno:
        return offset
    still = state.high_seqno == offset.seqno
    exact_base = offset.seqno if offset.at_high else offset.consistent_seqno
    exact = state.exact_from is not None and state.exact_from <= exact_base
    if not still and not exact:
        return offset
    if (
        offset.consistent_seqno == offset.seqno
        and offset.first_consistent
        and state.purge_seqno <= offset.consistent_seqno
    ):
        return offset  # the common case, for a thousand vbuckets in each micro-batch
    # A read that started below the purge seqno was reset, which its offset does not show.
    reset = state.purge_seqno > offset.consistent_seqno or not offset.first_consistent
    first_consistent = offset.seqno if reset else offset.first_consistent
    return offset._replace(consistent_seqno=offset.seqno, first_consistent=first_consistent, at_high=0)


def resume_offset(offset: VbucketOffset, state: SourceState, rules: Rules) -> VbucketOffset:
    """Where reading resumes: at the offset, or where a rollback leads."""
    log = state.failover_log
    if not offset.seqno:
        known = offset.vbucket_uuid == state.vbucket_uuid
        return offset if known else offset._replace(vbucket_uuid=state.vbucket_uuid)
    index = log.index(offset.vbucket_uuid)
    if offset.seqno < min(state.purge_seqno, state.high_seqno):
        return _back(offset, 0, state, rules, f"deletions up to {state.purge_seqno} were purged")
    if index is None:
        return _back(offset, 0, state, _replaced(offset, rules), "its history was replaced")
    if index == 0 and offset.seqno <= state.high_seqno:
        return offset
    upper = log.upper(index, state.high_seqno)
    is_proven = offset.consistent_seqno == offset.seqno
    if offset.seqno <= upper and not offset.repairing and (is_proven or _can_reread(offset, state, rules)):
        return offset._replace(vbucket_uuid=state.vbucket_uuid, at_high=0)
    shared = min(offset.consistent_seqno, upper)
    back = 0 if shared < state.purge_seqno else shared
    return _back(offset, back, state, rules, f"the source has another history after {upper}")


def _can_reread(offset: VbucketOffset, state: SourceState, rules: Rules) -> bool:
    """Whether the changes after the consistent point can be read again.

    A deletion that was purged since would not come again. A source refuses a start at a seqno below the purge seqno,
    also if it purges between the plan and the read, but never a start at 0.
    """
    return rules.has_ranges and offset.consistent_seqno > 0 and offset.consistent_seqno >= state.purge_seqno


def end_seqno(offset: VbucketOffset, state: SourceState, rules: Rules) -> int:
    """The end of a query with this ending offset: at most what the source still has of it."""
    if not offset.seqno:
        return 0
    index = state.failover_log.index(offset.vbucket_uuid)
    if index is None:
        _replaced(offset, rules)
        return offset.seqno
    upper = state.failover_log.upper(index, state.high_seqno)
    if index and offset.seqno > upper and rules.on_rollback == "fail":
        why = f"endingOffsets is on a branch that the source left after {upper}"
        raise QueryRolledBack(offset.vbucket, upper, offset.position, state.vbucket_uuid, why)
    return min(offset.seqno, upper)


def _replaced(offset: VbucketOffset, rules: Rules) -> Rules:
    """The rules for a branch that the source does not know: data loss, or a reset whatever the policy is."""
    if rules.fail_on_data_loss and not rules.flush_resets:
        raise DataLoss(
            offset.vbucket,
            f"its history was replaced: uuid {offset.vbucket_uuid:#x}, read up to {offset.seqno}, is unknown now",
        )
    return rules._replace(on_rollback="rewind")


def _back(offset: VbucketOffset, seqno: int, state: SourceState, rules: Rules, why: str) -> VbucketOffset:
    if rules.on_rollback == "fail":
        raise QueryRolledBack(offset.vbucket, seqno, offset.position, state.vbucket_uuid, why)
    branch = offset.branch + 1
    if rules.on_rollback == "rewind" or not seqno or seqno < offset.first_consistent or not offset.first_consistent:
        return VbucketOffset(offset.vbucket, state.vbucket_uuid, branch=branch)
    return VbucketOffset(offset.vbucket, state.vbucket_uuid, seqno, seqno, branch, offset.first_consistent, repairing=1)


def next_offset(
    start: Offset,
    states: Mapping[int, SourceState],
    rules: Rules,
    *,
    rows_max: int | None = None,
    target: Mapping[int, int] | None = None,
    counter: ChangeCounter | None = None,
) -> Offset:
    """The end of the next batch; equal to ``start`` if there is nothing to read and nothing new to store.

    ``target`` has the last seqnos of a query with a fixed end. ``counter`` is asked only if a limit may be exceeded.
    """
    bases: dict[int, VbucketOffset] = {}
    ends: dict[int, int] = {}
    for offset, state in _present(start, states, rules):
        base = resume_offset(proven(offset, state), state, rules)
        bases[offset.vbucket] = base
        end = state.high_seqno if target is None else min(state.high_seqno, target.get(offset.vbucket, 0))
        ends[offset.vbucket] = max(end, base.seqno)
    _limit(bases, ends, states, rows_max, counter)
    return Offset(
        _ended(offset, bases[offset.vbucket], ends[offset.vbucket], states[offset.vbucket], rules)
        if offset.vbucket in bases
        else offset
        for offset in start
    )


def _present(
    start: Offset, states: Mapping[int, SourceState], rules: Rules
) -> Iterator[tuple[VbucketOffset, SourceState]]:
    """The offsets of the vbuckets that the source has; a missing one is data loss."""
    for offset in start:
        state = states.get(offset.vbucket)
        if state is not None:
            yield offset, state
        elif rules.fail_on_data_loss:
            raise DataLoss(offset.vbucket, "no node has it any more")


def _ended(offset: VbucketOffset, base: VbucketOffset, end: int, state: SourceState, rules: Rules) -> VbucketOffset:
    """The offset after the batch. If there is nothing to read, a new proof or branch is stored nevertheless."""
    is_high, rolls_back = end == state.high_seqno, base.branch != offset.branch
    repairing = int(bool(base.repairing) and (rolls_back or not is_high))
    if rolls_back or end > base.seqno or _is_reread(offset, base):
        at_high = int(is_high and end > base.consistent_seqno)
        return base._replace(seqno=end, at_high=at_high, repairing=repairing)
    return base._replace(repairing=repairing) if base.seqno and rules.has_ranges else offset


def _is_reread(before: VbucketOffset, after: VbucketOffset) -> bool:
    """Whether the batch between two offsets of one branch number reads changes again, after a failover."""
    return after.vbucket_uuid != before.vbucket_uuid and after.consistent_seqno < before.seqno


def _limit(
    bases: Mapping[int, VbucketOffset],
    ends: dict[int, int],
    states: Mapping[int, SourceState],
    rows_max: int | None,
    counter: ChangeCounter | None,
) -> None:
    """Limit the changes of a batch: each vbucket gets its share of the backlog.

    A range that ends below the purge seqno would be reset by the next batch, again and again. So each range reaches at
    least the purge seqno.
    """
    backlog = {vbucket: ends[vbucket] - base.seqno for vbucket, base in bases.items()}
    if rows_max is None or sum(backlog.values()) <= rows_max:
        return
    counts = {} if counter is None else counter.item_counts()
    backlog = {vbucket: min(behind, counts.get(vbucket, behind)) for vbucket, behind in backlog.items()}
    if sum(backlog.values()) <= rows_max:
        return
    shares = _shares(backlog, rows_max)
    cut = {number: (bases[number].seqno, share) for number, share in shares.items() if share < backlog[number]}
    # Counting takes a node some time. It is not worth it where nearly all seqnos have the current version of a key.
    uncertain = {
        number: (after, share)
        for number, (after, share) in cut.items()
        if (states[number].high_seqno - counts.get(number, 0)) * SUPERSEDED_MAX > share > 0
    }
    found = {} if counter is None else counter.visible_ends(uncertain)
    for vbucket, (after, share) in cut.items():
        end = found[vbucket][0] if vbucket in found else after + share
        ends[vbucket] = max(min(ends[vbucket], end), min(ends[vbucket], states[vbucket].purge_seqno))


def _shares(backlog: Mapping[int, int], rows_max: int) -> dict[int, int]:
    """Divide a limit in proportion to the backlogs, whose sum exceeds it."""
    total = sum(backlog.values())
    shares = {vbucket: rows_max * behind // total for vbucket, behind in backlog.items()}
    left = rows_max - sum(shares.values())
    for vbucket in sorted(backlog, key=lambda vbucket: (-(rows_max * backlog[vbucket] % total), vbucket))[:left]:
        shares[vbucket] += 1
    return shares


def backlog_rows(start: Offset, states: Mapping[int, SourceState], counts: Mapping[int, int] | None = None) -> int:
    """At most this many changes come after the offset, by the seqnos and the number of keys of each vbucket."""
    counts = {} if counts is None else counts
    pairs = ((offset, states.get(offset.vbucket)) for offset in start)
    backlog = {offset.vbucket: state.high_seqno - offset.seqno for offset, state in pairs if state is not None}
    return sum(max(0, min(behind, counts.get(vbucket, behind))) for vbucket, behind in backlog.items())


def ranges(start: Offset, end: Offset) -> Iterable[Range]:
    """The ranges between two offsets; none for a vbucket that did not advance."""
    for after in end:
        before = start.vbuckets.get(after.vbucket, VbucketOffset(after.vbucket))
        consistent = after._replace(seqno=after.consistent_seqno, at_high=0, repairing=0)
        if after.branch != before.branch:
            yield Range(
                consistent, after.seqno, RangeRollback(consistent.seqno, before.vbucket_uuid, after.vbucket_uuid)
            )
        elif _is_reread(before, after):
            yield Range(consistent, after.seqno)
        elif after.seqno > before.seqno:
            yield Range(after._replace(seqno=before.seqno, at_high=0, repairing=0), after.seqno)


def batch_ranges(
    start: Offset, states: Mapping[int, SourceState], rules: Rules, ends: Mapping[int, int]
) -> Iterator[Range]:
    """The ranges of a batch read, which no later range corrects: up to the ``ends``, or else to the current state.

    Spark keeps the ranges of a DataFrame and reads them again for each action. So a range without an end is open, also
    if there is nothing to read yet, and one from the beginning is read on any branch.
    """
    for offset, state in _present(start, states, rules):
        base = resume_offset(offset, state, rules)
        rollback = None
        if base.branch != offset.branch:
            rollback = RangeRollback(base.seqno, offset.vbucket_uuid, base.vbucket_uuid)
        elif _is_reread(offset, base):
            base = base._replace(seqno=base.consistent_seqno)
        end_seqno = ends.get(offset.vbucket)
        if end_seqno is None:
            base = base if base.seqno else base._replace(vbucket_uuid=0)
            yield Range(base, max(base.seqno, state.high_seqno), rollback, RangeEnd.OPEN)
        elif end_seqno > base.seqno or rollback is not None:
            yield Range(base, max(base.seqno, end_seqno), rollback, RangeEnd.EXACT)


def answered_with_rollback(asked: Range, seqno: int, log: FailoverLog, rules: Rules) -> Range:
    """The range to read instead of one that the source answers with a rollback.

    A batch that Spark runs again has its range from the log, whatever has happened to the source since. If the range's
    uuid is still the newest, the missing changes are read at once. Otherwise only the rollback is reported, and the
    next batch is planned from the current state of the source.
    """
    start, newest_uuid = asked.start, log.newest.vbucket_uuid
    if log.index(start.vbucket_uuid) is None:
        rules = _replaced(start, rules)
    if rules.on_rollback == "fail":
        why = "the range was planned before the source was rolled back"
        raise QueryRolledBack(start.vbucket, seqno, start.position, newest_uuid, why)
    if rules.on_rollback == "rewind" or seqno < start.first_consistent or not start.first_consistent:
        seqno = 0
    old_uuid = start.vbucket_uuid if asked.rollback is None else asked.rollback.old_uuid
    seqno_end = asked.end_seqno if newest_uuid == start.vbucket_uuid else seqno
    base = start._replace(vbucket_uuid=newest_uuid, seqno=seqno, consistent_seqno=min(seqno, start.consistent_seqno))
    return Range(base, seqno_end, RangeRollback(seqno, old_uuid, newest_uuid), asked.end)
