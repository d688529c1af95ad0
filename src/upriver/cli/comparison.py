"""What two copies of a vbucket hold differently."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa

#: What makes a document: the place in history and the CAS may differ.
COMPARED: Final = ("key", "value", "flags", "expiry", "datatype")

Kind = Literal["missing", "extra", "different"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that the second has not, has in addition, or has with something else; without a key the whole vbucket."""

    vbucket: int
    kind: Kind
    key: bytes | None = None


def differences(vbucket: int, first: pa.Table, second: pa.Table) -> Iterator[Difference]:
    """The differences of two sets of documents, by key."""
    if first.equals(second):  # copies of each other are in the same order
        return
    if first.sort_by("key").equals(second.sort_by("key")):
        return
    mine, theirs = _by_key(first), _by_key(second)
    for key in sorted(mine.keys() | theirs.keys()):
        if key not in theirs:
            yield Difference(vbucket, "missing", key)
        elif key not in mine:
            yield Difference(vbucket, "extra", key)
        elif mine[key] != theirs[key]:
            yield Difference(vbucket, "different", key)


def _by_key(table: pa.Table) -> dict[bytes, Sequence[Any]]:
    columns = [table.column(name).to_pylist() for name in table.schema.names]
    place = table.schema.get_field_index("key")
    return {row[place]: row for row in zip(*columns, strict=True)}
