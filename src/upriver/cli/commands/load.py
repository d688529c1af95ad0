"""``upriver load``: store many documents."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import pyarrow as pa
import pyarrow.compute as pc

from upriver.cli.errors import Failure, InputError
from upriver.cli.json_lines import MISPLACED, NotADocument, batches_of
from upriver.cli.output import progress, shown
from upriver.cli.parameters import ADDRESS, default_address
from upriver.cli.run_async import interruptible, run
from upriver.client import Address, KvClient
from upriver.errors import InvalidArguments, KeyNotFound, StatusError
from upriver.model import CHANGES, Event
from upriver.wire.codec import key_vbuckets

ROWS_MAX: Final = 64 * 1024
#: The columns that are read from a file. The node assigns the others.
TAKEN: Final = ("key", "value", "event", "flags", "expiry", "datatype")
_META: Final = ("cas", "rev_seqno")
#: The columns that say where a dump found a document.
_PLACE: Final = ("vbucket", MISPLACED.name)
_TYPES: Final = pa.schema([*CHANGES, MISPLACED])
_MISPLACED: Final = InvalidArguments(
    "it was in another vbucket than its key's; --with-meta puts it there again if the target has that vbucket"
)
_SUFFIXES: Final = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}


@click.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv", "parquet"]),
    help="Format. [default: by the ending of FILE, else jsonl]",
)
@click.option("--sample", type=click.IntRange(0), metavar="N", help="Store N sample documents instead of a file.")
@click.option("--with-meta", is_flag=True, help="Keep the CAS, revisions and vbuckets of a dump.")
@click.argument("places", metavar="[FILE] [ADDRESS]", nargs=-1)
@click.pass_context
def load(ctx: click.Context, form: str | None, sample: int | None, with_meta: bool, places: tuple[str, ...]) -> None:
    """Store documents from JSON lines, CSV or Parquet, or sample documents.

    FILE is the output of `upriver dump`, or - for standard input. JSON lines need a key and a value, and may have flags
    and an expiry; a value that is not a text is stored as JSON. CSV needs a first line with the names key, value and
    optionally flags and expiry. Parquet needs the columns key and value. If a key occurs twice, the later document
    wins. Deletions in a dump are applied and counted apart.

    A document that was in another vbucket than its key's goes there again with --with-meta. Without it such a document
    is refused, because it would replace the one in the key's vbucket.

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
            counts, refused = run(_load(batches, total, with_meta, address))
    except (NotADocument, ValueError) as error:
        raise Failure(f"{'standard input' if file == '-' else file}: {error}") from None
    deletions = counts[Event.DELETION] + counts[Event.EXPIRATION]
    deleted = f", {deletions:,} are deleted" if deletions else ""
    click.echo(f"{counts[Event.MUTATION]:,} documents are stored{deleted}", err=True)
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
) -> tuple[Counter[Event], dict[bytes, StatusError]]:
    """Write batch by batch, while a thread reads the next one; count what was stored and what was deleted."""
    counts: Counter[Event] = Counter()
    refused: dict[bytes, StatusError] = {}
    async with KvClient(address) as kv:
        with progress("load", total, "documents") as advance:
            reading = asyncio.create_task(asyncio.to_thread(_next, batches))
            while (batch := await reading) is not None:
                reading = asyncio.create_task(asyncio.to_thread(_next, batches))
                try:
                    rows, misplaced = placed(taken(batch, with_meta), kv.cluster_map.vbuckets, with_meta)
                    missed = await kv.write_batch(rows, with_meta=with_meta, keep_vbuckets=True)
                except BaseException:
                    await asyncio.gather(reading, return_exceptions=True)
                    raise
                _count(counts, rows, missed)
                # A deletion of a key that does not exist has nothing to do.
                refused |= {key: why for key, why in missed.items() if not isinstance(why, KeyNotFound)}
                refused |= dict.fromkeys(misplaced, _MISPLACED)
                advance(batch.num_rows)
    return counts, refused


def _count(counts: Counter[Event], rows: pa.RecordBatch, missed: Mapping[bytes, StatusError]) -> None:
    """Count the rows that were written, by their event."""
    if "event" not in rows.schema.names:
        counts[Event.MUTATION] += rows.num_rows - len(missed)
        return
    events = [Event(event) for event in rows.column("event").to_pylist()]
    by_key = dict(zip(rows.column("key").to_pylist(), events, strict=True))
    counts.update(events)
    counts.subtract(by_key[key] for key in missed)


def _next(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return next(batches, None)


def taken(batch: pa.RecordBatch, with_meta: bool) -> pa.RecordBatch:
    """The columns that are stored."""
    wanted = TAKEN + (_META if with_meta else ()) + (_PLACE if MISPLACED.name in batch.schema.names else ())
    names = [name for name in batch.schema.names if name in wanted]
    for needed in ("key", "value", *(_META if with_meta else ())):
        if needed not in names:
            there = ", ".join(batch.schema.names) or "none"
            raise Failure(f"the column {needed}{_purpose(needed)} is missing; the file has {there}")
    columns = []
    for name in names:
        column, kind = batch.column(name), _TYPES.field(name).type
        if column.null_count and name not in _PLACE:
            raise Failure(f"the column {name}{_purpose(name)} has empty values")
        try:
            columns.append(column if column.type == kind else column.cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise Failure(f"the column {name} has the wrong type: {error}") from None
    return pa.RecordBatch.from_arrays(columns, names=names)


def placed(rows: pa.RecordBatch, vbuckets: int, with_meta: bool) -> tuple[pa.RecordBatch, list[bytes]]:
    """The rows, each with the vbucket where it goes; and the keys of misplaced documents that cannot go there.

    ``vbuckets`` is the number of vbuckets of the target, which may differ from that of the source.
    """
    misplaced: list[bytes] = []
    own = key_vbuckets(rows.column("key"), vbuckets)
    if MISPLACED.name in rows.schema.names:
        is_misplaced, found = rows.column(MISPLACED.name).fill_null(False), rows.column("vbucket").fill_null(0)
        rows = rows.drop_columns(list(_PLACE))
        there = pc.and_(is_misplaced, pc.less(found, vbuckets)) if with_meta else pa.repeat(False, rows.num_rows)
        own = pc.if_else(there, found, own)
        refused = pc.and_not(is_misplaced, there)
        misplaced = rows.filter(refused).column("key").to_pylist()
        rows, own = rows.filter(pc.invert(refused)), own.filter(pc.invert(refused))
    return rows.append_column(CHANGES.field("vbucket"), own), misplaced


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
    names = [name for name in file.schema_arrow.names if name in TAKEN + _META + _PLACE]
    return file.iter_batches(ROWS_MAX, columns=names), file.metadata.num_rows


_READERS: Final[dict[str, Callable[[str], tuple[Iterator[pa.RecordBatch], int | None]]]] = {
    "jsonl": _from_lines,
    "csv": _from_csv,
    "parquet": _from_parquet,
}
