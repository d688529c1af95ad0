"""Batches, replays, rollbacks and crashes: the target ends with exactly what the node holds."""

from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.depth import examples
from tests.support.pipeline_model import Cluster, Contents, converge, row, table, value_of
from upriver.errors import TargetBehind
from upriver.pipelines.apply.applying import Applier, latest
from upriver.pipelines.targets.target import ReadAhead, Target, TargetProgress, Work
from upriver.spark.batch_planner import Policy
from upriver.spark.offsets import Offset, VbucketOffset


@dataclass
class Memory(Target):
    """The simplest target; it survives its process."""

    held: Contents = field(default_factory=dict)
    done: TargetProgress = field(default_factory=TargetProgress)
    commits: list[Work] = field(default_factory=list)

    def progress(self) -> TargetProgress:
        return self.done

    def commit(self, work: Work) -> None:
        if work.clear_all:
            self.held.clear()
        for vbucket, key in [name for name in self.held if name[0] in work.cleared]:
            del self.held[vbucket, key]
        for each in work.rows.to_pylist():
            if each["event"] == "mutation":
                self.held[each["vbucket"], each["key"]] = each["value"]
            else:
                self.held.pop((each["vbucket"], each["key"]), None)
        same = self.done.query == work.query
        number = work.number if work.number is not None else self.done.number if same else -1
        self.done = TargetProgress(work.query, number, dict(work.ahead))
        self.commits.append(work)

    def close(self) -> None:
        pass


class Still:
    """A cluster in which nothing happens by itself."""

    def random(self) -> float:
        return 1.0


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(Still(), 2, exact=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("policy", ["emit", "rewind"])
@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32))
@example(seed=69538)  # a deletion is forgotten between a read ahead and a stream from the beginning
def test_a_target_ends_with_the_nodes_contents(policy: Policy, exact: bool, seed: int) -> None:
    memory = Memory()
    converge(lambda: memory, lambda _: memory.held, seed, exact=exact, policy=policy)


def test_of_several_rows_of_a_key_the_last_counts_by_branch_and_arrival() -> None:
    rows = [
        row(0, 11, "mutation", b"k", b"new", branch=1),
        row(0, 12, "mutation", b"k", b"lost"),
        row(1, 5, "mutation", b"k", b"other"),
        row(0, 3, "mutation", b"j", b"1"),
        row(0, 4, "deletion", b"j", None),
    ]
    found = latest(table(rows)).to_pylist()
    assert {(each["vbucket"], each["key"], each["event"], each["value"]) for each in found} == {
        (0, b"k", "mutation", b"new"),
        (1, b"k", "mutation", b"other"),
        (0, b"j", "deletion", None),
    }


def test_a_batch_that_comes_again_is_known(cluster: Cluster) -> None:
    memory = Memory()
    applier = Applier(memory, cluster, "q")
    batch = table([row(0, 1, "mutation", b"k", b"v")])
    applier.apply(batch, 0)
    Applier(memory, cluster, "q").apply(batch, 0)
    assert len(memory.commits) == 2  # that it begins, and the batch
    applier.apply(batch, 0)
    assert applier.counts.replayed == 1


def test_another_query_begins_from_nothing(cluster: Cluster) -> None:
    memory = Memory()
    Applier(memory, cluster, "q").apply(table([row(0, 1, "mutation", b"old", b"v")]), 0)
    Applier(memory, cluster, "r").apply(table([row(0, 1, "mutation", b"new", b"v")]), 0)
    assert memory.held == {(0, b"new"): b"v"}
    assert memory.progress() == TargetProgress("r", 0, {})


@pytest.mark.parametrize("progress", [TargetProgress(), TargetProgress("other", 9), TargetProgress("q", 1)])
def test_a_target_without_the_batches_before_is_refused_and_left_as_it_is(
    cluster: Cluster, progress: TargetProgress
) -> None:
    memory = Memory({(0, b"theirs"): b"v"}, progress)
    with pytest.raises(TargetBehind, match="completed batches up to 2"):
        Applier(memory, cluster, "q").apply(table([row(0, 4, "mutation", b"k", b"v")]), 3)
    assert (memory.held, memory.commits) == ({(0, b"theirs"): b"v"}, [])


def test_what_a_rollback_undoes_is_read_from_the_node(cluster: Cluster) -> None:
    vbucket = cluster.vbuckets[0]
    for key in "ab":
        vbucket.write(key, delete=False)
    memory = Memory({(0, b"lost"): b"1", (1, b"other"): b"2"}, TargetProgress("q", 0))
    applier = Applier(memory, cluster, "q")
    applier.apply(table([row(0, 1, "rollback", None, None, branch=1)]), 1)
    assert memory.held == cluster.contents | {(1, b"other"): b"2"}
    assert memory.progress() == TargetProgress("q", 1, {0: ReadAhead(1, 2, 2)})
    assert (applier.counts.undone, applier.counts.read_again) == (1, 1)


