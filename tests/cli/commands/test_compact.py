"""``upriver compact``."""

from pathlib import Path

from click.testing import CliRunner

from upriver.cli import main
from upriver.node import start


def test_it_gives_space_back(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = ["compact", str(data)]
    with start(vbuckets=1, data=str(data)) as node:
        for _ in range(20):
            node.call(node.bucket.vbucket(0).set, b"large", bytes(500_000))
            assert node.bucket.sync(30)
        node.call(node.bucket.vbucket(0).flush)
        node.call(node.bucket.vbucket(0).set, b"key", b"value")
        node.bucket.flusher.request_checkpoint()
        assert node.bucket.sync(30)
        result = CliRunner().invoke(main, command, prog_name="upriver")
        assert result.exit_code == 1
        assert result.stderr == f"upriver compact: {data}: another process uses the directory\n"
    before, files = (data / "data.mdb").stat().st_size, sorted(path.name for path in data.iterdir())
    result = CliRunner().invoke(main, command, prog_name="upriver")
    assert result.exit_code == 0, result.stderr
    assert " MiB became " in result.stderr
    assert sorted(path.name for path in data.iterdir()) == files
    assert (data / "data.mdb").stat().st_size < before / 2
    with start(vbuckets=1, data=str(data)) as node:
        assert node.bucket.vbucket(0).get(b"key").value == b"value"


def test_what_is_no_data_directory(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["compact", str(tmp_path)], prog_name="upriver")
    assert (result.exit_code, result.stderr) == (
        1,
        f"upriver compact: {tmp_path}: this is not a data directory of a node\n",
    )
    result = CliRunner().invoke(main, ["compact", str(tmp_path / "absent")], prog_name="upriver")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
