"""The command line reference: the help of every command, as it is printed."""

from collections.abc import Iterator

import click

from docs.examples import vectors
from docs.protocol_pages import fenced, page
from upriver.cli import main
from upriver.wire import DIALECTS
from upriver.wire.explain import explain_packet, render

_WIDTH = 80
_INTRODUCTION = """\
`upriver` and `python -m upriver` are the same.

**Where the node is.** The last argument of each command that talks to a node is its address: `HOST:PORT`, or a URL
such as `upriver://user@host:port/bucket?tls=on`. Without it `$UPRIVER_ADDRESS` counts, else `127.0.0.1:11210`. The
password of a user comes from `$UPRIVER_PASSWORD` or from a prompt.

**What is printed.** On a terminal tables, colours and progress bars; in a pipe plain lines with tabs between the
columns and no headings, or JSON lines with `--json`. Complaints and progress go to standard error.

**Exit codes.** 0: done. 1: it went wrong or something was found: no such key, differences, a rollback, documents
refused, nobody at the address, wrong password. 2: what was asked makes no sense. 130: ended by Ctrl-C. Whatever it
is, it is one line on standard error. A reader that closes the pipe ends a command quietly, with 1.

**Completion.** `eval "$(_UPRIVER_COMPLETE=bash_source upriver)"` lets bash complete commands and options;
`zsh_source` and `fish_source` do so for the others."""


def cli_page() -> str:
    """The whole reference."""
    return page(
        "# The command line",
        _INTRODUCTION,
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
