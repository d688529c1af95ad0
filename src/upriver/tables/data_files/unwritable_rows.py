"""Rows that a data file cannot hold: which they are, and why.

A Parquet file is lost when one of its row groups cannot be written. So the rows at fault are found by writing to
memory, and the part is written again without them.
"""

from collections.abc import Callable, Iterable

import pyarrow as pa

#: Vbucket, key and seqno of a change.
ChangeId = tuple[int, bytes, int]


class UnwritableRows(Exception):
    """Rows cannot be written; all others of the part must be written again."""

    def __init__(self, reasons: dict[ChangeId, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons


def find_unwritable(batches: Iterable[pa.RecordBatch], write: Callable[[pa.RecordBatch], None]) -> dict[ChangeId, str]:
    """The changes that ``write`` fails on, and its reason for each. Halves are tried until single rows are left."""
    found: dict[ChangeId, str] = {}
    waiting = list(batches)
    while waiting:
        rows = waiting.pop()
        try:
            write(rows)
        except (MemoryError, OSError):
            raise  # the machine, not the row
        except Exception as error:
            if rows.num_rows > 1:
                half = rows.num_rows // 2
                waiting += [rows.slice(half), rows.slice(0, half)]
            else:
                found[change_ids(rows)[0]] = f"{type(error).__name__}: {error}"
    return found


def change_ids(rows: pa.RecordBatch) -> list[ChangeId]:
    """What identifies each change."""
    columns = (rows.column(name).to_pylist() for name in ("vbucket", "key", "seqno"))
    return list(zip(*columns, strict=True))
