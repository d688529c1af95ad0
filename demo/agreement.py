"""The contents of the nodes, the table and the index, each read by another way than it was written."""

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from upriver.client import Consumer
from upriver.model import Event
from upriver.pipelines.targets.search.texts import text_of


def in_nodes(address: str) -> dict[bytes, bytes]:
    """Every document, from a stream that starts at the beginning."""
    held: dict[bytes, bytes] = {}
    with Consumer.sync(address, end="latest") as consumer:
        for batch in consumer:
            for change in batch.changes():
                if change.event is Event.MUTATION:
                    held[change.key] = change.value
                else:
                    held.pop(change.key, None)
    return held


def in_table(path: Path) -> dict[bytes, Any]:
    """The documents of the table, read by delta-rs."""
    table = QueryBuilder().register("documents", DeltaTable(str(path)))
    rows = pa.table(table.execute("SELECT * FROM documents").read_all()).to_pylist()
    return {
        row["_key"].encode(): {name: value for name, value in row.items() if name[0] != "_" and value is not None}
        for row in rows
    }


def in_index(path: Path) -> dict[bytes, Any]:
    """The texts of the index."""
    with sqlite3.connect(path) as index:
        return dict(index.execute("SELECT key, body FROM documents"))


def differences(nodes: Mapping[bytes, bytes], target: Mapping[bytes, Any]) -> list[bytes]:
    """The keys whose documents differ or exist on one side only."""
    return sorted(
        key
        for key in nodes.keys() | target.keys()
        if key not in nodes or key not in target or target[key] not in (json.loads(nodes[key]), text_of(nodes[key]))
    )
