"""``upriver delete``: delete a key."""

import os

import click

from upriver.cli.commands.set import show_written
from upriver.cli.errors import Failure
from upriver.cli.parameters import address_argument, json_option
from upriver.cli.run_async import run
from upriver.client import Address, KvClient, Written
from upriver.errors import KeyNotFound


@click.command()
@click.argument("key")
@click.option("--cas", type=click.IntRange(0, 2**64 - 1), default=0, help="Delete only if the key has this CAS.")
@json_option
@address_argument
def delete(key: str, cas: int, as_json: bool, address: Address) -> None:
    """Delete a key.

    The exit code is 1 if there is no such key.

    \b
    Examples:
      upriver delete fruit
      upriver delete --cas 1789012345678 fruit 10.0.0.7:11210
    """
    written = run(_delete(key, cas, address))
    if as_json:
        show_written(written)


async def _delete(key: str, cas: int, address: Address) -> Written:
    async with KvClient(address) as kv:
        try:
            return await kv.delete(os.fsencode(key), cas=cas)
        except KeyNotFound:
            raise Failure(f"no such key: {key!r}") from None
