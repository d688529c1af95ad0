"""``upriver backup``: a copy of a node's data while it runs."""

from pathlib import Path

import click

from upriver.cli.run_async import one_line_errors


@click.command()
@click.argument("data", type=click.Path(path_type=Path), metavar="DATA")
@click.argument("target", type=click.Path(path_type=Path), metavar="BACKUP")
def backup(data: Path, target: Path) -> None:
    """Copy the data directory of a node, even while it runs.

    DATA is the directory of `upriver serve --data`, on the same machine. BACKUP is a new or empty directory. The copy
    is consistent: it holds everything that was on disk at one moment, including tombstones, failover logs and history.
    With --ack memory, the newest acknowledged writes may not be on disk yet, and are then missing.

    `upriver dump` copies documents over the network instead, without history and failover logs.

    \b
    Examples:
      upriver backup /var/lib/upriver /backup/monday
      upriver restore /backup/monday /var/lib/upriver
    """
    from upriver.engine.storage import online_backup

    with one_line_errors():
        online_backup(data, target)
    click.echo(f"{target}: a copy of {data}", err=True)
