"""``upriver restore``: a data directory from a backup."""

from pathlib import Path

import click

from upriver.cli.run_async import complaints


@click.command()
@click.argument("source", type=click.Path(path_type=Path), metavar="BACKUP")
@click.argument("data", type=click.Path(path_type=Path), metavar="DATA")
def restore(source: Path, data: Path) -> None:
    """Make a data directory for a node from a backup.

    DATA is a new or empty directory; the backup stays as it is. Every block is checked against its checksum first. The
    node that is started with DATA is another store than the one that was copied: it starts a new branch of history for
    each active vbucket, so consumers of the original notice and go back to what the copy holds.

    \b
    Examples:
      upriver restore /backup/monday /var/lib/upriver
      upriver serve --data /var/lib/upriver
    """
    from upriver.engine.storage import hot_copy

    with complaints():
        hot_copy(source, data, check=True)
    click.echo(f"{data}: restored from {source}", err=True)
