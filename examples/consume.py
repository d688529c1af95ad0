"""Keep a SQLite table equal to the cluster, through crashes on either side.

    python consume.py 127.0.0.1:11210 documents.db

Each batch and its progress are one transaction: after a crash nothing is missing and nothing is extra. When the source
has lost changes (by a failover, or a crash before they were on disk), the vbucket starts over.
"""

import json
import sqlite3
import sys

from upriver.client import Batch, Consumer, Progress
from upriver.model import Event

TABLES = """
CREATE TABLE IF NOT EXISTS documents (vbucket INT, key BLOB, value BLOB, PRIMARY KEY (vbucket, key));
CREATE TABLE IF NOT EXISTS progress (vbucket INT PRIMARY KEY, told TEXT);
"""


def apply(database: sqlite3.Connection, batch: Batch) -> None:
    """Apply one batch, completely or not at all."""
    with database:
        for row in batch.records.select(["vbucket", "event", "key", "value"]).to_pylist():
            if row["event"] == Event.MUTATION:
                database.execute("REPLACE INTO documents VALUES (:vbucket, :key, :value)", row)
            elif row["event"] in (Event.DELETION, Event.EXPIRATION):
                database.execute("DELETE FROM documents WHERE vbucket = :vbucket AND key = :key", row)
            else:  # the vbucket starts over, or was flushed
                database.execute("DELETE FROM documents WHERE vbucket = :vbucket", row)
        told = [(vbucket, json.dumps(progress.as_json())) for vbucket, progress in batch.progress.items()]
        database.executemany("REPLACE INTO progress VALUES (?, ?)", told)


def main(address: str, path: str) -> None:
    """Bring the table up to date with the cluster."""
    database = sqlite3.connect(path)
    database.executescript(TABLES)
    known = database.execute("SELECT vbucket, told FROM progress")
    start = {vbucket: Progress.from_json(json.loads(told)) for vbucket, told in known}
    with Consumer.sync(address, start=start or "earliest", end="latest", on_rollback="rewind") as consumer:
        for batch in consumer:
            apply(database, batch)
    print(*database.execute("SELECT count(*) FROM documents").fetchone(), "documents")


if __name__ == "__main__":
    main(*sys.argv[1:])
