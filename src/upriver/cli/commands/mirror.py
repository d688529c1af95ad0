"""``upriver mirror``: tables that the pipeline mirror keeps."""

import dataclasses
from pathlib import Path

import click

from upriver.cli.errors import Complaint
from upriver.cli.json_lines import text_fields
from upriver.cli.output import progress, show_json, shown
from upriver.cli.parameters import address_argument, json_option, vbuckets_option
from upriver.cli.run_async import complaints
from upriver.client import Address

DIFFERENT = 1


@click.group(no_args_is_help=False)
def mirror() -> None:
    """Compare a mirrored table with the nodes.

    `upriver run mirror` keeps such a table.

    \b
    Examples:
      upriver mirror verify tables/shop 127.0.0.1:11210
    """


@mirror.command()
@click.argument("table", type=click.Path(exists=True, file_okay=False, path_type=Path))
@vbuckets_option("Only these vbuckets, like 0-511,700.")
@click.option("--key-prefix", metavar="TEXT", help="Only keys that start with this; the same as for the pipeline.")
@click.option("--key-filter", metavar="REGEX", help="Only keys that match this (RE2); the same as for the pipeline.")
@click.option("--value-filter", metavar="JSON", help="Only JSON values with this field; the same as for the pipeline.")
@json_option
@address_argument
def verify(
    table: Path,
    vbuckets: tuple[int, ...] | None,
    key_prefix: str | None,
    key_filter: str | None,
    value_filter: str | None,
    as_json: bool,
    address: Address,
) -> None:
    """Compare a mirrored table with the nodes.

    It prints a line for each document that the table lacks (missing), has in addition (extra) or has with other values
    (different, with the columns). New writes show up as differences until the pipeline has applied them. Use the
    pipeline's filters here too. A document that no longer passes a value filter keeps its last version in the table,
    and is extra.

    The exit code is 0 if both hold the same, and 1 if they differ.

    \b
    Examples:
      upriver mirror verify tables/shop 127.0.0.1:11210
      upriver mirror verify --json tables/shop | jq -r .key
    """
    try:
        from upriver.pipelines.apply import NodeReader
        from upriver.pipelines.jobs import open_table, table_differences
        from upriver.spark import ReadOptions
    except ImportError as error:
        raise Complaint(f'{error.name} is missing: pip install "upriver[pipelines]"') from None
    given = {"key_prefix": key_prefix, "key_filter": key_filter, "value_filter": value_filter}
    filters = {name: text for name, text in given.items() if text is not None}
    found = 0
    with complaints():
        held = open_table(table)
        nodes = NodeReader(dataclasses.replace(ReadOptions.read(filters), address=address, vbuckets=vbuckets))
        try:
            numbers = nodes.vbuckets()
            with progress("verify", len(numbers), "vbuckets") as advance:
                for difference in table_differences(held, nodes, numbers, advance):
                    found += 1
                    assert difference.key is not None
                    named = text_fields("key", difference.key)
                    told = {"vbucket": difference.vbucket, "difference": difference.kind, **named}
                    if as_json:
                        show_json(told | {"columns": list(difference.columns)})
                    else:
                        columns = ",".join(difference.columns)
                        key = shown(difference.key)
                        click.echo(f"{difference.vbucket}\t{difference.kind}\t{key}\t{columns}".rstrip("\t"))
        finally:
            nodes.close()
            held.close()
    click.echo(f"{found:,} differences" if found else "no differences", err=True)
    if found:
        click.get_current_context().exit(DIFFERENT)
