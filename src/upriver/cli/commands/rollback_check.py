"""``upriver rollback-check``: would a consumer be rolled back, and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click

from upriver.cli.errors import Failure, InputError
from upriver.cli.output import show_json
from upriver.cli.parameters import POSITIONS, address_argument, json_option
from upriver.cli.run_async import one_line_errors, run
from upriver.client import Address, FileCheckpoint, Progress
from upriver.client.cluster import Cluster, VbucketStatus, active_vbuckets, failover_logs
from upriver.client.consumer import DRAFTS
from upriver.errors import KeyNotFound, OutOfRange
from upriver.model import (
    FailoverEntry,
    FailoverLog,
    StreamPosition,
    resume_by_entry,
    rollback_by_entry,
    rollback_by_snapshot,
)

DIALECTS = ("dcp", "upr", *DRAFTS)

ROLLED_BACK = 1


@click.command("rollback-check")
@click.option(
    "--at", "positions", type=POSITIONS, metavar="POSITIONS", help="Positions: VBUCKET:UUID:SEQNO[:START:END],…"
)
@click.option("--dialect", type=click.Choice(DIALECTS), default="dcp", show_default=True,
              help="Dialect whose rollback rules apply; tap has none.")  # fmt: skip
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), metavar="FILE", help="Read the positions from a checkpoint."
)
@json_option
@address_argument
def rollback_check(
    positions: dict[int, StreamPosition] | None, dialect: str, checkpoint: Path | None, as_json: bool, address: Address
) -> None:
    """Explain whether a consumer would be rolled back, and why.

    A position is a consumer's place in a vbucket: the uuid of the branch, the last seqno, and the bounds of the
    snapshot. It is compared with the failover log of the owner. Requests of `upr` and the drafts have no bounds: their
    consumers compare the logs themselves, and START is their last consistent point. The exit code is 1 if a vbucket
    would be rolled back.

    \b
    Examples:
      upriver rollback-check --at 7:0xdeadbeef:100
      upriver rollback-check --at 7:0xdeadbeef:100:90:120 10.0.0.7:11210
      upriver rollback-check --dialect upr --checkpoint seen.ckpt
    """
    if (positions is None) == (checkpoint is None):
        raise click.UsageError("give either --at POSITIONS or --checkpoint FILE")
    progress = _progress_in(checkpoint) if checkpoint is not None else {}
    positions = positions or {number: each.position for number, each in progress.items()}
    statuses, logs = run(_ask(sorted(positions), address))
    back = 0
    for number, position in sorted(positions.items()):
        if number not in statuses or number not in logs:
            raise Failure(f"vbucket {number}: no node of the cluster has it active")
        source = RollbackInputs(logs[number], statuses[number].high_seqno, statuses[number].purge_seqno)
        ours = progress[number].failover_log if number in progress else None
        to, why = judged(position, source) if dialect == "dcp" else judged_by_logs(position, ours, source, dialect)
        back += to is not None
        if as_json:
            show_json({"vbucket": number, "rollback": to is not None, "to_seqno": to, "why": why})
        else:
            verdict = "continues" if to is None else f"would be rolled back to {to}"
            click.echo(f"vbucket {number}: {verdict}: {why}")
    if back:
        click.get_current_context().exit(ROLLED_BACK)


def _progress_in(path: Path) -> dict[int, Progress]:
    if not path.exists():
        raise InputError(f"{path}: no such checkpoint")
    with one_line_errors():
        progress = dict(FileCheckpoint.existing(path).read())
    if any(each.is_unplaced for each in progress.values()):
        raise InputError(f"{path}: this is a checkpoint of tap, which has no positions to compare")
    return progress


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


class RollbackInputs(NamedTuple):
    """The facts about a vbucket at its owner that the rules need."""

    log: FailoverLog
    high_seqno: int
    purge_seqno: int


_NOTHING = "it starts at 0, so there is nothing to roll back"


def _purged(seqno: int, purge_seqno: int) -> str:
    return (
        f"tombstones up to seqno {purge_seqno} are purged, so at {seqno} it may have missed deletions and starts over"
    )


def judged(position: StreamPosition, source: RollbackInputs) -> tuple[int | None, str]:
    """The seqno to which a `dcp` consumer at this position rolls back, or None; and why."""
    return rollback_by_snapshot(*source, position), _explained(position, *source)


def _explained(position: StreamPosition, log: FailoverLog, high_seqno: int, purge_seqno: int) -> str:
    uuid, seqno = position.vbucket_uuid, position.seqno
    if seqno == 0:
        return _NOTHING
    if seqno < purge_seqno:
        return _purged(seqno, purge_seqno)
    place = log.index(uuid)
    if place is None:
        return f"the uuid {uuid:#x} is not in the failover log: the node does not know that branch, so it starts over"
    upper = log.upper(place, high_seqno)
    branch = "the newest branch" if place == 0 else f"branch {uuid:#x}, which has {place} newer ones"
    shared = f"it is on {branch}, whose history the node shares up to seqno {upper}"
    start, end = position.snapshot.start, position.snapshot.end
    if seqno in (start, end):
        if seqno <= upper:
            return f"{shared}; it is at {seqno}, not beyond that"
        return f"{shared}, but it holds changes up to {seqno}, which the node does not have"
    inside = f"it is in the middle of a snapshot from {start} to {end}, at {seqno}"
    if end <= upper:
        return f"{shared}; {inside}, which the node has completely"
    return (
        f"{shared}; {inside}, and the node cannot complete that snapshot, so it rolls back to its last consistent "
        "point or to where the branches part, whichever is earlier"
    )


def judged_by_logs(
    position: StreamPosition, ours: FailoverLog | None, source: RollbackInputs, dialect: str
) -> tuple[int | None, str]:
    """As ``judged``, for a consumer of `upr` or a draft, whose own log is in its checkpoint.

    Without a checkpoint, the entry of the node's log is used.
    """
    uuid, theirs = position.vbucket_uuid, source.log
    if ours is None:
        place = theirs.index(uuid)
        ours = FailoverLog((FailoverEntry(uuid, 0) if place is None else theirs.entries[place],))
    entry, seqno = resume_by_entry(position, ours, theirs)
    try:
        back = rollback_by_entry(*source, seqno, entry, with_errors=dialect == "upr")
    except (KeyNotFound, OutOfRange):  # both count as a rollback
        back = 0
    reached = seqno if back is None else back
    why = _explained_by_logs(position, ours, source, entry, seqno)
    return (reached if reached < position.seqno else None), why


def _explained_by_logs(
    position: StreamPosition, ours: FailoverLog, source: RollbackInputs, entry: FailoverEntry, seqno: int
) -> str:
    theirs, high_seqno, purge_seqno = source
    if position.seqno == 0:
        return _NOTHING
    place = theirs.index(entry.vbucket_uuid)
    if place is None or ours.index(entry.vbucket_uuid) is None:
        return (
            f"the uuid {position.vbucket_uuid:#x} is not in the failover log: the node does not know that branch, "
            "so it starts over"
        )
    if 0 < seqno < purge_seqno:
        return _purged(seqno, purge_seqno)
    there = theirs.entries[place]
    if seqno and there != entry:
        branch = f"it has branch {entry.vbucket_uuid:#x} from seqno {entry.seqno}"
        return f"{branch}, the node from {there.seqno}: it starts over"
    upper = theirs.upper(place, high_seqno)
    shared = f"the node shares its history up to seqno {upper}"
    if seqno < position.seqno:
        reason = (
            "the node never had its newer branches"
            if entry != ours.newest
            else f"there are newer branches ({place}), and without bounds its position may be inside a snapshot"
        )
        first = f"{reason}: it rolls back to {seqno} by itself"
        return first if seqno <= upper else f"{first}; {shared}, so it rolls back further"
    if seqno <= upper:
        return f"{shared}; it is at {seqno}, not beyond that"
    return f"{shared}, but it holds changes up to {seqno}, which the node does not have"
