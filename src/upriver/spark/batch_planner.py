"""Plans micro-batches by the rules of docs/semantics.md, without any I/O.

Theory of operation. The end E of a range is chosen before the range is read. A key that changes in between moves beyond
E, and then the changes up to E do not add up to a state that the source ever had. The next range corrects that, unless
the source fails over first: then the newer version may be lost, and no node would send the older one again. So an
offset also holds W, the last *proven* consistent point. After a failover a query goes back to W, and never continues
from E.

Two observations after the read, under the same uuid, prove that E is consistent. Either the high seqno of the source is
still E, so nothing has moved. Or the source retains every version from W on and was asked for exact ends.

A rollback is data. The offset's branch is increased by one, and the batch starts with a row that reports a *rollback*
to a seqno, or a *reset* if no earlier state can be kept. Both follow from the two offsets of a batch alone, so a batch
that Spark runs again reports the same.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from upriver.errors import DataLoss, QueryRolledBack
from upriver.model import FailoverLog
from upriver.spark.offsets import Offset, VbucketOffset

Policy = Literal["fail", "rewind", "emit"]
POLICIES: Final[tuple[Policy, ...]] = ("fail", "rewind", "emit")


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


class Range(NamedTuple):
    """The changes of one vbucket after ``start`` up to ``end_seqno``."""

    start: VbucketOffset
    end_seqno: int
    rollback: RangeRollback | None = None


class Rules(NamedTuple):
    """What to do when the source has lost changes."""

    on_rollback: Policy = "fail"
    fail_on_data_loss: bool = True


def proven(offset: VbucketOffset, state: SourceState) -> VbucketOffset:
    """The offset with its proven consistent point, given the state of the source after the read."""
    if offset.vbucket_uuid != state.vbucket_uuid or not offset.seqno:
        return offset
    still = state.high_seqno == offset.seqno
    exact = state.exact_from is not None and state.exact_from <= offset.consistent_seqno
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
    return offset._replace(
        consistent_seqno=offset.seqno, first_consistent=offset.seqno if reset else offset.first_consistent
    )


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
    if offset.consistent_seqno == offset.seqno <= upper:
        return offset._replace(vbucket_uuid=state.vbucket_uuid)
    shared = min(offset.consistent_seqno, upper)
    back = 0 if shared < state.purge_seqno else shared
    return _back(offset, back, state, rules, f"the source has another history after {upper}")


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
    if rules.fail_on_data_loss:
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
    return VbucketOffset(offset.vbucket, state.vbucket_uuid, seqno, seqno, branch, offset.first_consistent)


def next_offset(
    start: Offset,
    states: Mapping[int, SourceState],
    rules: Rules,
    *,
    rows_max: int | None = None,
    target: Mapping[int, int] | None = None,
) -> Offset:
    """The end of the next batch; equal to ``start`` if there is nothing to read.

    ``target`` has the last seqnos of a query with a fixed end.
    """
    bases: dict[int, VbucketOffset] = {}
    ends: dict[int, int] = {}
    for offset in start:
        state = states.get(offset.vbucket)
        if state is None:
            if rules.fail_on_data_loss:
                raise DataLoss(offset.vbucket, "no node has it any more")
            continue
        base = resume_offset(proven(offset, state), state, rules)
        bases[offset.vbucket] = base
        end = state.high_seqno if target is None else min(state.high_seqno, target.get(offset.vbucket, 0))
        ends[offset.vbucket] = max(end, base.seqno)
    _share(bases, ends, states, rows_max)
    return Offset(_ended(offset, bases.get(offset.vbucket), ends.get(offset.vbucket, 0)) for offset in start)


def _ended(offset: VbucketOffset, base: VbucketOffset | None, end: int) -> VbucketOffset:
    """The offset after the batch. A new consistent point alone does not start a batch."""
    if base is None or (base.branch == offset.branch and end == base.seqno):
        return offset
    return base._replace(seqno=end)


def _share(
    bases: Mapping[int, VbucketOffset], ends: dict[int, int], states: Mapping[int, SourceState], rows_max: int | None
) -> None:
    """Limit the rows of a batch: each vbucket gets its share of the backlog.

    A range that ends below the purge seqno would be reset by the next batch, again and again. So each range reaches at
    least the purge seqno.
    """
    backlog = {vbucket: ends[vbucket] - base.seqno for vbucket, base in bases.items()}
    total = sum(backlog.values())
    if rows_max is None or total <= rows_max:
        return
    shares = {vbucket: rows_max * behind // total for vbucket, behind in backlog.items()}
    left = rows_max - sum(shares.values())
    for vbucket in sorted(backlog, key=lambda vbucket: (-(rows_max * backlog[vbucket] % total), vbucket))[:left]:
        shares[vbucket] += 1
    for vbucket, share in shares.items():
        ends[vbucket] = max(bases[vbucket].seqno + share, min(ends[vbucket], states[vbucket].purge_seqno))


def backlog_rows(start: Offset, states: Mapping[int, SourceState]) -> int:
    """The number of seqnos between the offset and the high seqnos of the source."""
    pairs = ((offset, states.get(offset.vbucket)) for offset in start)
    return sum(max(0, state.high_seqno - offset.seqno) for offset, state in pairs if state is not None)


def ranges(start: Offset, end: Offset) -> Iterable[Range]:
    """The ranges between two offsets; none for a vbucket that did not advance."""
    for after in end:
        before = start.vbuckets.get(after.vbucket, VbucketOffset(after.vbucket))
        if after.branch != before.branch:
            base = after._replace(seqno=after.consistent_seqno)
            yield Range(base, after.seqno, RangeRollback(base.seqno, before.vbucket_uuid, after.vbucket_uuid))
        elif after.seqno > before.seqno:
            yield Range(after._replace(seqno=before.seqno), after.seqno)


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
    return Range(base, seqno_end, RangeRollback(seqno, old_uuid, newest_uuid))
