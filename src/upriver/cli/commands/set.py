"""``upriver set``: store a value."""

import os
import sys

import click

from upriver.cli.output import show_json
from upriver.cli.parameters import address_argument, json_option
from upriver.cli.run_async import run
from upriver.client import Address, KvClient, Written


@click.command("set")
@click.argument("key")
@click.argument("value")
@click.option("--flags", type=click.IntRange(0, 2**32 - 1), default=0, help="32 bits to store with the value.")
@click.option(
    "--expiry",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    help="Seconds until the key expires; above 30 days, a Unix time; 0 for never.",
)
@click.option("--cas", type=click.IntRange(0, 2**64 - 1), default=0, help="Store only if the key has this CAS.")
@json_option
@address_argument
def set_(key: str, value: str, flags: int, expiry: int, cas: int, as_json: bool, address: Address) -> None:
    """Store a value under a key.

    If VALUE is -, the value is read from standard input. --json prints the CAS, vbucket and seqno of the new value;
    without it nothing is printed. The exit code is 1 if the node refuses the value.

    \b
    Examples:
      upriver set fruit apple
      upriver set fruit - < apple.json
      upriver set --expiry 60 session 4711 10.0.0.7:11210
    """
    data = sys.stdin.buffer.read() if value == "-" else os.fsencode(value)
    written = run(_set(os.fsencode(key), data, flags, expiry, cas, address))
    if as_json:
        show_written(written)


def show_written(written: Written) -> None:
    """Print the result of a write as a line of JSON."""
    place = {"vbucket": written.vbucket, "vbucket_uuid": written.vbucket_uuid, "seqno": written.seqno}
    show_json({"cas": written.cas, **place})


async def _set(key: bytes, value: bytes, flags: int, expiry: int, cas: int, address: Address) -> Written:
    async with KvClient(address) as kv:
        return await kv.set(key, value, flags=flags, expiry=expiry, cas=cas)
