"""``upriver replicate``: keep copies on another node."""

import asyncio
from collections.abc import Callable

import click

from upriver.cli.complaint import Failure
from upriver.cli.move import show_step
from upriver.cli.output import progress
from upriver.cli.parameters import ADDRESS, VBUCKETS, address_argument, json_option
from upriver.cli.running import run
from upriver.client import Address, Mover, Step
from upriver.client.cluster import Cluster
from upriver.client.inquiry import VbucketStatus, vbuckets_of
from upriver.client.mover import PATIENCE_S
from upriver.protocol.mover import Goal, Phase

_LOOK_S = 0.2


@click.command()
@click.argument("vbuckets", type=VBUCKETS, metavar="VBUCKETS")
@click.option("--to", "destination", type=ADDRESS, required=True, metavar="ADDRESS", help="The node that gets copies.")
@click.option("--once", is_flag=True, help="End when the copies hold what the node holds at the start.")
@click.option("--patience", type=click.FloatRange(0.1), default=PATIENCE_S, show_default=True, metavar="SECONDS",
              help="Give up if nothing goes on for so long.")  # fmt: skip
@json_option
@address_argument
def replicate(
    vbuckets: tuple[int, ...], destination: Address, once: bool, patience: float, as_json: bool, address: Address
) -> None:
    """Keep copies of vbuckets on another node up to date, until Ctrl-C.

    ADDRESS is the node that has them active. On the other node they become replicas, whatever was there before; it must
    not have them active. Connections that break are made again. With --json each step of each vbucket is a line.

    \b
    Examples:
      upriver replicate 0-1023 --to 10.0.0.8:11210 10.0.0.7:11210
      upriver replicate --once 7 --to 10.0.0.8:11210
    """
    on_step = show_step if as_json else None
    run(_replicate(address, destination, vbuckets, once, patience, on_step))


async def _replicate(
    source: Address,
    destination: Address,
    vbuckets: tuple[int, ...],
    once: bool,
    patience_s: float,
    on_step: Callable[[Step], object] | None,
) -> None:
    goals = {number: each.high_seqno for number, each in (await _look(source)).items() if number in vbuckets}
    missing = [number for number in vbuckets if number not in goals]
    if missing:
        raise Failure(f"{source.endpoints[0]} has no vbucket {', '.join(map(str, missing[:10]))}")
    mover = Mover(source, destination, vbuckets, Goal.REPLICATE, patience_s=patience_s, on_step=on_step)
    watching = asyncio.create_task(_stop_when_there(mover, destination, goals)) if once else None
    try:
        steps = await mover.carry_out()
    finally:
        if watching is not None:
            watching.cancel()
        await mover.close()
    failed = [step for step in steps if step.phase is not Phase.STREAMING]
    if failed:
        raise Failure(f"vbucket {failed[0].vbucket}: {failed[0].reason or failed[0].phase.value}")


async def _stop_when_there(mover: Mover, destination: Address, goals: dict[int, int]) -> None:
    with progress("replicate", sum(goals.values()), "changes") as advance:
        shown = 0
        while True:
            held = await _look(destination)
            there = sum(min(goal, held[number].high_seqno) for number, goal in goals.items() if number in held)
            advance(max(0, there - shown))
            shown = max(shown, there)
            if there == sum(goals.values()) and goals.keys() <= held.keys():
                mover.stop()
                return
            await asyncio.sleep(_LOOK_S)


async def _look(address: Address) -> dict[int, VbucketStatus]:
    cluster = Cluster(address)
    try:
        return await vbuckets_of(await cluster.connection(address.endpoints[0]))
    finally:
        await cluster.close()
