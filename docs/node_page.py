"""The table of options in `docs/node.md`: from the declarations, between two marks in a page written by hand."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from upriver.node.options import NodeOptions

PAGE = Path(__file__).parent / "node.md"
BEGIN, END = "<!-- options: generated, run `make docs` -->\n", "<!-- end of options -->\n"


def node_page(text: str | None = None) -> str:
    """The page with the table as it should be."""
    text = PAGE.read_text() if text is None else text
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin + end == BEGIN + END, f"{PAGE.name} has lost the marks around its table of options"
    return f"{before}{BEGIN}\n{options_table()}\n{END}{after}"


def options_table() -> str:
    """Each option: its three names are one, its default, and what it does."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    rows += [
        f"| `--{field.name.replace('_', '-')}{_metavar(field)}` | {_default(field)} | {field.metadata['help']} |"
        for field in dataclasses.fields(NodeOptions)
    ]
    return "\n".join(rows) + "\n"


def _metavar(field: "dataclasses.Field[Any]") -> str:
    kind: Any = field.type
    if get_origin(kind) is Literal:
        return " " + "\\|".join(get_args(kind))
    return f" {field.metadata['metavar']}" if field.metadata["metavar"] else ""


def _default(field: "dataclasses.Field[Any]") -> str:
    return "" if field.default is None or str(field.default) in ("", "False") else f"`{field.default}`"
