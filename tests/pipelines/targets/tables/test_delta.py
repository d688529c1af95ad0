"""What only Delta tables have: transactions, versions, and other readers."""

from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.pipeline_model import row, table
from upriver.errors import ForeignData
from upriver.pipelines.targets.tables.delta import APPLICATION, KEPT, Delta, DeltaHistory
from upriver.pipelines.targets.target import Work


def batch(number: int, *keys: bytes) -> Work:
    rows = [row(0, number * 10 + n, "mutation", key, b'{"n": %d}' % number) for n, key in enumerate(keys)]
    return Work(query="q", number=number, rows=table(rows))


def test_a_batch_is_one_transaction_that_names_query_and_number(tmp_path: Path) -> None:
    delta = Delta(tmp_path)
    delta.commit(batch(0, b"a", b"b"))
    before = delta.version
    delta.commit(batch(1, b"a"))
    assert delta.version == before + 1
    read = DeltaTable(str(tmp_path))
    assert read.transaction_version(f"{APPLICATION}:q") == 1
    assert sorted(read.to_pyarrow_table(columns=["_key", "n"]).to_pylist(), key=lambda each: each["_key"]) == [
        {"_key": "a", "n": 1},
        {"_key": "b", "n": 0},
    ]


def test_files_of_progress_do_not_pile_up(tmp_path: Path) -> None:
    delta = Delta(tmp_path)
    for number in range(KEPT + 5):
        delta.commit(batch(number, b"k"))
    assert len(list((tmp_path / "_upriver").iterdir())) == KEPT
    assert Delta(tmp_path).progress().number == KEPT + 4


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ForeignData, match="not a Delta table, and not empty"):
        Delta(tmp_path)
    write_deltalake(str(tmp_path / "other"), table([row(0, 1, "mutation", b"k", b"v")]))
    with pytest.raises(ForeignData, match="not an Upriver mirror"):
        Delta(tmp_path / "other")


def test_a_missing_file_of_progress_is_told(tmp_path: Path) -> None:
    Delta(tmp_path).commit(batch(0, b"k"))
    for path in (tmp_path / "_upriver").iterdir():
        path.unlink()
    with pytest.raises(ForeignData, match="missing"):
        Delta(tmp_path)


def test_the_history_has_every_change_once(tmp_path: Path) -> None:
    history = DeltaHistory(tmp_path / "history")
    first = table([row(0, 1, "mutation", b"k", b"1"), row(0, 2, "deletion", b"k", None)])
    assert history.append(first, "q", 0)
    assert not history.append(first, "q", 0)
    assert DeltaHistory(tmp_path / "history").append(table([row(0, 1, "rollback", None, None)]), "q", 1)
    events = DeltaTable(str(tmp_path / "history")).to_pyarrow_table().sort_by("seqno").column("event").to_pylist()
    assert sorted(events) == ["deletion", "mutation", "rollback"]
