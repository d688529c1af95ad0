"""The history: every batch once, in a table that other programs may extend."""

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.pipeline_model import row
from upriver.errors import ForeignData
from upriver.pipelines.targets.tables import history as module
from upriver.pipelines.targets.tables.history import History, HistoryWriter
from upriver.spark import ROWS
from upriver.tables import NewFile, Table, TableSchema, TableStorage, read


@pytest.fixture
def storage(tmp_path: Path) -> TableStorage:
    return TableStorage.of(tmp_path / "history")


def kept(storage: TableStorage, query: str, *, adopt: bool = False) -> History:
    return History(storage, query, f"upriver-{query}", adopt=adopt)


def changes(*seqnos: int) -> pa.RecordBatch:
    rows = [row(1, seqno, "mutation", b"\xff", b"v%d" % seqno) for seqno in seqnos]
    return pa.RecordBatch.from_pylist(rows, ROWS)


def part(storage: TableStorage, attempt: str, *seqnos: int) -> list[NewFile]:
    writer = HistoryWriter(storage, attempt)
    writer.add(changes(*seqnos))
    found = writer.finish()
    assert found is not None
    return [found]


def seqnos(storage: TableStorage) -> list[int]:
    return sorted(read(storage.url, ["seqno"])["seqno"].to_pylist())


def test_a_batch_is_there_once(storage: TableStorage) -> None:
    history = kept(storage, "q")
    history.append([*part(storage, "a", 1, 2), *part(storage, "b", 3)], 0)
    history.append(part(storage, "c", 1, 2), 0)
    assert seqnos(storage) == [1, 2, 3]
    assert storage.local("c.parquet").exists() is False  # type: ignore[union-attr]
    kept(storage, "q").append(part(storage, "d", 1, 2), 0)
    kept(storage, "q").append([], 1)
    kept(storage, "q").append(part(storage, "e", 4), 1)
    kept(storage, "q").append(part(storage, "f", 4), 2)
    assert seqnos(storage) == [1, 2, 3, 4]


def test_files_of_the_committed_attempt_stay(storage: TableStorage) -> None:
    history, files = kept(storage, "q"), part(storage, "a", 1)
    history.append(files, 0)
    history.append(files, 0)
    assert seqnos(storage) == [1]


def test_all_columns_of_a_change_are_there(storage: TableStorage) -> None:
    given = changes(7).to_pylist()[0] | {"event": "rollback", "key": None, "value": b"\x01"}
    history = kept(storage, "q")
    writer = HistoryWriter(storage, "a")
    writer.add(pa.RecordBatch.from_pylist([given], ROWS))
    file = writer.finish()
    assert file is not None
    history.append([file], 0)
    (found,) = read(storage.url).to_pylist()
    assert found == given
    assert DeltaTable(storage.url).to_pyarrow_table().num_rows == 1  # no vectors, so every reader can


def test_other_programs_may_append(storage: TableStorage) -> None:
    history = kept(storage, "q")
    files = part(storage, "a", 1)
    write_deltalake(storage.url, pa.table(read(storage.url).schema.empty_table()), mode="append")
    write_deltalake(storage.url, pa.Table.from_batches([changes(9)]), mode="append")
    history.append(files, 0)
    assert seqnos(storage) == [1, 9]


def test_rows_are_written_in_pieces(storage: TableStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)
    writer = HistoryWriter(storage, "a")
    for seqno in range(5):
        writer.add(changes(seqno))
        assert not writer._waiting
    file = writer.finish()
    assert file is not None
    assert file.rows == 5


def test_nothing_is_left_of_an_abandoned_attempt(storage: TableStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)
    assert HistoryWriter(storage, "none").finish() is None
    for is_finished in (False, True):
        writer = HistoryWriter(storage, f"a{is_finished}")
        writer.add(changes(1))
        if is_finished:
            writer.finish()
        writer.abandon()
    assert [*storage.list()] == []


def test_whose_history_it_is(storage: TableStorage) -> None:
    kept(storage, "first").append(part(storage, "a", 1), 5)
    with pytest.raises(ForeignData, match="use --adopt to continue it"):
        kept(storage, "second")
    kept(storage, "second", adopt=True).append(part(storage, "b", 2), 0)
    kept(storage, "second").append(part(storage, "c", 3), 1)
    assert seqnos(storage) == [1, 2, 3]
    with pytest.raises(ForeignData, match="belongs to another mirror"):
        kept(storage, "first")


def test_a_table_of_the_latest_state_is_not_a_history(storage: TableStorage) -> None:
    Table.create(storage, TableSchema())
    with pytest.raises(ForeignData, match="not a history"):
        kept(storage, "q", adopt=True)
