"""What a micro-batch shall read: the rules of docs/semantics.md for a reader of ranges, without any I/O.

Theory of operation. A range's end E is chosen before the range is read. A key that changes in between moves beyond E,
and what was read up to E is then no state that the source ever had. That heals itself with the next range, unless the
source falls over before: then the newer version may be lost, and nobody would send the older one again. So an offset
keeps beside E the last seqno W that is *proven* whole, and after a failover a query goes back to W, never on from E.

Two things prove E whole, seen after the read under the same uuid: the source's high seqno is still E, so nothing has
moved; or the source keeps every version from W on and was asked for exact ends, so what was read was the state at E.

Going back is data. The offset's branch is raised by one and the batch begins with a row that says so: a *rollback* to
R, or a *reset* where nothing that was held can be built upon. Both can be told from the two offsets of a batch alone,
so a batch that is run again says the same.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from upriver.errors import DataLoss, QueryRolledBack
from upriver.model import FailoverLog
from upriver.spark.offsets import Offset, VbucketOffset

Policy = Literal["fail", "rewind", "emit"]
POLICIES: Final[tuple[Policy, ...]] = ("fail", "rewind", "emit")


class SourceState(NamedTuple):
    """What the source says of a vbucket."""

    failover_log: FailoverLog
    high_seqno: int
    purge_seqno: int = 0
    #: From here on the source keeps every version and serves exact ends; None if it does not know exact ends.
    exact_from: int | None = None

    @property
    def vbucket_uuid(self) -> int:
        """The branch that it writes now."""
        return self.failover_log.newest.vbucket_uuid


class GoBack(NamedTuple):
    """A range begins with this: what was read after ``seqno`` belongs to a lost branch; 0 is a reset."""

    seqno: int
    old_uuid: int
    new_uuid: int


class Range(NamedTuple):
    """What one task reads of one vbucket: the changes after ``place`` up to ``end_seqno``."""

    place: VbucketOffset
    end_seqno: int
    go_back: GoBack | None = None


class Rules(NamedTuple):
    """What a query wants when its source has lost something."""

    on_rollback: Policy = "fail"
    fail_on_data_loss: bool = True


def proven(place: VbucketOffset, state: SourceState) -> VbucketOffset:
    """The place with what can be proven of it, seen after it was read."""
    if place.vbucket_uuid != state.vbucket_uuid or not place.seqno:
        return place
    still = state.high_seqno == place.seqno
    exact = state.exact_from is not None and state.exact_from <= place.consistent_seqno
    if not still and not exact:
        return place
    if place.consistent_seqno == place.seqno and place.first_consistent and state.purge_seqno <= place.consistent_seqno:
        return place  # as it mostly is, for a thousand vbuckets in each micro-batch
    # Whoever read from below the purge seqno was reset while it read, and its offset does not know it.
    reset = state.purge_seqno > place.consistent_seqno or not place.first_consistent
    return place._replace(
        consistent_seqno=place.seqno, first_consistent=place.seqno if reset else place.first_consistent
    )


def going_on(place: VbucketOffset, state: SourceState, rules: Rules) -> VbucketOffset:
    """Where reading goes on: at the place, or where a rollback leads."""
    log = state.failover_log
    if not place.seqno:
        known = place.vbucket_uuid == state.vbucket_uuid
        return place if known else place._replace(vbucket_uuid=state.vbucket_uuid)
    index = log.index(place.vbucket_uuid)
    if place.seqno < min(state.purge_seqno, state.high_seqno):
        return _back(place, 0, state, rules, f"deletions up to {state.purge_seqno} are forgotten")
    if index is None:
        return _back(place, 0, state, _replaced(place, rules), "its history was replaced")
    if index == 0 and place.seqno <= state.high_seqno:
        return place
    upper = log.upper(index, state.high_seqno)
    if place.consistent_seqno == place.seqno <= upper:
        return place._replace(vbucket_uuid=state.vbucket_uuid)
    shared = min(place.consistent_seqno, upper)
    back = 0 if shared < state.purge_seqno else shared
    return _back(place, back, state, rules, f"the source went another way after {upper}")


def end_seqno(place: VbucketOffset, state: SourceState, rules: Rules) -> int:
    """Where a query ends that was told to end at this place: what the source has lost of it cannot be read."""
    if not place.seqno:
        return 0
    index = state.failover_log.index(place.vbucket_uuid)
    if index is None:
        _replaced(place, rules)
        return place.seqno
    upper = state.failover_log.upper(index, state.high_seqno)
    if index and place.seqno > upper and rules.on_rollback == "fail":
        why = f"it shall end on a branch that the source has left after {upper}"
        raise QueryRolledBack(place.vbucket, upper, place.position, state.vbucket_uuid, why)
    return min(place.seqno, upper)


def _replaced(place: VbucketOffset, rules: Rules) -> Rules:
    """What holds where nobody knows the branch any more: that is a loss of data, or a reset whatever the policy is."""
    if rules.fail_on_data_loss:
        raise DataLoss(
            place.vbucket,
            f"its history was replaced: uuid {place.vbucket_uuid:#x}, read up to {place.seqno}, is unknown now",
        )
    return rules._replace(on_rollback="rewind")


def _back(place: VbucketOffset, seqno: int, state: SourceState, rules: Rules, why: str) -> VbucketOffset:
    if rules.on_rollback == "fail":
        raise QueryRolledBack(place.vbucket, seqno, place.position, state.vbucket_uuid, why)
    branch = place.branch + 1
    if rules.on_rollback == "rewind" or not seqno or seqno < place.first_consistent or not place.first_consistent:
        return VbucketOffset(place.vbucket, state.vbucket_uuid, branch=branch)
    return VbucketOffset(place.vbucket, state.vbucket_uuid, seqno, seqno, branch, place.first_consistent)


def next_offset(
    start: Offset,
    states: Mapping[int, SourceState],
    rules: Rules,
    *,
    rows_max: int | None = None,
    target: Mapping[int, int] | None = None,
) -> Offset:
    """The end of the next batch; equal to ``start`` if there is nothing to do.

    ``target`` bounds the seqnos that a query with a fixed goal may reach.
    """
    bases: dict[int, VbucketOffset] = {}
    ends: dict[int, int] = {}
    for place in start:
        state = states.get(place.vbucket)
        if state is None:
            if rules.fail_on_data_loss:
                raise DataLoss(place.vbucket, "no node has it any more")
            continue
        base = going_on(proven(place, state), state, rules)
        bases[place.vbucket] = base
        end = state.high_seqno if target is None else min(state.high_seqno, target.get(place.vbucket, 0))
        ends[place.vbucket] = max(end, base.seqno)
    _share(bases, ends, states, rows_max)
    return Offset(_ended(place, bases.get(place.vbucket), ends.get(place.vbucket, 0)) for place in start)


def _ended(place: VbucketOffset, base: VbucketOffset | None, end: int) -> VbucketOffset:
    """The place after the batch. What is proven of it alone is no reason for one."""
    if base is None or (base.branch == place.branch and end == base.seqno):
        return place
    return base._replace(seqno=end)


def _share(
    bases: Mapping[int, VbucketOffset], ends: dict[int, int], states: Mapping[int, SourceState], rows_max: int | None
) -> None:
    """Let no batch have more rows than allowed: each vbucket gets its share, and whoever is behind moves.

    But who stops where deletions are forgotten starts over, and would stop there again, for ever; and a copy that was
    filled from nothing knows none up to where it was filled. So everybody gets as far as that.
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
    """How many seqnos lie between the offset and the source's end."""
    pairs = ((place, states.get(place.vbucket)) for place in start)
    return sum(max(0, state.high_seqno - place.seqno) for place, state in pairs if state is not None)


