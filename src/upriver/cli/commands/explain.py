"""``upriver explain``: packets, byte by byte."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TextIO

import click

from upriver.cli.errors import InputError
from upriver.cli.output import can_prompt
from upriver.errors import WireError
from upriver.wire import (
    DIALECTS,
    Explanation,
    Ink,
    NotHexadecimal,
    explanation_json,
    explanation_text,
    read_hexdump,
    uncoloured,
)
from upriver.wire import explain as explain_packets

_COLOURED: Mapping[Ink, Callable[[str], str]] = {
    Ink.TITLE: partial(click.style, bold=True),
    Ink.FRAME: partial(click.style, dim=True),
    Ink.HEADER: partial(click.style, fg="cyan"),
    Ink.NUMBER: partial(click.style, fg="yellow"),
    Ink.TEXT: partial(click.style, fg="green"),
    Ink.MEANING: partial(click.style, fg="magenta"),
}


@click.command()
@click.option(
    "-d",
    "--dialect",
    type=click.Choice(list(DIALECTS)),
    help="Dialect of the packets. [default: the one that fits best]",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of diagrams.")
@click.option(
    "-f", "--file", "path", type=click.Path(path_type=Path), metavar="FILE", help="Read FILE; - is standard input."
)
@click.argument("words", metavar="[HEX...]", nargs=-1)
def explain(dialect: str | None, as_json: bool, path: Path | None, words: tuple[str, ...]) -> None:
    """Explain packets: byte diagram and list of fields.

    Packets are read as hexadecimal digits from the command line, from a file (-f FILE) or from standard input (-, or no
    argument). A file may contain raw bytes, digits with or without 0x, spaces, colons and # comments, the output of xxd
    or hexdump -C, or a recording. All packets of a run must be in one dialect.

    \b
    Examples:
      upriver explain 80 5c 0000 00 00 0000 00000000 00000001 0000000000000000
      upriver explain --dialect upr -f packets.hex
      xxd packets.bin | upriver explain --json -

    JSON: a list of {"dialect", "message", "magic", "offset", "length", "fields"}, where a field is {"name", "first",
    "last", "value", "meaning"} with first and last as inclusive byte offsets inside the packet. Numbers are numbers.
    Keys and values are text, or "hex:" and digits if they are not UTF-8. The drafts with a 12-byte header have no
    magic: null.

    Invalid input is reported after the packets before it; the exit code is then 2.
    """
    data = _given(words, path)
    explained = explain_packets(data, None if dialect is None else DIALECTS[dialect])
    show = _show_json if as_json else _show_text
    if failure := show(explained):
        raise InputError(str(failure))


def _given(words: tuple[str, ...], path: Path | None) -> bytes:
    if words and words != ("-",):
        if path is not None:
            raise InputError("HEX and -f FILE exclude each other: give one of them")
        return _bytes_of(" ".join(words).encode())
    if path is None and not words and can_prompt():
        raise InputError("nothing to explain: give HEX, -f FILE or - for standard input")
    return _bytes_of(_contents(path))


def _contents(path: Path | None) -> bytes:
    if path is None or str(path) == "-":
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _bytes_of(given: bytes) -> bytes:
    try:
        data = read_hexdump(given)
    except NotHexadecimal as error:
        raise InputError(str(error)) from None
    if not data:
        raise InputError("nothing to explain: the input is empty")
    return data


def _show_text(explained: Iterator[Explanation]) -> WireError | None:
    """Print each packet as soon as it is explained; returns the error that ended it, if any."""
    paint = _coloured if wants_colour(sys.stdout, os.environ) else uncoloured
    between = ""
    try:
        for explanation in explained:
            click.echo(between + explanation_text(explanation, paint))
            between = "\n"
    except WireError as error:
        return error
    return None


def _show_json(explained: Iterator[Explanation]) -> WireError | None:
    """Print the list; it is valid JSON even after an error, which is returned."""
    found: list[dict[str, object]] = []
    failure = None
    try:
        found.extend(map(explanation_json, explained))  # keeps the packets before an error
    except WireError as error:
        failure = error
    click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    return failure


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to use colours: only on a terminal, and not if NO_COLOR is set."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def _coloured(text: str, ink: Ink) -> str:
    return _COLOURED[ink](text)
