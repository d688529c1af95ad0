"""The repair rules inside a task, one by one. Random histories of them are in the tests of the table's keeper."""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from tests.support.modelled_source import failover_log
from tests.support.pipeline_model import row
from tests.support.table_model import ModelledSource, TableCluster
from upriver.errors import DataLoss
from upriver.pipelines.apply.task_apply import (
    ATTEMPTS_MAX,
    Outlook,
    TaskOutcome,
    apply_ranges,
    outlook,
    read_ahead,
    replace,
    still_ahead,
)
from upriver.pipelines.targets.target import ReadAhead
from upriver.spark import Offset, Range, SourceState, VbucketOffset
from upriver.spark.batch_planner import RangeRollback


class Collected:
    """A sink that holds what a task has added."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, rows: pa.RecordBatch) -> None:
        assert rows.num_rows
        self.rows += rows.to_pylist()

    def discard(self, vbucket: int) -> None:
        self.rows = [each for each in self.rows if each["vbucket"] != vbucket]

    @property
    def names(self) -> list[tuple[int, int, bytes]]:
        return [(each["vbucket"], each["seqno"], each["key"]) for each in self.rows]


@pytest.fixture
def cluster() -> TableCluster:
    """Two vbuckets in which nothing happens by itself: f, g and h, and f again in the first; f in the second."""
    cluster = TableCluster(InTurn(), 2, exact=True)
    cluster.is_busy = False
    for key in "fghf":
        cluster.put(0, key, b"{}")
    cluster.put(1, "f", b"{}")
    return cluster


class InTurn(random.Random):
    """Chooses the first of everything: one row of the first range at a time."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return 0 if stop is None else start

    def choice(self, seq: Any) -> Any:
        return seq[0]


class Interrupted(ModelledSource):
    """Something happens before each batch of rows."""

    def __init__(self, cluster: TableCluster, *events: Any) -> None:
        super().__init__(cluster)
        self._events = list(events)

    def rows(self, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
        for rows in super().rows(ranges):
            yield rows
            if self._events:
                self._events.pop(0)()


def asked(vbucket: int, start: int, end: int, uuid: int = 1, rollback: RangeRollback | None = None) -> Range:
    return Range(VbucketOffset(vbucket, uuid, start, start, first_consistent=1), end, rollback)


def test_changes_are_passed_on_in_their_order(cluster: TableCluster) -> None:
    sink = Collected()
    outcome = apply_ranges(ModelledSource(cluster), [asked(0, 0, 4), asked(1, 0, 1)], {}, sink)
    assert sorted(sink.names) == [(0, 2, b"g"), (0, 3, b"h"), (0, 4, b"f"), (1, 1, b"f")]
    assert [seqno for vbucket, seqno, _ in sink.names if not vbucket] == [2, 3, 4]
    assert outcome == TaskOutcome(changes=4)


def test_a_planned_rollback_is_read_from_the_node_only(cluster: TableCluster) -> None:
    cluster.vbuckets[0].fail_over(1)
    sink, back = Collected(), RangeRollback(2, 1, 2)
    outcome = apply_ranges(ModelledSource(cluster), [asked(0, 2, 3, 2, back), asked(1, 0, 1)], {}, sink)
    assert sorted(sink.names) == [(0, 1, b"f"), (0, 2, b"g"), (0, 3, b"h"), (1, 1, b"f")]
    assert outcome.replaced == {0: ReadAhead(2, 3, 3)}
    assert outcome.undone == 1


def test_a_history_sees_rollbacks_and_the_rows_after_them(cluster: TableCluster) -> None:
    cluster.vbuckets[0].fail_over(1)
    sink, seen = Collected(), Collected()
    apply_ranges(ModelledSource(cluster), [asked(0, 2, 3, 2, RangeRollback(2, 1, 2))], {}, sink, seen.add)
    assert [(each["event"], each["seqno"]) for each in seen.rows] == [("rollback", 2), ("mutation", 3)]
    assert sink.names == [(0, 1, b"f"), (0, 2, b"g"), (0, 3, b"h")]


def test_what_was_read_before_a_rollback_is_forgotten(cluster: TableCluster) -> None:
    vbucket = cluster.vbuckets[0]

    def fail_over() -> None:
        vbucket.fail_over(4)
        cluster.put(0, "h", b"new")

    sink = Collected()
    source = Interrupted(cluster, fail_over)
    outcome = apply_ranges(source, [asked(0, 0, 4), asked(1, 0, 1)], {}, sink)
    assert sorted(sink.names) == [(0, 1, b"h"), (1, 1, b"f")]
    assert outcome.replaced == {0: ReadAhead(2, 1, 1)}
    assert outcome.undone == 1


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (ReadAhead(1, 3, 3), [4]),  # the state at 3 is in the target
        (ReadAhead(1, 0, 3), [2, 3, 4]),  # the target has it only roughly
        (ReadAhead(7, 3, 3), [2, 3, 4]),  # of another branch
        (ReadAhead(2**64 - 5, 3, 3), [2, 3, 4]),
    ],
)
def test_rows_of_the_stream_that_a_read_covers_are_skipped(
    cluster: TableCluster, read: ReadAhead, found: list[int]
) -> None:
    sink = Collected()
    outcome = apply_ranges(ModelledSource(cluster), [asked(0, 0, 4), asked(1, 0, 1)], {0: read}, sink)
    assert [seqno for vbucket, seqno, _ in sink.names if not vbucket] == found
    assert (1, 1, b"f") in sink.names
    assert outcome.passed == {0: (1, 4)}
    assert outcome.changes == len(found) + 1


