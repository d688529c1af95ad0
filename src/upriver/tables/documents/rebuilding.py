"""Documents from the rows of a table, and rows of older data files as rows of the current schema."""

import json
import math
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from upriver.tables.documents.parsing import parse
from upriver.tables.schema import Column, Kind, TableSchema

#: The integers that a double represents, each by its own.
_EXACT: Final = 2**53


def documents_of(rows: pa.Table, schema: TableSchema) -> pa.Array:
    """The JSON document of each row: its original value, if the row keeps one, else rebuilt from the columns.

    A rebuilt document has the same fields and values; their order and the white space may differ.
    """
    kept = rows.column("_raw").to_pylist()
    fields = [
        _fields(column, rows.column(column.name).to_pylist())
        for column in schema.columns
        if column.name in rows.column_names
    ]
    documents = zip(*fields, strict=True) if fields else [()] * len(kept)
    return pa.array(
        [
            ("{" + ",".join(filter(None, found)) + "}").encode() if raw is None else raw
            for raw, found in zip(kept, documents, strict=True)
        ],
        pa.binary(),
    )


def conform(rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Rows of a data file with the columns of the schema, in its order; further columns follow unchanged.

    A column that the file lacks is null. An integer column that has become one of decimals is converted; where a double
    does not represent the integer, the cell becomes null and the row keeps its document in ``_raw``.
    """
    wide = [name for name, kind in schema.columns if kind == "float" and _is_integer(rows, name)]
    if wide:
        rows = _widened(rows, wide, schema)
    arrays = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        for field in schema.arrow
    ]
    others = [field for field in rows.schema if field.name not in schema.arrow.names]
    arrays += [rows.column(field.name) for field in others]
    return pa.table(arrays, schema=pa.schema([*schema.arrow, *others]))


def completed(rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Rows that ``conform`` returned, with the columns of documents in ``_raw`` filled as if they were written now.

    Fields of these documents may have become columns since.
    """
    raw = rows.column("_raw").combine_chunks()
    mask = raw.is_valid()
    if raw.null_count == len(raw):
        return rows
    parsed = parse(raw.filter(mask), schema.columns)
    arrays = {column.name: array for column, array in zip(schema.columns, parsed.columns, strict=True)}
    for name, array in {**arrays, "_raw": parsed.raw}.items():
        field = rows.schema.field(name)
        column = rows.column(name).combine_chunks()
        filled = pc.replace_with_mask(column, mask, array.cast(field.type))
        rows = rows.set_column(rows.schema.get_field_index(name), field, filled)
    return rows


def _is_integer(rows: pa.Table, name: str) -> bool:
    return name in rows.column_names and pa.types.is_integer(rows.schema.field(name).type)


def _widened(rows: pa.Table, names: list[str], schema: TableSchema) -> pa.Table:
    found = TableSchema(
        Column(name, "int" if kind == "float" and _is_integer(rows, name) else kind) for name, kind in schema.columns
    )
    columns, inexact = {}, pa.array([False] * rows.num_rows, pa.bool_())
    for name in names:
        numbers = rows.column(name).combine_chunks()
        beyond = pc.fill_null(pc.or_(pc.greater(numbers, _EXACT), pc.less(numbers, -_EXACT)), False)
        columns[name] = pc.if_else(beyond, pa.scalar(None, numbers.type), numbers).cast(pa.float64())
        inexact = pc.or_(inexact, beyond)
    if pc.any(inexact, min_count=0).as_py():
        documents = documents_of(rows.filter(inexact), found)
        columns["_raw"] = pc.replace_with_mask(
            rows.column("_raw").cast(pa.binary()).combine_chunks(), inexact, documents
        )
    for name, array in columns.items():
        rows = rows.set_column(rows.column_names.index(name), name, array)
    return rows


def _fields(column: Column, cells: list[Any]) -> list[str]:
    """The text of one field in each document; empty where it has none."""
    name = json.dumps(column.name, ensure_ascii=False)
    return ["" if cell is None else f"{name}:{_text(column.kind, cell)}" for cell in cells]


def _text(kind: Kind, cell: Any) -> str:
    if kind == "json":
        return str(cell)
    if kind == "float" and not math.isfinite(cell):
        return "null"  # another program wrote it
    return json.dumps(cell, ensure_ascii=False)
