"""``upriver get``: the value of a key."""

import os

import click

from upriver.cli.errors import Failure
from upriver.cli.json_lines import text_fields
from upriver.cli.output import on_terminal, show_json
from upriver.cli.parameters import address_argument
from upriver.cli.run_async import run
from upriver.client import Address, Item, KvClient


@click.command()
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print key, value, flags and CAS as a line of JSON.")
@address_argument
def get(key: str, as_json: bool, address: Address) -> None:
    """Print the value of a key.

    In a pipe it prints exactly the bytes of the value; on a terminal it adds a newline. The exit code is 1 if there is
    no such key.

    \b
    Examples:
      upriver get fruit
      upriver get --json fruit 10.0.0.7:11210
      upriver get picture upriver://me@10.0.0.7/default > picture.png
    """
    found = run(_get(os.fsencode(key), address))
    if found is None:
        raise Failure(f"no such key: {key!r}")
    if as_json:
        texts = text_fields("key", os.fsencode(key)) | text_fields("value", found.value)
        show_json({**texts, "flags": found.flags, "cas": found.cas})
    else:
        click.echo(found.value, nl=on_terminal())


async def _get(key: bytes, address: Address) -> Item | None:
    async with KvClient(address) as kv:
        return await kv.get(key)
