"""What the ranges of one task do to a target: the repair rules, applied inside the task.

Theory of operation. A task reads its ranges in order and passes the changes on. A row *rollback*, *reset* or *flush*
means that the target may hold changes that the source has lost, and that the right versions will not be sent again. The
task then forgets what it has read of that vbucket and reads the vbucket from the node, from the beginning; the target
replaces it in the same commit. This needs no tombstones.

What was read that way is newer than the stream, so the read is recorded (``ReadAhead``) until the stream has passed it:
the stream's rows up to that point are skipped, and the driver checks before every batch whether the node is still on
the basis of the read. If it is not, changes may be lost that the stream has never reported, and the vbucket is read
again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import DataLoss
from upriver.pipelines.targets.target import ReadAhead
from upriver.spark import Offset, Range, SourceState, VbucketOffset

#: How often a vbucket is read if it changes its branch meanwhile.
ATTEMPTS_MAX: Final = 5


class ChangeSink(Protocol):
    """Where a task puts its changes, in their order; the last change of a key wins."""

    def add(self, rows: pa.RecordBatch) -> None:
        """Take changes of keys."""

    def discard(self, vbucket: int) -> None:
        """Forget what was added for this vbucket."""


class TaskSource(ABC):
    """What a task asks of the nodes."""

    @abstractmethod
    def rows(self, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
        """The Spark rows of these ranges, those of whole vbuckets included."""

    @abstractmethod
    def vbuckets(self) -> Collection[int]:
        """The vbuckets that the query reads."""

    @abstractmethod
    def states(self, vbuckets: Collection[int]) -> Mapping[int, SourceState]:
        """The current states of these vbuckets, as far as they have an owner."""

    def close(self) -> None:  # noqa: B027
        """Close the connections that serve only this task."""


#: Connects a task to the nodes; the argument names the columns of its rows. It travels to the tasks, so it must be
#: picklable.
Connect = Callable[[Sequence[str]], TaskSource]


@dataclass
class TaskOutcome:
    """What a task has done, apart from what its sink holds."""

    #: The vbuckets that were read from the node and replace what the target holds of them.
    replaced: dict[int, ReadAhead] = field(default_factory=dict)
    #: Vbuckets that the source does not have, and of which the target must hold nothing.
    cleared: set[int] = field(default_factory=set)
    #: By vbucket with a read ahead of the stream: the branch and the last seqno that the stream has brought.
    passed: dict[int, tuple[int, int]] = field(default_factory=dict)
    changes: int = 0
    #: Rollbacks, resets and flushes.
    undone: int = 0


class Outlook(NamedTuple):
    """Which reads are still ahead of the stream, which have lost their basis, and which could not be checked."""

    ahead: dict[int, ReadAhead]
    left: set[int]
    unseen: set[int]


def outlook(ahead: Mapping[int, ReadAhead], reached: Offset, states: Mapping[int, SourceState]) -> Outlook:
    """Check reads ahead of the stream.

    A read is no longer ahead when batches have passed it on the same basis. Rows alone do not show this, because
    filters leave some out; offsets alone do not either, because the basis may have changed.
    """
    found = {number: states[number] for number in ahead if number in states}
    left = {
        number
        for number, state in found.items()
        if (state.vbucket_uuid, state.purge_seqno) != (ahead[number].vbucket_uuid, ahead[number].purge_seqno)
    }
    unseen = ahead.keys() - found.keys()
    still = {
        number: read
        for number, read in ahead.items()
        if number in left or number in unseen or not _is_passed(read, reached.vbuckets.get(number))
    }
    return Outlook(still, left, unseen)


def _is_passed(read: ReadAhead, offset: VbucketOffset | None) -> bool:
    return offset is not None and offset.vbucket_uuid == read.vbucket_uuid and offset.seqno >= read.until_seqno


def still_ahead(
    ahead: Mapping[int, ReadAhead], passed: Mapping[int, tuple[int, int]], unseen: Collection[int] = ()
) -> dict[int, ReadAhead]:
    """The reads that the rows of a batch have not passed. Those that could not be checked stay."""
    return {
        number: read
        for number, read in ahead.items()
        if number in unseen or not _covers(passed.get(number, (0, 0)), read)
    }


def _covers(passed: tuple[int, int], read: ReadAhead) -> bool:
    uuid, seqno = passed
    return uuid == read.vbucket_uuid and seqno >= read.until_seqno


def apply_ranges(
    source: TaskSource,
    ranges: Iterable[Range],
    ahead: Mapping[int, ReadAhead],
    sink: ChangeSink,
    seen: Callable[[pa.RecordBatch], None] | None = None,
) -> TaskOutcome:
    """Read the ranges into the sink. ``seen`` gets every row of the stream, also of vbuckets that are read again."""
    outcome = TaskOutcome()
    asked = list(ranges)
    again = {each.start.vbucket for each in asked if each.rollback is not None}
    undone = set(again)
    for rows in source.rows([each for each in asked if each.rollback is None or seen is not None]):
        if seen is not None:
            seen(rows)
        found = _marked(rows)
        undone |= found
        for number in found - again:
            again.add(number)
            sink.discard(number)
        _note_passed(outcome.passed, rows, ahead)
        changes = _new(rows, ahead, again)
        outcome.changes += changes.num_rows
        if changes.num_rows:
            sink.add(changes)
    outcome.undone = len(undone)
    replace(source, again, sink, outcome)
    return outcome


def replace(source: TaskSource, vbuckets: Collection[int], sink: ChangeSink, outcome: TaskOutcome) -> None:
    """Read these vbuckets from the nodes, from the beginning."""
    left = set(vbuckets)
    for _ in range(ATTEMPTS_MAX if left else 0):
        before = _states(source, left)
        starts = [Range(VbucketOffset(n, state.vbucket_uuid), state.high_seqno) for n, state in before.items()]
        for rows in source.rows([each for each in starts if each.end_seqno]):
            changes = rows.filter(pc.is_valid(rows.column("key")))
            outcome.changes += changes.num_rows
            sink.add(changes)
        after = _states(source, left)
        same = {number for number in left if after[number].vbucket_uuid == before[number].vbucket_uuid}
        outcome.replaced |= {number: read_ahead(before[number], after[number]) for number in same}
        left -= same
        for number in left:
            sink.discard(number)
        if not left:
            return
    if left:
        raise DataLoss(min(left), f"it changed its branch {ATTEMPTS_MAX} times during the read; try again later")


def read_ahead(before: SourceState, after: SourceState) -> ReadAhead:
    """Whether a read is the exact state at its end: nothing changed meanwhile, or the node keeps all versions."""
    end = before.high_seqno
    exact = after.exact_from is not None and after.exact_from <= end
    if exact or after.high_seqno == end:
        return ReadAhead(before.vbucket_uuid, end, end, before.purge_seqno)
    return ReadAhead(before.vbucket_uuid, 0, after.high_seqno, before.purge_seqno)


def _states(source: TaskSource, vbuckets: Collection[int]) -> dict[int, SourceState]:
    states = source.states(vbuckets)
    missing = [number for number in vbuckets if number not in states]
    if missing:
        raise DataLoss(min(missing), "no node has it now")
    return {number: states[number] for number in sorted(vbuckets)}


def _marked(rows: pa.RecordBatch) -> set[int]:
    """The vbuckets that a row about a whole vbucket names. Only such rows have no key."""
    keys = rows.column("key")
    if not keys.null_count:
        return set()
    return set(rows.column("vbucket").filter(pc.is_null(keys)).to_pylist())


def _new(rows: pa.RecordBatch, ahead: Mapping[int, ReadAhead], again: Collection[int]) -> pa.RecordBatch:
    """The changes that neither a read ahead nor the coming read of the vbucket covers."""
    if not ahead and not again:
        return rows
    vbuckets = rows.column("vbucket").to_numpy()
    known = np.isin(vbuckets, list(again))
    for number in set(np.unique(vbuckets).tolist()) & ahead.keys():
        read = ahead[number]
        same = (vbuckets == number) & (_uuids(rows) == read.vbucket_uuid)
        known |= same & (rows.column("seqno").to_numpy() <= read.consistent_seqno)
    known |= pc.is_null(rows.column("key")).to_numpy(zero_copy_only=False)
    return rows.filter(pa.array(~known)) if known.any() else rows


def _note_passed(passed: dict[int, tuple[int, int]], rows: pa.RecordBatch, ahead: Mapping[int, ReadAhead]) -> None:
    if not ahead:
        return
    vbuckets, seqnos, uuids = rows.column("vbucket").to_numpy(), rows.column("seqno").to_numpy(), _uuids(rows)
    is_change = pc.is_valid(rows.column("key")).to_numpy(zero_copy_only=False)
    for number in set(np.unique(vbuckets).tolist()) & ahead.keys():
        ours = np.flatnonzero((vbuckets == number) & is_change)
        if len(ours):
            passed[number] = int(uuids[ours[-1]]), int(seqnos[ours[-1]])


def _uuids(rows: pa.RecordBatch) -> np.ndarray:
    uuids: np.ndarray = rows.column("vbucket_uuid").to_numpy()
    return uuids.view(np.uint64)
