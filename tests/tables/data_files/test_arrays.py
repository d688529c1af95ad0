"""Between Arrow and numpy."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.tables.data_files.arrays import booleans, integers, is_valid


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.uint64()], ids=str)
def test_integers(kind: pa.DataType) -> None:
    column = pa.array([1, 2, 3, 100], kind)
    assert integers(column).tolist() == [1, 2, 3, 100]
    assert integers(column.slice(1, 2)).tolist() == [2, 3]
    assert integers(column.slice(0, 0)).tolist() == []


@given(st.lists(st.none() | st.integers(0, 9), max_size=30), st.integers(0, 20))
def test_validity(values: list[int | None], start: int) -> None:
    column = pa.array(values, pa.int32()).slice(start)
    assert is_valid(column).tolist() == [value is not None for value in values[start:]]


def test_a_column_of_nulls() -> None:
    assert is_valid(pa.nulls(3, pa.int32())).tolist() == [False] * 3
    assert is_valid(pa.nulls(3)).tolist() == [False] * 3


@given(st.lists(st.booleans(), max_size=30))
def test_booleans(values: list[bool]) -> None:
    assert booleans(np.array(values, np.bool_)).to_pylist() == values


WITHOUT_PANDAS = """
import sys, tempfile, pathlib, pickle
sys.modules["pandas"] = None  # an import of it would fail
from upriver.tables import TableSchema, TableStorage, Column, PartWriter, locate
rows = pickle.loads(sys.stdin.buffer.read())
with tempfile.TemporaryDirectory() as folder:
    storage = TableStorage.of(folder)
    for attempt in "ab":
        writer = PartWriter(storage, TableSchema([Column("n", "int")]), bytes(16), attempt=attempt)
        writer.add(rows)
        writer.discard(7)
        result = writer.finish()
    (file,) = result.files
    locate(storage, [file.add(1)], result.keys, (), pathlib.Path(folder))
    storage.delete([path.path for path in storage.list() if path.path.endswith(".idx")])
    locate(storage, [file.add(1)], result.keys, (), pathlib.Path(folder))
sys.modules.pop("pandas")
print(sorted(name for name in sys.modules if name.startswith("pandas")))
"""


def test_a_task_does_not_import_pandas() -> None:
    """Which takes a new worker longer than everything else together."""
    import pickle

    from tests.support.table_parts import number, rows_of

    rows = rows_of([(1, b"a", number(1)), (2, b"\xff", b"x"), (1, b"b", None), (1, b"a", number(2)), (7, b"c", b"{}")])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PANDAS], input=pickle.dumps(rows), capture_output=True, check=True
    )
    assert done.stdout == b"[]\n"
