"""The command line reference: the help of every command, as it is printed."""

from collections.abc import Iterator

import click

from docs.examples import vectors
from docs.protocol_pages import fenced, page
from upriver.cli import main
from upriver.wire import DIALECTS
from upriver.wire.explain import explain_packet, render

_WIDTH = 80


def cli_page() -> str:
    """The whole reference."""
    return page(
        "# The command line",
        "`upriver` and `python -m upriver` are the same. Wrong input is one line on standard error and exit code 2.",
        fenced(_help(main, "upriver")),
        *_commands(),
    )


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
    """What explain prints, with the transport specification's mutation."""
    vector = next(v for v in vectors()["upr"]["vectors"] if v["title"] == "UPR_MUTATION command")
    packet = bytes.fromhex(vector["wire"])
    yield "For example, the mutation of the transport specification:"
    yield fenced(f"$ upriver explain {vector['wire']}\n{render(explain_packet(packet, DIALECTS['upr']))}")
