"""``upriver move``: move vbuckets to another node."""

from collections import Counter
from collections.abc import Callable

import click

from upriver.cli.errors import Failure
from upriver.cli.output import progress, show_json
from upriver.cli.parameters import ADDRESS, VBUCKETS, address_argument, json_option, patience_option
from upriver.cli.run_async import interruptible, run
from upriver.client import PARALLEL, Address, Mover, Step
from upriver.protocol.move import Goal, Phase


@click.command()
@click.argument("vbuckets", type=VBUCKETS, metavar="VBUCKETS")
@click.option("--to", "destination", type=ADDRESS, required=True, metavar="ADDRESS", help="Destination node.")
@click.option("--undo", is_flag=True, help="Undo an interrupted move, unless it is complete.")
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=PARALLEL,
    show_default=True,
    help="Number of vbuckets to move in parallel.",
)
@patience_option("Give up on a vbucket that makes no progress for this long.")
@json_option
@address_argument
def move(
    vbuckets: tuple[int, ...],
    destination: Address,
    undo: bool,
    parallel: int,
    patience: float,
    as_json: bool,
    address: Address,
) -> None:
    """Move vbuckets to another node while they are in use.

    ADDRESS is the source node. The mover copies everything, blocks writes for a moment, copies the rest, makes the
    source's copy dead and the destination's copy active, and sends all nodes a new cluster map, so that clients follow.
    At no time are both copies active. Users need the role admin on both nodes.

    After an interruption, run the same command again to continue, or add --undo to undo the move. --undo asks the
    destination first; while that cannot be reached, the source stays as it is. With --json each step of each vbucket is
    a line. The exit code is 0 only if all vbuckets have moved, or all are undone. Run only one mover per vbucket.

    \b
    Examples:
      upriver move 0-511 --to 10.0.0.8:11210 10.0.0.7:11210
      upriver move 7 --to 10.0.0.8:11210 --undo 10.0.0.7:11210
    """
    goal = Goal.UNDO if undo else Goal.TAKE_OVER
    again = "run the same command again to continue, or add --undo to undo unfinished moves"
    with interruptible(again), progress("undo" if undo else "move", len(vbuckets), "vbuckets") as advance:

        def on_step(step: Step) -> None:
            if as_json:
                show_step(step)
            advance(int(step.phase.over))

        steps = run(_move(address, destination, vbuckets, goal, parallel, patience, on_step))
    _conclude(steps, Phase.UNDONE if undo else Phase.MOVED)


async def _move(
    source: Address,
    destination: Address,
    vbuckets: tuple[int, ...],
    goal: Goal,
    parallel: int,
    patience_s: float,
    on_step: Callable[[Step], object],
) -> list[Step]:
    mover = Mover(source, destination, vbuckets, goal, parallel=parallel, patience_s=patience_s, on_step=on_step)
    try:
        return await mover.carry_out()
    finally:
        await mover.close()


def show_step(step: Step) -> None:
    """Print a step as a line of JSON."""
    found = {"vbucket": step.vbucket, "phase": step.phase.name.lower(), "reason": step.reason}
    show_json({**found, "bytes": step.bytes_passed_on, "told": step.told})


def _conclude(steps: list[Step], wanted: Phase) -> None:
    counted = Counter(step.phase.name.lower() if step.phase.over else "unfinished" for step in steps)
    click.echo(", ".join(f"{count} {name}" for name, count in sorted(counted.items())), err=True)
    failed = [step for step in steps if step.phase is not wanted]
    if failed:
        step = failed[0]
        raise Failure(f"vbucket {step.vbucket}: {step.reason or step.phase.value}")
