"""A cluster, a query and its crashes as a model: what any target must end with, whatever happens to them.

The plan of the query is the real one (spark.batch_planner), the vbuckets are those of its own model, and the target is
a real one that is driven as a pipeline drives it: batches that are run again, a failure before or after the target's
commit, a lost checkpoint.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from tests.support.modelled_source import ModelledVbucket, failover_log
from upriver.pipelines.apply.applying import Applier
from upriver.pipelines.targets.target import NodeSource, ReadAhead, ReadBasis, Target, TargetProgress, Work
from upriver.spark.batch_planner import Policy, Range, Rules, SourceState, answered_with_rollback, next_offset, ranges
from upriver.spark.offsets import Offset, VbucketOffset
from upriver.spark.rows import FIELDS, rollback_value, signed

SCHEMA = pa.schema([pa.field(name, kind) for name, kind in FIELDS.items()])
#: Contents: by vbucket and key what the value is.
Contents = dict[tuple[int, bytes], bytes]


def row(vbucket: int, seqno: int, event: str, key: bytes | None, value: bytes | None, **others: Any) -> dict[str, Any]:
    """One row of Spark."""
    known = {"rev_seqno": 1, "cas": seqno, "flags": 0, "expiry": 0, "lock_time": 0, "datatype": 0}
    place = {"vbucket_uuid": 1, "branch": 0, "snapshot_start": 0, "snapshot_end": seqno}
    shown = {"vbucket": vbucket, "seqno": seqno, "event": event, "key": key, "value": value}
    return known | place | shown | others


def table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows of Spark as the table that a pipeline gets."""
    return pa.Table.from_pylist(list(rows), SCHEMA)


def value_of(number: int) -> bytes:
    """What the model's number is at a node: every third is not JSON, and the fields are not the same everywhere."""
    if number % 3 == 0:
        return b"plain %d \xff" % number
    return b'{"n": %d, "text": "word%d", "only%d": true}' % (number, number, number % 4)


class Crash(Exception):
    """The process is gone here."""


class Cluster(NodeSource):
    """Some vbuckets, and what a target may ask of them."""

    def __init__(self, choose: random.Random, vbuckets: int, *, exact: bool) -> None:
        self.choose = choose
        self.exact = exact
        self.is_busy = True
        self.vbuckets = {number: ModelledVbucket(exact=exact) for number in range(vbuckets)}

    @property
    def states(self) -> dict[int, SourceState]:
        return {number: vbucket.state for number, vbucket in self.vbuckets.items()}

    @property
    def contents(self) -> Contents:
        return {
            (number, key.encode()): value_of(value)
            for number, vbucket in self.vbuckets.items()
            for key, value in vbucket.contents.items()
        }

    def disturb(self, times: int) -> None:
        """Things happen to the vbuckets."""
        for _ in range(self.choose.randrange(times)):
            vbucket = self.choose.choice(list(self.vbuckets.values()))
            match self.choose.randrange(14):
                case 0 | 1:
                    vbucket.fail_over(self.choose.randrange(5))
                case 2 if not self.exact:
                    vbucket.purge()
                case 3:
                    vbucket.versions.clear()  # a flush: another history from 0
                    vbucket.purge_seqno = 0
                    vbucket.uuids += 1
                    vbucket.log = failover_log((vbucket.uuids, 0))
                case _:
                    vbucket.write(self.choose.choice("abcde"), delete=self.choose.random() < 0.3)

    def rows(self, asked: Range, rules: Rules) -> list[dict[str, Any]]:
        """What a task reads of a range, whenever it does."""
        place, vbucket = asked.start, self.vbuckets[asked.start.vbucket]
        if (seqno := vbucket.rollback_for(place)) is not None:
            asked = answered_with_rollback(asked, seqno, vbucket.log, rules)
        shared: dict[str, Any] = {"vbucket_uuid": signed(vbucket.state.vbucket_uuid), "branch": place.branch}
        rows = []
        if (back := asked.rollback) is not None:
            event, value = "rollback" if back.seqno else "reset", rollback_value(back.old_uuid, back.new_uuid)
            rows.append(row(place.vbucket, back.seqno, event, None, value, **shared))
        return rows + [
            self._change(place.vbucket, *version, **shared)
            for version in vbucket.read(asked.start.seqno, asked.end_seqno)
        ]

    @staticmethod
    def _change(number: int, seqno: int, key: str, value: int | None, **shared: Any) -> dict[str, Any]:
        if value is None:
            return row(number, seqno, "deletion" if seqno % 2 else "expiration", key.encode(), None, **shared)
        return row(number, seqno, "mutation", key.encode(), value_of(value), **shared)

    # What a target asks

    def grounds(self, vbuckets: Iterable[int]) -> Mapping[int, ReadBasis]:
        states = {number: self.vbuckets[number].state for number in vbuckets if number in self.vbuckets}
        return {number: ReadBasis(state.vbucket_uuid, state.purge_seqno) for number, state in states.items()}

    def groups(self, vbuckets: Iterable[int]) -> list[list[int]]:
        return [[number] for number in sorted(vbuckets)]

    def read(self, vbuckets: Iterable[int]) -> tuple[pa.Table, dict[int, ReadAhead]]:
        rows: list[dict[str, Any]] = []
        ahead: dict[int, ReadAhead] = {}
        for number in vbuckets:
            vbucket = self.vbuckets[number]
            uuid, end, purged = vbucket.state.vbucket_uuid, vbucket.high, vbucket.purge_seqno
            if self.is_busy and self.choose.random() < 0.3:  # somebody writes while it is read
                vbucket.write(self.choose.choice("abcde"), delete=self.choose.random() < 0.3)
            rows += [self._change(number, *version, vbucket_uuid=signed(uuid)) for version in vbucket.read(0, end)]
            whole = self.exact or vbucket.high == end
            ahead[number] = ReadAhead(uuid, end, end, purged) if whole else ReadAhead(uuid, 0, vbucket.high, purged)
        return table(rows), ahead