def ranges(start: Offset, end: Offset) -> Iterable[Range]:
    """What lies between two offsets, vbucket by vbucket; nothing for those that did not move."""
    for after in end:
        before = start.places.get(after.vbucket, VbucketOffset(after.vbucket))
        if after.branch != before.branch:
            base = after._replace(seqno=after.consistent_seqno)
            yield Range(base, after.seqno, GoBack(base.seqno, before.vbucket_uuid, after.vbucket_uuid))
        elif after.seqno > before.seqno:
            yield Range(after._replace(seqno=before.seqno), after.seqno)


def answered_with_rollback(asked: Range, seqno: int, log: FailoverLog, rules: Rules) -> Range:
    """What is read instead of a range that the source, when it is read, wants to be rolled back.

    A batch that Spark runs again has its range from the log, whatever has happened to the source since. While the
    range's uuid is still the newest, what is missing can be read at once; otherwise only the going back is told, and
    the next batch is planned from where the source stands then.
    """
    place, newest_uuid = asked.place, log.newest.vbucket_uuid
    if log.index(place.vbucket_uuid) is None:
        rules = _replaced(place, rules)
    if rules.on_rollback == "fail":
        why = "the range was planned before the source was rolled back"
        raise QueryRolledBack(place.vbucket, seqno, place.position, newest_uuid, why)
    if rules.on_rollback == "rewind" or seqno < place.first_consistent or not place.first_consistent:
        seqno = 0
    old_uuid = place.vbucket_uuid if asked.go_back is None else asked.go_back.old_uuid
    seqno_end = asked.end_seqno if newest_uuid == place.vbucket_uuid else seqno
    base = place._replace(vbucket_uuid=newest_uuid, seqno=seqno, consistent_seqno=min(seqno, place.consistent_seqno))
    return Range(base, seqno_end, GoBack(seqno, old_uuid, newest_uuid))
