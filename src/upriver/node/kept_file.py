"""Small files that a node keeps beside its data, each written as a whole: a crash leaves the old one or the new one."""

import os
from pathlib import Path

from upriver.errors import StorageError

#: What a crash may leave behind, and nobody reads.
UNFINISHED = ".new"


def keep(path: Path, content: bytes) -> None:
    """Write the file; it is on disk when this returns. ``StorageError`` if it cannot be."""
    new = path.with_name(path.name + UNFINISHED)
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise StorageError(str(path), error.strerror or str(error)) from None


def drop(path: Path) -> None:
    """Remove the file, if it is there; it is gone from the disk when this returns."""
    try:
        path.unlink(missing_ok=True)
        _sync(path.parent)
    except FileNotFoundError:  # not even the directory
        return
    except OSError as error:
        raise StorageError(str(path), error.strerror or str(error)) from None


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