def test_what_was_read_ahead_is_not_overwritten_by_the_older_rows_of_the_stream(cluster: Cluster) -> None:
    memory = Memory({(0, b"a"): b"newer"}, TargetProgress("q", 0, {0: ReadAhead(1, 5, 5)}))
    applier = Applier(memory, cluster, "q")
    applier.apply(table([row(0, 4, "mutation", b"a", b"older")]), 1)
    assert memory.held == {(0, b"a"): b"newer"}
    assert memory.progress().ahead
    applier.apply(table([row(0, 5, "mutation", b"b", b"1"), row(0, 6, "mutation", b"a", b"newest")]), 2)
    assert memory.held == {(0, b"a"): b"newest"}
    assert not memory.progress().ahead


def test_what_was_read_under_a_lost_branch_is_read_again(cluster: Cluster) -> None:
    vbucket = cluster.vbuckets[0]
    vbucket.write("a", delete=False)
    memory = Memory({(0, b"lost"): b"1"}, TargetProgress("q", 0, {0: ReadAhead(99, 5, 5)}))
    applier = Applier(memory, cluster, "q")
    applier.settle()
    assert memory.held == cluster.contents
    assert memory.progress() == TargetProgress("q", 0, {0: ReadAhead(1, 1, 1)})
    applier.settle()
    assert len(memory.commits) == 1


def test_what_was_read_before_the_node_forgot_deletions_is_read_again(cluster: Cluster) -> None:
    """A stream from the beginning does not tell them: it supposes that nothing is held yet."""
    vbucket = cluster.vbuckets[0]
    vbucket.write("a", delete=False)
    memory = Memory({}, TargetProgress("q", 0))
    applier = Applier(memory, cluster, "q")
    applier.apply(table([row(0, 0, "reset", None, None, branch=1)]), 1)
    assert memory.progress() == TargetProgress("q", 1, {0: ReadAhead(1, 1, 1)})
    vbucket.write("a", delete=True)
    vbucket.write("b", delete=False)
    vbucket.purge()
    applier.apply(table([row(0, 3, "mutation", b"b", value_of(3), branch=1)]), 2)
    assert memory.held == cluster.contents


def test_what_the_stream_has_passed_is_not_looked_at_any_more_though_a_filter_hides_it(cluster: Cluster) -> None:
    vbucket = cluster.vbuckets[0]
    vbucket.write("a", delete=False)
    memory = Memory({}, TargetProgress("q", 0, {0: ReadAhead(1, 5, 5)}))
    reached = [Offset([VbucketOffset(0, 1, 5)]), Offset([VbucketOffset(0, 1, 4)])]
    applier = Applier(memory, cluster, "q", reached.pop)
    applier.apply(table([]), 1)
    assert memory.progress().ahead
    applier.apply(table([]), 2)
    assert not memory.progress().ahead
    assert applier.counts.read_again == 0


def test_what_the_stream_has_passed_is_noted_while_no_batch_comes(cluster: Cluster) -> None:
    vbucket = cluster.vbuckets[0]
    vbucket.write("a", delete=False)
    memory = Memory({}, TargetProgress("q", 0, {0: ReadAhead(1, 1, 1)}))
    applier = Applier(memory, cluster, "q", lambda: Offset([VbucketOffset(0, 1, 1)]))
    applier.settle()
    assert memory.progress() == TargetProgress("q", 0)
    vbucket.write("a", delete=True)
    vbucket.purge()
    applier.settle()
    assert applier.counts.read_again == 0


@pytest.mark.parametrize("reached", [Offset([]), Offset([VbucketOffset(0, 1, 3)])])
def test_what_was_read_of_a_vbucket_that_is_away_is_looked_at_when_it_is_back(
    cluster: Cluster, reached: Offset
) -> None:
    memory = Memory({(0, b"a"): b"v"}, TargetProgress("q", 0, {0: ReadAhead(1, 1, 1)}))
    vbucket = cluster.vbuckets[0]
    for key, delete in (("a", False), ("a", True), ("b", False)):
        vbucket.write(key, delete=delete)
    vbucket.purge()
    applier = Applier(memory, cluster, "q", lambda: reached)
    away = cluster.vbuckets.pop(0)
    applier.apply(table([row(0, 3, "mutation", b"b", value_of(3))]), 1)  # it was read before
    cluster.vbuckets[0] = away
    applier.settle()
    assert memory.held == cluster.contents


def test_a_batch_of_nothing_but_marks_is_noted(cluster: Cluster) -> None:
    memory = Memory({}, TargetProgress("q", 2))
    Applier(memory, cluster, "q").apply(table([row(1, 0, "flush", None, None)]), 3)
    assert memory.progress() == TargetProgress("q", 3, {})
    assert isinstance(memory.commits[-1].rows, pa.Table)
