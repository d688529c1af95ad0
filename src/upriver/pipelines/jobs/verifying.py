"""Does a mirror hold what the nodes hold? Read from both, vbucket by vbucket."""

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from upriver.pipelines.apply.applying import latest
from upriver.pipelines.apply.rereading import NodeReader
from upriver.pipelines.targets.tables.columns import keys_of
from upriver.pipelines.targets.tables.table import TableTarget

#: The place in history may differ: a vbucket that moved has its own.
_IGNORED: Final = ("_seqno",)


class Difference(NamedTuple):
    """A key that the table has not (missing), has in addition (extra), or has with something else (different)."""

    vbucket: int
    kind: str
    key: bytes
    #: The columns that differ.
    columns: tuple[str, ...] = ()


def differences(
    table: TableTarget, nodes: NodeReader, vbuckets: list[int], done: Callable[[int], None] = lambda _: None
) -> Iterator[Difference]:
    """What the table holds differently; what has expired counts on neither side."""
    for group in nodes.groups(vbuckets):
        rows, _ = nodes.read(group)
        rows = latest(rows)
        now = int(time.time())
        theirs = _live(table.documents(rows.filter(pc.equal(rows.column("event"), "mutation"))), now)
        ours = _live(table.read(group), now)
        yield from _compared(theirs, ours)
        done(len(group))


def _live(rows: pa.Table, now: int) -> pa.Table:
    expiry = rows.column("_expiry")
    lasting = rows.filter(pc.or_(pc.equal(expiry, 0), pc.greater(expiry, now)))
    return lasting.drop_columns(list(_IGNORED)).sort_by([("_vbucket", "ascending"), ("_key", "ascending")])


def _compared(theirs: pa.Table, ours: pa.Table) -> Iterator[Difference]:
    if theirs.equals(ours):
        return
    wanted, held = _by_key(theirs), _by_key(ours)
    for name in sorted(wanted.keys() | held.keys()):
        vbucket, key = name
        if name not in held:
            yield Difference(vbucket, "missing", key)
        elif name not in wanted:
            yield Difference(vbucket, "extra", key)
        elif wanted[name] != held[name]:
            pairs = zip(theirs.column_names, wanted[name], held[name], strict=True)
            yield Difference(vbucket, "different", key, tuple(column for column, a, b in pairs if a != b))


def _by_key(table: pa.Table) -> dict[tuple[int, bytes], tuple[object, ...]]:
    names = zip(table.column("_vbucket").to_pylist(), keys_of(table).to_pylist(), strict=True)
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return dict(zip(names, rows, strict=True))
