"""Errors that Spark shows in one line.

Spark runs data sources in Python workers of its own and puts the traceback of an exception into its message. An error
that Upriver raises on purpose says everything in one line, and frames of our internals only hide it. A worker leaves
out the traceback if an environment variable is set when it reports the exception, and it ends afterwards. So the
variable is set in the worker that is about to fail, for such errors only; bugs keep their tracebacks.

A worker that cannot make the reader of a stream fails with an error of its own instead of ours (``UnboundLocalError``).
So such a stream gets a reader that raises our error when Spark asks for an offset.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from upriver.errors import UpriverError

C = TypeVar("C", bound=type)
#: What Spark calls.
_CALLED_BY_SPARK: Final = (
    "schema", "reader", "streamReader", "writer", "streamWriter", "partitions", "read", "write", "commit",
    "initialOffset", "latestOffset", "reportLatestOffset", "prepareForTriggerAvailableNow", "getDefaultReadLimit",
)  # fmt: skip
_HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"


def short_errors(cls: C) -> C:
    """Let errors of the methods that Spark calls appear in one line."""
    for name in _CALLED_BY_SPARK:
        method = vars(cls).get(name)
        if method is not None:
            setattr(cls, name, _shortened(method))
    return cls


def _shortened(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with _in_one_line():
            result = method(*args, **options)
        return _iterated(result) if inspect.isgenerator(result) else result

    return call


def _iterated(rows: Iterator[Any]) -> Iterator[Any]:
    with _in_one_line():
        yield from rows


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except UpriverError:
        if is_worker():
            os.environ[_HIDE_TRACEBACK] = "1"
        raise


@short_errors
class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream that cannot be read."""

    def __init__(self, error: UpriverError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Raises the error."""
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002, N802
        """Raises the error."""
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Raises the error."""
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:  # noqa: ARG002
        """Raises the error."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Raises the error."""
        raise self._error


def is_worker() -> bool:
    """Whether this process is one of Spark's Python workers."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
