"""Files that are there as a whole or not at all."""

from pathlib import Path

import pytest

from upriver.errors import StorageError
from upriver.node.kept_file import UNFINISHED, drop, keep


def test_a_file_is_written_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    keep(path, b"one")
    keep(path, b"two")
    assert path.read_bytes() == b"two"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    drop(path)
    drop(path)
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    keep(path, b"one")
    (tmp_path / ("file" + UNFINISHED)).mkdir()
    with pytest.raises(StorageError, match=str(path)):
        keep(path, b"two")
    assert path.read_bytes() == b"one"


def test_nothing_to_remove_where_there_is_no_directory(tmp_path: Path) -> None:
    drop(tmp_path / "none" / "file")
    (tmp_path / "directory").mkdir()
    with pytest.raises(StorageError):
        drop(tmp_path / "directory")
