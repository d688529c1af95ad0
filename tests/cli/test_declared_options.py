"""Command line parameters that follow from declared options."""

import dataclasses

import click
from click.testing import CliRunner

from upriver.cli.declared_options import declared_option
from upriver.options import as_count, as_flag, as_seconds, as_text, one_of, option


@dataclasses.dataclass(frozen=True)
class Example:
    """Options of an example."""

    rows_max: int = option(7, as_count, "maximum number of rows", "N")
    order: str = option("up", one_of("up", "down"), "order of the rows")
    pause: float = option(1.5, as_seconds, "time between rows", "TIME")
    to: str | None = option(None, as_text, "where the rows go")
    schema: str | None = option(None, as_text, "columns of the rows", "'NAME TYPE, …'")
    quiet: bool = option(False, as_flag, "print nothing")
    verify: bool = option(True, as_flag, "read the rows again")


def test_the_help_shows_values_and_defaults() -> None:
    parameters = [declared_option(field, field.name.replace("_", "-")) for field in dataclasses.fields(Example)]
    given: list[dict[str, object]] = []
    command = click.Command("example", params=[*parameters], callback=lambda **values: given.append(values))
    assert command.get_help(click.Context(command, terminal_width=80)).partition("Options:\n")[2].splitlines() == [
        "  --rows-max N             Maximum number of rows. [default: 7]",
        "  --order up|down          Order of the rows. [default: up]",
        "  --pause TIME             Time between rows. [default: 1.5s]",
        "  --to TEXT                Where the rows go.",
        "  --schema 'NAME TYPE, …'  Columns of the rows.",
        "  --quiet                  Print nothing.",
        "  --verify / --no-verify   Read the rows again.",
        "  --help                   Show this message and exit.",
    ]
    assert CliRunner().invoke(command, ["--rows-max", "many", "--no-verify"]).exit_code == 0
    nothing = dict.fromkeys(["rows_max", "order", "pause", "to", "schema", "quiet", "verify"])
    assert given == [nothing | {"rows_max": "many", "verify": False}]
