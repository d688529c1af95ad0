"""``upriver checkpoint``: the files with the progress of consumers."""

from pathlib import Path

import click

from upriver.cli.errors import Failure, InputError
from upriver.cli.output import show_table
from upriver.cli.parameters import json_option, vbuckets_option
from upriver.cli.run_async import one_line_errors
from upriver.client.consumer import FileCheckpoint, Progress

_file = click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
_COLUMNS = ("vbucket", "vbucket_uuid", "seqno", "snapshot_start", "snapshot_end")


@click.group(no_args_is_help=False)
def checkpoint() -> None:
    """Show, back up, restore and reset the checkpoints of consumers.

    A checkpoint is a file with the progress of a consumer such as `upriver tail --checkpoint`. Change it only while the
    consumer is stopped.

    \b
    Examples:
      upriver checkpoint show seen.ckpt
      upriver checkpoint backup seen.ckpt monday.ckpt
      upriver checkpoint reset --vbuckets 7 seen.ckpt
    """


@checkpoint.command()
@json_option
@_file
def show(as_json: bool, path: Path) -> None:
    """Show the position of a consumer in each vbucket."""
    found, progress = _read(path)
    rows = (
        (number, at.vbucket_uuid, at.seqno, at.snapshot.start, at.snapshot.end)
        for number, at in ((number, progress[number].position) for number in sorted(progress))
    )
    click.echo(f"{path}: progress in {len(progress)} vbuckets of {found.source or 'a source without a name'}", err=True)
    show_table(_COLUMNS, rows, as_json=as_json)


@checkpoint.command()
@_file
@click.argument("target", type=click.Path(path_type=Path), metavar="BACKUP")
def backup(path: Path, target: Path) -> None:
    """Copy a checkpoint to another file, which must not exist."""
    _copy(path, target)


@checkpoint.command()
@click.argument("source", type=click.Path(path_type=Path), metavar="BACKUP")
@_file
@click.option("--force", is_flag=True, help="Replace an existing checkpoint, which is kept as FILE.1.")
def restore(source: Path, path: Path, force: bool) -> None:
    """Restore a checkpoint from a backup: its consumer repeats everything since then."""
    _copy(source, path, force=force)


@checkpoint.command()
@vbuckets_option("Only these vbuckets, like 0-511,700.")
@_file
def reset(vbuckets: tuple[int, ...] | None, path: Path) -> None:
    """Discard the progress of a consumer, so that it starts over."""
    found, progress = _read(path)
    kept = {} if vbuckets is None else {n: each for n, each in progress.items() if n not in vbuckets}
    with one_line_errors():
        found.write(kept)
    click.echo(f"{path}: {len(progress) - len(kept)} vbuckets start over", err=True)


def _read(path: Path) -> tuple[FileCheckpoint, dict[int, Progress]]:
    if not path.exists():
        raise Failure(f"{path}: no such checkpoint")
    with one_line_errors():
        found = FileCheckpoint.existing(path)
        return found, found.read()


def _copy(source: Path, target: Path, *, force: bool = False) -> None:
    found, progress = _read(source)
    if target.exists() and not force:
        raise InputError(f"{target}: the file exists already; choose another one")
    with one_line_errors():
        if target.exists() and FileCheckpoint.existing(target).source != found.source:
            raise InputError(f"{target}: it belongs to another source than {source}")
        copy = FileCheckpoint(target, source=found.source)
        copy.selection = found.selection
        copy.write(progress)
    click.echo(f"{target}: progress in {len(progress)} vbuckets", err=True)
