"""A full-text index in a file: SQLite with FTS5, without further dependencies.

The FTS5 table indexes the table of documents without a copy of the texts. Triggers keep both in step, so that one
transaction changes both.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from upriver.errors import ForeignData, SearchError, StorageError
from upriver.pipelines.targets.search.texts import text_of
from upriver.pipelines.targets.target import Target, TargetProgress, Work

#: The application id of the file ("upri"), which identifies an index.
APPLICATION: Final = 0x75707269
VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE state (progress TEXT NOT NULL);
CREATE TABLE documents (
  id INTEGER PRIMARY KEY, vbucket INTEGER NOT NULL, key BLOB NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL,
  seqno INTEGER NOT NULL, cas INTEGER NOT NULL, UNIQUE (vbucket, key)
);
CREATE VIRTUAL TABLE texts USING fts5(name, body, content='documents', content_rowid='id', tokenize='unicode61');
CREATE TRIGGER added AFTER INSERT ON documents BEGIN
  INSERT INTO texts (rowid, name, body) VALUES (new.id, new.name, new.body);
END;
CREATE TRIGGER removed AFTER DELETE ON documents BEGIN
  INSERT INTO texts (texts, rowid, name, body) VALUES ('delete', old.id, old.name, old.body);
END;
CREATE TRIGGER changed AFTER UPDATE ON documents BEGIN
  INSERT INTO texts (texts, rowid, name, body) VALUES ('delete', old.id, old.name, old.body);
  INSERT INTO texts (rowid, name, body) VALUES (new.id, new.name, new.body);
END;
"""
_STORE: Final = """
INSERT INTO documents (vbucket, key, name, body, seqno, cas) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (vbucket, key) DO UPDATE SET body = excluded.body, seqno = excluded.seqno, cas = excluded.cas
"""
_SEARCH: Final = """
SELECT key, snippet(texts, 1, ?, ?, '…', 24), -bm25(texts) FROM texts JOIN documents ON documents.id = texts.rowid
WHERE texts MATCH ? ORDER BY bm25(texts), documents.name LIMIT ?
"""


class Hit(NamedTuple):
    """A found document."""

    key: bytes
    #: The found words in context, marked.
    snippet: str
    score: float


class SqliteIndex(Target):
    """An index file; other processes can search it while batches are applied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fresh = not path.exists() or not path.stat().st_size
        path.parent.mkdir(parents=True, exist_ok=True)
        # Batches and idle work come from two threads, but never at the same time.
        self._db = _connected(path, isolation_level=None, check_same_thread=False)
        try:
            if fresh:
                self._db.execute("PRAGMA journal_mode = WAL")
                made = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
                self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {made} COMMIT;")
            else:
                check(self._db, path)
        except BaseException:
            self._db.close()
            raise

    def progress(self) -> TargetProgress:
        """The progress of the index."""
        row = self._db.execute("SELECT progress FROM state").fetchone()
        return TargetProgress() if row is None else TargetProgress.of_text(row[0])

    def commit(self, work: Work) -> None:
        """One transaction of SQLite."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._apply(work)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def documents(self) -> Iterator[tuple[int, bytes, str]]:
        """Vbucket, key and text of every document."""
        yield from self._db.execute("SELECT vbucket, key, body FROM documents ORDER BY vbucket, key")

    def _apply(self, work: Work) -> None:
        if work.clear_all:
            self._db.execute("DELETE FROM documents")
        self._db.executemany("DELETE FROM documents WHERE vbucket = ?", [(number,) for number in work.cleared])
        columns = (work.rows.column(name).to_pylist() for name in ("event", "vbucket", "key", "value", "seqno", "cas"))
        stored, gone = [], []
        for event, vbucket, key, value, seqno, cas in zip(*columns, strict=True):
            if event == "mutation":
                stored.append((vbucket, key, key.decode(errors="replace"), text_of(value), seqno, cas))
            else:
                gone.append((vbucket, key))
        self._db.executemany("DELETE FROM documents WHERE vbucket = ? AND key = ?", gone)
        self._db.executemany(_STORE, stored)
        progress = self.progress().after(work)
        self._db.execute("DELETE FROM state")
        self._db.execute("INSERT INTO state VALUES (?)", (progress.as_text(),))


def _connected(path: Path, parameters: str = "", **settings: Any) -> sqlite3.Connection:
    # A URI, in which special characters of the name are escaped.
    try:
        db: sqlite3.Connection = sqlite3.connect(
            f"{path.absolute().as_uri()}{parameters}", uri=True, timeout=60, **settings
        )
    except sqlite3.OperationalError as error:
        raise StorageError(str(path), str(error)) from None
    return db


def check(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not an index."""
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise ForeignData(str(path), f"not an Upriver index ({error}); choose another file") from None
    if application != APPLICATION:
        raise ForeignData(str(path), "a database, but not an Upriver index; choose another file")
    if version != VERSION:
        raise ForeignData(str(path), f"it has version {version}, but this release supports only version {VERSION}")


def search(path: Path, query: str, limit: int, marks: tuple[str, str]) -> list[Hit]:
    """The best hits for a query of FTS5: words, "phrases", prefix*, AND, OR, NOT."""
    if not path.exists():
        raise ForeignData(str(path), "no such index; create it with upriver run index")
    db = _connected(path, "?mode=ro")
    try:
        check(db, path)
        return [Hit(*row) for row in db.execute(_SEARCH, (*marks, query, limit))]
    except sqlite3.OperationalError as error:
        raise SearchError(query, f'{error} (put words with punctuation in quotes: "user:1")') from None
    finally:
        db.close()
