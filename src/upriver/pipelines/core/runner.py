"""Runs a job: starts it, watches it, restarts it after temporary failures, and stops it cleanly.

Each leg of a pipeline is a Spark query with its own checkpoint. After a temporary failure the leg is restarted, after
pauses that grow until a batch succeeds. After any other failure, or when no batch succeeds within the runner's
patience, all legs are stopped and the failure is raised with its place. Stopping interrupts the running batch, which is
repeated at the next start.
"""

import contextlib
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from upriver.client.transport import Backoff
from upriver.errors import PipelineFailed
from upriver.pipelines.core.directory import RunDirectory, state_directory
from upriver.pipelines.core.failures import Trouble, trouble
from upriver.pipelines.core.idle_work import IdleWork
from upriver.pipelines.core.pipeline import Job, Pipeline, Task
from upriver.pipelines.core.progress import Lag, Meter, RunProgress, Summary
from upriver.pipelines.core.session import is_remote, spark_session, task_cores
from upriver.pipelines.core.source_watch import SourceWatch
from upriver.pipelines.core.warm_up import WARM_UP
from upriver.spark import Offset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: After this long without a successful batch, a temporary failure counts as permanent.
PATIENCE_S: Final = 600.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 15.0
_LOOK_S: Final = 0.1
_TELL_S: Final = 1.0
LOG: Final = "spark.log"

