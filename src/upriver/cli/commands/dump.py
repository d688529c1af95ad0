"""``upriver dump``: write all documents to a file."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, Protocol

import click
import pyarrow as pa
import pyarrow.compute as pc

from upriver.cli.errors import Failure, InputError
from upriver.cli.json_lines import MISPLACED, lines_of, with_misplaced
from upriver.cli.output import Advance, progress
from upriver.cli.parameters import address_argument, patience_option, replicas_option, vbuckets_option
from upriver.cli.run_async import interruptible, run
from upriver.client import Address, Consumer
from upriver.client.cluster import active_vbuckets
from upriver.model import CHANGES, Event

#: The columns of a Parquet file.
COLUMNS: Final = ("vbucket", "event", "seqno", "rev_seqno", "cas", "flags", "expiry", "datatype", "key", "value")
#: The size of a row group: large enough to compress well, small enough for memory.
ROWS_MAX: Final = 256 * 1024
BYTES_MAX: Final = 32 * 1024 * 1024


class Writer(Protocol):
    """The destination of a dump."""

    async def write(self, changes: pa.Table) -> None:
        """Write documents."""

    async def close(self) -> None:
        """Finish the output."""


@click.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "parquet"]),
    help="Format. [default: by the ending of FILE, else jsonl]",
)
@click.option("-o", "--output", metavar="FILE", default="-", help="Write to FILE; - is standard output.")
@vbuckets_option("Only these vbuckets, like 0-511,700.")
@replicas_option
@click.option("--keys-only", is_flag=True, help="Leave out the values.")
@click.option("--deletions", is_flag=True, help="Include tombstones that are not purged yet.")
@patience_option()
@address_argument
def dump(
    form: str | None,
    output: str,
    vbuckets: tuple[int, ...] | None,
    replicas: bool,
    keys_only: bool,
    deletions: bool,
    patience: float,
    address: Address,
) -> None:
    """Write all documents as JSON lines or Parquet.

    Each line is a document: key, value, flags, expiry, cas, seqno, vbucket, rev_seqno. A key or value that is not UTF-8
    is written in base64, as key_base64 or value_base64; `upriver load` reads both forms. A document that a client put
    into another vbucket than its key's is marked as misplaced. Parquet has the same columns, with keys and values as
    bytes.

    Each vbucket is written as it was at the start of the dump; writers are not blocked. A server other than an Upriver
    node may send a key twice if it changes during the dump; the later line is the newer one.

    \b
    Examples:
      upriver dump 127.0.0.1:11210 > all.jsonl
      upriver dump -o all.parquet
      upriver dump --keys-only --vbuckets 0-15 | wc -l

    A file that is named with -o appears under its name only when it is complete. If no node has the active copy of a
    vbucket, the dump fails and names the vbuckets; --replicas reads their newest replicas instead.
    """
    form = form or ("parquet" if output.endswith(".parquet") else "jsonl")
    if form == "parquet" and output == "-":
        raise InputError("cannot write Parquet to standard output: name a file with -o")
    columns = tuple(name for name in COLUMNS if not (keys_only and name == "value"))
    left = "the output is incomplete" if output == "-" else f"{output} is not written"
    with interruptible(left), _opened(output, form, columns) as writer:
        settings: dict[str, Any] = {"vbuckets": vbuckets, "keys_only": keys_only, "patience_s": patience}
        settings["active_only"] = not replicas
        run(_dump(writer, deletions, address, columns=columns, **settings))


async def _dump(writer: Writer, deletions: bool, address: Address, **settings: Any) -> None:
    now = int(time.time())
    async with Consumer(address, end="latest", on_rollback="fail", **settings) as consumer:
        held = await active_vbuckets(consumer.cluster, settings["vbuckets"])
        total = sum(each.high_seqno for each in held.values())
        with progress("dump", total, "changes") as advance:
            await _write_all(consumer, writer, deletions, now, advance)
    await writer.close()


async def _write_all(consumer: Consumer, writer: Writer, deletions: bool, now: int, advance: Advance) -> None:
    # Many vbuckets make many small batches, which are combined first.
    gathered: list[pa.RecordBatch] = []
    rows = size = 0

    async def hand_over() -> None:
        changes = pa.Table.from_batches(gathered)
        await writer.write(changes if deletions else live(changes, now))
        gathered.clear()

    vbuckets = consumer.cluster_map.vbuckets
    async for batch in consumer:
        if batch.event is not None:
            what = batch.event.event.name.lower()
            raise Failure(f"vbucket {batch.event.vbucket} had a {what} during the dump: start it again")
        gathered.append(with_misplaced(batch.records, vbuckets))
        rows += len(batch)
        size += batch.wire_bytes
        advance(len(batch))
        if rows >= ROWS_MAX or size >= BYTES_MAX:
            await hand_over()
            rows = size = 0
    if gathered:
        await hand_over()


def live(changes: pa.Table, now: int) -> pa.Table:
    """The rows that are documents: stored and not expired."""
    stored = pc.equal(changes.column("event"), pa.scalar(int(Event.MUTATION), pa.uint8()))
    expiry = changes.column("expiry")
    if (pc.max(expiry).as_py() or 0) > 0:
        lasting = pc.or_(pc.equal(expiry, 0), pc.greater(expiry, pa.scalar(now, pa.uint32())))
        stored = pc.and_(stored, lasting)
    return changes if pc.all(stored).as_py() is not False else changes.filter(stored)


@contextlib.contextmanager
def _opened(output: str, form: str, columns: tuple[str, ...]) -> Iterator[Writer]:
    if output == "-":
        yield LinesWriter(sys.stdout.buffer)
        return
    with _until_complete(Path(output)) as path:
        if form == "jsonl":
            with path.open("wb") as file:
                yield LinesWriter(file)
            return
        writer = ParquetWriter(str(path), pa.schema([*(CHANGES.field(name) for name in columns), MISPLACED]))
        try:
            yield writer
        finally:
            writer.abandon()


@contextlib.contextmanager
def _until_complete(output: Path) -> Iterator[Path]:
    """A temporary path that replaces the output at the end, so that a partial dump never has its name."""
    if output.is_dir():
        raise InputError(f"{output}: Is a directory")
    if output.exists() and not output.is_file():  # a device or a pipe
        yield output
        return
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        part.touch()
    except OSError as error:
        raise InputError(f"{output}: {error.strerror}") from None
    try:
        yield part
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


class LinesWriter:
    """JSON lines."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    async def write(self, changes: pa.Table) -> None:
        """Write documents."""
        for batch in changes.to_batches():
            self._file.write("".join(f"{line}\n" for line in lines_of(batch)).encode())

    async def close(self) -> None:
        """Finish the output."""
        self._file.flush()


class ParquetWriter:
    """A Parquet file; each row group is encoded in a thread while the next one is read."""

    def __init__(self, path: str, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq  # here: the import is slow, and only Parquet needs it

        few = [name for name in ("vbucket", "event", "flags", "expiry", "datatype") if name in schema.names]
        self._file = pq.ParquetWriter(
            path, schema, compression="zstd", compression_level=1, use_dictionary=few, write_statistics=few
        )
        self._writing: asyncio.Task[None] | None = None

    async def write(self, changes: pa.Table) -> None:
        """Write documents, after the previous ones."""
        if self._writing is not None:
            await self._writing
        self._writing = asyncio.create_task(asyncio.to_thread(self._file.write_table, changes))

    async def close(self) -> None:
        """Finish the output."""
        if self._writing is not None:
            await self._writing
        self._file.close()

    def abandon(self) -> None:
        """Close an unfinished file."""
        if self._file.is_open:
            self._file.close()
