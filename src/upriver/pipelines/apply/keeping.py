"""Pipelines that keep the latest state of every key: what mirror and index have in common."""

import uuid
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from upriver.errors import OptionError
from upriver.files import write_atomically
from upriver.pipelines.apply.applying import Applier
from upriver.pipelines.apply.rereading import NodeReader
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.options import PipelineOptions
from upriver.pipelines.core.pipeline import Pipeline
from upriver.pipelines.targets.target import Target
from upriver.spark import ReadOptions

_QUERY: Final = "query"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingOptions(PipelineOptions):
    """The options of such a pipeline."""

    def __post_init__(self) -> None:
        if self.start != "earliest":
            raise OptionError("start", self.start, "the target holds the state of every key: it must be earliest")


class Keeping(Pipeline):
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

    def open(self, directory: Path) -> None:
        """Open the target; data of another query is dropped."""
        super().open(directory)
        with self._working:
            self._let_go()
            self._kept = self.opened()
            self._nodes = NodeReader(ReadOptions.read(self.reader_options()))
            kept = RunDirectory(directory)
            self._applier = Applier(self._kept, self._nodes, query_of(directory), kept.reached)
            batch = kept.batch()
            self._applier.begin(done=-1 if batch is None else batch.done)

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


def query_of(directory: Path) -> str:
    """The name of the query with its checkpoint there: created once, the same after every restart."""
    path = directory / _QUERY
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, uuid.uuid4().hex.encode())
    return path.read_text()
