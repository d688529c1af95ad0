"""``upriver backup``."""

from pathlib import Path

from click.testing import CliRunner

from upriver.cli import main
from upriver.node import start


def test_there_and_back(tmp_path: Path) -> None:
    with start(vbuckets=2, data=str(tmp_path / "data")) as node:
        node.call(node.bucket.vbucket(0).set, b"fruit", b"apple")
    for command, source, target in (("backup", "data", "copy"), ("restore", "copy", "again")):
        result = CliRunner().invoke(main, [command, str(tmp_path / source), str(tmp_path / target)])
        assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    with start(vbuckets=2, data=str(tmp_path / "again")) as node:
        assert node.bucket.vbucket(0).get(b"fruit").value == b"apple"


def test_nothing_to_copy(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["backup", str(tmp_path / "data"), str(tmp_path / "copy")], prog_name="upriver")
    assert result.exit_code == 1
    assert result.stderr == f"upriver backup: {tmp_path / 'data'}: the directory does not exist\n"
