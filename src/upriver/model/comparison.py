"""How two tables of documents differ, key by key."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import pyarrow as pa


class Difference(NamedTuple):
    """A key that the second table lacks (missing), has in addition (extra), or has with other values (different).

    Without a key it concerns the whole vbucket.
    """

    vbucket: int
    kind: Literal["missing", "extra", "different"]
    key: bytes | None = None
    #: The columns that differ.
    columns: tuple[str, ...] = ()


def differences(first: pa.Table, second: pa.Table, vbucket: str = "vbucket", key: str = "key") -> Iterator[Difference]:
    """The differences between two tables with the same columns. ``vbucket`` and ``key`` name the columns with those."""
    if first.equals(second):
        return
    order = [(vbucket, "ascending"), (key, "ascending")]
    if first.sort_by(order).equals(second.sort_by(order)):
        return
    ours, theirs = _by_name(first, vbucket, key), _by_name(second, vbucket, key)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield Difference(name[0], "missing", name[1])
        elif name not in ours:
            yield Difference(name[0], "extra", name[1])
        elif ours[name] != theirs[name]:
            pairs = zip(first.column_names, ours[name], theirs[name], strict=True)
            yield Difference(name[0], "different", name[1], tuple(column for column, a, b in pairs if a != b))


def _by_name(table: pa.Table, vbucket: str, key: str) -> dict[tuple[int, bytes], tuple[object, ...]]:
    names = zip(table.column(vbucket).to_pylist(), table.column(key).to_pylist(), strict=True)
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return dict(zip(names, rows, strict=True))
