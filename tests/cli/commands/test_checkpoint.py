"""``upriver checkpoint``."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from upriver.cli import main
from upriver.client import FileCheckpoint, Progress
from upriver.model import Snapshot, StreamPosition


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)], prog_name="upriver")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint with two vbuckets."""
    path = tmp_path / "seen"
    positions = {3: StreamPosition(7, 20, Snapshot(10, 30)), 5: StreamPosition.at(8, 40)}
    FileCheckpoint(path, source="orders").write({number: Progress.at(each) for number, each in positions.items()})
    return path


def shown(path: Path) -> dict[int, dict[str, int]]:
    result = run("show", "--json", path)
    assert result.exit_code == 0, result.output
    return {row.pop("vbucket"): row for row in map(json.loads, result.stdout.splitlines())}


def test_show(path: Path) -> None:
    assert shown(path) == {
        3: {"vbucket_uuid": 7, "seqno": 20, "snapshot_start": 10, "snapshot_end": 30},
        5: {"vbucket_uuid": 8, "seqno": 40, "snapshot_start": 40, "snapshot_end": 40},
    }
    plain = run("show", path)
    assert plain.stdout.splitlines()[0] == "3\t7\t20\t10\t30"
    assert "2 vbuckets of orders" in plain.stderr


def test_backup_reset_restore(path: Path, tmp_path: Path) -> None:
    before = shown(path)
    copy = tmp_path / "copy"
    assert run("backup", path, copy).exit_code == 0
    assert run("backup", path, copy).exit_code == 2  # there already
    assert run("reset", "--vbuckets", "3", path).exit_code == 0
    assert list(shown(path)) == [5]
    assert run("reset", path).exit_code == 0
    assert shown(path) == {}
    assert run("restore", copy, path).exit_code == 2
    assert run("restore", "--force", copy, path).exit_code == 0
    assert shown(path) == before
    assert FileCheckpoint(path, source="orders").read().keys() == {3, 5}


def test_not_over_the_checkpoint_of_another_source(path: Path, tmp_path: Path) -> None:
    FileCheckpoint(tmp_path / "other", source="users").write({})
    result = run("restore", "--force", path, tmp_path / "other")
    assert result.exit_code == 2
    assert "another source" in result.stderr


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n")
    for name in ("text", "nothing"):
        for command in (("show",), ("reset",), ("backup",)):
            more = (tmp_path / "copy",) if command == ("backup",) else ()
            result = run(*command, tmp_path / name, *more)
            assert result.exit_code == 1
            assert result.stderr.count("\n") == 1
    assert not (tmp_path / "copy").exists()
