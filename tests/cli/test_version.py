"""``upriver version``."""

import platform

import pyarrow
from click.testing import CliRunner

from upriver import __version__
from upriver.cli import main
from upriver.cli.version import codec


def test_version() -> None:
    result = CliRunner().invoke(main, ["version"])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"upriver  {__version__}",
        f"python   {platform.python_version()}",
        f"pyarrow  {pyarrow.__version__}",
        f"codec    {codec()}",
    ]


def test_codec() -> None:
    assert codec() in {"compiled", "plain Python"}
