"""``upriver failover-log``: the branches of history of vbuckets."""

import click

from upriver.cli.errors import Failure
from upriver.cli.node_connection import connected
from upriver.cli.output import show_table
from upriver.cli.parameters import address_argument, json_option, vbuckets_option
from upriver.cli.run_async import run
from upriver.client import Address
from upriver.client.cluster import failover_logs, vbuckets_of
from upriver.model import FailoverLog


@click.command("failover-log")
@vbuckets_option("Only these vbuckets, like 0-511,700.")
@json_option
@address_argument
def failover_log(vbuckets: tuple[int, ...] | None, as_json: bool, address: Address) -> None:
    """Show the failover logs of vbuckets.

    Each line is a branch, newest first: history after the seqno was written under the uuid. A consumer on an older
    branch may have to roll back; `upriver rollback-check` explains it.

    \b
    Examples:
      upriver failover-log --vbuckets 7
      upriver failover-log --json 10.0.0.7:11210
    """
    logs = run(_logs(vbuckets, address))
    rows = (
        (number, place, f"{entry.vbucket_uuid:#x}" if not as_json else entry.vbucket_uuid, entry.seqno)
        for number, log in logs.items()
        for place, entry in enumerate(log)
    )
    show_table(("vbucket", "entry", "vbucket_uuid", "seqno"), rows, as_json=as_json)


async def _logs(vbuckets: tuple[int, ...] | None, address: Address) -> dict[int, FailoverLog]:
    async with connected(address) as connection:
        numbers = sorted(await vbuckets_of(connection)) if vbuckets is None else vbuckets
        logs = await failover_logs(connection, numbers)
    missing = [number for number in numbers if number not in logs]
    if missing:
        raise Failure(f"{address.endpoints[0]} has no vbucket {', '.join(map(str, missing[:10]))}")
    return logs
