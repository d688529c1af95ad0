"""Compares a table with the documents of the nodes, some vbuckets per task.

A task reads the rows of its vbuckets from all files of the table, because rows of every vbucket are in every file. So
there are as few tasks as memory allows, and at least one for each worker.
"""

import pickle
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upriver.model import Difference
from upriver.pipelines.apply.task_source import NodeTaskSource
from upriver.pipelines.core.workers import Workers
from upriver.pipelines.targets.tables.table_task import COLUMNS
from upriver.spark import Range, ReadOptions, VbucketOffset
from upriver.tables import Add, RowComparison, Table, TableSchema, TableStorage, rows_of_vbuckets

#: Memory for the rows of a task, about; they are compressed in files.
TASK_BYTES: Final = 160 << 20
_ROW_BYTES: Final = 200
_COMPRESSION: Final = 4
#: A smaller table is compared by one task.
_SMALL_BYTES: Final = 16 << 20
_VBUCKETS: Final = 2**16


def table_differences(
    table: Table, source: ReadOptions, workers: Workers, done: Callable[[int], None] = lambda _: None
) -> Iterator[Difference]:
    """The differences between the documents of the nodes and a table. Expired documents are ignored on both sides.

    ``done`` is called with a number of vbuckets when they have been compared.
    """
    nodes = NodeTaskSource(source, COLUMNS)
    try:
        vbuckets = sorted(nodes.vbuckets())
    finally:
        nodes.close()
    files = tuple(table.snapshot.files.values())
    work = Comparison(table.storage, files, table.schema, source)
    groups = _groups(vbuckets, files, workers.count)
    # Rows of vbuckets that the source does not have are extra; the first task finds them.
    rest = None if source.vbuckets is not None else [number for group in groups[1:] for number in group]
    items = [pickle.dumps((group, None if number else rest)) for number, group in enumerate(groups)]
    for each in workers.map(work, items, lambda number: done(len(groups[number]))):
        yield from pickle.loads(each)


def _groups(vbuckets: Collection[int], files: Collection[Add], workers: int) -> list[list[int]]:
    """The vbuckets of each task."""
    rows = sum((file.rows or 0) - file.dead for file in files)
    size = rows * _ROW_BYTES + sum(file.size for file in files) * _COMPRESSION
    count = 1 if size < _SMALL_BYTES else max(workers, -(-size // TASK_BYTES))
    return [each.tolist() for each in np.array_split(np.array(vbuckets, np.int64), min(count, len(vbuckets) or 1))]


@dataclass(frozen=True)
class Comparison:
    """The work of one task."""

    storage: TableStorage
    files: tuple[Add, ...]
    schema: TableSchema
    source: ReadOptions

    def __call__(self, item: bytes) -> bytes:
        """Compare some vbuckets. With a list of all others, rows of unknown vbuckets are included, and extra."""
        vbuckets, rest = pickle.loads(item)
        wanted = np.full(_VBUCKETS, rest is not None)
        wanted[vbuckets], wanted[rest or []] = True, False
        compared = RowComparison(
            rows_of_vbuckets(self.storage, self.files, self.schema, wanted), self.schema, int(time.time())
        )
        for changes in self._changes(vbuckets):
            compared.add(changes)
        return pickle.dumps(list(compared.differences()))

    def _changes(self, vbuckets: Collection[int]) -> Iterator[pa.RecordBatch]:
        """All changes of these vbuckets, as the nodes have them now."""
        nodes = NodeTaskSource(self.source, COLUMNS)
        try:
            states = nodes.states(vbuckets)
            ranges = [Range(VbucketOffset(n, state.vbucket_uuid), state.high_seqno) for n, state in states.items()]
            for rows in nodes.rows([each for each in ranges if each.end_seqno]):
                yield rows.filter(pc.is_valid(rows.column("key"))) if rows.column("key").null_count else rows
        finally:
            nodes.close()
