"""Read tables into Arrow, pandas and Polars."""

import json
from decimal import Decimal
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType
from pyroaring import BitMap

from tests.support.object_store import ObjectStore, object_store
from tests.support.sample_tables import arrow_rows, data_file, new_table
from upriver.errors import CorruptData, OptionError, StorageError, UnsupportedTable
from upriver.tables import read
from upriver.tables.reading import arrow_schema
from upriver.tables.schema import OWN
from upriver.tables.table import Edit, Table

__all__ = ["object_store"]

TEN = {key: key for key in range(10)}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Keys 0 to 9 without 1 and 2, and key 50."""
    table = new_table(tmp_path)
    files = [data_file(table.storage, TEN, "a.parquet"), data_file(table.storage, {50: 50}, "b.parquet")]
    table.commit(Edit("WRITE", files, dead={"a.parquet": BitMap([1, 2])}))
    return table


def test_arrow(table: Table, tmp_path: Path) -> None:
    rows = read(tmp_path)
    assert rows.schema.names == [*OWN.names, "n"]
    assert sorted(rows["n"].to_pylist()) == [0, 3, 4, 5, 6, 7, 8, 9, 50]
    assert read(str(tmp_path)).equals(rows)


def test_columns(table: Table, tmp_path: Path) -> None:
    assert read(tmp_path, ["n", "_key"]).schema.names == ["n", "_key"]
    with pytest.raises(OptionError, match="columns = 'nothing': unknown column; choose from _key, "):
        read(tmp_path, ["n", "nothing"])


def test_pandas_and_polars(table: Table, tmp_path: Path) -> None:
    frame = read(tmp_path, ["n"], "pandas")
    assert type(frame).__module__.startswith("pandas")
    assert sum(frame["n"]) == 92
    other = read(tmp_path, ["n"], as_="polars")
    assert isinstance(other, pl.DataFrame)
    assert other["n"].sum() == 92
    with pytest.raises(OptionError, match="arrow, pandas, polars"):
        read(tmp_path, as_="spark")  # type: ignore[arg-type]


def test_an_empty_table(tmp_path: Path) -> None:
    new_table(tmp_path)
    assert read(tmp_path).num_rows == 0
    assert read(tmp_path, ["n"]).schema == pa.schema({"n": pa.int64()})


def test_no_table(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no table"):
        read(tmp_path / "nothing")


def test_vectors_that_are_off(tmp_path: Path) -> None:
    table = new_table(tmp_path, vectors=False)
    table.commit(Edit("WRITE", [data_file(table.storage, TEN)]))
    assert read(tmp_path).num_rows == 10


def test_columns_that_a_file_lacks(table: Table, tmp_path: Path) -> None:
    theirs = DeltaTable(str(tmp_path))
    theirs.alter.add_columns([Field("day", PrimitiveType("date")), Field("price", PrimitiveType("decimal(10,2)"))])
    rows = arrow_rows({60: 60}).append_column("price", pa.array([Decimal("1.50")], pa.decimal128(10, 2)))
    write_deltalake(theirs, rows, mode="append", schema_mode="merge")
    found = read(tmp_path, ["n", "day", "price"])
    assert found.schema.types == [pa.int64(), pa.date32(), pa.decimal128(10, 2)]
    assert dict(zip(found["n"].to_pylist(), found["price"].to_pylist(), strict=True))[60] == Decimal("1.50")
    assert found["price"].null_count == 9


def test_any_delta_table_with_supported_features(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "x": [1, 2],
            "nested": [{"a": [1, 2]}, {"a": None}],
            "m": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        }
    )
    write_deltalake(str(tmp_path / "plain"), rows)
    assert sorted(read(tmp_path / "plain").to_pylist(), key=str) == sorted(rows.to_pylist(), key=str)
    write_deltalake(str(tmp_path / "parts"), rows, partition_by=["x"])
    with pytest.raises(UnsupportedTable, match="partitions by x"):
        read(tmp_path / "parts")


def test_types() -> None:
    fields = [
        {"name": str(number), "type": type_} for number, type_ in enumerate(["byte", "timestamp", "decimal(5, 1)"])
    ]
    assert arrow_schema(json.dumps({"fields": fields})).types == [
        pa.int8(),
        pa.timestamp("us", "UTC"),
        pa.decimal128(5, 1),
    ]
    with pytest.raises(UnsupportedTable, match="type variant"):
        arrow_schema(json.dumps({"fields": [{"name": "v", "type": "variant"}]}))


def test_a_damaged_or_missing_file(table: Table, tmp_path: Path) -> None:
    (tmp_path / "b.parquet").write_bytes(b"nonsense")
    with pytest.raises(CorruptData, match=r"b\.parquet: the data file cannot be read"):
        read(tmp_path)
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(CorruptData, match=r"b\.parquet: the data file is missing"):
        read(tmp_path)


def test_an_object_store(object_store: ObjectStore) -> None:
    table = new_table(object_store.new_storage())
    file = data_file(table.storage, TEN)
    table.commit(Edit("WRITE", [file], dead={file.path: BitMap([0])}))
    assert sorted(read(table.storage.url, ["n"], options=object_store.options)["n"].to_pylist()) == list(range(1, 10))
