"""Documents that no table can hold."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.broken_writer import refuse_keys
from tests.support.mirrored_tables import mirror_now
from tests.support.table_parts import number, rows_of
from upriver.client import SyncKvClient
from upriver.errors import OptionError, TargetRefused
from upriver.node import EmbeddedNode
from upriver.pipelines.jobs.mirror import MirrorOptions
from upriver.pipelines.targets.tables.error_file import ERRORS, ErrorFile
from upriver.pipelines.targets.tables.table_keeper import KeeperSettings
from upriver.tables import TableStorage, read


def test_a_file_holds_changes_with_their_reasons(tmp_path: Path) -> None:
    errors = ErrorFile(TableStorage.of(tmp_path), "a")
    assert (errors.finish(), errors.rows, list(tmp_path.iterdir())) == ("", 0, [])
    errors.add(rows_of([(3, b"\xff", number(1)), (4, b"k", b"")]), ["one", "two"])
    errors.add(rows_of([(5, b"l", b"{}")], 9), ["three"])
    assert (errors.finish(), errors.rows) == ("a.parquet", 3)
    found = pq.read_table(tmp_path / "a.parquet")
    assert found.schema.equals(ERRORS)
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (b"\xff", 3, 1, "one", number(1)),
        (b"k", 4, 2, "two", b""),
        (b"l", 5, 9, "three", b"{}"),
    ]


def test_an_abandoned_file_is_removed(tmp_path: Path) -> None:
    errors = ErrorFile(TableStorage.of(tmp_path), "a")
    errors.abandon()
    errors.add(rows_of([(3, b"k", number(1))]), ["one"])
    errors.abandon()
    assert list(tmp_path.iterdir()) == []


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
