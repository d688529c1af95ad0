"""A full-text index in a file: SQLite with FTS5. Nothing else has to be installed.

The texts stand in an FTS5 table without a copy of their own, beside the table of documents; triggers keep the two
together, so that one transaction of a batch is one of both.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from upriver.errors import ForeignData, SearchError, StorageError
from upriver.pipelines.targets.search.texts import text_of
from upriver.pipelines.targets.target import Target, TargetProgress, Work

#: What the file says of itself ("upri"), so that no other file is taken for one.
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
    """A document that was found."""

    key: bytes
    #: The place of the words in the text, marked.
    snippet: str
    score: float


class SqliteIndex(Target):
    """The file; it may be searched by others while batches come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fresh = not path.exists() or not path.stat().st_size
        path.parent.mkdir(parents=True, exist_ok=True)
        # Batches come in one thread and what is idle in another, never at once.
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
        """How far it is."""
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
    # As a URI, in which signs of the name that mean something there are escaped.
    try:
        db: sqlite3.Connection = sqlite3.connect(
            f"{path.absolute().as_uri()}{parameters}", uri=True, timeout=60, **settings
        )
    except sqlite3.OperationalError as error:
        raise StorageError(str(path), str(error)) from None
    return db


def check(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file of something else."""
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise ForeignData(str(path), f"it is no index ({error})") from None
    if application != APPLICATION:
        raise ForeignData(str(path), "it is a database, but no index of ours: name another file")
    if version != VERSION:
        raise ForeignData(str(path), f"it has the version {version}, and this release knows {VERSION}")


def search(path: Path, query: str, limit: int, marks: tuple[str, str]) -> list[Hit]:
    """The best hits for a query of FTS5: words, "phrases", prefix*, AND, OR, NOT."""
    if not path.exists():
        raise ForeignData(str(path), "there is no index")
    db = _connected(path, "?mode=ro")
    try:
        check(db, path)
        return [Hit(*row) for row in db.execute(_SEARCH, (*marks, query, limit))]
    except sqlite3.OperationalError as error:
        raise SearchError(query, f'{error} (words with signs stand in quotes: "user:1")') from None
    finally:
        db.close()