def test_uuids_have_64_bits(cluster: TableCluster) -> None:
    uuid = 2**64 - 5
    cluster.vbuckets[0].log = failover_log((uuid, 0))
    sink = Collected()
    read = {0: ReadAhead(uuid, 4, 4)}
    outcome = apply_ranges(ModelledSource(cluster), [asked(0, 0, 4, uuid)], read, sink)
    assert sink.rows == []
    assert outcome.passed == {0: (uuid, 4)}


def test_a_vbucket_that_changes_its_branch_during_the_read_is_read_again(cluster: TableCluster) -> None:
    sink, outcome = Collected(), TaskOutcome()
    source = Interrupted(cluster, lambda: cluster.vbuckets[0].fail_over(2))
    replace(source, [0, 1], sink, outcome)
    assert sorted(sink.names) == [(0, 1, b"f"), (0, 2, b"g"), (1, 1, b"f")]
    assert outcome.replaced == {0: ReadAhead(2, 2, 2), 1: ReadAhead(1, 1, 1)}


def test_a_vbucket_that_never_stays_is_an_error(cluster: TableCluster) -> None:
    source = Interrupted(cluster, *[lambda: cluster.vbuckets[0].fail_over(0)] * 4 * ATTEMPTS_MAX)
    with pytest.raises(DataLoss, match=f"changed its branch {ATTEMPTS_MAX} times"):
        replace(source, [0], Collected(), TaskOutcome())


def test_a_vbucket_without_an_owner_is_an_error(cluster: TableCluster) -> None:
    class Moving(ModelledSource):
        def states(self, vbuckets: Collection[int]) -> Mapping[int, SourceState]:
            return super().states([number for number in vbuckets if number != 1])

    with pytest.raises(DataLoss, match=r"vbucket 1.*no node has it now"):
        replace(Moving(cluster), [0, 1], Collected(), TaskOutcome())


def test_an_empty_vbucket_replaces_what_the_target_holds(cluster: TableCluster) -> None:
    cluster.vbuckets[1].versions.clear()
    sink, outcome = Collected(), TaskOutcome()
    replace(ModelledSource(cluster), [1], sink, outcome)
    assert (sink.rows, outcome.replaced) == ([], {1: ReadAhead(1, 0, 0)})


def state(high: int, exact_from: int | None = None, uuid: int = 1, purge: int = 0) -> SourceState:
    return SourceState(failover_log((uuid, 0)), high, purge, exact_from)


@pytest.mark.parametrize(
    ("before", "after", "read"),
    [
        (state(5, purge=2), state(5, purge=3), ReadAhead(1, 5, 5, 2)),  # nothing was written meanwhile
        (state(5), state(7), ReadAhead(1, 0, 7)),  # a key may have moved beyond 5
        (state(5, 0), state(7, 0), ReadAhead(1, 5, 5)),
        (state(5, 0), state(7, 5), ReadAhead(1, 5, 5)),
        (state(5, 0), state(7, 6), ReadAhead(1, 0, 7)),  # the state at 5 was forgotten
    ],
)
def test_whether_a_read_is_a_state_that_the_node_had(before: SourceState, after: SourceState, read: ReadAhead) -> None:
    assert read_ahead(before, after) == read


READ = ReadAhead(1, 5, 5, 2)


@pytest.mark.parametrize(
    ("offset", "found", "expected"),
    [
        (VbucketOffset(0, 1, 4), state(9, purge=2), Outlook({0: READ}, set(), set())),
        (VbucketOffset(0, 1, 5), state(9, purge=2), Outlook({}, set(), set())),
        (VbucketOffset(0, 2, 5), state(9, purge=2), Outlook({0: READ}, set(), set())),
        (None, state(9, purge=2), Outlook({0: READ}, set(), set())),
        (VbucketOffset(0, 1, 5), state(9, purge=3), Outlook({0: READ}, {0}, set())),
        (VbucketOffset(0, 1, 5), state(9, uuid=3, purge=2), Outlook({0: READ}, {0}, set())),
        (VbucketOffset(0, 1, 5), None, Outlook({0: READ}, set(), {0})),
    ],
    ids=["behind", "passed", "other branch", "not begun", "purged", "failed over", "no owner"],
)
def test_the_outlook_of_a_read(offset: VbucketOffset | None, found: SourceState | None, expected: Outlook) -> None:
    reached = Offset([] if offset is None else [offset])
    assert outlook({0: READ}, reached, {} if found is None else {0: found}) == expected


def test_rows_show_which_reads_the_stream_has_passed() -> None:
    ahead = dict.fromkeys(range(5), READ)
    passed = {0: (1, 5), 1: (1, 4), 2: (9, 7), 4: (1, 5)}
    assert still_ahead(ahead, passed, unseen={4}).keys() == {1, 2, 3, 4}


def test_rows_about_vbuckets_pass_nothing(cluster: TableCluster) -> None:
    class Marked(ModelledSource):
        def rows(self, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
            if ranges[0].start.seqno:
                marks = [row(0, 9, "flush", None, None, vbucket_uuid=1)]
                yield pa.RecordBatch.from_pylist(marks, next(super().rows([asked(0, 0, 4)])).schema)
            else:
                yield from super().rows(ranges)

    sink = Collected()
    outcome = apply_ranges(Marked(cluster), [asked(0, 1, 4)], {0: READ}, sink)
    assert (outcome.passed, outcome.undone) == ({}, 1)
    assert [seqno for _, seqno, _ in sink.names] == [2, 3, 4]
