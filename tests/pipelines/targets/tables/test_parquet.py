"""What only the directories of Parquet files have: the link, and readers that have begun."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.pipeline_model import row, table
from upriver.errors import ForeignData
from upriver.pipelines.targets.tables.parquet import KEPT, ParquetTable
from upriver.pipelines.targets.target import Work


def batch(number: int, key: bytes = b"k") -> Work:
    return Work(query="q", number=number, rows=table([row(0, number, "mutation", key, b'{"n": %d}' % number)]))


def test_current_is_a_directory_for_every_reader(tmp_path: Path) -> None:
    target = ParquetTable(tmp_path / "t")
    for number in range(5):
        target.commit(batch(number))
    assert pq.read_table(tmp_path / "t" / "current").column("n").to_pylist() == [4]
    assert len(list((tmp_path / "t").glob("v*"))) == KEPT + 1


def test_a_reader_that_has_begun_finds_its_files(tmp_path: Path) -> None:
    target = ParquetTable(tmp_path)
    target.commit(batch(0))
    directory = (tmp_path / "current").resolve()
    target.commit(batch(1))
    assert pq.read_table(directory).column("n").to_pylist() == [0]


def test_what_an_unfinished_attempt_has_left_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ParquetTable(tmp_path)
    target.commit(batch(0))

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("upriver.pipelines.targets.tables.parquet.os.replace", fail)
        with pytest.raises(OSError, match="no space"):
            target.commit(batch(1, b"lost"))
    target.commit(batch(1))
    for each in (target, ParquetTable(tmp_path)):
        assert each.read().column("_key").to_pylist() == ["k"]


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ForeignData, match="not an Upriver mirror, and not empty"):
        ParquetTable(tmp_path)


def test_two_who_write_to_one_table_do_not_undo_each_other(tmp_path: Path) -> None:
    first = ParquetTable(tmp_path)
    first.commit(batch(0))
    second = ParquetTable(tmp_path)
    second.commit(batch(1, b"theirs"))
    with pytest.raises(ForeignData, match="another process writes to it"):
        first.commit(batch(1, b"mine"))
    assert set(second.read().column("_key").to_pylist()) == {"theirs", "k"}
    second.commit(batch(2))
    assert ParquetTable(tmp_path).read().num_rows == 2
