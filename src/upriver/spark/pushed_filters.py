"""Filters of a batch query that the source applies itself, before rows leave the task.

Filters on ``vbucket`` choose the vbuckets that are read. Those on ``event`` and ``key`` are applied to the rows of a
task; if all wanted keys have a common prefix, Upriver nodes send only keys with that prefix. Two bounds that enclose
exactly the keys with one prefix count as a filter by prefix, because Spark has none for binary columns. All other
filters stay with Spark.

Spark keeps the pushdown of filters off by default, and then refuses readers that implement it. So ``PushDown`` looks to
Spark as if it were the method of the base class, which Spark calls only if the pushdown is on.

Spark up to 4.3 has one plan of partitions for all scans of a DataFrame: that of the last scan whose filters it pushed.
Other scans, with other filters or with none, then read what these filters leave. Neither the planning process nor a
task can tell the scans apart, so there the source takes no filter. Spark got a plan per scan together with
``DataSourceReader.pushLimit`` (SPARK-58551).
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from upriver.model import Event

if TYPE_CHECKING:
    from upriver.spark.readers import BatchReader

_COMPARED: Final[Mapping[type[Filter], Callable[[Any, Any], bool]]] = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: lambda value, values: value in values,
}
_EQUAL: Final = (EqualTo, EqualNullSafe, In)
_BOUND: Final = (GreaterThanOrEqual, LessThan)
#: Whether each scan of a DataFrame has a plan of its own.
SCANS_ARE_APART: Final = hasattr(DataSourceReader, "pushLimit")
_EVENTS: Final = tuple(event.name.lower() for event in Event)


@dataclasses.dataclass(frozen=True)
class PushedFilters:
    """The filters that the source applies; None where a column is not filtered."""

    by_vbucket: tuple[Filter, ...] = ()
    events: frozenset[str] | None = None
    keys: frozenset[bytes] | None = None
    #: All wanted keys begin with this.
    key_prefix: bytes = b""
    #: Rows about whole vbuckets, which have no key, are not wanted.
    needs_key: bool = False

    def vbuckets(self, numbers: Iterable[int]) -> list[int]:
        """The vbuckets that can have rows."""
        return [number for number in numbers if all(_holds(each, number) for each in self.by_vbucket)]

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that pass."""
        import pyarrow.compute as pc  # queries without pushed filters do not wait for it

        masks: list[pa.Array] = []
        if self.events is not None:
            names = _array(pa.string(), [name.encode() for name in self.events])
            masks.append(pc.is_in(batch.column("event"), value_set=names))
        if self.keys is not None:
            masks.append(pc.is_in(batch.column("key"), value_set=_array(pa.binary(), list(self.keys))))
        elif self.key_prefix:
            masks.append(pc.starts_with(batch.column("key"), self.key_prefix))
        elif self.needs_key:
            masks.append(pc.is_valid(batch.column("key")))
        return batch.filter(functools.reduce(pc.and_, masks)) if masks else batch


class PushDown:
    """What Spark finds as ``pushFilters`` of a reader."""

    def __init__(self, reader: "BatchReader") -> None:
        self._reader = reader
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that the source can apply, and return the others, which Spark applies."""
        if not SCANS_ARE_APART:
            return filters
        by_column = {name: [each for each in filters if _column(each) == name] for name in ("vbucket", "event", "key")}
        by_key = _applicable_to_keys(by_column["key"])
        taken = [
            *(each for each in by_column["vbucket"] if _is_about(each, int)),
            *(each for each in by_column["event"] if _is_about(each, str)),
            *by_key,
        ]
        self._reader.pushed = PushedFilters(
            tuple(each for each in taken if _column(each) == "vbucket"),
            _events([each for each in taken if _column(each) == "event"]),
            _keys(by_key),
            _key_prefix(by_key),
            bool(by_key),
        )
        return [each for each in filters if not any(each is other for other in taken)]


def _column(given: Filter) -> str:
    """The name of the filter's column; empty for a field inside a column."""
    if isinstance(given, Not):
        return _column(given.child)
    attribute: Sequence[str] = getattr(given, "attribute", ())
    return attribute[0] if len(attribute) == 1 else ""


def _is_about(given: Filter, kind: type) -> bool:
    """Whether the filter compares with values of this type."""
    if isinstance(given, Not):
        return not isinstance(given.child, Not | IsNotNull) and _is_about(given.child, kind)
    if isinstance(given, IsNotNull):
        return True
    values = given.value if isinstance(given, In) else [getattr(given, "value", None)]
    return type(given) in _COMPARED and all(type(value) is kind for value in values)


def _holds(given: Filter, value: Any) -> bool:
    """Whether a value, which is not null, passes."""
    if isinstance(given, Not):
        return not _holds(given.child, value)
    return isinstance(given, IsNotNull) or _COMPARED[type(given)](value, getattr(given, "value", None))


def _events(filters: Sequence[Filter]) -> frozenset[str] | None:
    wanted = frozenset(name for name in _EVENTS if all(_holds(each, name) for each in filters))
    return None if len(wanted) == len(_EVENTS) else wanted


def _applicable_to_keys(filters: Sequence[Filter]) -> list[Filter]:
    """The filters on keys that are quick here: equality, ``IN``, and two bounds that mean a prefix."""
    taken: list[Filter] = [each for each in filters if isinstance(each, _EQUAL) and _is_about(each, bytes)]
    if not taken:
        bounds = [each for each in filters if isinstance(each, _BOUND) and _is_about(each, bytes)]
        taken += bounds if _bounded_prefix(bounds) else []
    return [*taken, *(each for each in filters if isinstance(each, IsNotNull))]


def _keys(filters: Sequence[Filter]) -> frozenset[bytes] | None:
    sets = [
        frozenset(each.value if isinstance(each, In) else [each.value]) for each in filters if isinstance(each, _EQUAL)
    ]
    return frozenset.intersection(*sets) if sets else None


def _key_prefix(filters: Sequence[Filter]) -> bytes:
    keys = _keys(filters)
    if keys is None:
        return _bounded_prefix([each for each in filters if not isinstance(each, IsNotNull)])
    first, last = min(keys, default=b""), max(keys, default=b"")
    return first[: next((at for at, byte in enumerate(first) if last[at : at + 1] != bytes([byte])), len(first))]


def _bounded_prefix(bounds: Sequence[Filter]) -> bytes:
    """The prefix of exactly the keys from the lower bound to before the upper one; empty if they have none."""
    lower = [each.value for each in bounds if isinstance(each, GreaterThanOrEqual)]
    upper = [each.value for each in bounds if isinstance(each, LessThan)]
    if len(lower) != 1 or len(upper) != 1 or not lower[0] or lower[0][-1] == 0xFF:
        return b""
    prefix: bytes = lower[0]
    return prefix if upper[0] == prefix[:-1] + bytes([prefix[-1] + 1]) else b""


def _array(kind: pa.DataType, values: Sequence[bytes]) -> pa.Array:
    """An array from buffers, because ``pa.array`` imports pandas."""
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))])


def key_pattern(prefix: bytes) -> str:
    """The pattern of all keys that begin with these bytes."""
    letters = (chr(byte) if byte < 128 and chr(byte).isalnum() else f"\\x{byte:02x}" for byte in prefix)
    return "^" + "".join(letters)
