"""Whether rows of a table hold given documents."""

import json
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from upriver.tables.documents.parsing import parse
from upriver.tables.documents.rebuilding import conform
from upriver.tables.schema import TableSchema


def matches(values: pa.Array, rows: pa.Table, schema: TableSchema) -> pa.BooleanArray:
    """For each row whether it represents the value at its place; a null value, which is not a document, never matches.

    The value is parsed into the columns of the schema. A row without ``_raw`` must have exactly these cells. A row with
    ``_raw`` must have kept an equal value there; it may lack the cells of columns that the table got later.
    """
    parsed = parse(values, schema.columns)
    rows = conform(rows, schema)
    kept = _array(rows.column("_raw"))
    keeps = kept.is_valid()
    good = pc.and_(values.is_valid(), pc.or_(keeps, parsed.raw.is_null()))
    for column, expected in zip(schema.columns, parsed.columns, strict=True):
        found = _array(rows.column(column.name))
        absent = pc.and_(found.is_null(), pc.or_(expected.is_null(), keeps))
        # A cell that is null on one side only gives null, which becomes false in the end.
        good = pc.and_kleene(good, pc.or_kleene(absent, pc.equal(found, expected)))
    if kept.null_count < len(kept):
        good = pc.and_kleene(good, pc.or_(pc.invert(keeps), _equal_values(values, kept)))
    return pc.coalesce(good, pc.xor(keeps, keeps))


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([*column.chunks, pa.array([], column.type)])


def _equal_values(values: pa.Array, kept: pa.Array) -> pa.BooleanArray:
    """Equal bytes, or documents that are equal: a widened row keeps a document that was rebuilt from its cells."""
    values = values.cast(pa.binary())
    equal = pc.fill_null(pc.equal(values, kept), False)
    differing = pc.indices_nonzero(pc.and_(pc.invert(equal), kept.is_valid()))
    if not len(differing):
        return equal
    mask = equal.to_pylist()
    for index in differing.to_pylist():
        mask[index] = _is_same_document(values[index].as_py(), kept[index].as_py())
    return pa.array(mask)


def _is_same_document(one: bytes | None, other: bytes) -> bool:
    try:
        return one is not None and _is_same(_DECODER.decode(one.decode()), _DECODER.decode(other.decode()))
    except (ValueError, RecursionError):
        return False


def _is_same(one: Any, other: Any) -> bool:
    """Equal JSON values; Python takes ``True`` for 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a duplicate field")
    return document


def _refuse(_: str) -> NoReturn:
    raise ValueError("not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unique)
