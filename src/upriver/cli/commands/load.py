"""``upriver load``: store many documents."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
import pyarrow as pa

from upriver.cli.errors import Failure, InputError
from upriver.cli.json_lines import NotADocument, batches_of
from upriver.cli.output import progress, shown
from upriver.cli.parameters import ADDRESS, default_address
from upriver.cli.run_async import interruptible, run
from upriver.client import Address, KvClient
from upriver.errors import KeyNotFound, StatusError
from upriver.model import CHANGES

ROWS_MAX: Final = 64 * 1024
#: The columns that are read from a file. The node assigns the others.
TAKEN: Final = ("key", "value", "event", "flags", "expiry", "datatype")
_META: Final = ("cas", "rev_seqno")
_SUFFIXES: Final = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}


@click.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv", "parquet"]),
    help="Format. [default: by the ending of FILE, else jsonl]",
)
@click.option("--sample", type=click.IntRange(0), metavar="N", help="Store N sample documents instead of a file.")
@click.option("--with-meta", is_flag=True, help="Keep the CAS and revisions of a dump, and apply its deletions.")
@click.argument("places", metavar="[FILE] [ADDRESS]", nargs=-1)
@click.pass_context
def load(ctx: click.Context, form: str | None, sample: int | None, with_meta: bool, places: tuple[str, ...]) -> None:
    """Store documents from JSON lines, CSV or Parquet, or sample documents.

    FILE is the output of `upriver dump`, or - for standard input. JSON lines need a key and a value, and may have flags
    and an expiry; a value that is not a text is stored as JSON. CSV needs a first line with the names key, value and
    optionally flags and expiry. Parquet needs the columns key and value. If a key occurs twice, the later document
    wins.

    The exit code is 1 if documents were refused; the others are stored.

    \b
    Examples:
      upriver load --sample 20000 127.0.0.1:11210
      upriver load all.jsonl
      upriver dump 10.0.0.7:11210 | upriver load - 10.0.0.8:11210
      upriver dump --deletions 10.0.0.7 | upriver load --with-meta - 10.0.0.8
      upriver load --with-meta all.parquet upriver://me@10.0.0.8/default
    """
    file, address = _places(ctx, places, sample)
    batches: Iterator[pa.RecordBatch]
    total: int | None
    if file is None:
        batches, total = sample_batches(sample or 0), sample
    else:
        form = form or _SUFFIXES.get(Path(file).suffix.lower(), "jsonl")
        batches, total = _READERS[form](file)
    try:
        with interruptible("some documents may be stored; load the file again"):
            stored, refused = run(_load(batches, total, with_meta, address))
    except (NotADocument, ValueError) as error:
        raise Failure(f"{'standard input' if file == '-' else file}: {error}") from None
    click.echo(f"{stored:,} documents are stored", err=True)
    if refused:
        key, why = next(iter(refused.items()))
        raise Failure(f"{len(refused):,} documents were refused, for example {shown(key)!r}: {why.detail or why.text}")


def _places(ctx: click.Context, places: tuple[str, ...], sample: int | None) -> tuple[str | None, Address]:
    """The file and the address."""
    if sample is None and not places:
        raise click.UsageError("give a FILE, - for standard input, or --sample N")
    file, *rest = places if sample is None else ("", *places)
    if len(rest) > 1:
        raise click.UsageError("too many arguments: give a FILE and an ADDRESS")
    text = rest[0] if rest else default_address()
    return file or None, ADDRESS.convert(text, None, ctx)


async def _load(
    batches: Iterator[pa.RecordBatch], total: int | None, with_meta: bool, address: Address
) -> tuple[int, dict[bytes, StatusError]]:
    """Write batch by batch; a thread reads the next one."""
    stored = 0
    refused: dict[bytes, StatusError] = {}
    async with KvClient(address) as kv:
        with progress("load", total, "documents") as advance:
            reading = asyncio.create_task(asyncio.to_thread(_next, batches))
            while (batch := await reading) is not None:
                reading = asyncio.create_task(asyncio.to_thread(_next, batches))
                try:
                    missed = await kv.write_batch(taken(batch, with_meta), with_meta=with_meta)
                except BaseException:
                    await asyncio.gather(reading, return_exceptions=True)
                    raise
                # A deletion of a key that does not exist has nothing to do.
                missed = {key: why for key, why in missed.items() if not isinstance(why, KeyNotFound)}
                refused |= missed
                stored += batch.num_rows - len(missed)
                advance(batch.num_rows)
    return stored, refused


def _next(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return next(batches, None)


def taken(batch: pa.RecordBatch, with_meta: bool) -> pa.RecordBatch:
    """The columns that are stored."""
    wanted = TAKEN + (_META if with_meta else ())
    names = [name for name in batch.schema.names if name in wanted]
    for needed in ("key", "value", *(_META if with_meta else ())):
        if needed not in names:
            there = ", ".join(batch.schema.names) or "none"
            raise Failure(f"the column {needed}{_purpose(needed)} is missing; the file has {there}")
    columns = []
    for name in names:
        column, kind = batch.column(name), CHANGES.field(name).type
        if column.null_count:
            raise Failure(f"the column {name}{_purpose(name)} has empty values")
        try:
            columns.append(column if column.type == kind else column.cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise Failure(f"the column {name} has the wrong type: {error}") from None
    return pa.RecordBatch.from_arrays(columns, names=names)


def _purpose(name: str) -> str:
    return " for --with-meta" if name in _META else ""


# Sources of documents


def sample_batches(count: int) -> Iterator[pa.RecordBatch]:
    """Sample documents, the same each time."""
    towns = ("Aare", "Doubs", "Emme", "Reuss", "Rhine", "Rhone", "Ticino", "Thur")
    for start in range(0, count, ROWS_MAX):
        rows = range(start, min(start + ROWS_MAX, count))
        keys = [b"sample:%08d" % row for row in rows]
        values = [
            json.dumps({"number": row, "river": towns[row % len(towns)], "level_cm": row * 7919 % 1000}).encode()
            for row in rows
        ]
        yield pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def _from_lines(path: str) -> tuple[Iterator[pa.RecordBatch], int | None]:
    return batches_of(_open(path), ROWS_MAX), None


def _open(path: str) -> Any:
    if path == "-":
        return sys.stdin.buffer
    try:
        return click.get_current_context().with_resource(open(path, "rb"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _from_csv(path: str) -> tuple[Iterator[pa.RecordBatch], int | None]:
    from pyarrow import csv

    types = {name: CHANGES.field(name).type for name in TAKEN}
    try:
        reader = csv.open_csv(
            _open(path),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=False),
        )
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: {error}") from None
    return iter(reader), None


def _from_parquet(path: str) -> tuple[Iterator[pa.RecordBatch], int | None]:
    import pyarrow.parquet as pq

    if path == "-":
        raise InputError("cannot read Parquet from standard input: name a file")
    try:
        file = click.get_current_context().with_resource(pq.ParquetFile(path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: {error}") from None
    names = [name for name in file.schema_arrow.names if name in TAKEN + _META]
    return file.iter_batches(ROWS_MAX, columns=names), file.metadata.num_rows


_READERS: Final[dict[str, Callable[[str], tuple[Iterator[pa.RecordBatch], int | None]]]] = {
    "jsonl": _from_lines,
    "csv": _from_csv,
    "parquet": _from_parquet,
}
