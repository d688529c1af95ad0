"""``upriver version``: what is installed here."""

import platform

import click
import pyarrow

from upriver import __version__
from upriver.wire.columns import CODEC

_CODECS = {"compiled": "compiled", "plain": "plain Python"}


@click.command()
def version() -> None:
    """Print versions, and which columnar codec is in use.

    The codec turns whole buffers of packets into Arrow batches. It is compiled where a C compiler was at hand when
    Upriver was installed; elsewhere plain Python does the same, more slowly.
    """
    for name, what in versions().items():
        click.echo(f"{name:<8} {what}")


def versions() -> dict[str, str]:
    """What the command prints, by name."""
    return {
        "upriver": __version__,
        "python": platform.python_version(),
        "pyarrow": pyarrow.__version__,
        "codec": codec(),
    }


def codec() -> str:
    """Which columnar codec serves: ``compiled`` or ``plain Python``."""
    return _CODECS[CODEC]
