"""The live rows of a data file, in pieces and with the columns of the table."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyroaring import BitMap

from upriver.tables.data_files.arrays import booleans, plain_columns, without_views
from upriver.tables.data_files.data_file import positions_in
from upriver.tables.documents.rebuilding import completed, conform
from upriver.tables.schema import TableSchema

#: Size of a piece, and its number of rows, at most.
PIECE_BYTES: Final = 8 << 20
PIECE_ROWS: Final = 1 << 16
#: Column chunks are read through a buffer of this size, not as a whole.
_BUFFER_BYTES: Final = 1 << 20


def live_rows(path: Path, dead: BitMap, schema: TableSchema) -> Iterator[pa.Table]:
    """All rows but the dead ones, in order. Columns of other programs follow those of the schema.

    Columns that are newer or wider than those of the file are filled from the documents that rows keep.
    """
    for rows in stored_rows(path, dead):
        found = conform(rows, schema)
        is_older = any(
            name not in rows.column_names or rows.schema.field(name).type != schema.arrow.field(name).type
            for name, _ in schema.columns
        )
        yield completed(found, schema) if is_older else found


def stored_rows(path: Path, dead: BitMap) -> Iterator[pa.Table]:
    """All rows but the dead ones, in order, with the columns of the file."""
    gone = positions_in(dead)
    first = 0
    with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        for group in range(file.num_row_groups):
            described = file.metadata.row_group(group)
            row_bytes = max(1, described.total_byte_size // max(1, described.num_rows))
            count = max(1, min(PIECE_ROWS, PIECE_BYTES // row_bytes))
            for batch in file.iter_batches(count, row_groups=[group], use_threads=False):
                mask = _live(gone, first, batch.num_rows)
                first += batch.num_rows
                rows = plain_columns(batch)
                if mask is not None:
                    rows = rows.filter(booleans(mask))
                if rows.num_rows:
                    yield pa.Table.from_batches([rows])


def foreign_columns(path: Path | IO[bytes], schema: TableSchema) -> list[pa.Field]:
    """The columns of a data file that are not the table's own, and not filled from documents."""
    fields = (field for field in pq.read_schema(path) if field.name not in schema.arrow.names)
    return [field.with_type(without_views(field.type)) for field in fields]


def _live(gone: NDArray[np.uint32], first: int, count: int) -> NDArray[np.bool_] | None:
    """Whether each of these rows is live; None if all are."""
    low, high = np.searchsorted(gone, [first, first + count])
    if low == high:
        return None
    mask = np.ones(count, np.bool_)
    mask[gone[low:high] - first] = False
    return mask
