"""The tables of options in `docs/spark.md`: from the declarations, between marks in a page written by hand."""

import dataclasses
from pathlib import Path

from docs.marked_tables import with_table
from upriver.spark.options import ConnectionOptions, ReadOptions, WriteOptions, spark_name

PAGE = Path(__file__).parent / "spark.md"
TABLES = {"read": ReadOptions, "write": WriteOptions}


def spark_page(text: str | None = None) -> str:
    """The page with the tables as they should be."""
    text = PAGE.read_text() if text is None else text
    for name, options in TABLES.items():
        text = with_table(text, PAGE.name, name, options_table(options))
    return text


def options_table(options: type[ConnectionOptions]) -> str:
    """Each option as Spark writes it, its default, and what it does."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    for field in dataclasses.fields(options):
        values = field.metadata["values"]
        shown = f"`{spark_name(field.name)}`" + (f" {values}" if values else "")
        default = "" if field.default in (None, False) else f"`{str(field.default).lower()}`"
        rows.append(f"| {shown} | {default} | {field.metadata['meaning']} |")
    return "\n".join(rows) + "\n"
