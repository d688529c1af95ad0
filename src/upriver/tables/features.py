"""What Delta tables may use: deletion vectors, and nothing else that changes how readers or writers work.

Other writers can switch features on at any time, so every commit checks the table again. A feature of the old protocol
versions (append-only, constraints, …) may be listed as long as nothing uses it. All others are refused if they are
listed, because most of them bind writers from then on.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from upriver.errors import UnsupportedTable
from upriver.tables.actions import Metadata, Protocol

VECTORS: Final = "deletionVectors"
#: The property that tells writers to use deletion vectors.
USE_VECTORS: Final = "delta.enableDeletionVectors"
_WITH_VECTORS: Final = Protocol(3, 7, [VECTORS], [VECTORS])
_WITHOUT: Final = Protocol(1, 2)
#: Features that protocol versions below 7 imply, from the version on. ``_used`` finds out whether a table uses them.
_IMPLIED: Final = {
    "appendOnly": 2,
    "invariants": 2,
    "checkConstraints": 3,
    "changeDataFeed": 4,
    "generatedColumns": 4,
    "columnMapping": 5,
    "identityColumns": 6,
}
#: Properties that switch a feature on, and the value that leaves it off.
_SWITCHES: Final = {
    "delta.appendOnly": "false",
    "delta.enableChangeDataFeed": "false",
    "delta.columnMapping.mode": "none",
}
#: Metadata of a column that makes writers compute or check its values.
_COLUMN_RULES: Final = {
    "delta.invariants": "an invariant",
    "delta.generationExpression": "a generated value",
    "delta.identity.start": "an identity",
}


def protocol_for(*, vectors: bool) -> Protocol:
    """The protocol of a new table."""
    return _WITH_VECTORS if vectors else _WITHOUT


def with_vectors(protocol: Protocol) -> Protocol:
    """A protocol with deletion vectors, and all that it has besides."""
    if protocol.writer < 7:
        listed = [name for name, version in _IMPLIED.items() if version <= protocol.writer]
    else:
        listed = list(protocol.writer_features or ())
    reads = [name for name in listed if name == "columnMapping" and protocol.reader >= 2]
    reads = list(protocol.reader_features or reads)
    return Protocol(3, 7, sorted({*reads, VECTORS}), sorted({*listed, VECTORS}))


def without_vectors(protocol: Protocol) -> Protocol:
    """A protocol without deletion vectors, for a table that has none any more."""
    reads = sorted({*(protocol.reader_features or ())} - {VECTORS})
    writes = sorted({*(protocol.writer_features or ())} - {VECTORS})
    if not writes:
        return _WITHOUT
    return Protocol(3 if reads else 1, 7, reads or None, writes)


def require_supported(where: str, protocol: Protocol, metadata: Metadata, *, writing: bool = True) -> None:
    """Raise ``UnsupportedTable`` if the table uses what Upriver cannot write, or cannot read."""
    found = [*_listed(protocol, writing=writing), *_used(metadata, writing=writing)]
    if found:
        raise UnsupportedTable(
            where, f"the table uses what Upriver does not support: {'; '.join(found)}. Undo this, or build a new table"
        )


def _listed(protocol: Protocol, *, writing: bool) -> Iterator[str]:
    if protocol.reader > 3 or (writing and protocol.writer > 7):
        yield f"protocol versions {protocol.reader} and {protocol.writer}"
    listed = set(protocol.reader_features or ())
    if writing:
        listed.update(protocol.writer_features or ())
    for name in sorted(listed - _IMPLIED.keys() - {VECTORS}):
        yield f"{name} (ALTER TABLE … DROP FEATURE {name})"


def _used(metadata: Metadata, *, writing: bool) -> Iterator[str]:
    properties = metadata.properties
    for name, off in _SWITCHES.items():
        if properties.get(name, off).lower() != off and (writing or name == "delta.columnMapping.mode"):
            yield f"{name} = {properties[name]} (ALTER TABLE … SET TBLPROPERTIES ('{name}' = '{off}'))"
    if metadata.partition_columns:
        yield f"partitions by {', '.join(metadata.partition_columns)}"
    if writing:
        yield from _bound(metadata)


def _bound(metadata: Metadata) -> Iterator[str]:
    """Rules for writers only."""
    for name in metadata.properties:
        if name.startswith("delta.constraints."):
            constraint = name.removeprefix("delta.constraints.")
            yield f"the constraint {constraint} (ALTER TABLE … DROP CONSTRAINT {constraint})"
    # A checkpoint would forget the last batch of a query that was idle for this long.
    if (name := "delta.setTransactionRetentionDuration") in metadata.properties:
        yield f"{name} (ALTER TABLE … UNSET TBLPROPERTIES ('{name}'))"
    columns: list[dict[str, Any]] = json.loads(metadata.schema)["fields"]
    for column in columns:
        if not column.get("nullable", True):
            yield f"NOT NULL of the column {column['name']}"
        for name, what in _COLUMN_RULES.items():
            if name in column.get("metadata", {}):
                yield f"{what} of the column {column['name']}"
