"""JSON values as columns of a table.

Each field of a document goes into the column of its name. If the columns do not represent a value completely, the row
also keeps the original value in ``_raw``:

- a value of another kind than the column's, a null, a field without a column, two fields of one name;
- an integer beyond 64 bits, a decimal that overflows, an integer beyond 2^53 in a column of decimals;
- half of a surrogate pair in a text, which UTF-8 cannot represent;
- a value that is not a JSON object at all, has bytes that are not UTF-8, or nests too deeply. Then all cells are null.

Otherwise only the cell of the field in question is null. Decimals are rounded to the nearest double. Objects and arrays
become JSON text without white space; their numbers and strings stay as they were written. The loops are compiled if a C
compiler was available (see ``CODEC``); the results are the same either way.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import pyarrow as pa

from upriver.tables.documents import plain_parsing
from upriver.tables.documents.field_report import FieldReport
from upriver.tables.schema import TYPES, Column

_parser: ModuleType
try:
    from upriver.tables.documents import _parsing

    _parser, CODEC = _parsing, "compiled"
except ImportError:  # built where there was no C compiler
    _parser, CODEC = plain_parsing, "plain"

#: Offsets of a binary array have 31 bits.
_BYTES_MAX = 2**31 - 1


class Parsed(NamedTuple):
    """The documents of an array as columns."""

    #: One array for each requested column, with the type that ``schema.TYPES`` has for its kind.
    columns: list[pa.Array]
    #: The values that the columns do not represent completely; null for others.
    raw: pa.Array
    report: FieldReport


def parse(values: pa.Array, columns: Sequence[Column], *, parser: ModuleType = _parser) -> Parsed:
    """Read documents; a null is not one. ``values`` have at most 2 GiB, so that no column can have more."""
    if values.type != pa.binary():
        values = _as_binary(values)
    try:
        arrays, raw, documents, unknown, decimals = parser.parse_columns(values, columns)
    except Exception:
        if _is_damaged(values):
            raise
        return _parsed_in_halves(values, columns, parser)
    return Parsed(arrays, raw, FieldReport(documents, unknown, frozenset(decimals)))


def _parsed_in_halves(values: pa.Array, columns: Sequence[Column], parser: ModuleType) -> Parsed:
    """One value that the parser fails on must not stop the others: it is only kept in ``_raw``."""
    if len(values) <= 1:
        return Parsed([pa.nulls(len(values), TYPES[column.kind]) for column in columns], values, FieldReport())
    half = len(values) // 2
    first, second = (parse(part, columns, parser=parser) for part in (values.slice(0, half), values.slice(half)))
    arrays = [pa.concat_arrays(pair) for pair in zip(first.columns, second.columns, strict=True)]
    return Parsed(arrays, pa.concat_arrays([first.raw, second.raw]), first.report + second.report)


def _is_damaged(values: pa.Array) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return True
    return False


def _as_binary(values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.binary())
    except pa.ArrowInvalid as error:
        raise ValueError(f"parse at most {_BYTES_MAX:,} bytes of documents at a time") from error
