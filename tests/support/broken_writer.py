"""A Parquet writer that fails for some rows, as no row is known to do."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def refuse_keys(monkeypatch: pytest.MonkeyPatch, *keys: str) -> None:
    """Writing rows with these keys into a table fails, with the file."""
    write = pq.ParquetWriter.write_table

    def write_table(self: pq.ParquetWriter, table: pa.Table, *arguments: Any, **options: Any) -> None:
        if "_key" in table.column_names and (found := set(keys) & set(table.column("_key").to_pylist())):
            raise ValueError(f"no room for {min(found)}")
        write(self, table, *arguments, **options)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", write_table)
