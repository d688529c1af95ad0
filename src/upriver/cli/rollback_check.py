"""``upriver rollback-check``: would a consumer be sent back, and why."""

from collections.abc import Mapping
from pathlib import Path

import click

from upriver.cli.complaint import Complaint, Failure
from upriver.cli.output import show_json
from upriver.cli.parameters import POSITIONS, address_argument, json_option
from upriver.cli.running import complaints, run
from upriver.client import Address, FileCheckpoint
from upriver.client.cluster import Cluster
from upriver.client.inquiry import VbucketStatus, active_vbuckets, failover_logs
from upriver.model import FailoverLog, StreamPosition
from upriver.model.rollback import rollback_by_snapshot

ROLLED_BACK = 1


@click.command("rollback-check")
@click.option("--at", "positions", type=POSITIONS, metavar="POSITIONS", help="VBUCKET:UUID:SEQNO[:START:END],…")
@click.option("--checkpoint", type=click.Path(path_type=Path), metavar="FILE", help="Take the positions of a consumer.")
@json_option
@address_argument
def rollback_check(
    positions: dict[int, StreamPosition] | None, checkpoint: Path | None, as_json: bool, address: Address
) -> None:
    """Tell whether a consumer would be sent back, and why.

    A position is what a consumer keeps of a vbucket: the uuid of the branch, the last seqno, and the bounds of the
    snapshot that it lies in. It is held against the failover log of the active node, by the rule of `dcp`. Exit code 1
    if a vbucket would be rolled back.

    \b
    Examples:
      upriver rollback-check --at 7:0xdeadbeef:100
      upriver rollback-check --at 7:0xdeadbeef:100:90:120 10.0.0.7:11210
      upriver rollback-check --checkpoint seen.ckpt
    """
    if (positions is None) == (checkpoint is None):
        raise click.UsageError("give either --at POSITIONS or --checkpoint FILE")
    if checkpoint is not None:
        positions = _positions_in(checkpoint)
    assert positions is not None
    statuses, logs = run(_ask(sorted(positions), address))
    back = 0
    for number, position in sorted(positions.items()):
        if number not in statuses or number not in logs:
            raise Failure(f"vbucket {number}: no node of the cluster has it active")
        status = statuses[number]
        to = rollback_by_snapshot(logs[number], status.high_seqno, status.purge_seqno, position)
        why = explained(position, logs[number], status.high_seqno, status.purge_seqno)
        back += to is not None
        if as_json:
            show_json({"vbucket": number, "rollback": to is not None, "to_seqno": to, "why": why})
        else:
            verdict = "goes on" if to is None else f"would be rolled back to {to}"
            click.echo(f"vbucket {number}: {verdict}: {why}")
    if back:
        click.get_current_context().exit(ROLLED_BACK)


def _positions_in(path: Path) -> dict[int, StreamPosition]:
    if not path.exists():
        raise Complaint(f"{path}: there is no such checkpoint")
    with complaints():
        progress = FileCheckpoint.existing(path).read()
    return {number: each.position for number, each in progress.items()}


async def _ask(numbers: list[int], address: Address) -> tuple[Mapping[int, VbucketStatus], Mapping[int, FailoverLog]]:
    cluster = Cluster(address)
    logs: dict[int, FailoverLog] = {}
    try:
        known = await cluster.open()
        numbers = [number for number in numbers if number < known.vbuckets]
        statuses = await active_vbuckets(cluster, numbers)
        for number in statuses:
            endpoint = known.owner(number)
            assert endpoint is not None
            logs |= await failover_logs(await cluster.connection(endpoint), [number])
    finally:
        await cluster.close()
    return statuses, logs


def explained(position: StreamPosition, log: FailoverLog, high_seqno: int, purge_seqno: int) -> str:
    """Why a consumer at this position may go on, or may not."""
    uuid, seqno = position.vbucket_uuid, position.seqno
    if seqno == 0:
        return "it starts at 0, and who has nothing can lose nothing"
    if seqno < purge_seqno:
        return (
            f"deletions up to seqno {purge_seqno} are purged, it stands before them at {seqno} and may have missed "
            "some, so it starts over"
        )
    place = log.index(uuid)
    if place is None:
        return f"the uuid {uuid:#x} is not in the failover log: nothing is known of that branch, so it starts over"
    upper = log.upper(place, high_seqno)
    branch = "the newest branch" if place == 0 else f"branch {uuid:#x}, since which {place} newer ones have begun"
    shared = f"it is on {branch}, of which the node shares the history up to seqno {upper}"
    start, end = position.snapshot.start, position.snapshot.end
    if seqno in (start, end):
        if seqno <= upper:
            return f"{shared}, and holds nothing beyond that: it is at {seqno}"
        return f"{shared}, and it holds changes up to {seqno}, which the node does not have"
    inside = f"it is in the middle of a snapshot from {start} to {end}, at {seqno}"
    if end <= upper:
        return f"{shared}; {inside}, which the node has whole"
    return (
        f"{shared}; {inside}, and the node cannot finish that snapshot as it was begun, so it goes back "
        f"to where it was whole or the branches part, whichever is earlier"
    )
