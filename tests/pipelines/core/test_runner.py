"""The runner: it starts again what may pass, tells what does not, and never loses what was done."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="the spark extra is not installed")

from pyspark.sql import SparkSession

from tests.support.background_pipeline import BackgroundPipeline
from upriver.client import SyncKvClient
from upriver.errors import CheckpointError, NodeUnavailable, PipelineFailed, TemporaryFailure
from upriver.node import EmbeddedNode
from upriver.pipelines import RunProgress, Task, run
from upriver.pipelines.core import runner
from upriver.pipelines.core.options import JobOptions, PipelineOptions
from upriver.pipelines.core.row_pipeline import RowPipeline
from upriver.pipelines.core.runner import all_known, end_of, rows_between
from upriver.pipelines.core.warm_up import WarmUp
from upriver.spark import Offset, VbucketOffset


class Waiting(Task):
    """Counts to three, then waits until it is stopped."""

    name = "waiting"
    options_type = JobOptions
    closed = 0
    number = 0
    interrupts_itself = False

    def carry_out(self, directory: Path, tell: Callable[[], object], stop: threading.Event) -> None:
        for self.number in range(1, 4):
            tell()
        if self.interrupts_itself:
            signal.raise_signal(signal.SIGINT)
        assert stop.wait(60)

    def counts(self) -> dict[str, int]:
        return {"number": self.number}

    def close(self) -> None:
        self.closed += 1


def test_a_task_tells_how_far_it_is_and_is_closed_once(tmp_path: Path) -> None:
    job = Waiting.of()
    with BackgroundPipeline(job, tmp_path) as running:
        running.wait(lambda: bool(running.seen) and running.seen[-1].counts == {"number": 3})
        with pytest.raises(CheckpointError, match="another process"):
            run(Waiting.of(), checkpoint=tmp_path)
        assert [progress.counts["number"] for progress in running.seen] == [1, 2, 3]
    assert running.summary is not None
    assert (running.summary.pipeline, running.summary.checkpoint) == ("waiting", str(tmp_path))
    assert not running.summary.interrupted
    assert job.closed == 1


def test_ctrl_c_stops_and_the_handler_is_as_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    job = Waiting.of()
    job.interrupts_itself = True
    assert run(job, checkpoint=tmp_path).interrupted
    assert signal.getsignal(signal.SIGINT) is before


def test_another_source_is_refused_before_anything_begins(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    run(Waiting.of({"from": "a:1"}), checkpoint=tmp_path, stop=stop)
    with pytest.raises(CheckpointError, match="from is 'a:1' there and 'b:1' here"):
        run(Waiting.of({"from": "b:1"}), checkpoint=tmp_path)


def test_what_is_not_known_of_all_is_not_told() -> None:
    assert [all_known(values) for values in ([1, 0], [1, None], [])] == [True, False, False]


class Collecting(RowPipeline):
    """Keeps the keys that come, and fails as often as the test asks for it."""

    name = "collecting"
    options_type = PipelineOptions

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self.keys: list[bytes] = []
        self.troubles: list[Exception] = []
        self.idled = threading.Event()

    def apply(self, found: pa.Table, batch_number: int) -> None:
        if self.troubles:
            raise self.troubles.pop()
        self.keys += found.column("key").to_pylist()

    def idle(self) -> None:
        self.idled.set()


@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.heavy
def test_trouble_that_passes_is_waited_for_and_other_trouble_is_told(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    def fill(name: str) -> None:
        with SyncKvClient(upriver_node.address) as kv:
            kv.set_many({f"{name}{n}": b"v" for n in range(50)})

    def job() -> Collecting:
        return Collecting.of({"from": upriver_node.address})

    fill("a")
    first, seen = job(), list[RunProgress]()
    first.troubles = [TemporaryFailure("full"), ConnectionResetError("cut")]
    summary = run(first, checkpoint=tmp_path, once=True, on_progress=seen.append)
    assert sorted(first.keys) == sorted(b"a%d" % n for n in range(50))
    assert summary.last.restarts >= 2  # and those that a slow machine makes Spark need
    assert (summary.last.batches, summary.last.rows) == (1, 50)
    assert (summary.last.lag_changes, summary.last.lag_s) == (0, 0.0)
    assert summary.last.waiting_for == ""
    assert any("full" in progress.waiting_for for progress in seen)

    fill("b")
    second = job()
    second.troubles = [ValueError("nonsense")]
    with pytest.raises(
        PipelineFailed, match=r"stage 'apply', batch \d+, .*vbucket \d+ \(changes \d+ to \d+\): ValueError"
    ):
        run(second, checkpoint=tmp_path, once=True)
    third = job()
    third.troubles = [TemporaryFailure("full") for _ in range(100)]
    with pytest.raises(PipelineFailed, match="full"):
        run(third, checkpoint=tmp_path, once=True, patience_s=0.5)

    last = job()
    with BackgroundPipeline(last, tmp_path) as running:
        running.wait(lambda: sorted(last.keys) == sorted(b"b%d" % n for n in range(50)))
        fill("c")
        running.wait(lambda: len(last.keys) == 100 and last.idled.is_set())
        running.wait(lambda: (running.seen[-1].rows, running.seen[-1].lag_changes) == (100, 0))
    assert running.summary is not None
    assert running.summary.last.rows == 100


class Held(Collecting):
    """Its batches are not done before somebody lets them."""

    name = "held"

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self.entered = threading.Event()
        self.let = threading.Event()

    def apply(self, found: pa.Table, batch_number: int) -> None:
        self.entered.set()
        assert self.let.wait(200)
        super().apply(found, batch_number)


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_what_the_source_gets_while_a_batch_is_at_work_counts_as_behind(
    spark: SparkSession, upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    job = Held.of({"from": upriver_node.address})
    with SyncKvClient(upriver_node.address) as kv, BackgroundPipeline(job, tmp_path) as running:
        kv.set_many({f"a{n}": b"v" for n in range(50)})
        running.wait(job.entered.is_set)
        kv.set_many({f"b{n}": b"v" for n in range(30)})
        running.wait(lambda: running.seen[-1].lag_changes == 80 and (running.seen[-1].lag_s or 0.0) > 1.0)
        job.let.set()
        running.wait(lambda: running.seen[-1].lag_changes == 0)
        assert (len(job.keys), running.seen[-1].lag_s) == (80, 0.0)


def test_a_server_reports_offsets_not_changes() -> None:
    """Of a pipeline on a server of Spark Connect, only Spark's progress is known here."""
    ends = [Offset(VbucketOffset(n, 1, seqno) for n, seqno in seqnos.items()) for seqnos in ({0: 5}, {0: 7, 1: 3})]
    source = {"startOffset": ends[0].packed(), "endOffset": json.dumps(ends[1].packed())}
    progress = {"sources": [source], "numInputRows": 2}
    assert rows_between(progress) == 5
    assert [each.seqno for each in end_of(progress)] == [7, 3]
    assert rows_between({"sources": [{"endOffset": None}]}) == 0


