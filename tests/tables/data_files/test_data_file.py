"""Data files: what is written, and that all readers can read it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap

from tests.support.sample_tables import assert_all_see
from tests.support.table_parts import PartTable, number
from upriver.tables import TableStorage
from upriver.tables.data_files.data_file import DataFileWriter, NewFile, bitmap_of, positions_in, serialised

COLUMNS = pa.schema({"_vbucket": pa.int32(), "_seqno": pa.int64(), "text": pa.string()})


def rows(*found: tuple[int | None, int | None, str]) -> pa.Table:
    columns = zip(zip(*found, strict=True), COLUMNS, strict=True)
    return pa.table([pa.array(column, field.type) for column, field in columns], schema=COLUMNS)


@pytest.fixture
def storage(tmp_path: Path) -> TableStorage:
    return TableStorage.of(tmp_path)


def test_row_groups_and_statistics(storage: TableStorage) -> None:
    writer = DataFileWriter(storage, "a.parquet", COLUMNS)
    writer.write(rows((5, 10, "x"), (3, 11, "y")))
    writer.write(COLUMNS.empty_table())
    size = writer.size
    writer.write(pa.concat_tables([rows((4, -2, "z")), rows((None, None, "n"))]))
    assert 0 < size < writer.size
    assert next(iter(storage.list())).path != "a.parquet"  # not published yet
    file = writer.finish()
    assert file == NewFile(
        "a.parquet",
        storage.size("a.parquet"),
        4,
        {
            "numRecords": 4,
            "minValues": {"_vbucket": 3, "_seqno": -2},
            "maxValues": {"_vbucket": 5, "_seqno": 11},
            "nullCount": {"_vbucket": 1, "_seqno": 1},
            "tightBounds": True,
        },
    )
    found = pq.ParquetFile(storage.local("a.parquet"))
    assert found.num_row_groups == 2
    assert found.read()["text"].to_pylist() == ["x", "y", "z", "n"]
    seqno, text = (found.metadata.row_group(0).column(place) for place in (1, 2))
    assert "DELTA_BINARY_PACKED" in seqno.encodings
    assert seqno.is_stats_set
    assert not text.is_stats_set
    assert text.compression == "ZSTD"


def test_small_files_are_small(tmp_path: Path) -> None:
    """A batch of a hundred updates writes little more than the documents."""
    table = PartTable(tmp_path)
    (file,) = table.add([(key % 8, b"k%d" % key, number(key)) for key in range(100)]).files
    assert file.size < 6000


def test_a_discarded_file_leaves_nothing(storage: TableStorage) -> None:
    writer = DataFileWriter(storage, "a.parquet", COLUMNS)
    writer.write(rows((5, 10, "x")))
    writer.discard()
    assert list(storage.list()) == []
    failing = DataFileWriter(storage, "a.parquet", COLUMNS)
    with pytest.raises(ValueError, match="schema"):
        failing.write(pa.table({"other": [1]}))
    failing.discard()
    failing.discard()
    assert list(storage.list()) == []


def test_dead_rows_loosen_the_statistics() -> None:
    file = NewFile("a.parquet", 1, 5, {"numRecords": 5, "tightBounds": True})
    dead = file.with_dead(BitMap([1, 4]))
    assert dead.dead_rows == BitMap([1, 4])
    assert dead.stats == {"numRecords": 5, "tightBounds": False}
    assert dead.with_dead(BitMap()) == file
    assert file.dead_rows == BitMap()
    assert dead.add(9, data_change=False).stats == '{"numRecords":5,"tightBounds":false}'


def test_positions_and_bitmaps() -> None:
    positions = np.array([0, 7, 2**32 - 1], np.uint32)
    bitmap = bitmap_of(positions)
    assert list(bitmap) == positions.tolist()
    assert positions_in(bitmap).tolist() == positions.tolist()
    assert positions_in(BitMap()).tolist() == []
    assert len(serialised(BitMap(range(100_000)))) < 100


def test_all_readers_read_the_files(tmp_path: Path) -> None:
    table = PartTable(tmp_path, rows_per_file=40, chunk_bytes=2000)
    table.add([(key % 8, b"k%d" % key, number(key)) for key in range(100)])
    table.add([(key % 8, b"k%d" % key, number(-key) if key % 2 else None) for key in range(0, 100, 5)])
    expected = {key: key for key in range(100)}
    for key in range(0, 100, 5):
        expected[key] = -key
        if key % 2 == 0:
            del expected[key]
    assert_all_see(table.storage, expected.items())
    table.commit_merged(table.merge())
    assert_all_see(table.storage, expected.items())
