"""``upriver replicate``: keep copies on another node."""

import asyncio
from collections.abc import Callable

import click

from upriver.cli.commands.move import show_step
from upriver.cli.errors import Failure
from upriver.cli.node_connection import connected
from upriver.cli.output import progress
from upriver.cli.parameters import ADDRESS, VBUCKETS, address_argument, json_option, patience_option
from upriver.cli.run_async import run
from upriver.client import Address, Mover, Step
from upriver.client.cluster import VbucketStatus, vbuckets_of
from upriver.errors import UpriverError
from upriver.protocol.move import Goal, Phase

_LOOK_S = 0.2


@click.command()
@click.argument("vbuckets", type=VBUCKETS, metavar="VBUCKETS")
@click.option("--to", "destination", type=ADDRESS, required=True, metavar="ADDRESS", help="Destination node.")
@click.option("--once", is_flag=True, help="Stop when the copies hold what the source held at the start.")
@patience_option("Give up after this long without progress.")
@json_option
@address_argument
def replicate(
    vbuckets: tuple[int, ...], destination: Address, once: bool, patience: float, as_json: bool, address: Address
) -> None:
    """Keep copies of vbuckets on another node up to date, until Ctrl-C.

    ADDRESS is the node with the active copies. On the destination the vbuckets become replicas and replace other
    copies, which must not be active. Broken connections and ended streams are restarted. A vbucket that cannot be
    replicated is reported at once, and the others continue. With --json each step of each vbucket is a line.

    \b
    Examples:
      upriver replicate 0-1023 --to 10.0.0.8:11210 10.0.0.7:11210
      upriver replicate --once 7 --to 10.0.0.8:11210
    """
    tells = len(vbuckets) > 1  # a single vbucket is reported by the exit of the command
    run(_replicate(address, destination, vbuckets, once, patience, show_step if as_json else _tell if tells else None))


def _tell(step: Step) -> None:
    """Report a vbucket that cannot be replicated."""
    if step.phase is Phase.FAILED:
        click.echo(f"vbucket {step.vbucket} is not replicated: {step.reason}", err=True)


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
    streaming: set[int] = set()

    def take_step(step: Step) -> None:
        (streaming.add if step.phase is Phase.STREAMING else streaming.discard)(step.vbucket)
        if step.phase is Phase.FAILED:
            goals.pop(step.vbucket, None)
        if on_step is not None:
            on_step(step)

    mover = Mover(source, destination, vbuckets, Goal.REPLICATE, patience_s=patience_s, on_step=take_step)
    watching = asyncio.create_task(stop_when_there(mover, source, destination, goals, streaming)) if once else None
    try:
        steps = await mover.carry_out()
    finally:
        if watching is not None:
            watching.cancel()
        await mover.close()
    failed = [step for step in steps if step.phase is not Phase.STREAMING]
    if failed:
        raise Failure(f"vbucket {failed[0].vbucket}: {failed[0].reason or failed[0].phase.value}")


async def stop_when_there(
    mover: Mover, source: Address, destination: Address, goals: dict[int, int], streaming: set[int]
) -> None:
    """Stop the mover when the copies have reached their goals, or hold all that the source still has."""
    with progress("replicate", sum(goals.values()), "changes") as advance:
        shown = 0
        while True:
            there = await _there(source, destination, goals)
            advance(max(0, sum(there.values()) - shown))
            shown = max(shown, sum(there.values()))
            if there == goals and goals.keys() <= streaming:
                mover.stop()
                return
            await asyncio.sleep(_LOOK_S)


async def _there(source: Address, destination: Address, goals: dict[int, int]) -> dict[int, int]:
    """The seqno that each copy has reached. Copies that are not on the branch of their source yet are left out."""
    try:
        original, copies = await asyncio.gather(_look(source), _look(destination))
    except UpriverError:  # the mover decides when to give up
        return {}
    for number in goals.keys() & original.keys():  # after a flush there is less to reach
        goals[number] = min(goals[number], original[number].high_seqno)
    return {
        number: min(goal, copies[number].high_seqno)
        for number, goal in goals.items()
        if number in original and number in copies and copies[number].vbucket_uuid == original[number].vbucket_uuid
    }


async def _look(address: Address) -> dict[int, VbucketStatus]:
    async with connected(address) as connection:
        return await vbuckets_of(connection)
