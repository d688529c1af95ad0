"""Command line parameters that follow from declared options. This imports little: ``--help`` must be quick."""

import dataclasses
from typing import Any

import click

from upriver.options import as_flag, shown_default


def declared_option(field: "dataclasses.Field[Any]", name: str) -> click.Option:
    """The parameter for a declared option, which is called ``--name``. Its text is read later, with all the others."""
    help_text = f"{field.metadata['help'][0].upper()}{field.metadata['help'][1:]}."
    if field.metadata["read"] is as_flag:
        names = f"--{name}/--no-{name}" if field.default else f"--{name}"
        return click.Option([names, field.name], is_flag=True, default=None, help=help_text)
    default = shown_default(field)
    values = field.metadata["values"]
    is_quoted = values.startswith("'")  # one text, whose commas separate no choices
    metavar = values if is_quoted else values.replace(" or a URL", "").replace(", ", "|") or "TEXT"
    return click.Option(
        [f"--{name}", field.name],
        type=str,
        metavar=metavar,
        help=help_text + (f" [default: {default}]" if default else ""),
    )
