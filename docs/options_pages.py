"""The tables of options in `docs/node.md`, `docs/spark.md` and `docs/pipelines.md`.

They follow from the declarations, and are written between marks in pages that are written by hand.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.inserts import filled
from upriver.node.options import NodeOptions
from upriver.options import hyphenated, shown_default
from upriver.pipelines.core.options import shown_name
from upriver.pipelines.core.registry import PIPELINES, find
from upriver.spark.options import ReadOptions, WriteOptions, spark_name

DOCS = Path(__file__).parent


def tables() -> dict[str, dict[str, str]]:
    """The tables of each page, by name."""
    return {
        "node.md": {"node": options_table(NodeOptions, lambda name: f"--{hyphenated(name)}")},
        "spark.md": {
            "read": options_table(ReadOptions, spark_name),
            "write": options_table(WriteOptions, spark_name),
        },
        "pipelines.md": {
            name: options_table(find(name).options_type, lambda name: f"--{shown_name(name)}")
            for name in sorted(PIPELINES)
        },
    }


def options_pages() -> dict[Path, str]:
    """Each page with its tables as they should be."""
    return {
        DOCS / page: filled(DOCS / page, {f"{name} options": table for name, table in found.items()})
        for page, found in tables().items()
    }


def options_table(options: type[Any], spell: Callable[[str], str]) -> str:
    """Each option with its values, its default and its help."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    for field in dataclasses.fields(options):
        values, default = field.metadata["values"], shown_default(field)
        shown = f"`{spell(field.name)}`" + (f" {values}" if values else "")
        rows.append(f"| {shown} | {default and f'`{default}`'} | {field.metadata['help']} |")
    return "\n".join(rows)
