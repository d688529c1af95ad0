"""``upriver restore``."""

import struct
from pathlib import Path

from click.testing import CliRunner

from tests.support.node_process import refused
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


def test_one_bit_of_the_older_meta_page_is_refused(tmp_path: Path) -> None:
    """With it LMDB shows the commit before the last one, without a word. A node refuses the directory as well."""
    with start(vbuckets=2, data=str(tmp_path / "data")) as node:
        node.call(node.bucket.vbucket(0).set, b"fruit", b"apple")
    file = tmp_path / "data" / "data.mdb"
    good = bytearray(file.read_bytes())
    numbers = {struct.unpack_from("<Q", good, place)[0]: place for place in (144, 4096 + 144)}
    last, older = max(numbers), min(numbers)
    struct.pack_into("<Q", good, numbers[older], last + 1)
    file.write_bytes(good)
    said = (
        f"data.mdb cannot be read: an LMDB meta page claims commit {last + 1}, but its tree is that of commit {older}"
    )
    arguments = ["restore", str(tmp_path / "data"), str(tmp_path / "again")]
    result = CliRunner().invoke(main, arguments, prog_name="upriver")
    assert (result.exit_code, result.stderr) == (1, f"upriver restore: {tmp_path / 'data'}: {said}\n")
    line = refused("--port", "0", "--vbuckets", "2", "--data", str(tmp_path / "data"))
    assert line == f"upriver serve: {tmp_path / 'data'}: {said}: restore the directory from a backup\n"


def test_a_changed_list_of_free_pages_is_refused(tmp_path: Path) -> None:
    """LMDB would overwrite the page that is listed now."""
    with start(vbuckets=2, data=str(tmp_path / "data")) as node:
        for i in range(3):
            node.call(node.bucket.vbucket(0).set, b"fruit", b"apple %d" % i)
            node.bucket.sync()
    file = tmp_path / "data" / "data.mdb"
    good = file.read_bytes()
    newest = max((0, 4096), key=lambda meta: int(struct.unpack_from("<Q", good, meta + 144)[0]))
    free, main_tree = (int(struct.unpack_from("<Q", good, newest + place)[0]) for place in (80, 128))
    (pointer,) = struct.unpack_from("<H", good, free * 4096 + 16)  # its first list: a key, a count, pages
    damaged = bytearray(good)
    struct.pack_into("<Q", damaged, free * 4096 + pointer + 24, main_tree)
    file.write_bytes(damaged)
    arguments = ["restore", str(tmp_path / "data"), str(tmp_path / "again")]
    result = CliRunner().invoke(main, arguments, prog_name="upriver")
    assert result.exit_code == 1
    assert "the free pages: " in result.stderr
    assert "the free pages: " in refused("--port", "0", "--vbuckets", "2", "--data", str(tmp_path / "data"))
