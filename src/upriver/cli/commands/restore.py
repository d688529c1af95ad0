"""``upriver restore``: a data directory from a backup."""

from pathlib import Path

import click

from upriver.cli.run_async import one_line_errors


@click.command()
@click.argument("source", type=click.Path(path_type=Path), metavar="BACKUP")
@click.argument("data", type=click.Path(path_type=Path), metavar="DATA")
def restore(source: Path, data: Path) -> None:
    """Create a data directory from a backup.

    DATA is a new or empty directory; the backup is not changed. Every block is checked against its checksum first. A
    node that runs on DATA starts a new branch of history for each active vbucket, so that consumers of the original
    node roll back to the state of the backup.

    \b
    Examples:
      upriver restore /backup/monday /var/lib/upriver
      upriver serve --data /var/lib/upriver
    """
    from upriver.engine.storage import online_backup

    with one_line_errors():
        online_backup(source, data, check=True)
    click.echo(f"{data}: restored from {source}", err=True)
