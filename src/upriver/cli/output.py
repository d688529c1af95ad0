"""The output of commands: tables on a terminal, lines with tabs in a pipe, or JSON lines; and progress bars.

Rich is imported only to draw on a terminal, because the import is slow.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

Advance = Callable[[int], None]


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def can_prompt() -> bool:
    """Whether standard input is a terminal, so that a prompt can be shown."""
    return sys.stdin.isatty()


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, as_json: bool) -> None:
    """Print rows with a heading; in a pipe without it."""
    if as_json:
        for row in rows:
            show_json(dict(zip(columns, row, strict=True)))
    elif on_terminal():
        _draw(columns, list(rows))
    else:
        for row in rows:
            click.echo("\t".join(map(str, row)))


def show_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    click.echo(json.dumps(value, ensure_ascii=False))


def _draw(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    numeric = [bool(rows) and all(isinstance(row[place], int) for row in rows) for place in range(len(columns))]
    table = Table(box=SIMPLE, header_style="bold")
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name.replace("_", " "), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console().print(table)


@contextlib.contextmanager
def progress(what: str, total: int | None, unit: str = "") -> Iterator[Advance]:
    """A progress bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)


def shown(data: bytes) -> str:
    """Bytes as readable text: invalid UTF-8 and control characters are escaped."""
    text = data.decode(errors="backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
