"""How batches of changes become the state of a target: order, replays, and what is undone. One place for all targets.

Theory of operation. A batch is applied in one transaction that also notes its number, so a batch that Spark runs again
after a crash is known and left out. Of several rows of a key the last one counts, by (branch, arrival).

A row *rollback*, *reset* or *flush* says that some of what the target holds may never have been, and that the right
version will not be sent again. The target then drops the vbucket and takes what the node holds, in one transaction;
no key needs a tombstone for that, however long ago it was deleted. What was read is further than the stream is: rows
up to there are left out, and if the node changes its branch before the stream has come so far, which the stream does
not tell when it had not come to the lost part itself, the vbucket is read again.

A query that the target does not know begins from nothing: what an earlier query has left is dropped. But a query that
has batches behind it does not bring them again, so a target without them (somebody removed it, or filled it anew, or
put an old copy back) is refused as it is.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import TargetBehind
from upriver.pipelines.targets.target import NodeSource, ReadAhead, Target, TargetProgress, Work
from upriver.spark import ROWS, Offset, unsigned

#: Events that concern a whole vbucket.
OF_VBUCKETS: Final = ("flush", "rollback", "reset")
#: No row of Spark.
NOTHING: Final = ROWS.empty_table()
#: No batch is done.
NOWHERE: Final = Offset(())


@dataclass
class Applied:
    """What became of the batches so far."""

    #: Batches that the target had already.
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
        """``query`` is a name that no other query has, and that this one has after each restart; ``reached`` tells
        where the batches that are done have ended."""
        self._target = target
        self._reached = reached
        self._source = source
        self._query = query
        self.counts = Applied()

    def begin(self, done: int = -1) -> TargetProgress:
        """How far the target is with this query, which has the batches up to ``done`` behind it; what another query has
        left there is dropped."""
        progress = self._target.progress()
        is_known = progress.query == self._query
        held = progress.number if is_known else -1
        if held < done:
            raise TargetBehind(held, done)
        if is_known:
            return progress
        self._target.commit(Work(query=self._query, number=None, rows=NOTHING, clear_all=True))
        return TargetProgress(self._query)

    def apply(self, changes: pa.Table, number: int) -> None:
        """One batch, whether it comes for the first time or again."""
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
        """Look whether what was read is still true; for times when no batch comes."""
        kept = self.begin().ahead
        ahead, left, _ = self._look(kept)
        if ahead != kept:  # noted, so that it is neither asked for nor read again when deletions are forgotten later
            self._target.commit(Work(query=self._query, number=None, rows=NOTHING, ahead=ahead))
        self._read_again(left, ahead)

    def _look(self, ahead: Mapping[int, ReadAhead]) -> tuple[dict[int, ReadAhead], set[int], set[int]]:
        """What is still ahead, the vbuckets whose reads stand on nothing any more, and those of which nobody can tell.

        What batches have passed, on the ground of the read, is not ahead any more. Rows alone do not tell that, because
        filters leave some out; nor do places alone, because nobody could say whether the ground was the same.
        """
        if not ahead:
            return {}, set(), set()
        places = self._reached().places
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
        """Replace these vbuckets, some at a time: each of them is whole after its transaction."""
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
    """The rows without those that the target has from the node itself."""
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
    """What the stream has not come to yet."""
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
