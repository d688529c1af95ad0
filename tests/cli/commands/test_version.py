"""``upriver version``."""

import platform

import pyarrow
import pytest
from click.testing import CliRunner

from upriver import __version__
from upriver.cli import main
from upriver.cli.commands.version import compiled
from upriver.node.build_info import compiled_parts
from upriver.wire.codec import frame_runs


def test_version() -> None:
    result = CliRunner().invoke(main, ["version"])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"upriver  {__version__}",
        f"python   {platform.python_version()}",
        f"pyarrow  {pyarrow.__version__}",
        f"compiled {compiled()}",
    ]


def test_what_plain_python_serves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if not all(compiled_parts().values()):
        pytest.skip("not everything is compiled here")
    assert compiled() == "everything"
    monkeypatch.setattr(frame_runs, "change_run", frame_runs.plain_change_run)
    assert compiled() == "all but frames"
    monkeypatch.setattr("upriver.node.build_info._imports", lambda name: False)
    assert compiled() == "all but item table, request loop, frames"


def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.cli.commands.version.plain_parts", lambda: list(compiled_parts()))
    assert compiled() == "nothing"
