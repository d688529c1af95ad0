"""Read a table into memory: Arrow, pandas or Polars.

For programs that cannot read deletion vectors, and for our own checks. Works for every Delta table that uses nothing
but deletion vectors.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from upriver.errors import CorruptData, OptionError, StorageError, UnsupportedTable
from upriver.tables.actions import Add
from upriver.tables.deletion_vectors import read_vector
from upriver.tables.features import require_supported
from upriver.tables.log import load
from upriver.tables.storage import TableStorage

_TYPES: Final = {
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
}
_DECIMAL: Final = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


def read(
    path: str | Path,
    columns: Sequence[str] | None = None,
    as_: Literal["arrow", "pandas", "polars"] = "arrow",
    *,
    options: Mapping[str, str] | None = None,
) -> Any:
    """The rows of a table, or some of its columns. ``options`` are those of the object store."""
    if as_ not in ("arrow", "pandas", "polars"):
        raise OptionError("as_", as_, "must be one of arrow, pandas, polars")
    storage = TableStorage.of(path, options)
    snapshot = load(storage)
    if snapshot is None:
        raise StorageError(storage.url, "there is no table")
    require_supported(storage.url, snapshot.protocol, snapshot.metadata, writing=False)
    schema = arrow_schema(snapshot.metadata.schema, storage.url)
    if columns is not None:
        if unknown := [name for name in columns if name not in schema.names]:
            raise OptionError("columns", unknown[0], f"unknown column; choose from {', '.join(schema.names)}")
        schema = pa.schema([schema.field(name) for name in columns])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda file: read_rows(storage, file, schema), snapshot.files.values()))
    rows = pa.concat_tables([schema.empty_table(), *parts])
    if as_ == "pandas":
        return rows.to_pandas()
    if as_ == "polars":
        import polars

        return polars.from_arrow(rows)
    return rows


def read_rows(storage: TableStorage, file: Add, schema: pa.Schema) -> pa.Table:
    """The live rows of a data file, with these columns; a column that the file lacks is null."""
    try:
        with storage.open(file.path) as source, pq.ParquetFile(source) as parquet:
            known = set(parquet.schema_arrow.names)
            table = parquet.read([name for name in schema.names if name in known])
            count = parquet.metadata.num_rows
    except FileNotFoundError:
        raise CorruptData(f"{storage.url}/{file.path}", "the data file is missing") from None
    except pa.ArrowException as error:
        raise CorruptData(f"{storage.url}/{file.path}", f"the data file cannot be read: {error}") from error
    arrays = [
        table.column(field.name).cast(field.type, safe=False) if field.name in known else pa.nulls(count, field.type)
        for field in schema
    ]
    rows = pa.table(arrays, schema=schema)
    dead = read_vector(storage, file.deletion_vector)
    if dead:
        alive = np.ones(count, bool)
        alive[np.asarray(dead.to_array())] = False
        rows = rows.filter(pa.array(alive))
    return rows


def arrow_schema(schema: str, where: str = "table") -> pa.Schema:
    """The Arrow schema of a Delta schema, foreign columns included."""
    return pa.schema([pa.field(field["name"], _type(field["type"], where)) for field in json.loads(schema)["fields"]])


def _type(found: Any, where: str) -> pa.DataType:
    match found:
        case str() if found in _TYPES:
            return _TYPES[found]
        case str() if decimal := _DECIMAL.fullmatch(found):
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        case {"type": "struct", "fields": fields}:
            return pa.struct([pa.field(field["name"], _type(field["type"], where)) for field in fields])
        case {"type": "array", "elementType": element}:
            return pa.list_(_type(element, where))
        case {"type": "map", "keyType": key, "valueType": value}:
            return pa.map_(_type(key, where), _type(value, where))
    raise UnsupportedTable(where, f"the table has a column of the type {found}, which Upriver cannot read")
