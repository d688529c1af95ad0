"""Documents that no table can hold."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.broken_writer import refuse_keys
from tests.support.mirrored_tables import mirror_now
from tests.support.table_model import TableRun
from tests.support.table_parts import number, rows_of
from upriver.client import SyncKvClient
from upriver.errors import OptionError, TargetRefused
from upriver.node import EmbeddedNode
from upriver.pipelines.jobs.mirror import MirrorOptions
from upriver.pipelines.targets.tables.error_file import ERRORS, ErrorFile, ErrorPlace
from upriver.pipelines.targets.tables.table_keeper import KeeperSettings
from upriver.tables import TableStorage, read
from upriver.tables import storage as storage_module


def test_a_file_holds_changes_with_their_reasons(tmp_path: Path) -> None:
    errors = ErrorFile(TableStorage.of(tmp_path), "a.parquet")
    assert (errors.finish(), errors.rows, list(tmp_path.iterdir())) == ("", 0, [])
    errors.add(rows_of([(3, b"\xff", number(1)), (4, b"k", b"")]), ["one", "two"])
    errors.add(rows_of([(5, b"l", b"{}")], 9), ["three"])
    errors.add(rows_of([(3, b"\xff", number(1))]), ["again, after a rollback during the read"])
    assert (errors.finish(), errors.rows) == ("a.parquet", 3)
    found = pq.read_table(tmp_path / "a.parquet")
    assert found.schema.equals(ERRORS)
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (b"\xff", 3, 1, "one", number(1)),
        (b"k", 4, 2, "two", b""),
        (b"l", 5, 9, "three", b"{}"),
    ]


def test_an_abandoned_attempt_leaves_what_another_has_finished(tmp_path: Path) -> None:
    storage = TableStorage.of(tmp_path)
    for end, left in ((ErrorFile.abandon, []), (ErrorFile.finish, ["a.parquet"]), (ErrorFile.abandon, ["a.parquet"])):
        errors = ErrorFile(storage, "a.parquet")
        errors.add(rows_of([(3, b"k", number(1))]), ["one"])
        end(errors)
        assert [file.name for file in tmp_path.iterdir()] == left


def test_only_files_that_were_not_committed_are_discarded(tmp_path: Path) -> None:
    place = ErrorPlace(TableStorage.of(tmp_path), "upriver-q", 3)
    kept = ["upriver-q.2.a.parquet", "upriver-q-again.3.a.parquet", "upriver-qq.3.a.parquet", "mine.parquet"]
    pending = [place.path(b"one"), place.path(b"two"), "upriver-q.10.a.parquet"]
    for name in (*kept, *pending):
        (tmp_path / name).write_bytes(b"")
    assert len(set(pending)) == 3
    place.discard(but=pending[:1])
    assert {file.name for file in tmp_path.iterdir()} == {*kept, pending[0]}
    assert place.path(b"one") == pending[0], "another attempt replaces the file"


def test_a_crash_at_any_operation_leaves_every_refused_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "sync", lambda _: None)  # nothing cuts the power here
    refuse_keys(monkeypatch, "bad0", "bad1")
    crashes = 0
    for operation in range(100):
        run = TableRun(
            tmp_path / str(operation), operation, is_quiet=True, errors=TableStorage.of(tmp_path / f"errors{operation}")
        )
        for number_ in range(3):
            run.cluster.put(number_, f"k{number_}", number(1))
        for number_ in range(2):
            run.cluster.put(number_, f"bad{number_}", number(2))
        if operation % 2:  # otherwise the first batch already has refused documents
            run.catch_up()
            run.cluster.put(0, "bad0", number(3))
            run.cluster.put(2, "k2", number(3))
        run.survives(lambda run=run, operation=operation: run.start(operation // 2))  # type: ignore[misc]
        run.batch(None)
        run.cluster.put(0, "k0", number(4))
        run.batch(None)
        run.start()
        found = pq.read_table(tmp_path / f"errors{operation}").to_pylist()
        told = Counter((row["vbucket"], row["key"], row["value"]) for row in found)
        again = {(0, b"bad0", number(3)): 1} if operation % 2 else {}
        assert told == {(0, b"bad0", number(2)): 1, (1, b"bad1", number(2)): 1, **again}, run.told
        assert sorted(read(run.table.url)["_key"].to_pylist()) == ["k0", "k1", "k2"]
        crashed = any("StorageCrash" in each for each in run.told)
        crashes += crashed
        if not crashed and operation % 2:
            break
    assert crashes > 20


def test_documents_that_cannot_be_written_go_to_the_errors_and_leave_no_old_row(
    upriver_node: EmbeddedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = KeeperSettings(errors=TableStorage.of(tmp_path / "errors"))
    documents = {f"k{n}": b'{"n": %d}' % n for n in range(100)}
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many(documents)
    mirror_now(upriver_node.address, tmp_path / "t", settings)
    assert not (tmp_path / "errors").exists()
    refuse_keys(monkeypatch, "k3", "k77")
    mirror_now(upriver_node.address, tmp_path / "t", settings)
    assert sorted(read(tmp_path / "t")["_key"].to_pylist()) == sorted(documents.keys() - {"k3", "k77"})
    (path,) = (tmp_path / "errors").iterdir()
    found = {row["key"]: (row["reason"], row["value"]) for row in pq.read_table(path).to_pylist()}
    assert found == {
        b"k3": ("ValueError: no room for k3", documents["k3"]),
        b"k77": ("ValueError: no room for k77", documents["k77"]),
    }


def test_without_a_place_for_errors_one_error_names_the_document_and_the_option(
    upriver_node: EmbeddedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        vbucket = kv.set("k", b"{}").vbucket
    refuse_keys(monkeypatch, "k")
    with pytest.raises(TargetRefused) as caught:
        mirror_now(upriver_node.address, tmp_path / "t")
    text = str(caught.value)
    assert f"1 refused: key b'k' of vbucket {vbucket}, seqno 1 (ValueError: no room for k)" in text
    assert "with --errors-to PATH" in text
    assert not list((tmp_path / "t").glob("*.parquet"))


@pytest.mark.parametrize("place", ["t", "t/errors", "h/x"])
def test_errors_are_not_stored_inside_of_a_table(tmp_path: Path, place: str) -> None:
    given = {"to": str(tmp_path / "t"), "history": str(tmp_path / "h")}
    with pytest.raises(OptionError, match="inside of a table"):
        MirrorOptions.read({**given, "errors-to": str(tmp_path / place)})
    assert MirrorOptions.read({**given, "errors-to": str(tmp_path / "t2")}).errors_to
