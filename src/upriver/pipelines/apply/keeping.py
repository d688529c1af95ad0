"""Pipelines that keep the latest state of every key: what mirror and index have in common."""

from abc import abstractmethod
from dataclasses import dataclass

import pyarrow as pa

from upriver.errors import OptionError
from upriver.pipelines.apply.applying import Applier
from upriver.pipelines.apply.rereading import NodeReader
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.options import PipelineOptions
from upriver.pipelines.core.row_pipeline import RowPipeline
from upriver.pipelines.targets.target import Target
from upriver.spark import ReadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingOptions(PipelineOptions):
    """The options of such a pipeline."""

    def __post_init__(self) -> None:
        if self.start != "earliest":
            raise OptionError("start", self.start, "the target holds the state of every key: it must be earliest")


class Keeping(RowPipeline):
    """Applies batches to a target, and checks documents that were read from the nodes."""

    options: KeepingOptions

    def __init__(self, options: KeepingOptions) -> None:
        super().__init__(options)
        self._kept: Target | None = None
        self._nodes: NodeReader | None = None
        self._applier: Applier | None = None
        self._counted: dict[str, int] = {}

    @abstractmethod
    def opened(self) -> Target:
        """Open the target."""

    def open(self, directory: RunDirectory) -> None:
        """Open the target; data of another query is dropped."""
        super().open(directory)
        with self._working:
            self._let_go()
            self._kept = self.opened()
            self._nodes = NodeReader(ReadOptions.read(self.reader_options()))
            self._applier = Applier(self._kept, self._nodes, directory.query, directory.reached)
            batch = directory.batch()
            self._applier.begin(done=-1 if batch is None else batch.done, logged=directory.logged)

    def apply(self, found: pa.Table, batch_number: int) -> None:
        """Apply one batch to the target."""
        assert self._applier is not None, "the pipeline is not open"
        self._applier.apply(found, batch_number)

    def idle(self) -> None:
        """Check whether documents that were read from the nodes are still valid."""
        if self._applier is not None and self._working.acquire(blocking=False):
            try:
                self._applier.settle()
            finally:
                self._working.release()

    def counts(self) -> dict[str, int]:
        """Counts since the first start: changes, rollbacks and repeated reads."""
        return _sum(self._counted, self._applier)

    def close(self) -> None:
        """Close the target."""
        with self._working:
            self._let_go()

    def _let_go(self) -> None:
        self._counted = _sum(self._counted, self._applier)
        for each in (self._kept, self._nodes):
            if each is not None:
                each.close()
        self._kept = self._nodes = self._applier = None


def _sum(before: dict[str, int], applier: Applier | None) -> dict[str, int]:
    counts = {} if applier is None else vars(applier.counts)
    return {name: before.get(name, 0) + counts.get(name, 0) for name in {**before, **counts}}
