"""Rows of Spark, prepared in tasks and applied by the driver, also as a sink."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from tests.support.pipeline_model import row, table
from upriver.pipelines.core.options import PipelineOptions
from upriver.pipelines.core.row_pipeline import InTask, RowPipeline
from upriver.spark import ROWS


class Keys(InTask):
    """Passes on the keys only."""

    columns = ("key",)
    schema = pa.schema([("key", pa.binary())])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch([batch.column("key")], schema=self.schema)


class Collecting(RowPipeline):
    """Keeps what it is given."""

    name = "collecting"
    options_type = PipelineOptions
    work: InTask | None = None

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self.found: dict[int, pa.Table] = {}

    def in_task(self) -> InTask | None:
        return self.work

    def apply(self, found: pa.Table, batch_number: int) -> None:
        self.found[batch_number] = found


def test_rows_travel_to_the_driver_as_they_are() -> None:
    pipeline, rows = Collecting.of(), table([row(0, 1, "mutation", b"k", b"v"), row(1, 2, "deletion", b"l", None)])
    messages = [pipeline.in_sink_task(rows.to_batches()), pipeline.in_sink_task([])]
    pipeline.apply_messages(messages, 4)
    assert pipeline.found[4].equals(rows.cast(ROWS))
    assert pipeline.columns == ROWS.names


def test_tasks_may_pass_on_less() -> None:
    pipeline = Collecting.of()
    pipeline.work = Keys()
    pipeline.apply_messages([pipeline.in_sink_task(table([row(0, 1, "mutation", b"k", b"v")]).to_batches())], 0)
    assert pipeline.found[0].to_pydict() == {"key": [b"k"]}


def test_a_batch_without_tasks_is_applied_too() -> None:
    pipeline = Collecting.of()
    pipeline.apply_messages([], 7)
    assert pipeline.found[7].num_rows == 0
