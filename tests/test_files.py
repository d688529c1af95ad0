"""A file that is replaced as a whole survives a crash at any step, and is on disk when the writer returns."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from upriver.errors import StorageError, UsersFileError
from upriver.files import UNFINISHED, remove, storage_errors, write_atomically

#: The writer, with a process that ends at once when it calls one function of ``os`` for the n-th time.
CRASHING = """
import os, pathlib, sys
from upriver.files import write_atomically
step, countdown = sys.argv[2], int(sys.argv[3])
real = getattr(os, step)
def crash(*arguments):
    global countdown
    countdown -= 1
    if not countdown:
        os._exit(3)
    return real(*arguments)
setattr(os, step, crash)
write_atomically(pathlib.Path(sys.argv[1]), b"new")
"""


def test_a_file_is_written_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    remove(path)
    remove(path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("step", "calls", "kept"),
    [("fsync", 1, b"old"), ("replace", 1, b"old"), ("fsync", 2, b"new")],
    ids=["before the file is synced", "before the rename", "before the folder is synced"],
)
def test_a_crash_between_the_steps_leaves_a_complete_file(tmp_path: Path, step: str, calls: int, kept: bytes) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    command = [sys.executable, "-c", CRASHING, str(path), step, str(calls)]
    assert subprocess.run(command, check=False).returncode == 3
    assert path.read_bytes() == kept
    assert all(each.name in ("file", f".file{UNFINISHED}") for each in tmp_path.iterdir())
    write_atomically(path, b"after the restart")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"after the restart"]


def test_the_file_is_synced_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        steps.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_atomically(tmp_path / "file", b"content", before_rename=lambda: steps.append("hook"))
    assert steps == ["sync file", "hook", "rename", "sync folder"]
    remove(tmp_path / "file")
    assert steps[4:] == ["sync folder"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one")

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"two", before_rename=fail)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"one"


def test_permissions_are_those_of_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "file"
    leftover = tmp_path / f".file{UNFINISHED}"
    leftover.write_bytes(b"of a crash")
    leftover.chmod(0o666)
    write_atomically(path, b"secret", mode=0o600, keep_owner=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    mask = os.umask(0o027)
    try:
        write_atomically(path, b"public")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_temporary_name_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"not ours")
    (tmp_path / f".file{UNFINISHED}").symlink_to(other)
    write_atomically(tmp_path / "file", b"content")
    assert other.read_bytes() == b"not ours"
    assert not (tmp_path / "file").is_symlink()


def test_errors_name_the_file(tmp_path: Path) -> None:
    remove(tmp_path / "no folder" / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match=str(tmp_path / "folder")), storage_errors(tmp_path / "folder"):
        remove(tmp_path / "folder")
    path = tmp_path / "no folder" / "file"
    with pytest.raises(UsersFileError, match="No such file"), storage_errors(path, UsersFileError):
        write_atomically(path, b"")
