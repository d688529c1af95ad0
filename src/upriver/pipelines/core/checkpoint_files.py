"""The small files next to a checkpoint, on the local disk or on any file system that Spark can reach.

Spark's own part of a checkpoint may be anywhere. What a pipeline keeps beside it is there too, so it goes through
Spark's file system layer, with Spark's credentials. Local directories need no Spark.
"""

import contextlib
import fcntl
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from upriver.errors import CheckpointError
from upriver.files import storage_errors, write_atomically

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_UNFINISHED: Final = ".unfinished"
_LOCK: Final = "lock"


class CheckpointFiles(ABC):
    """Named files below one root."""

    #: The root, as Spark's option ``checkpointLocation`` takes it.
    root: str

    @staticmethod
    def of(where: str | Path) -> "CheckpointFiles":
        """The files at a path or a URL."""
        text = str(where)
        if _SCHEME.match(text) is None:
            return LocalFiles(Path(text))
        parts = urlsplit(text)
        return LocalFiles(Path(unquote(parts.path))) if parts.scheme == "file" else SparkFiles(text)

    @property
    def path(self) -> Path:
        """The local directory; refuses a root elsewhere."""
        raise CheckpointError(
            self.root, "this pipeline needs a checkpoint on a local disk: choose another --checkpoint"
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second runner out, where that is possible. Without it, Spark's log and the target refuse one later."""
        yield

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file; its folder exists afterwards."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """The names in a folder; none if it does not exist."""


class LocalFiles(CheckpointFiles):
    """A local directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self.root = str(self._directory)

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory while a runner uses it."""
        with storage_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._directory / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise CheckpointError(
                self.root, "another process uses this checkpoint: stop it, or choose another --checkpoint"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            os.close(lock)

    def read(self, name: str) -> bytes | None:
        """The content of a file."""
        with storage_errors(self._directory / name):
            try:
                return (self._directory / name).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Replace a file atomically."""
        path = self._directory / name
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder."""
        try:
            return [entry.name for entry in (self._directory / folder).iterdir()]
        except FileNotFoundError:
            return []


class SparkFiles(CheckpointFiles):
    """A directory on a file system of the running Spark."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")

    def read(self, name: str) -> bytes | None:
        """The content of a file; an interrupted write may have left only its new content."""
        jvm, files = self._layer()
        for path in (self._path(jvm, name), self._path(jvm, name + _UNFINISHED)):
            if files.exists(path):
                stream = files.open(path)
                try:
                    return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
                finally:
                    stream.close()
        return None

    def write(self, name: str, data: bytes) -> None:
        """Replace a file. No file system of Spark replaces atomically, but one of the two files is always complete."""
        jvm, files = self._layer()
        target, unfinished = self._path(jvm, name), self._path(jvm, name + _UNFINISHED)
        stream = files.create(unfinished, True)
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()
        files.delete(target, False)
        if not files.rename(unfinished, target):
            why = "the file could not be renamed: check permissions and free space, and start again"
            raise CheckpointError(f"{self.root}/{name}", why)

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder."""
        jvm, files = self._layer()
        path = self._path(jvm, folder)
        if not files.exists(path):
            return []
        return [status.getPath().getName() for status in files.listStatus(path)]

    def _layer(self) -> tuple[Any, Any]:
        """Spark's JVM and its file system for the root."""
        from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
        from pyspark import SparkContext

        context = SparkContext._active_spark_context
        if context is None:
            raise CheckpointError(self.root, "no Spark is running in this process to reach it: use a local directory")
        jvm: Any = context._jvm
        try:
            return jvm, self._path(jvm, "").getFileSystem(context._jsc.hadoopConfiguration())
        except Py4JJavaError as error:
            why = str(error.java_exception.getMessage()).splitlines()[0]
            raise CheckpointError(self.root, f"Spark cannot reach it: {why}") from None

    def _path(self, jvm: Any, name: str) -> Any:
        return jvm.org.apache.hadoop.fs.Path(f"{self.root}/{name}" if name else self.root)