class Endless:
    """A query that has nothing to do."""

    isActive = True  # noqa: N815
    recentProgress: ClassVar[list[object]] = []  # noqa: N815
    lastProgress = None  # noqa: N815

    def stop(self) -> None:
        self.isActive = False


class WithoutSpark(Collecting):
    """Its query is not one of Spark, so that a test controls how long it takes to start."""

    name = "without_spark"

    def start(self, changes: object, checkpoint: str, *, once: bool = False) -> Any:
        self.began = time.monotonic()
        return Endless()

    def settle(self) -> None:
        self.ended = time.monotonic()


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark takes longer to start than the pipelines of these tests may run."""

    def slowly(*_: object) -> Any:
        time.sleep(0.6)
        return MagicMock()

    monkeypatch.setattr(runner, "spark_session", slowly)
    monkeypatch.setattr(runner, "task_cores", lambda _: 1)
    monkeypatch.setattr(runner, "WARM_UP", WarmUp())


@pytest.mark.usefixtures("no_spark")
def test_the_start_of_spark_is_not_part_of_the_time_to_run(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    job = WithoutSpark.of({"from": upriver_node.address})
    run(job, checkpoint=tmp_path, seconds=0.5)
    assert job.ended - job.began >= 0.5


class Stumbling(WithoutSpark):
    """Its work between batches fails now and then."""

    name = "stumbling"

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self.failures: list[Exception] = []

    def start(self, changes: object, checkpoint: str, *, once: bool = False) -> Any:
        query: Any = super().start(changes, checkpoint, once=once)
        query.lastProgress = "it runs"
        return query

    def idle(self) -> None:
        super().idle()
        if self.failures:
            raise self.failures.pop(0)


@pytest.mark.usefixtures("no_spark")
def test_work_between_batches_that_fails_for_a_moment_does_not_stop_the_query(
    upriver_node: EmbeddedNode, tmp_path: Path
) -> None:
    job, stop, seen = Stumbling.of({"from": upriver_node.address}), threading.Event(), list[RunProgress]()
    job.failures = [NodeUnavailable("a:1", "no answer")]

    def told(progress: RunProgress) -> None:
        seen.append(progress)
        if not progress.waiting_for and any(each.waiting_for for each in seen):
            stop.set()

    summary = run(job, checkpoint=tmp_path, on_progress=told, stop=stop)
    assert any("no answer" in each.waiting_for for each in seen)
    assert summary.last.restarts == 0
    job = Stumbling.of({"from": upriver_node.address})
    job.failures = [ValueError("a bug")]
    with pytest.raises(PipelineFailed, match="a bug"):
        run(job, checkpoint=tmp_path)


class Repairing(WithoutSpark):
    """Repairs until the test has seen enough."""

    name = "repairing"

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self.repairing = threading.Event()
        self.enough = threading.Event()

    def idle(self) -> None:
        self.repairing.set()
        assert self.enough.wait(60)


@pytest.mark.usefixtures("no_spark")
def test_progress_is_told_while_a_repair_runs(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    job, seen = Repairing.of({"from": upriver_node.address}), list[float]()

    def told(progress: RunProgress) -> None:
        if job.repairing.is_set() and not job.enough.is_set():
            seen.append(progress.seconds)
            if len(seen) == 2:
                job.enough.set()
                stop.set()

    stop = threading.Event()
    run(job, checkpoint=tmp_path, on_progress=told, stop=stop)
    assert len(seen) == 2
