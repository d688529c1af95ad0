"""``upriver tail``: changes as they happen."""

import sys
from typing import Any, Final

import click

from upriver.cli.errors import InputError
from upriver.cli.json_lines import event_line, lines_of, with_misplaced
from upriver.cli.output import on_terminal, shown
from upriver.cli.parameters import (
    POSITIONS,
    address_argument,
    json_option,
    patience_option,
    replicas_option,
    vbuckets_option,
)
from upriver.cli.run_async import run
from upriver.client import Address, Batch, Consumer, FileCheckpoint
from upriver.client.consumer import DIALECTS, POLICIES
from upriver.client.transport import PATIENCE_S
from upriver.errors import InvalidArguments
from upriver.model import Event

_COLOURS: Final = {"mutation": "green", "deletion": "red", "expiration": "yellow"}


@click.command()
@click.option(
    "-d", "--dialect", type=click.Choice(list(DIALECTS)), default="dcp", help="Dialect to speak.  [default: dcp]"
)
@click.option(
    "--from",
    "start",
    default="now",
    metavar="WHERE",
    help="Where to start: earliest, now, or positions VBUCKET:UUID:SEQNO[:START:END],…  [default: now]",
)
@click.option(
    "--stream-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Port for stream requests, if it differs from the node's port.",
)
@click.option("--until-now", is_flag=True, help="Stop at the changes that exist now.")
@click.option("--checkpoint", metavar="FILE", help="Resume from FILE, and save progress there.")
@click.option(
    "--on-rollback",
    type=click.Choice(list(POLICIES)),
    default="rewind",
    help="What to do when the source rolls back.  [default: rewind]",
)
@click.option("-n", "--limit", type=click.IntRange(1), help="Stop after this many changes.")
@vbuckets_option("Only these vbuckets, like 0-511,700.")
@replicas_option
@click.option("--keys-only", is_flag=True, help="Leave out the values.")
@click.option("--key-filter", metavar="REGEX", help="Only keys that match this (RE2).")
@click.option("--value-filter", metavar="JSON", help='Only JSON values that match this: {"field": "a.b", "equals": 1}.')
@click.option("--persisted-only", is_flag=True, help="Only changes that are on the node's disk.")
@click.option("--history", is_flag=True, help="Every retained version, not only the newest of each key.")
@patience_option(
    f"Give up when a vbucket has had no stream for this long.  [default: {PATIENCE_S:g} with --until-now]", None
)
@json_option
@address_argument
def tail(
    start: str, until_now: bool, checkpoint: str | None, limit: int | None, as_json: bool, address: Address,
    **settings: Any,
) -> None:  # fmt: skip
    """Show changes as they happen, until Ctrl-C.

    Each line is a change: vbucket, seqno, event, key, value. With --json the lines are those of `upriver dump`, with
    the event added. Events of whole vbuckets (rollback, reset, flush) have no key. With a checkpoint, every change is
    shown at least once, even if either side restarts. Without --until-now and --patience, it waits for an unreachable
    node, or for the owner of a vbucket that has none, without a time limit. With --until-now it fails if no node has
    the active copy of a vbucket, unless --replicas is given.

    \b
    Examples:
      upriver tail --from earliest --json --dialect upr
      upriver tail --key-filter '^order:' --value-filter '{"field": "state", "contains": "paid"}'
      upriver tail --from 7:0xdeadbeef:100 --vbuckets 7
      upriver tail --checkpoint seen.ckpt --json 10.0.0.7:11210 | while read -r line; do …; done
    """
    settings["start"] = _start(start)
    settings["end"] = "latest" if until_now else "never"
    settings["patience_s"] = settings.pop("patience")
    settings["active_only"] = not settings.pop("replicas")
    if checkpoint is not None:
        settings["checkpoint"] = FileCheckpoint(checkpoint, source=str(address))
    run(_tail(settings, limit, as_json, address))


async def _tail(settings: dict[str, Any], limit: int | None, as_json: bool, address: Address) -> None:
    try:
        consumer = Consumer(address, **settings)
    except InvalidArguments as error:
        raise InputError(error.detail) from None
    left = limit
    async with consumer:
        async for batch in consumer:
            lines = _json_lines(batch, consumer.cluster_map.vbuckets) if as_json else _plain_lines(batch)
            sys.stdout.write("".join(f"{line}\n" for line in lines[:left]))
            sys.stdout.flush()
            if left is not None:
                left -= len(lines[:left])
                if left == 0:
                    return


def _start(text: str) -> Any:
    if text in ("earliest", "now"):
        return "latest" if text == "now" else text
    return POSITIONS.convert(text, None, click.get_current_context())


def _json_lines(batch: Batch, vbuckets: int) -> list[str]:
    if batch.event is not None:
        return [event_line(batch.event)]
    return list(lines_of(with_misplaced(batch.records, vbuckets), with_event=True))


def _plain_lines(batch: Batch) -> list[str]:
    coloured = on_terminal()
    lines = []
    for row in batch.records.select(["vbucket", "seqno", "event", "key", "value"]).to_pylist():
        event = Event(row["event"]).name.lower()
        name = click.style(event, fg=_COLOURS.get(event, "magenta")) if coloured else event
        cells = [str(row["vbucket"]), str(row["seqno"]), name, shown(row["key"]), shown(row["value"] or b"")]
        lines.append("\t".join(cells).rstrip("\t"))
    return lines
