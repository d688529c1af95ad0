"""``upriver stats``: the statistics of a node."""

import click

from upriver.cli.node_connection import connected
from upriver.cli.output import show_json, show_table
from upriver.cli.parameters import address_argument
from upriver.cli.run_async import run
from upriver.client import Address
from upriver.client.cluster import statistics


@click.command()
@click.option("-g", "--group", default="", metavar="NAME", help="Group: vbucket, vbucket-details, dcp, tap, memory, …")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@address_argument
def stats(group: str, as_json: bool, address: Address) -> None:
    """Show the statistics of a node.

    If the address names several nodes, the first one is asked.

    \b
    Examples:
      upriver stats
      upriver stats --group "vbucket-details 7" 10.0.0.7:11210
      upriver stats --json | jq .curr_items
    """
    found = run(_stats(group, address))
    if as_json:
        show_json(found)
    else:
        show_table(("name", "value"), found.items(), as_json=False)


async def _stats(group: str, address: Address) -> dict[str, str]:
    async with connected(address) as connection:
        return await statistics(connection, group)
