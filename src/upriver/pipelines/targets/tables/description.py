"""What a table is like: its rows, files, columns, owner and log."""

import json
from dataclasses import dataclass

from upriver.pipelines.targets.tables.history import PROPERTY as HISTORY
from upriver.pipelines.targets.tables.table_keeper import BUCKET, DUE, QUERY, application, reads_ahead
from upriver.tables import LOG, Table


@dataclass(frozen=True, kw_only=True)
class TableDescription:
    """The facts about a table that people ask for."""

    path: str
    #: "latest state" or "history".
    kind: str
    version: int
    #: When the last commit was written, in seconds since the epoch.
    changed_s: float
    rows: int
    #: Rows in data files that deletion vectors hide.
    dead_rows: int
    files: int
    size: int
    deletion_vectors: bool
    #: Name and type of each column, in order; JSON text is "json".
    columns: dict[str, str]
    #: The query that keeps the table, and the bucket of its documents.
    query: str | None
    bucket: str | None
    #: The number of the last batch; None before the first.
    last_batch: int | None
    #: Vbuckets that were read from the node, and that the stream has not passed yet.
    reads_ahead: list[int]
    #: Vbuckets that will be read again, because another program has changed their rows.
    foreign_changes: list[int]
    log_files: int
    log_size: int


def describe_table(table: Table) -> TableDescription:
    """Read what a table is like; its data files are not read."""
    snapshot, properties = table.snapshot, table.properties
    files, log = snapshot.files.values(), list(table.storage.list(LOG))
    dead = sum(file.dead for file in files)
    return TableDescription(
        path=table.storage.url,
        kind="history" if HISTORY in properties else "latest state",
        version=snapshot.version,
        changed_s=max((file.modified for file in log), default=0.0),
        rows=sum(file.rows or 0 for file in files) - dead,
        dead_rows=dead,
        files=len(files),
        size=sum(file.size for file in files),
        deletion_vectors=table.vectors,
        columns=_columns(snapshot.metadata.schema),
        query=properties.get(QUERY),
        bucket=properties.get(BUCKET),
        last_batch=snapshot.txns.get(application(table)),
        reads_ahead=sorted(reads_ahead(table)),
        foreign_changes=sorted(json.loads(properties.get(DUE, "[]"))),
        log_files=len(log),
        log_size=sum(file.size for file in log),
    )


def _columns(schema: str) -> dict[str, str]:
    """The columns of a table, those of other programs included."""
    found = {}
    for field in json.loads(schema)["fields"]:
        mark = (field.get("metadata") or {}).get("upriver")
        kind = field["type"] if isinstance(field["type"], str) else field["type"]["type"]
        found[field["name"]] = str(mark or kind)
    return found
