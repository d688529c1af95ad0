"""``upriver vbucket``: the vbuckets of a node and their roles."""

import click

from upriver.cli.node_connection import connected
from upriver.cli.output import show_table
from upriver.cli.parameters import VBUCKETS, address_argument, json_option
from upriver.cli.run_async import run
from upriver.client import Address
from upriver.client.cluster import VbucketStatus, vbuckets_of
from upriver.model import VbucketState
from upriver.wire import memcached

_COLUMNS = ("vbucket", "state", "vbucket_uuid", "high_seqno", "persisted_seqno", "purge_seqno")


@click.group(no_args_is_help=False)
def vbucket() -> None:
    """List vbuckets, change their role, and delete dead ones.

    Only one node may have the active copy of a vbucket; `upriver move` takes care of that. Change roles by hand only
    for a failover, when the owner is lost.

    \b
    Examples:
      upriver vbucket list
      upriver vbucket set 0-511 active 10.0.0.8:11210
      upriver vbucket delete 0-511 10.0.0.7:11210
    """


@vbucket.command("list")
@click.option("--state", type=click.Choice([each.value for each in VbucketState]), help="Only vbuckets with this role.")
@json_option
@address_argument
def list_(state: str | None, as_json: bool, address: Address) -> None:
    """List the vbuckets of a node: role, newest uuid, and the seqnos in memory, on disk and of the purge."""
    rows = (
        (each.number, each.state.value, each.vbucket_uuid, each.high_seqno, each.persisted_seqno, each.purge_seqno)
        for each in run(_list(address))
        if state in (None, each.state.value)
    )
    show_table(_COLUMNS, rows, as_json=as_json)


async def _list(address: Address) -> list[VbucketStatus]:
    async with connected(address) as connection:
        found = await vbuckets_of(connection)
    return [found[number] for number in sorted(found)]


@vbucket.command("set")
@click.argument("vbuckets", type=VBUCKETS, metavar="VBUCKETS")
@click.argument("state", type=click.Choice([each.value for each in VbucketState]))
@address_argument
def set_(vbuckets: tuple[int, ...], state: str, address: Address) -> None:
    """Set the role of vbuckets, and create missing ones. Returns when the change is on disk."""
    run(_set(vbuckets, VbucketState(state), address))


async def _set(vbuckets: tuple[int, ...], state: VbucketState, address: Address) -> None:
    async with connected(address) as connection:
        for number in vbuckets:
            await connection.ask(memcached.SetVbucket(vbucket=number, state=memcached.VbucketState[state.name]))


@vbucket.command()
@click.argument("vbuckets", type=VBUCKETS, metavar="RANGES")
@address_argument
def delete(vbuckets: tuple[int, ...], address: Address) -> None:
    """Delete dead vbuckets with all their data. Returns when the change is on disk.

    A move leaves dead vbuckets on its source. The command stops at the first vbucket that is not dead or does not
    exist; those before it are deleted. Other servers than Upriver delete a vbucket in any role.
    """
    run(_delete(vbuckets, address))


async def _delete(vbuckets: tuple[int, ...], address: Address) -> None:
    async with connected(address) as connection:
        for number in vbuckets:
            await connection.ask(memcached.DeleteVbucket(vbucket=number))