Listener = Callable[[RunProgress], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run a job."""

    #: Stop at the changes that exist now.
    once: bool = False
    #: Stop this many seconds after the first start of a query; None for never.
    seconds: float | None = None
    #: Another Spark than a local one.
    master: str | None = None
    patience_s: float = PATIENCE_S


def run(
    job: Job,
    *,
    checkpoint: str | Path | None = None,
    once: bool = False,
    seconds: float | None = None,
    master: str | None = None,
    patience_s: float = PATIENCE_S,
    on_progress: Listener | None = None,
    stop: threading.Event | None = None,
) -> Summary:
    """Run a job until it is done, its time is over, ``stop`` is set, or Ctrl-C; returns the summary.

    ``once`` stops at the changes that exist now, and ``seconds`` after this time, in which the start of Spark does not
    count; without both it runs on. The default ``checkpoint`` depends on source and target, and is in the user's state
    directory.
    """
    directory = RunDirectory.default(job) if checkpoint is None else RunDirectory(checkpoint)
    plan = Plan(once=once, seconds=seconds, master=master, patience_s=patience_s)
    with contextlib.ExitStack() as stack:
        stack.callback(job.close)
        stack.callback(job.conclude)
        if not directory.is_local:
            spark_session(_log(directory), master)  # which reaches the directory
        stack.enter_context(directory)
        directory.claim(job)
        listener = on_progress or (lambda _: None)
        runner = _Runner(job, directory, plan, listener, stop or threading.Event())
        return runner.run()


class _Runner:
    """One run of one job."""

    def __init__(
        self, job: Job, directory: RunDirectory, plan: Plan, listener: Listener, stop: threading.Event
    ) -> None:
        self._job = job
        self._directory = directory
        self._plan = plan
        self._listener = listener
        self._stop = stop
        self._started = time.monotonic()
        self._legs: list[_Leg] = []
        self._interrupted = False

    def run(self) -> Summary:
        """Run the job to its end."""
        if isinstance(self._job, Pipeline):
            self._run_pipeline(self._job)
        else:
            assert isinstance(self._job, Task)
            with self._interruptible():
                self._job.carry_out(self._directory.path, self._tell, self._stop)
        last = self._tell()
        return Summary(self._job.name, str(self._directory), last, self._interrupted)

    def _run_pipeline(self, pipeline: Pipeline) -> None:
        spark = spark_session(_log(self._directory), self._plan.master)
        legs = pipeline.legs()
        for each in legs:
            place = self._directory if len(legs) == 1 else self._directory.leg(each.name)
            self._legs.append(_Leg(spark, each, place, self._plan))
        with self._interruptible(), contextlib.ExitStack() as stack:
            for leg in self._legs:
                stack.enter_context(leg.source)
                stack.callback(leg.end)
            self._watch()

    def _watch(self) -> None:
        """Wait until all legs are done, the time is over or the job is stopped."""
        told, began = 0.0, None
        while not self._stop.wait(_LOOK_S):
            for leg in self._legs:
                leg.look()
            now = time.monotonic()
            if all(leg.is_done for leg in self._legs):
                return
            if began is None and any(leg.has_begun for leg in self._legs):
                began = now
            if self._plan.seconds is not None and began is not None and now - began >= self._plan.seconds:
                return
            if now - told >= _TELL_S:
                told = now
                self._tell()

    def _tell(self) -> RunProgress:
        """Report the progress."""
        counts: Counter[str] = Counter(self._job.counts())
        for leg in self._legs:
            if leg.pipeline is not self._job:
                counts.update(leg.pipeline.counts())
            leg.weigh()
        meters = [leg.meter for leg in self._legs]
        changes = [leg.lag.changes for leg in self._legs]
        seconds = [leg.lag.seconds for leg in self._legs]
        progress = RunProgress(
            pipeline=self._job.name,
            seconds=time.monotonic() - self._started,
            rows=sum(meter.rows for meter in meters),
            rows_per_s=sum(meter.rows_per_s for meter in meters),
            lag_changes=sum(each for each in changes if each is not None) if all_known(changes) else None,
            lag_s=max(each for each in seconds if each is not None) if all_known(seconds) else None,
            batches=sum(meter.batches for meter in meters),
            restarts=sum(leg.restarts for leg in self._legs),
            counts=dict(counts),
            waiting_for="; ".join(leg.trouble.why for leg in self._legs if leg.trouble is not None),
            warnings=tuple(self._job.warnings()),
        )
        self._listener(progress)
        return progress

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Stop cleanly on Ctrl-C and SIGTERM; Spark's own handler would not."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_: Any) -> None:
            self._interrupted = True
            self._stop.set()

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Leg:
    """One query with all its restarts."""

    def __init__(self, spark: "SparkSession", pipeline: Pipeline, directory: RunDirectory, plan: Plan) -> None:
        self._spark = spark
        #: Whether the pipeline runs on a server of Spark Connect. Then its progress is all that is known here.
        self._is_remote = is_remote(spark)
        self._reached = Offset(())
        self.pipeline = pipeline
        self._directory = directory
        self._plan = plan
        self._query: StreamingQuery | None = None
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._again_at = 0.0
        self._failing_since: float | None = None
        self._measured_at = 0.0
        self.source = SourceWatch(pipeline.options.source, pipeline.options.vbuckets)
        self.meter = Meter()
        self.lag = Lag()
        self._idle_work = IdleWork(spark)
        self.restarts = 0
        #: Whether it has tried to start its query.
        self.has_begun = False
        #: The failure that it is waiting out.
        self.trouble: Trouble | None = None
        self.is_done = False

    def look(self) -> None:
        """Check the query, and restart or end it."""
        if self.is_done:
            return
        if self._idle_work.is_running and (self._query is None or not self._query.isActive):
            return  # what it has begun is completed first
        if self._query is None:
            if time.monotonic() >= self._again_at and WARM_UP.may_start(self):
                self._attempt(self._start)
                self.has_begun = True
            return
        if self._query.isActive:
            if time.monotonic() - self._measured_at >= _TELL_S:
                self._measure(self._query)
                if not self._is_remote:
                    self._attempt(self._work_between_batches)
            return
        self._measure_last(self._query)
        error = self._query.exception()
        if error is not None:
            self._failed(self.pipeline.failure or str(error), applying=self.pipeline.failure is not None)
        elif (idle_error := self._idle_work.last_error()) is not None:
            self._failed(idle_error, applying=False)
        else:
            self.is_done = True
            WARM_UP.is_ready(self)

    def weigh(self) -> None:
        """Update the lag."""
        reached = self._reached if self._is_remote else self._directory.reached()
        # A query that starts at latest has no known start until its first batch is complete.
        if self.source.high_seqnos and (reached.vbuckets or self.pipeline.options.start == "earliest"):
            self.lag.seen(self.source.held(reached), self.source.high_seqnos)

    def end(self) -> None:
        """Stop the query and wait until nothing runs any more."""
        if self._query is not None:
            with contextlib.suppress(Exception):  # it may have ended with an error
                self._query.stop()
            self._idle_work.cancel()  # before the wait for what it holds
            self.pipeline.settle()
            self._measure_last(self._query)
            self._query = None
        self._idle_work.cancel()
        WARM_UP.gave_up(self)

    def _start(self) -> None:
        self.pipeline.failure = None
        reader = self._spark.readStream.format("upriver").options(**self.pipeline.reader_options())
        checkpoint, once = self._directory.spark, self._plan.once
        if self._is_remote:
            self._query = self.pipeline.start_on_server(reader.load(), checkpoint, once=once)
            return
        self.pipeline.open(self._directory)
        changes = reader.option("cores", task_cores(self._spark)).load()
        self._query = self.pipeline.start(changes, checkpoint, once=once)

    def _work_between_batches(self) -> None:
        """Start it, again if it has failed for a moment: the query need not wait for that."""
        try:
            self._idle_work.start(self.pipeline.idle)
        except Exception as error:
            found = trouble(error, applying=False)
            if not found.is_temporary:
                raise
            self.trouble = found

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self.end()
            self._failed(error, applying=False)

    def _failed(self, error: BaseException | str, *, applying: bool) -> None:
        """Schedule a restart, if that may help."""
        self._query = None
        WARM_UP.gave_up(self)
        found = trouble(error, applying=applying)
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if not found.is_temporary or now - self._failing_since > self._plan.patience_s:
            where = found.where(self._directory.batch())
            raise PipelineFailed(self.pipeline.name, found.stage, where, found.why, str(self._directory)) from (
                error if isinstance(error, BaseException) else None
            )
        self.trouble = found
        self.restarts += 1
        self._again_at = now + self._backoff.pause_s()

    def _measure(self, query: "StreamingQuery") -> None:
        self._measured_at = time.monotonic()
        for event in query.recentProgress:
            WARM_UP.is_ready(self)
            told = json.loads(event.json)
            if self._is_remote:
                self._reached = end_of(told)
            if self.meter.take(told, rows_between if self._is_remote else self.pipeline.rows_of):
                self._succeeded()
        if query.isActive and self.trouble is not None and query.lastProgress is not None:
            self._succeeded()

    def _measure_last(self, query: "StreamingQuery") -> None:
        """Measure a query that has ended, also batches that it has completed without saying so."""
        self._measure(query)
        for rows in self.pipeline.unreported():
            self.meter.add(rows)

    def _succeeded(self) -> None:
        self.trouble = None
        self._failing_since = None
        self._backoff.reset(_FIRST_PAUSE_S)


def end_of(progress: Mapping[str, Any], name: str = "endOffset") -> Offset:
    """The offset in a progress event of Spark."""
    found = progress["sources"][0].get(name)
    return Offset(()) if not found else Offset.unpacked(json.loads(found) if isinstance(found, str) else found)


def rows_between(progress: Mapping[str, Any]) -> int:
    """The number of seqnos in the batch of a progress event; those that were superseded are included."""
    before = {each.vbucket: each.seqno for each in end_of(progress, "startOffset")}
    return sum(max(0, each.seqno - before.get(each.vbucket, 0)) for each in end_of(progress))


def _log(directory: RunDirectory) -> Path:
    """The file for Spark's messages: in the directory, or in the default place if the directory is elsewhere."""
    folder = directory.path if directory.is_local else state_directory()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / LOG


def all_known(values: list[Any]) -> bool:
    """Whether there are any changes, and all are applied."""
    return bool(values) and None not in values
