"""``upriver compact``: give the free space of a data file back."""

from pathlib import Path

import click

from upriver.cli.run_async import one_line_errors


@click.command()
@click.argument("data", type=click.Path(path_type=Path), metavar="DATA")
def compact(data: Path) -> None:
    """Make the data file of a stopped node smaller.

    DATA is the directory of `upriver serve --data`. A node uses freed space again but does not give it back. This
    command copies what is in use to a new file, which then takes the place of the old one. It needs space for both, and
    no node may use the directory meanwhile.

    \b
    Example:
      upriver compact /var/lib/upriver
    """
    from upriver.engine.storage import compact as compact_file

    with one_line_errors():
        before, after = compact_file(data)
    click.echo(f"{data}: {before / 2**20:.1f} MiB became {after / 2**20:.1f} MiB", err=True)