class FailingTarget(Target):
    """A target whose process ends before or after a commit, now and then."""

    def __init__(self, target: Target, choose: random.Random) -> None:
        self._target = target
        self._choose = choose
        self.is_fragile = True

    def progress(self) -> TargetProgress:
        return self._target.progress()

    def commit(self, work: Work) -> None:
        fate = self._choose.randrange(8) if self.is_fragile else 7
        if fate == 0:
            raise Crash
        self._target.commit(work)
        if fate == 1:
            raise Crash

    def close(self) -> None:
        self._target.close()


def converge(
    opened: Callable[[], Target], contents: Callable[[Target], Contents], seed: int, *, exact: bool, policy: Policy,
    vbuckets: int = 3, batches: int = 10, normal: Callable[[Contents], Contents] = lambda found: found,
) -> None:  # fmt: skip
    """Let things happen, then let the stream come to its end: target and cluster hold the same."""
    choose = random.Random(seed)
    cluster, rules = Cluster(choose, vbuckets, exact=exact), Rules(policy, fail_on_data_loss=False)
    target = FailingTarget(opened(), choose)
    query, number = "first", 0
    offset = beginning = Offset(map(VbucketOffset, range(vbuckets)))

    def applier() -> Applier:
        return Applier(target, cluster, query, lambda: offset)

    def run(end: Offset) -> None:
        nonlocal target
        while True:
            cluster.disturb(4 if target.is_fragile else 1)
            rows = [row for asked in ranges(offset, end) for row in cluster.rows(asked, rules)]
            try:
                return applier().apply(table(rows), number)
            except Crash:
                target.close()
                target = FailingTarget(opened(), choose)

    for _ in range(choose.randrange(1, batches)):
        cluster.disturb(10)
        if choose.randrange(12) == 0:  # the checkpoint is lost
            query, number, offset = query + "again", 0, beginning
        end = next_offset(offset, cluster.states, rules, rows_max=choose.choice((None, 1, 3)))
        if end != offset:
            run(end)
            offset, number = end, number + 1
    target.is_fragile = cluster.is_busy = False
    rest = 4  # one to go back, one to read, the others to see that there is no more
    while rest:
        end = next_offset(offset, cluster.states, rules, rows_max=(None, 1, 3)[seed % 3])
        if end != offset:
            assert number < 1000, "it does not come to an end"
            run(end)
            offset, number = end, number + 1
        else:
            rest -= 1
        applier().settle()
    assert contents(target._target) == normal(cluster.contents)
    target.close()
