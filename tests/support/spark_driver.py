"""Plays Spark without a JVM: plans, pickles readers and work, reads it as tasks do, and comes back in another life."""

import json
import pickle
from collections.abc import Iterator
from typing import Any, Self

from pyspark.sql.types import StructType

from upriver.spark.data_source import UpriverDataSource
from upriver.spark.range_reader import close_readers


def source_of(**options: Any) -> UpriverDataSource:
    """The data source as Spark makes it: options are text."""
    return UpriverDataSource({name: str(value) for name, value in options.items()})


def read_batch(schema: StructType | None = None, **options: Any) -> list[dict[str, Any]]:
    """All rows of a batch read, perhaps with a schema that was asked for."""
    source = source_of(**options)
    reader = source.reader(schema or source.schema())
    try:
        return [row for partition in reader.partitions() for row in _read(reader, partition)]
    finally:
        close_readers()


class Query:
    """A stream read: one micro-batch after the other."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._start()
        self.offset = self.end = self.initial()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.stop()
        close_readers()

    def _start(self) -> None:
        source = source_of(**self._options)
        self._reader: Any = source.streamReader(source.schema())

    def restart(self, **options: Any) -> None:
        """Go on from the checkpoint in another process, perhaps with other options."""
        self._options |= options
        self._reader.stop()
        self._start()

    def initial(self) -> dict[str, Any]:
        """The offset at which the query starts, which Spark asks for until the first batch is committed."""
        return self._logged(self._reader.initialOffset())

    def plan(self) -> bool:
        """Log the end of the next micro-batch; whether there is anything new."""
        self.end = self._logged(self._reader.latestOffset(self.offset, self._reader.getDefaultReadLimit()))
        return self.end != self.offset

    def read(self) -> list[dict[str, Any]]:
        """The rows of the micro-batch that was logged."""
        partitions = self._reader.partitions(self.offset, self.end)
        rows = [row for partition in partitions for row in _read(self._reader, partition)]
        self.offset = self.end
        return rows

    def batch(self) -> list[dict[str, Any]]:
        """The rows of the next micro-batch; none if there is nothing new."""
        return self.read() if self.plan() else []

    def rest(self) -> Iterator[list[dict[str, Any]]]:
        """The micro-batches until there is nothing new."""
        while self.plan():
            yield self.read()

    def latest(self) -> dict[str, Any]:
        """How far the source is, as it reports."""
        return self._logged(self._reader.reportLatestOffset())

    @staticmethod
    def _logged(offset: dict[str, Any]) -> dict[str, Any]:
        logged: dict[str, Any] = json.loads(json.dumps(offset))
        return logged


def _read(reader: Any, partition: Any) -> list[dict[str, Any]]:
    reader, partition = pickle.loads(pickle.dumps((reader, partition)))
    return [row for batch in reader.read(partition) for row in batch.to_pylist()]
