"""How batches of changes become the state of a target: order, repeated batches and rollbacks, for all targets.

Theory of operation. A batch is applied in one transaction that also stores its number, so a batch that Spark repeats
after a crash is recognised and skipped. If a key has several rows, the last one wins, by (branch, arrival).

A row *rollback*, *reset* or *flush* means that the target may hold changes that the source has lost, and that the right
versions will not be sent again. The target then replaces the vbucket by the node's documents, in one transaction; this
needs no tombstones. The documents are newer than the stream: the stream's rows up to that seqno are skipped. The node
may change its branch before the stream gets there, and the stream does not report changes that were lost before it
reached them. So the vbucket is then read again.

A query that the target does not know starts from nothing, and the data of an earlier query is dropped. A query with
completed batches will not repeat them, so a target without these batches (removed, refilled or restored from an old
copy) is refused. So is a target with batches that the checkpoint does not know, because an old copy of the checkpoint
was restored: other batches would get their numbers, and would seem to be applied. If Spark's part of the checkpoint is
gone, the query starts from nothing too.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import TargetAhead, TargetBehind
from upriver.pipelines.targets.target import NodeSource, ReadAhead, Target, TargetProgress, Work
from upriver.spark import ROWS, Offset, unsigned

#: Events of a whole vbucket.
OF_VBUCKETS: Final = ("flush", "rollback", "reset")
#: An empty table of Spark rows.
NOTHING: Final = ROWS.empty_table()
#: Before the first batch.
NOWHERE: Final = Offset(())


@dataclass
class Applied:
    """Counts of the applied batches."""

    #: Batches that the target already had.
    replayed: int = 0
    #: Rollbacks, resets and flushes in them.
    undone: int = 0
    #: Vbuckets that were read from the node.
    read_again: int = 0


class Applier:
    """Applies the batches of one query to a target."""

    def __init__(
        self, target: Target, source: NodeSource, query: str, reached: Callable[[], Offset] = lambda: NOWHERE
    ) -> None:
        """``query`` is the unique name of the query, the same after each restart. ``reached`` returns the end of the
        completed batches."""
        self._target = target
        self._reached = reached
        self._source = source
        self._query = query
        self.counts = Applied()

    def begin(self, done: int = -1, logged: int | None = None) -> TargetProgress:
        """Prepare the target for this query, which has completed batches up to ``done`` and planned batches up to
        ``logged``. Data of another query is dropped."""
        progress = self._target.progress()
        is_known = progress.query == self._query and not (logged == -1 < progress.number)
        held = progress.number if is_known else -1
        if held < done:
            raise TargetBehind(held, done)
        if logged is not None and held > logged:
            raise TargetAhead(held, logged)
        if is_known:
            return progress
        self._target.commit(Work(query=self._query, number=-1, rows=NOTHING, clear_all=True))
        return TargetProgress(self._query)

    def apply(self, changes: pa.Table, number: int) -> None:
        """Apply one batch, for the first time or again."""
        progress = self.begin(done=number - 1)
        if number <= progress.number:
            self.counts.replayed += 1
            return
        is_mark = pc.is_in(changes.column("event"), pa.array(OF_VBUCKETS))
        marks = changes.filter(is_mark)
        ahead, left, unseen = self._look(progress.ahead)
        again = set(marks.column("vbucket").to_pylist()) | left
        self._read_again(again, ahead)
        rows = changes.filter(pc.invert(is_mark))
        work = Work(
            query=self._query,
            number=number,
            rows=latest(_unknown(rows, ahead, again)),
            ahead=_still_ahead(ahead, rows) | {vbucket: ahead[vbucket] for vbucket in unseen},
        )
        self._target.commit(work)
        self.counts.undone += marks.num_rows

    def settle(self) -> None:
        """Check whether documents that were read are still valid; for times without batches."""
        kept = self.begin().ahead
        ahead, left, _ = self._look(kept)
        if ahead != kept:  # stored, so that it is not checked and read again when tombstones are purged later
            self._target.commit(Work(query=self._query, number=None, rows=NOTHING, ahead=ahead))
        self._read_again(left, ahead)

    def _look(self, ahead: Mapping[int, ReadAhead]) -> tuple[dict[int, ReadAhead], set[int], set[int]]:
        """The reads that are still ahead of the stream, the vbuckets whose reads are invalid, and the unknown ones.

        A read is no longer ahead when batches have passed it on the same basis. Rows alone do not show this, because
        filters leave some out; places alone do not either, because the basis may have changed.
        """
        if not ahead:
            return {}, set(), set()
        places = self._reached().vbuckets
        now = self._source.grounds(ahead)
        left = {number for number, ground in now.items() if ground != ahead[number].ground}
        unseen = ahead.keys() - now.keys()
        still = {
            number: read
            for number, read in ahead.items()
            if number in left
            or number in unseen
            or (place := places.get(number)) is None
            or place.vbucket_uuid != read.vbucket_uuid
            or place.seqno < read.until_seqno
        }
        return still, left, unseen

    def _read_again(self, vbuckets: Collection[int], ahead: dict[int, ReadAhead]) -> None:
        """Replace these vbuckets, a few per transaction."""
        for group in self._source.groups(vbuckets) if vbuckets else ():
            rows, read = self._source.read(group)
            ahead |= read
            cleared = frozenset(group)
            work = Work(query=self._query, number=None, rows=latest(rows), cleared=cleared, ahead=dict(ahead))
            self._target.commit(work)
            self.counts.read_again += len(group)


def latest(rows: pa.Table) -> pa.Table:
    """The last row of each key, by (branch, arrival)."""
    if rows.num_rows < 2:
        return rows
    places = pa.array(np.arange(rows.num_rows))
    branches = rows.column("branch")
    if pc.count_distinct(branches).as_py() > 1:
        order = pa.table({"branch": branches, "place": places})
        rows = rows.take(pc.sort_indices(order, [("branch", "ascending"), ("place", "ascending")]))
    keyed = pa.table({"vbucket": rows.column("vbucket"), "key": rows.column("key"), "place": places})
    last = keyed.group_by(["vbucket", "key"], use_threads=False).aggregate([("place", "max")]).column("place_max")
    return rows if len(last) == rows.num_rows else rows.take(pc.take(last, pc.sort_indices(last)))


def _unknown(rows: pa.Table, ahead: Mapping[int, ReadAhead], again: Collection[int]) -> pa.Table:
    """The rows without those that a read has already covered."""
    if not ahead:
        return rows
    vbuckets = rows.column("vbucket").to_numpy()
    seqnos = rows.column("seqno").to_numpy()
    uuids = rows.column("vbucket_uuid").to_numpy()
    known = np.isin(vbuckets, list(again))
    for number, read in ahead.items():
        if number not in again:
            same = (vbuckets == number) & (uuids.astype(np.uint64) == read.vbucket_uuid)
            known |= same & (seqnos <= read.consistent_seqno)
    return rows.filter(pa.array(~known))


def _still_ahead(ahead: Mapping[int, ReadAhead], rows: pa.Table) -> dict[int, ReadAhead]:
    """The reads that the stream has not passed yet."""
    if not ahead:
        return {}
    of_read = rows.filter(pc.is_in(rows.column("vbucket"), pa.array(list(ahead), pa.int32())))
    reached = of_read.group_by(["vbucket", "vbucket_uuid"]).aggregate([("seqno", "max")])
    passed = {
        (vbucket, unsigned(uuid)): seqno
        for vbucket, uuid, seqno in zip(*(column.to_pylist() for column in _columns(reached)), strict=True)
    }
    return {
        number: read for number, read in ahead.items() if passed.get((number, read.vbucket_uuid), 0) < read.until_seqno
    }


def _columns(reached: pa.Table) -> list[pa.ChunkedArray]:
    return [reached.column(name) for name in ("vbucket", "vbucket_uuid", "seqno_max")]
