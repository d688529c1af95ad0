"""Data files that a task writes: Parquet in row groups, with the statistics that Delta's log stores.

Integers of ours are stored as packed differences, because seqnos and CAS values grow steadily. Nothing has a
dictionary, which costs more time than it saves space under zstd. Parquet itself keeps statistics only where readers can
skip by them.
"""

import contextlib
import json
from array import array
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyroaring import BitMap

from upriver.tables.actions import Add
from upriver.tables.data_files.arrays import integers
from upriver.tables.schema import OWN
from upriver.tables.storage import TableStorage

#: The columns whose minimum and maximum are known to readers.
RANGED: Final = ("_vbucket", "_seqno")
_PACKED: Final = tuple(field.name for field in OWN if pa.types.is_integer(field.type))
#: Rows of a Parquet row group, at most; chunks of rows are smaller anyway.
_GROUP_ROWS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file that no commit names yet."""

    path: str
    size: int
    #: Dead ones included.
    rows: int
    #: As in Delta's log.
    stats: dict[str, Any]
    #: Rows that later changes of the same task replaced: a serialised bitmap, or nothing.
    dead: bytes = b""

    @property
    def dead_rows(self) -> BitMap:
        """The positions of dead rows."""
        return BitMap.deserialize(self.dead) if self.dead else BitMap()

    def with_dead(self, dead: BitMap) -> "NewFile":
        """The same file with these dead rows; statistics then include rows that do not count."""
        stats = self.stats | {"tightBounds": not dead}
        return replace(self, dead=serialised(dead) if dead else b"", stats=stats)

    def add(self, now_ms: int, *, data_change: bool = True) -> Add:
        """The action that adds the file, without a vector."""
        stats = json.dumps(self.stats, separators=(",", ":"))
        return Add(self.path, self.size, now_ms, data_change, stats)


def bitmap_of(positions: NDArray[np.uint32]) -> BitMap:
    """The bitmap of positions."""
    return BitMap(array("I", positions.tobytes()))  # an array is copied as a whole, anything else by element


def positions_in(bitmap: BitMap) -> NDArray[np.uint32]:
    """The positions in a bitmap, sorted."""
    return np.frombuffer(bitmap.to_array(), np.uint32) if bitmap else np.empty(0, np.uint32)


def serialised(positions: BitMap) -> bytes:
    """A bitmap as small as possible."""
    positions.run_optimize()
    return bytes(positions.serialize())


def parquet_writer(sink: pa.NativeFile, schema: pa.Schema) -> pq.ParquetWriter:
    """Writes Parquet as data files have it."""
    return pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        column_encoding=dict.fromkeys([name for name in _PACKED if name in schema.names], "DELTA_BINARY_PACKED"),
        write_statistics=[name for name in RANGED if name in schema.names],
        store_schema=False,
    )


class DataFileWriter:
    """Writes one data file, a row group at a time. It exists for others once ``finish`` returns."""

    def __init__(self, storage: TableStorage, path: str, schema: pa.Schema) -> None:
        self.path = path
        self.rows = 0
        self._storage = storage
        self._bounds: dict[str, tuple[int, int]] = {}
        self._nulls = dict.fromkeys((name for name in RANGED if name in schema.names), 0)
        self._published = contextlib.ExitStack()
        target = self._published.enter_context(storage.new_file(path))
        with contextlib.ExitStack() as failed:
            failed.callback(self.discard)
            self._sink = pa.OSFile(str(target), "wb")
            self._writer = parquet_writer(self._sink, schema)
            self._target = target
            failed.pop_all()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return int(self._sink.tell())

    def write(self, rows: pa.Table) -> None:
        """Append rows as one row group."""
        if not rows.num_rows:
            return
        self._writer.write_table(rows, row_group_size=_GROUP_ROWS_MAX)
        self.rows += rows.num_rows
        for name in RANGED:
            if name in rows.column_names:
                self._nulls[name] += rows.column(name).null_count
                for chunk in rows.column(name).chunks:
                    self._widen(name, chunk.drop_null() if chunk.null_count else chunk)

    def finish(self) -> NewFile:
        """Publish the file, durably."""
        try:
            self._writer.close()
            self._sink.close()
            size = self._target.stat().st_size
        except BaseException:
            self.discard()
            raise
        self._published.close()
        stats = {
            "numRecords": self.rows,
            "minValues": {name: low for name, (low, _) in self._bounds.items()},
            "maxValues": {name: high for name, (_, high) in self._bounds.items()},
            "nullCount": self._nulls,
            "tightBounds": True,
        }
        return NewFile(self.path, size, self.rows, stats)

    def discard(self) -> None:
        """Leave nothing behind."""
        writer, sink = getattr(self, "_writer", None), getattr(self, "_sink", None)
        if writer is not None:
            with contextlib.suppress(OSError, pa.ArrowException):
                writer.close()
            writer.is_open = False  # or it would try again when it is collected
        if sink is not None:
            with contextlib.suppress(OSError):
                sink.close()
        error = _Discarded()
        with contextlib.suppress(_Discarded):
            self._published.__exit__(_Discarded, error, None)

    def _widen(self, name: str, chunk: pa.Array) -> None:
        if not len(chunk):
            return
        numbers = integers(chunk)
        low, high = int(numbers.min()), int(numbers.max())
        before = self._bounds.get(name, (low, high))
        self._bounds[name] = min(before[0], low), max(before[1], high)


class _Discarded(Exception):
    """Ends the block of a new file, so that the file is not published."""
