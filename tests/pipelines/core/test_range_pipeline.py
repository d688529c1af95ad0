"""A plan, tasks and a commit: run by a batch, repeated, and as a Spark sink."""

import pickle
from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from upriver.pipelines.core.options import PipelineOptions
from upriver.pipelines.core.progress import Meter
from upriver.pipelines.core.range_pipeline import RangePipeline, RangeTask, RunTasks


def reversed_bytes(item: bytes) -> bytes:
    return item[::-1]


class Remembering(RangePipeline):
    """Commits batches to a list; a batch of one result is run once more."""

    name = "remembering"
    options_type = PipelineOptions

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self.committed: list[tuple[int, list[bytes]]] = []

    def plan(self, batch_number: int | None) -> RangeTask | None:
        known = {number for number, _ in self.committed}
        return None if batch_number in known else reversed_bytes

    def commit(self, results: Sequence[bytes], batch_number: int, run: RunTasks) -> int:
        found = run(reversed_bytes) if len(results) == 1 else list(results)
        self.committed.append((batch_number, found))
        return 10 * len(found)


def test_a_batch_is_committed_once() -> None:
    pipeline = Remembering.of()
    runs: list[RangeTask] = []

    def run(task: RangeTask) -> list[bytes]:
        runs.append(task)
        return [task(b"ab"), task(b"cd")]

    for _ in range(2):
        pipeline._run(run, 3)
    assert pipeline.committed == [(3, [b"ba", b"dc"])]
    assert len(runs) == 1


def test_changes_are_counted_by_the_commit_and_not_by_spark() -> None:
    pipeline = Remembering.of()
    pipeline._run(lambda task: [task(b"ab"), task(b"cd")], 3)
    assert pipeline.rows_of({"batchId": 3, "numInputRows": 2}) == 20
    assert pipeline.rows_of({"batchId": 4, "numInputRows": 2}) == 0


def test_no_batch_is_forgotten_that_ends_between_two_looks_at_the_progress() -> None:
    pipeline, meter = Remembering.of(), Meter()

    def results(count: int, task: RangeTask) -> list[bytes]:
        return [task(b"ab")] * count

    for number, tasks in enumerate((2, 3, 0, 4)):
        pipeline._run(partial(results, tasks), number)
    pipeline._run(lambda task: [task(b"ab")], 3)  # a repetition, which the target has already
    for _ in range(2):
        for number in range(3):
            meter.take({"runId": "r", "batchId": number, "numInputRows": 2}, pipeline.rows_of)
    assert (meter.rows, meter.batches) == (50, 2)
    assert pipeline.unreported() == [40]  # the query was stopped before it reported the last batch
    assert pipeline.unreported() == []


def test_the_source_yields_ranges() -> None:
    assert Remembering.of().reader_options()["output"] == "ranges"


def test_a_sink_has_the_same_halves_and_can_repeat_its_tasks() -> None:
    pipeline = Remembering.of()
    rows = pa.record_batch({"task": pa.array([0]), "ranges": pa.array([b"ab"], pa.binary())})
    message = pipeline.in_sink_task([rows])
    assert pickle.loads(message) == [(b"ab", b"ba")]
    pipeline.apply_messages([message], 0)
    pipeline.apply_messages([message, message], 0)
    pipeline.apply_messages([message, message], 1)
    assert pipeline.committed == [(0, [b"ba"]), (1, [b"ba", b"ba"])]
