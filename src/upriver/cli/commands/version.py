"""``upriver version``: the installed versions."""

import platform

import click
import pyarrow

from upriver import __version__
from upriver.node import compiled_parts, plain_parts


@click.command()
def version() -> None:
    """Print versions, and which compiled parts are in use.

    Installing Upriver builds them if there is a C compiler. Parts that are missing, or older than the rest, are named.
    Without the item table and the request loop no node starts; for the others plain Python does the same, many times
    slower.
    """
    for name, what in versions().items():
        click.echo(f"{name:<8} {what}")


def versions() -> dict[str, str]:
    """The versions by name."""
    return {
        "upriver": __version__,
        "python": platform.python_version(),
        "pyarrow": pyarrow.__version__,
        "compiled": compiled(),
    }


def compiled() -> str:
    """Which parts run compiled: ``everything``, ``nothing``, or all but those that are named."""
    plain = plain_parts()
    if not plain:
        return "everything"
    return "nothing" if len(plain) == len(compiled_parts()) else f"all but {', '.join(plain)}"
