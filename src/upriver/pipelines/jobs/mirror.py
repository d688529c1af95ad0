"""The pipeline mirror: tables with the latest state of every key, and optionally the history."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from upriver.errors import ForeignData, OptionError
from upriver.files import sync
from upriver.model import Difference, differences
from upriver.options import as_text, one_of, option
from upriver.pipelines.apply.applying import latest
from upriver.pipelines.apply.keeping import Keeping, KeepingOptions, query_of
from upriver.pipelines.apply.rereading import NodeReader
from upriver.pipelines.targets.tables.columns import keys_of
from upriver.pipelines.targets.tables.delta import Delta, DeltaHistory
from upriver.pipelines.targets.tables.parquet import ParquetTable
from upriver.pipelines.targets.tables.table import TableTarget

FORMATS: Final = ("delta", "parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions(KeepingOptions):
    """The options of mirror."""

    to: str = option("mirror", as_text, "directory of the table", "DIR")
    format: str = option("delta", one_of(*FORMATS), "format of the table")
    history: str | None = option(None, as_text, "directory of a second table, which gets every change", "DIR")

    def __post_init__(self) -> None:
        super(MirrorOptions, self).__post_init__()
        if self.history is not None and Path(self.history).absolute() == Path(self.to).absolute():
            raise OptionError("history", self.history, "this is the directory of the latest state: choose another one")


class ParquetHistory:
    """Every change, one file per batch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, changes: pa.Table, query: str, number: int) -> bool:
        """Add a batch, unless the table has it already."""
        self._path.mkdir(parents=True, exist_ok=True)
        path = self._path / f"{query}-{number:012}.parquet"
        if path.exists():
            return False
        made = self._path / f".{path.name}"
        pq.write_table(changes, made, compression="zstd")
        sync(made)  # before the name exists: a crash must not leave half a file under it
        made.replace(path)
        sync(self._path)
        return True


class Mirror(Keeping):
    """Keeps a table of all documents current."""

    name = "mirror"
    options_type = MirrorOptions
    options: MirrorOptions

    @property
    def target(self) -> str:
        """The absolute path of the directory."""
        return str(Path(self.options.to).absolute())

    def opened(self) -> TableTarget:
        """Open the table, and create it if necessary."""
        return (Delta if self.options.format == "delta" else ParquetTable)(Path(self.options.to))

    def apply(self, found: pa.Table, batch_number: int) -> None:
        """Write the history first: a batch is complete when the table has it."""
        if self.options.history is not None:
            assert self.directory is not None
            kind = DeltaHistory if self.options.format == "delta" else ParquetHistory
            kind(Path(self.options.history)).append(found, query_of(self.directory), batch_number)
        super().apply(found, batch_number)


def open_table(path: Path) -> TableTarget:
    """Open an existing mirror of either format."""
    if (path / "_delta_log").is_dir():
        return Delta(path)
    if (path / "current").is_symlink():
        return ParquetTable(path)
    raise ForeignData(str(path), "not a mirror: give the directory of upriver run mirror")


def table_differences(
    table: TableTarget, nodes: NodeReader, vbuckets: list[int], done: Callable[[int], None] = lambda _: None
) -> Iterator[Difference]:
    """The differences between the documents of the nodes and a table. Expired documents are ignored on both sides."""
    for group in nodes.groups(vbuckets):
        rows, _ = nodes.read(group)
        rows = latest(rows)
        now = int(time.time())
        theirs = table.documents(rows.filter(pc.equal(rows.column("event"), "mutation")))
        yield from differences(_compared(theirs, now), _compared(table.read(group), now), "_vbucket", "_key")
        done(len(group))


def _compared(rows: pa.Table, now: int) -> pa.Table:
    """The rows without their seqnos, because a moved vbucket assigns its own, and with their keys as bytes."""
    expiry = rows.column("_expiry")
    lasting = rows.filter(pc.or_(pc.equal(expiry, 0), pc.greater(expiry, now)))
    place = lasting.schema.get_field_index("_key")
    return lasting.set_column(place, "_key", keys_of(lasting)).drop_columns(["_seqno", "_raw_key"])
