"""Small files that are replaced as a whole: a crash leaves the old content or the new one, never a part of it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from upriver.errors import StorageError

#: The end of a temporary file's name. A crash may leave such a file; it is never read, and the next write replaces it.
UNFINISHED: Final = ".new"


def write_atomically(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o666,
    keep_owner: bool = False,
    before_rename: Callable[[], object] = lambda: None,
) -> None:
    """Write a file; it is on disk when this returns. ``OSError`` leaves the old file in place.

    ``mode`` is reduced by the umask. ``keep_owner`` gives the new file the old file's owner, where that is permitted.
    ``before_rename`` runs when the new content is safe and the old file is still in place.
    """
    temporary = path.with_name(f".{path.name}{UNFINISHED}")
    temporary.unlink(missing_ok=True)
    try:
        # O_EXCL: never write through a link, nor into a file that has other permissions.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            if keep_owner:
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    before = path.stat()
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        before_rename()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, if it exists; it is gone from the disk when this returns."""
    with contextlib.suppress(FileNotFoundError):  # there may be no folder either
        path.unlink()
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(path: Path, kind: type[StorageError] = StorageError) -> Iterator[None]:
    """Turn an ``OSError`` into a ``StorageError`` that names the file."""
    try:
        yield
    except OSError as error:
        raise kind(str(path), error.strerror or str(error)) from error
