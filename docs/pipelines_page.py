"""The tables of options in `docs/pipelines.md`: from the declarations, between marks in a page written by hand."""

import dataclasses
from pathlib import Path

from docs.marked_tables import with_table
from upriver.pipelines.core.options import JobOptions, shown_name
from upriver.pipelines.core.registry import PIPELINES, find

PAGE = Path(__file__).parent / "pipelines.md"


def pipelines_page(text: str | None = None) -> str:
    """The page with the tables as they should be."""
    text = PAGE.read_text() if text is None else text
    for name in sorted(PIPELINES):
        text = with_table(text, PAGE.name, name, options_table(find(name).options_type))
    return text


def options_table(options: type[JobOptions]) -> str:
    """Each option as it is typed, its default, and what it does."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    for field in dataclasses.fields(options):
        values, default = field.metadata["values"], field.default
        shown = f"`--{shown_name(field.name)}`" + (f" {values}" if values else "")
        told = f"{default:g} s" if isinstance(default, float) else str(default).lower()
        rows.append(f"| {shown} | {'' if default in (None, False) else f'`{told}`'} | {field.metadata['meaning']} |")
    return "\n".join(rows) + "\n"
