"""The index in a file."""

import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import examples
from tests.support.pipeline_model import Contents, converge, row, table, value_of
from upriver.errors import ForeignData, SearchError, StorageError
from upriver.pipelines.targets.search.sqlite_index import Hit, SqliteIndex, search
from upriver.pipelines.targets.search.texts import text_of
from upriver.pipelines.targets.target import ReadAhead, Target, TargetProgress, Work

MARKS = ("<", ">")


def contents(target: Target) -> Contents:
    """Texts, which tell the model's values."""
    assert isinstance(target, SqliteIndex)
    target._db.execute("INSERT INTO texts (texts) VALUES ('integrity-check')")
    return {(vbucket, key): text.encode() for vbucket, key, text in target.documents()}


@pytest.mark.parametrize("exact", [False, True])
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**32))
def test_an_index_ends_with_the_nodes_contents(exact: bool, seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "index.db"
        by_text = {text_of(value_of(n)).encode(): value_of(n) for n in range(1000)}

        def held(target: Target) -> Contents:
            # A value that is not text has none: then any such value is right.
            return {
                name: by_text[text] if text else next(v for v in by_text.values() if not text_of(v))
                for name, text in contents(target).items()
            }

        def normal(found: Contents) -> Contents:
            return {name: value if text_of(value) else by_text[b""] for name, value in found.items()}

        converge(lambda: SqliteIndex(path), held, seed, exact=exact, policy="emit", normal=normal)


def test_what_cannot_be_opened_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path}: unable to open database file"):
        SqliteIndex(tmp_path)
    with pytest.raises(StorageError, match=f"{tmp_path}: "):
        search(tmp_path, "word", 1, MARKS)


def work(*rows: dict[str, object], number: int | None = 0, **others: object) -> Work:
    return Work(query="q", number=number, rows=table(rows), **others)  # type: ignore[arg-type]


def test_words_are_found_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "index.db"
    index = SqliteIndex(path)
    index.commit(
        work(
            row(0, 1, "mutation", b"shoes:1", b'{"name": "red shoes", "size": 42}'),
            row(1, 1, "mutation", b"hat", b'{"name": "a red hat"}'),
            row(1, 2, "mutation", b"\xff", b"red"),
        )
    )
    assert [hit.key for hit in search(path, "red shoes", 10, MARKS)] == [b"shoes:1"]
    assert search(path, "shoe*", 10, MARKS)[0].snippet == "red <shoes> 42"
    assert len(search(path, "red", 2, MARKS)) == 2
    assert [hit.key for hit in search(path, "red NOT hat", 10, MARKS)] == [b"\xff", b"shoes:1"]
    assert search(path, '"hat red"', 10, MARKS) == []
    index.commit(work(row(0, 3, "deletion", b"shoes:1", None), row(1, 4, "expiration", b"\xff", None), number=1))
    assert [hit.key for hit in search(path, "red", 10, MARKS)] == [b"hat"]
    index.commit(work(row(1, 5, "mutation", b"hat", b"blue"), number=2, ahead={1: ReadAhead(7, 5, 5)}))
    assert search(path, "red", 10, MARKS) == []
    assert isinstance(search(path, "blue", 10, MARKS)[0], Hit)
    index.close()
    again = SqliteIndex(path)
    assert again.progress() == TargetProgress("q", 2, {1: ReadAhead(7, 5, 5)})
    again.close()


def test_a_failed_batch_leaves_nothing(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "i")
    with pytest.raises(AttributeError):
        index.commit(work(row(0, 1, "mutation", b"k", b"v"), row(0, 2, "mutation", b"j", None)))
    assert list(index.documents()) == []
    assert index.progress() == TargetProgress()
    index.close()


@pytest.mark.parametrize("name", ["no#1", "what?", "100%41", "a b"])
def test_a_file_may_be_called_anything(tmp_path: Path, name: str) -> None:
    SqliteIndex(tmp_path / name).close()
    assert search(tmp_path / name, "x", 10, MARKS) == []


def test_queries_that_make_no_sense_and_files_of_something_else(tmp_path: Path) -> None:
    SqliteIndex(tmp_path / "i").close()
    with pytest.raises(SearchError, match="invalid query"):
        search(tmp_path / "i", '"half', 10, MARKS)
    with pytest.raises(SearchError, match=r"no such column: bar .put words with punctuation in quotes"):
        search(tmp_path / "i", "foo-bar", 10, MARKS)
    with pytest.raises(ForeignData, match="no such index"):
        search(tmp_path / "nothing", "x", 10, MARKS)
    (tmp_path / "text").write_text("no database at all, just some text that is long enough to be read" * 20)
    with pytest.raises(ForeignData, match="not an Upriver index"):
        SqliteIndex(tmp_path / "text")
    db = sqlite3.connect(tmp_path / "other")
    db.execute("CREATE TABLE t (x)")
    db.commit()
    db.close()
    with pytest.raises(ForeignData, match="not an Upriver index"):
        SqliteIndex(tmp_path / "other")
