"""The command line reference in `docs/cli.md`: the help of every command, as it is printed."""

from collections.abc import Iterator
from pathlib import Path

import click

from docs.examples import vectors
from docs.inserts import filled
from docs.protocol_pages import fenced
from upriver.cli import main
from upriver.wire import DIALECTS
from upriver.wire.explain import explain_packet, explanation_text

_WIDTH = 80
PAGE = Path(__file__).parent / "cli.md"


def cli_page() -> str:
    """The reference inside a page that is written by hand."""
    return filled(PAGE, {"commands": "\n\n".join([fenced(_help(main, "upriver")), *_commands()])})


def _commands() -> Iterator[str]:
    for name, command in sorted(main.commands.items()):
        yield f"## upriver {name}"
        yield fenced(_help(command, f"upriver {name}"))
        for part, subcommand in sorted(command.commands.items()) if isinstance(command, click.Group) else ():
            yield f"### upriver {name} {part}"
            yield fenced(_help(subcommand, f"upriver {name} {part}"))
        if name == "explain":
            yield from _sample()


def _help(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=name, terminal_width=_WIDTH, help_option_names=["-h", "--help"])
    return command.get_help(context)


def _sample() -> Iterator[str]:
    """The output of explain for the mutation of the transport specification."""
    vector = next(v for v in vectors()["upr"]["vectors"] if v["title"] == "UPR_MUTATION command")
    packet = bytes.fromhex(vector["wire"])
    yield "For example, the mutation of the transport specification:"
    yield fenced(f"$ upriver explain {vector['wire']}\n{explanation_text(explain_packet(packet, DIALECTS['upr']))}")
