"""The live rows of a data file, in pieces."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from tests.support.table_parts import SCHEMA
from upriver.tables.data_files import live_rows as module
from upriver.tables.data_files.live_rows import foreign_columns, live_rows


@given(st.integers(0, 40), st.sets(st.integers(0, 39)), st.integers(1, 20), st.integers(1, 20))
def test_all_but_the_dead(
    tmp_path_factory: pytest.TempPathFactory, count: int, dead: set[int], group: int, piece: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    rows = pa.table({"n": pa.array(range(count), pa.int64()), "_key": pa.array(map(str, range(count)), pa.string())})
    pq.write_table(rows, path, row_group_size=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_ROWS", piece)
        found = list(live_rows(path, BitMap(number for number in dead if number < count), SCHEMA))
    assert [number for rows in found for number in rows["n"].to_pylist()] == [n for n in range(count) if n not in dead]
    assert all(0 < rows.num_rows <= piece and rows.schema.equals(SCHEMA.arrow) for rows in found)


def test_large_rows_come_in_small_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"_raw": [bytes(3 << 20)] * 9}), path, compression="none", use_dictionary=False)
    assert [rows.num_rows for rows in live_rows(path, BitMap([4]), SCHEMA)] == [2, 2, 1, 2, 1]


def test_a_column_that_has_become_wider_gets_the_decimals_of_kept_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    kept = pa.array([None, b'{"n": 1.5}', b'{"n": 2, "m": 3}'], pa.binary())
    pq.write_table(pa.table({"n": pa.array([1, None, 2], pa.int64()), "_raw": kept}), path)
    (rows,) = live_rows(path, BitMap(), SCHEMA.widened(["n"]))
    assert rows["n"].to_pylist() == [1, 1.5, 2]
    assert rows["_raw"].to_pylist() == [None, None, b'{"n": 2, "m": 3}']


def test_columns_of_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1], "score": [0.5], "_vbucket": pa.array([1], pa.int32())}), path)
    assert [field.name for field in foreign_columns(path, SCHEMA)] == ["score"]
    (rows,) = live_rows(path, BitMap(), SCHEMA)
    assert rows.column_names == [*SCHEMA.arrow.names, "score"]


def test_texts_as_views_which_delta_rs_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = {"_key": pa.array(["a", None, "c"], pa.string_view()), "theirs": pa.array([b"x"] * 3, pa.binary_view())}
    pq.write_table(pa.table(texts), path)
    (rows,) = live_rows(path, BitMap([0]), SCHEMA)
    assert rows["_key"].to_pylist() == [None, "c"]
    assert rows.schema.field("theirs").type == pa.binary() == foreign_columns(path, SCHEMA)[0].type
