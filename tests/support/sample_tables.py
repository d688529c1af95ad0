"""Small tables, and what different readers see in them.

A row is a key number and a value: ``_key`` is ``k<number>``, ``_vbucket`` is the number modulo 8, ``n`` is the value.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder

from upriver.tables import OWN, Add, Column, Table, TableSchema, TableStorage, read

VBUCKETS = 8
SCHEMA = TableSchema([Column("n", "int")])
Rows = Mapping[int, int]


def arrow_rows(rows: Rows) -> pa.Table:
    """Rows as a data file has them."""
    columns = {field.name: pa.nulls(len(rows), field.type) for field in OWN}
    columns["_key"] = pa.array([f"k{key}" for key in rows], pa.string())
    columns["_vbucket"] = pa.array([key % VBUCKETS for key in rows], pa.int32())
    return pa.table({**columns, "n": pa.array(list(rows.values()), pa.int64())})


def data_file(storage: TableStorage, rows: Rows, path: str | None = None) -> Add:
    """Write a data file, without a commit."""
    path = path or f"{uuid.uuid4()}.parquet"
    with storage.new_file(path) as file:
        pq.write_table(arrow_rows(rows), file)
    stats = {
        "numRecords": len(rows),
        "minValues": {"n": min(rows.values()), "_vbucket": min(key % VBUCKETS for key in rows)},
        "maxValues": {"n": max(rows.values()), "_vbucket": max(key % VBUCKETS for key in rows)},
        "nullCount": {"n": 0, "_vbucket": 0},
    }
    return Add(path, storage.size(path), time.time_ns() // 1_000_000, stats=json.dumps(stats))


def new_table(where: Path | TableStorage, *, vectors: bool = True, **properties: str) -> Table:
    """An empty table."""
    storage = TableStorage.of(where) if isinstance(where, Path) else where
    return Table.create(
        storage, SCHEMA, {f"upriver.{name}": value for name, value in properties.items()}, vectors=vectors
    )


def numbered(rows: Iterable[tuple[str, int]]) -> list[tuple[int, int]]:
    """Rows as sorted pairs."""
    return sorted((int(key[1:]), n) for key, n in rows)


def _by_upriver(url: str, options: Mapping[str, str], column: str) -> Iterable[tuple[str, int]]:
    rows = read(url, ["_key", column], options=options)
    return zip(rows["_key"].to_pylist(), rows[column].to_pylist(), strict=True)


def _by_delta_rs(url: str, options: Mapping[str, str], column: str) -> Iterable[tuple[str, int]]:
    table = DeltaTable(url, storage_options=dict(options) or None)
    found = QueryBuilder().register("t", table).execute(f"select _key, {column} from t").read_all()
    rows = pa.table(found)
    return zip(rows["_key"].to_pylist(), rows[column].to_pylist(), strict=True)


def _by_polars(url: str, options: Mapping[str, str], column: str) -> Iterable[tuple[str, int]]:
    rows: Any = polars.scan_delta(url, storage_options=dict(options) or None).select("_key", column).collect()
    return [(key, n) for key, n in rows.iter_rows()]


@cache
def _duckdb() -> duckdb.DuckDBPyConnection:
    """DuckDB with its Delta extension from a package, because it would download it otherwise."""
    package = find_spec("duckdb_extension_delta")
    assert package is not None
    assert package.origin is not None
    (extension,) = Path(package.origin).parent.rglob("delta.duckdb_extension")
    connection = duckdb.connect(config={"autoinstall_known_extensions": False})
    connection.load_extension(str(extension))
    return connection


def _by_duckdb(url: str, options: Mapping[str, str], column: str) -> Iterable[tuple[str, int]]:
    assert not options, "local tables only"
    return _duckdb().execute(f"select _key, {column} from delta_scan(?)", [url]).fetchall()


#: By name: a function of the table's URL, its options and a column that gives that column for each key.
READERS: dict[str, Callable[[str, Mapping[str, str], str], Iterable[tuple[str, int]]]] = {
    "upriver": _by_upriver,
    "delta-rs": _by_delta_rs,
    "polars": _by_polars,
    "duckdb": _by_duckdb,
}


def rows_seen(storage: TableStorage, reader: str = "upriver") -> list[tuple[int, int]]:
    """The rows that a reader finds in a table, sorted."""
    return numbered(READERS[reader](storage.url, storage.options, "n"))


def assert_all_see(storage: TableStorage, rows: Iterable[tuple[int, int]]) -> None:
    """All readers find exactly these rows.

    In an object store in this process only those that release Python's lock while they wait for it.
    """
    expected = sorted(rows)
    for reader in READERS if storage.local() is not None else ("upriver", "polars"):
        assert rows_seen(storage, reader) == expected, reader
