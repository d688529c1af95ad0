"""The keys that a query has seen, with their seqnos: they determine which keys a rollback concerns.

A cache cannot list its keys, and no node knows a key that only a lost branch had. So the pipeline stores every key that
it has seen, in a file that belongs to the checkpoint.
"""

import sqlite3
from pathlib import Path
from typing import Final

import pyarrow as pa

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS seen (vbucket INTEGER, key BLOB, seqno INTEGER, PRIMARY KEY (vbucket, key)) WITHOUT ROWID
"""
_STORE: Final = """
INSERT INTO seen VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET seqno = max(seqno, excluded.seqno)
"""


class SeenKeys:
    """The file of seen keys."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_SCHEMA)

    def add(self, rows: pa.Table) -> None:
        """Store the keys of these rows; they are on disk when it returns."""
        columns = (rows.column(name).to_pylist() for name in ("vbucket", "key", "seqno"))
        self._db.execute("BEGIN")
        try:
            self._db.executemany(_STORE, zip(*columns, strict=True))
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def above(self, vbucket: int, seqno: int) -> list[bytes]:
        """The keys of a vbucket that were seen above a seqno."""
        found = self._db.execute("SELECT key FROM seen WHERE vbucket = ? AND seqno > ?", (vbucket, seqno))
        return [key for (key,) in found]

    def close(self) -> None:
        """Close the file."""
        self._db.close()
