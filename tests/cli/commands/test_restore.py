"""``upriver restore``."""

from pathlib import Path

from click.testing import CliRunner

from upriver.cli import main
from upriver.node import start


def test_not_over_what_is_there(tmp_path: Path) -> None:
    with start(vbuckets=2, data=str(tmp_path / "data")):
        pass
    result = CliRunner().invoke(main, ["restore", str(tmp_path / "data"), str(tmp_path / "data")], prog_name="upriver")
    assert result.exit_code == 1
    assert "the target directory is not empty" in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_backup(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    result = CliRunner().invoke(main, ["restore", str(tmp_path / "notes"), str(tmp_path / "x")], prog_name="upriver")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert not (tmp_path / "x").exists()
