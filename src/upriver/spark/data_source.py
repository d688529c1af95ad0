"""The data source ``upriver``: its readers, its writers and the schema of its rows."""

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, IntegerType, IntegralType, LongType, NullType, StringType, StructType

from upriver.errors import OptionError, UpriverError
from upriver.spark.options import ReadOptions, WriteOptions
from upriver.spark.range_rows import RangeRowsReader, range_schema
from upriver.spark.readers import BatchReader, StreamReader
from upriver.spark.row_writer import RowWriter, WriteOutcome
from upriver.spark.rows import FIELDS, SCHEMA, document_metadata
from upriver.spark.short_errors import RefusedStream, short_errors

LOG: Final = logging.getLogger("upriver.spark")


@short_errors
class UpriverDataSource(DataSource):
    """Changes of a cluster as rows, and rows as changes."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format``."""
        return "upriver"

    def schema(self) -> StructType:
        """One row for each change."""
        options = self._read_options()
        if options.output == "ranges":
            return range_schema()
        return row_schema(options.value_format, options.value_schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        options = self._read_options()
        if options.output == "ranges":
            raise OptionError("output", "ranges", "only a stream plans ranges: use readStream")
        columns = readable_columns(schema, self.schema())
        if options.dialect == "tap":
            from upriver.spark.tap_readers import TapReader

            return TapReader(options, columns)
        return BatchReader(options, columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A stream read. Spark shows an error of its methods, but not one that is raised here."""
        try:
            return self._stream_reader(schema)
        except UpriverError as error:
            return RefusedStream(error)

    def _stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._read_options()
        if options.ending_offsets != "latest":
            given = next(value for name, value in self.options.items() if name.lower() == "endingoffsets")
            raise OptionError("endingOffsets", given, "a stream has no end: use a batch read, or stop the query")
        if options.output == "ranges":
            return RangeRowsReader(options, tuple(FIELDS))
        columns = readable_columns(schema, self.schema())
        if options.dialect == "tap":
            from upriver.spark.tap_readers import TapStreamReader

            return TapStreamReader(options, columns)
        return StreamReader(options, columns)

    def writer(self, schema: StructType, overwrite: bool) -> "UpriverWriter":
        """A batch write."""
        return UpriverWriter(self._write_options(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> "UpriverStreamWriter":  # noqa: N802
        """A stream write."""
        return UpriverStreamWriter(self._write_options(schema, overwrite))

    def _write_options(self, schema: StructType, overwrite: bool) -> WriteOptions:
        if overwrite:
            raise OptionError("mode", "overwrite", "a bucket cannot be overwritten: write with mode append")
        options = WriteOptions.read(dict(self.options))
        check_writable(schema, with_meta=options.mode == "meta")
        return options

    def _read_options(self) -> ReadOptions:
        return ReadOptions.read(dict(self.options))


class Done(WriterCommitMessage):
    """The outcome of a task's writes."""

    def __init__(self, outcome: WriteOutcome) -> None:
        self.outcome = outcome


@short_errors
class _Writer:
    """Writes the rows of a task."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Done:
        """Write the rows of one task."""
        return Done(RowWriter(self.options).write(iterator))

    @staticmethod
    def _total(messages: Sequence[WriterCommitMessage | None]) -> WriteOutcome:
        return sum((message.outcome for message in messages if isinstance(message, Done)), WriteOutcome())


@short_errors
class UpriverWriter(_Writer, DataSourceArrowWriter):
    """A batch write."""

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All tasks are done, and their writes are in the cluster already."""
        _report(self._total(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """A task has failed. Written rows stay, and writing them again changes nothing."""


@short_errors
class UpriverStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """A stream write."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        """A micro-batch is done."""
        _report(self._total(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """A micro-batch has failed. Spark runs it again, which changes nothing."""


def _report(outcome: WriteOutcome) -> None:
    level = logging.WARNING if outcome.refused else logging.INFO
    LOG.log(level, "%s%s", outcome, ": " + "; ".join(outcome.samples) if outcome.samples else "")


def readable_columns(schema: StructType, declared: StructType) -> list[str]:
    """The requested columns; raises before the first task starts if a type is wrong."""
    for field in schema:
        if field.name in declared.names and not isinstance(field.dataType, type(declared[field.name].dataType)):
            kind = declared[field.name].dataType.simpleString()
            given = f"{field.name} {field.dataType.simpleString()}"
            raise OptionError("schema", given, f"the column is {kind}: read it as {kind} and cast it")
    return schema.fieldNames()


def check_writable(schema: StructType, *, with_meta: bool) -> None:
    """Raise before the first task starts if the rows cannot be written."""
    names = schema.fieldNames()
    missing = [name for name in ("key", *(("cas", "rev_seqno") if with_meta else ())) if name not in names]
    if missing:
        raise OptionError("schema", ", ".join(names), f"the column {', '.join(missing)} is missing")
    for name in ("key", "value"):
        if name in names and not isinstance(schema[name].dataType, StringType | BinaryType | NullType):
            kind = schema[name].dataType.simpleString()
            raise OptionError("schema", f"{name} {kind}", "must be string or binary: use a cast, or to_json")
    for name in ("vbucket", "seqno", "branch", "flags", "expiry", "cas", "rev_seqno", "datatype"):
        if name in names and not isinstance(schema[name].dataType, IntegralType | NullType):
            kind = schema[name].dataType.simpleString()
            raise OptionError("schema", f"{name} {kind}", "must be a whole number: use a cast to long")
    if "event" in names and not isinstance(schema["event"].dataType, StringType):
        kind = schema["event"].dataType.simpleString()
        raise OptionError("schema", f"event {kind}", "must be string: mutation, deletion or expiration")


def row_schema(value_format: str, value_schema: str | None) -> StructType:
    """The schema of the rows; documents are text, and the column's metadata has their schema."""
    kinds = {"int": IntegerType(), "long": LongType(), "string": StringType(), "binary": BinaryType()}
    schema = StructType()
    for name, kind in (part.split() for part in SCHEMA.split(", ")):
        if name == "value" and value_format != "binary":
            schema.add(name, StringType(), metadata=document_metadata(value_format, value_schema))
        else:
            schema.add(name, kinds[kind])
    return schema
