"""Which vbuckets another program has touched when it changed rows of a table.

A row that has no vbucket, or an impossible one, belongs to ``NO_VBUCKET``, as in the key indexes.
"""

from collections.abc import Iterable

import pyarrow.parquet as pq
from pyroaring import BitMap

from upriver.tables import NO_VBUCKET, ChangedRows, TableStorage

_VBUCKET = "_vbucket"


def touched_vbuckets(storage: TableStorage, changed: Iterable[ChangedRows]) -> set[int] | None:
    """The vbuckets of these rows; None if they are unknown, because a file is gone."""
    found: set[int] = set()
    for rows in changed:
        vbuckets = _vbuckets(storage, rows.path, rows.positions)
        if vbuckets is None:
            return None
        found |= vbuckets
    return found


def _vbuckets(storage: TableStorage, path: str, positions: BitMap | None) -> set[int] | None:
    try:
        with storage.open(path) as source, pq.ParquetFile(source) as file:
            if _VBUCKET not in file.schema_arrow.names:
                return {NO_VBUCKET}
            column = file.read([_VBUCKET]).column(_VBUCKET)
    except FileNotFoundError:
        return None
    if positions is not None:
        column = column.take(list(positions))
    numbers = column.unique().to_pylist()
    return {number if number is not None and 0 <= number < NO_VBUCKET else NO_VBUCKET for number in numbers}
