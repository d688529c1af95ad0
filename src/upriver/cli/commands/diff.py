"""``upriver diff``: compare two nodes."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click
import pyarrow as pa

from upriver.cli.commands.dump import live
from upriver.cli.errors import Failure
from upriver.cli.json_lines import text_fields
from upriver.cli.node_connection import connected
from upriver.cli.output import Advance, on_terminal, progress, show_json, shown
from upriver.cli.parameters import ADDRESS, address_argument, json_option, patience_option, vbuckets_option
from upriver.cli.run_async import run
from upriver.client import Address, Consumer
from upriver.client.cluster import SingleNode, VbucketStatus, vbuckets_of
from upriver.model import CHANGES, Difference, VbucketState, differences

#: Changes of each node to hold in memory at a time; at least those of one vbucket.
CHANGES_MAX: Final = 256 * 1024
#: A document. Its seqno and CAS may differ between nodes.
_COMPARED: Final = ("vbucket", "key", "value", "flags", "expiry", "datatype")
_COLUMNS: Final = (*_COMPARED, "event", "seqno")
_READ: Final = pa.schema([CHANGES.field(name) for name in _COLUMNS])
_COLOURS: Final = {"missing": "red", "extra": "yellow", "different": "magenta"}
DIFFERENT: Final = 1


@click.command()
@click.argument("first", type=ADDRESS, metavar="FIRST")
@vbuckets_option("Only these vbuckets, like 0-511,700.")
@patience_option()
@json_option
@address_argument
def diff(first: Address, vbuckets: tuple[int, ...] | None, patience: float, as_json: bool, address: Address) -> None:
    """Compare two nodes, vbucket by vbucket.

    It prints a line for each document that the second node, ADDRESS, lacks (missing), has in addition (extra), or has
    with another value, flags or expiry (different). A line without a key concerns a whole vbucket. Each node is asked
    for its own copies in every role except dead, so that replicas can be compared with their source. It compares a few
    vbuckets at a time, each in its state at that moment; concurrent writes show up as differences.

    The exit code is 0 if both nodes hold the same, and 1 if they differ or cannot be read.

    \b
    Examples:
      upriver diff 10.0.0.7:11210 10.0.0.8:11210
      upriver diff --vbuckets 0-15 --json 10.0.0.7 10.0.0.8 | jq -r .key
    """
    found = run(_diff(first, address, vbuckets, patience, as_json))
    click.echo(f"{found:,} differences" if found else "no differences", err=True)
    if found:
        click.get_current_context().exit(DIFFERENT)


async def _diff(
    first: Address, second: Address, wanted: tuple[int, ...] | None, patience_s: float, as_json: bool
) -> int:
    mine, theirs = await asyncio.gather(_held(first), _held(second))
    numbers = sorted(mine.keys() | theirs.keys()) if wanted is None else list(wanted)
    unknown = [str(number) for number in numbers if number not in mine and number not in theirs]
    if unknown:  # nothing was compared, which must not look like equal
        raise Failure(f"neither node has vbucket {', '.join(unknown[:10])}, except as a dead copy")
    found = 0
    for number in numbers:
        if (number in mine) != (number in theirs):
            found += 1
            _show(Difference(number, "missing" if number in mine else "extra"), as_json)
    both = [number for number in numbers if number in mine and number in theirs]
    total = sum(held[number].high_seqno for held in (mine, theirs) for number in both)
    with progress("diff", total, "changes") as advance:
        for group in _groups(both, mine, theirs):
            ours, others = await asyncio.gather(
                _read(first, group, mine, patience_s, advance), _read(second, group, theirs, patience_s, advance)
            )
            for number in group:
                for difference in differences(ours[number], others[number]):
                    found += 1
                    _show(difference, as_json)
    return found


async def _held(address: Address) -> Mapping[int, VbucketStatus]:
    async with connected(address) as connection:
        held = await vbuckets_of(connection)
    return {number: status for number, status in held.items() if status.state is not VbucketState.DEAD}


def _groups(
    numbers: Sequence[int], mine: Mapping[int, VbucketStatus], theirs: Mapping[int, VbucketStatus]
) -> Iterator[list[int]]:
    """Groups of vbuckets to read together: bounded in memory, and large enough to save connections."""
    group: list[int] = []
    changes = 0
    for number in numbers:
        size = max(mine[number].high_seqno, theirs[number].high_seqno)
        if group and changes + size > CHANGES_MAX:
            yield group
            group, changes = [], 0
        group.append(number)
        changes += size
    if group:
        yield group


async def _read(
    address: Address, group: list[int], held: Mapping[int, VbucketStatus], patience_s: float, advance: Advance
) -> dict[int, pa.Table]:
    """The documents of a node in these vbuckets."""
    now = int(time.time())
    pieces: dict[int, list[pa.RecordBatch]] = {number: [] for number in group}
    ends = {number: held[number].high_seqno for number in group if held[number].high_seqno}
    if ends:
        reading: dict[str, Any] = {"vbuckets": list(ends), "end": ends, "columns": _COLUMNS, "patience_s": patience_s}
        consumer = Consumer(address, active_only=False, **reading)
        consumer.cluster = SingleNode(address, ends)
        async with consumer:
            async for batch in consumer:
                at = 0
                for each in batch.runs:
                    pieces[each.vbucket].append(batch.records.slice(at, each.rows))
                    at += each.rows
                advance(len(batch))
    return {number: _documents(batches, now) for number, batches in pieces.items()}


def _documents(batches: list[pa.RecordBatch], now: int) -> pa.Table:
    return live(pa.Table.from_batches(batches, _READ), now).select(list(_COMPARED))


def _show(difference: Difference, as_json: bool) -> None:
    key = difference.key
    if as_json:
        named = {"key": None} if key is None else text_fields("key", key)
        show_json({"vbucket": difference.vbucket, "difference": difference.kind, **named})
        return
    kind = click.style(difference.kind, fg=_COLOURS[difference.kind]) if on_terminal() else difference.kind
    click.echo(f"{difference.vbucket}\t{kind}\t{'' if key is None else shown(key)}")
