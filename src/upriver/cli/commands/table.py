"""``upriver table``: tables that the pipeline mirror keeps."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from upriver.cli.errors import Failure, InputError
from upriver.cli.json_lines import text_fields
from upriver.cli.output import progress, show_json, shown
from upriver.cli.parameters import TIME, address_argument, json_option, vbuckets_option
from upriver.cli.run_async import one_line_errors
from upriver.client import Address
from upriver.errors import ForeignData, OldLayout, StorageError
from upriver.model import Difference

if TYPE_CHECKING:
    from upriver.pipelines.core import Workers
    from upriver.pipelines.targets.tables import TableDescription
    from upriver.tables import Table

DIFFERENT: Final = 1
_UNITS: Final = ("bytes", "kB", "MB", "GB", "TB")


class StorageOptionsType(click.ParamType[dict[str, str]]):
    """Options of an object store."""

    name = "options"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        """The options by name."""
        if isinstance(value, dict):
            return value
        from upriver.tables import storage_options

        try:
            return storage_options(value)
        except ValueError as error:
            self.fail(f"{value!r} must be {error}", param, ctx)


_path = click.argument("path")
_storage = click.option(
    "--storage-options",
    "storage",
    type=StorageOptionsType(),
    metavar="NAME=VALUE,…",
    help="Options of the object store; by default from the environment.",
)
_master = click.option("--master", metavar="URL", help="Work in the tasks of this Spark, not in processes here.")


@click.group(no_args_is_help=False)
def table() -> None:
    """Show, compact, vacuum and verify the tables of the pipeline mirror.

    PATH is the directory of a table, or a URL (s3://, gs://, az://). All commands work while `upriver run mirror` keeps
    the table.

    \b
    Examples:
      upriver table show tables/shop
      upriver table compact tables/shop
      upriver table vacuum --dry-run tables/shop
      upriver table verify tables/shop 127.0.0.1:11210
    """


@table.command()
@_storage
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_path
def show(storage: dict[str, str] | None, as_json: bool, path: str) -> None:
    """Show rows, files, columns, owner and log of a table.

    *Reads ahead* are vbuckets that were read from the node after a rollback, until the stream has passed that read.
    *Foreign changes* are vbuckets whose rows another program has changed; the mirror reads them again.

    \b
    Examples:
      upriver table show tables/shop
      upriver table show --json s3://lake/shop | jq .rows
    """
    with _errors():
        from upriver.pipelines.targets.tables import describe_table

        found = describe_table(_opened(path, storage))
    if as_json:
        show_json(dataclasses.asdict(found))
    else:
        for name, value in _lines(found):
            click.echo(f"{name:<17}{value}".rstrip())


def _lines(found: "TableDescription") -> Iterator[tuple[str, str]]:
    yield "table", f"{found.path} ({found.kind})"
    yield "version", f"{found.version}, of {datetime.fromtimestamp(found.changed_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    yield "rows", f"{found.rows:,} live, {found.dead_rows:,} dead"
    yield "files", f"{found.files:,}, {_size(found.size)}"
    yield "log", f"{found.log_files:,} files, {_size(found.log_size)}"
    yield "deletion vectors", "on" if found.deletion_vectors else "off"
    yield "query", found.query or "none"
    yield "bucket", found.bucket or "unknown"
    yield "last batch", "none" if found.last_batch is None else str(found.last_batch)
    yield "reads ahead", _vbuckets(found.reads_ahead)
    yield "foreign changes", _vbuckets(found.foreign_changes)
    for number, (name, kind) in enumerate(found.columns.items()):
        yield "" if number else "columns", f"{name} {kind}"


@table.command()
@_storage
@_master
@_path
def compact(storage: dict[str, str] | None, master: str | None, path: str) -> None:
    """Merge all small files of a table, and purge its dead rows.

    The mirror compacts by itself when it pays; this does everything at once, for example before an export. Queries that
    are running still find the old files, which vacuum deletes after the retention. Rows that the mirror changes in the
    meantime stay changed.

    \b
    Examples:
      upriver table compact tables/shop
      upriver table compact --master spark://10.0.0.1:7077 s3://lake/shop
    """
    with _errors(), _workers(master) as workers:
        from upriver.pipelines.targets.tables import compact_table, describe_table

        opened = _opened(path, storage)
        before = describe_table(opened)
        with progress("compact", None, "files") as advance:
            replaced = compact_table(opened, workers, lambda _: advance(1))
        opened.read_log()
        after = describe_table(opened)
    for name, found in (("before", before), ("after", after)):
        click.echo(f"{name}\t{found.files:,} files\t{_size(found.size)}\t{found.rows:,} rows\t{found.dead_rows:,} dead")
    click.echo(f"{replaced:,} files were replaced" if replaced else "nothing to compact", err=True)


@table.command()
@_storage
@click.option(
    "--retention", type=TIME, metavar="TIME", help="Keep files for this long, if that is shorter than the table says."
)
@click.option("--dry-run", is_flag=True, help="Only list the files.")
@_path
def vacuum(storage: dict[str, str] | None, retention: float | None, dry_run: bool, path: str) -> None:
    """Delete files that no version of a table needs any more.

    A file stays for the table's retention, seven days, after it was replaced, because queries may still read it. The
    mirror deletes such files by itself, once an hour. With a short retention, queries that take longer fail. Files that
    tasks wrote within the last hour always stay.

    \b
    Examples:
      upriver table vacuum --dry-run tables/shop
      upriver table vacuum --retention 24h tables/shop
    """
    with _errors():
        from upriver.tables import vacuum_table

        found = vacuum_table(_opened(path, storage), retention_s=retention, dry_run=dry_run)
    if dry_run:
        for each in found.paths:
            click.echo(each)
    done = "would be deleted" if dry_run else "deleted"
    click.echo(f"{len(found.paths):,} files, {_size(found.size)} {done}", err=True)


@table.command()
@vbuckets_option("Only these vbuckets, like 0-511,700.")
@click.option("--key-prefix", metavar="TEXT", help="Only keys that start with this; the same as for the pipeline.")
@click.option("--key-filter", metavar="REGEX", help="Only keys that match this (RE2); the same as for the pipeline.")
@click.option("--value-filter", metavar="JSON", help="Only JSON values with this field; the same as for the pipeline.")
@_storage
@_master
@json_option
@_path
@address_argument
def verify(
    vbuckets: tuple[int, ...] | None,
    storage: dict[str, str] | None,
    master: str | None,
    as_json: bool,
    path: str,
    address: Address,
    **given: str | None,
) -> None:
    """Compare a table with the nodes.

    It prints a line for each document that the table lacks (missing), has in addition (extra) or has with other values
    (different, with the columns). New writes show up as differences until the pipeline has applied them. Use the
    pipeline's filters here too. A document that no longer passes a value filter keeps its last version in the table,
    and is extra.

    The exit code is 0 if both hold the same, and 1 if they differ.

    \b
    Examples:
      upriver table verify tables/shop 127.0.0.1:11210
      upriver table verify --key-prefix user: --json tables/users | jq -r .key
      upriver table verify --master spark://10.0.0.1:7077 s3://lake/shop 10.0.0.7:11210
    """
    found = 0
    with _errors(), _workers(master) as workers:
        from upriver.pipelines.targets.tables import table_differences
        from upriver.spark import ReadOptions, close_readers

        filters = {name: text for name, text in given.items() if text is not None}
        source = dataclasses.replace(ReadOptions.read(filters), address=address, vbuckets=vbuckets)
        opened = _opened(path, storage, latest_state=True)
        try:
            with progress("verify", None, "vbuckets") as advance:
                for difference in table_differences(opened, source, workers, advance):
                    found += 1
                    _show_difference(difference, as_json)
        finally:
            close_readers()
    click.echo(f"{found:,} differences" if found else "no differences", err=True)
    if found:
        click.get_current_context().exit(DIFFERENT)


def _show_difference(difference: Difference, as_json: bool) -> None:
    key = difference.key  # another program may have written a row without a key
    if as_json:
        named = {"key": None} if key is None else text_fields("key", key)
        told = {"vbucket": difference.vbucket, "difference": difference.kind, **named}
        show_json(told | {"columns": list(difference.columns)})
        return
    columns = ",".join(difference.columns)
    shown_key = "" if key is None else shown(key)
    click.echo(f"{difference.vbucket}\t{difference.kind}\t{shown_key}\t{columns}".rstrip("\t"))


def _opened(path: str, storage: dict[str, str] | None, *, latest_state: bool = False) -> "Table":
    from upriver.pipelines.targets.tables import describe_table
    from upriver.tables import Table, TableStorage

    place = TableStorage.of(path, storage)
    try:
        found = Table.open(place)
    except OldLayout:
        raise
    except ForeignData:  # whose advice is for a new mirror
        raise StorageError(place.url, "not a table of Upriver; name one that `upriver run mirror` keeps") from None
    if latest_state and describe_table(found).kind != "latest state":
        raise StorageError(found.storage.url, "the table is a history; name the table of the latest state")
    return found


@contextlib.contextmanager
def _workers(master: str | None) -> "Iterator[Workers]":
    """Processes of this machine, or the tasks of a Spark, which ends with this process."""
    from upriver.pipelines.core import ProcessWorkers, SparkWorkers, spark_session, trouble

    if master is None:
        try:
            yield ProcessWorkers()
        except BrokenProcessPool:
            raise Failure("a process that worked on the table was killed, perhaps for lack of memory") from None
        return
    with tempfile.TemporaryDirectory(prefix="upriver-table-") as folder:
        try:
            yield SparkWorkers(spark_session(Path(folder, "spark.log"), master))
        except Exception as error:
            if type(error).__module__.startswith(("pyspark", "py4j")):
                raise Failure(trouble(error, applying=True).why) from None
            raise


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn expected errors, and a missing extra, into one line."""
    try:
        with one_line_errors():
            yield
    except ModuleNotFoundError as error:
        raise InputError(f'{error.name} is missing: pip install "upriver[pipelines]"') from None


def _vbuckets(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    names = ", ".join(map(str, numbers[:10])) + (", …" if len(numbers) > 10 else "")
    return f"{len(numbers):,} vbuckets: {names}"


def _size(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} {_UNITS[-1]}"
