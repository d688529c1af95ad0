"""The files of one table: a local directory, or a prefix in an object store.

Names are paths below the table's root, with ``/`` between parts. A write is durable when it returns, and readers never
see a part of it: locally a temporary file is synced and renamed, and the folder is synced; an object store does this by
itself.
``put_if_absent`` decides races between writers: only one of them gets a name.

A temporary file starts with a dot and ends with ``UNFINISHED``. A crash may leave it; vacuum removes it.

A missing file is a ``FileNotFoundError``. Every other failure is a ``StorageError`` that names the file.
"""

import abc
import contextlib
import errno
import hashlib
import io
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from upriver.errors import StorageError, without_password
from upriver.files import UNFINISHED, sync

#: URL schemes that obstore serves, and how it spells them.
OBJECT_STORES: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "az": "az",
    "azure": "azure",
    "abfs": "abfs",
    "abfss": "abfss",
}
#: Options of the HTTP client, which obstore wants apart.
_CLIENT_OPTIONS: Final = frozenset(
    {
        "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout",
        "pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate", "proxy_excludes", "read_timeout", "timeout",
        "root_certificate", "user_agent",
    }
)  # fmt: skip
#: Bytes that a reader of an object store asks for at least.
_BUFFER: Final = 2**16
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def storage_options(text: str) -> dict[str, str]:
    """Read options of an object store, as in ``aws_region=eu-west-1,aws_endpoint=http://host:9000``."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ValueError("options such as 'aws_region=eu-west-1,aws_endpoint=http://host:9000'")
    return {name.strip(): value.strip() for name, _, value in pairs}


class StoredFile(NamedTuple):
    """A file as a listing shows it."""

    path: str
    size: int
    #: Seconds since the epoch.
    modified: float


class TableStorage(abc.ABC):
    """Reads and writes the files below one root."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        #: What ``of`` opens again, in another process too.
        self.url = url
        self.options = dict(options)

    @staticmethod
    def of(where: str | Path, options: Mapping[str, str] | None = None) -> "TableStorage":
        """The storage of a path or a URL. Options are those of the object store, as delta-rs and obstore name them."""
        text = str(where)
        found = _SCHEME.match(text)
        if found is None:
            return _LocalStorage(Path(text))
        scheme = found[1].lower()
        if scheme == "file":
            return _LocalStorage(Path(unquote(urlsplit(text).path)))
        if scheme not in OBJECT_STORES or not text.startswith(f"{found[1]}://"):
            known = ", ".join(f"{name}://" for name in OBJECT_STORES)
            raise StorageError(
                without_password(text),
                f"tables cannot be stored at {scheme}:// addresses; use a local path or one of {known}",
            )
        return _ObjectStorage(OBJECT_STORES[scheme] + text[len(scheme) :].rstrip("/"), options or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return TableStorage.of, (self.url, self.options)

    def __repr__(self) -> str:
        return f"TableStorage({without_password(self.url)!r})"

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        return self.stat(path).size

    @abc.abstractmethod
    def local(self, path: str = "") -> Path | None:
        """Where a file is on the local disk; None for an object store."""

    @abc.abstractmethod
    def stat(self, path: str) -> StoredFile:
        """Size and time of a file."""

    @abc.abstractmethod
    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """The content of a file, or a range of it."""

    @abc.abstractmethod
    def open(self, path: str) -> IO[bytes]:
        """A file to read and seek in."""

    @abc.abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file, or replace it."""

    @abc.abstractmethod
    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write a file unless one of this name exists; returns whether this call wrote it.

        After an error the file may exist or not.
        """

    @abc.abstractmethod
    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredFile]:
        """All files below a folder (its name ends with ``/``) whose path sorts after ``after``, in any order."""

    @abc.abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Remove files; one that does not exist is skipped."""

    @abc.abstractmethod
    def new_file(
        self, path: str, *, durable: bool = True, cache: Path | None = None
    ) -> contextlib.AbstractContextManager[Path]:
        """A local path to write to. The file appears under ``path`` when the block ends without an error.

        A file that can be made again need not be ``durable``: after a power failure it may be missing or damaged. With
        a ``cache`` the file stays there, so that ``fetched`` need not fetch it.
        """

    @abc.abstractmethod
    def fetched(self, path: str, cache: Path) -> Path:
        """A local path to read from: the file itself, or a copy below ``cache``. For files that never change."""


class _LocalStorage(TableStorage):
    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))  # tasks run in other folders
        super().__init__(str(self.root), {})

    def local(self, path: str = "") -> Path:
        return self.root / path

    def stat(self, path: str) -> StoredFile:
        with self._errors(path):
            found = os.stat(self.root / path)
            return StoredFile(path, found.st_size, found.st_mtime)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        with self._errors(path), open(self.root / path, "rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def open(self, path: str) -> IO[bytes]:
        with self._errors(path):
            return open(self.root / path, "rb")

    def write(self, path: str, data: bytes) -> None:
        with self.new_file(path) as file:
            file.write_bytes(data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        target = self.root / path
        temporary = self._temporary(path)
        with self._errors(path):
            try:
                temporary.write_bytes(data)
                sync(temporary)
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOTSUP):
                    raise StorageError(
                        str(target), "the file system has no hard links, so commits are unsafe"
                    ) from None
                raise
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
            sync(target.parent)
        return True

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredFile]:
        with self._errors(prefix):
            folders = [prefix]
            while folders:
                folder = folders.pop()
                # A folder may not exist yet, and a file may vanish while the list is made.
                with contextlib.suppress(FileNotFoundError), os.scandir(self.root / folder) as entries:
                    for entry in entries:
                        path = folder + entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(path + "/")
                        elif path > after:
                            with contextlib.suppress(FileNotFoundError):
                                found = entry.stat(follow_symlinks=False)
                                yield StoredFile(path, found.st_size, found.st_mtime)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with self._errors(path), contextlib.suppress(FileNotFoundError):
                os.unlink(self.root / path)

    @contextlib.contextmanager
    def new_file(self, path: str, *, durable: bool = True, cache: Path | None = None) -> Iterator[Path]:  # noqa: ARG002
        target = self.root / path
        with self._errors(path):
            temporary = self._temporary(path)
            try:
                yield temporary
                if durable:
                    sync(temporary)
                os.replace(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            if durable:
                sync(target.parent)

    def fetched(self, path: str, cache: Path) -> Path:  # noqa: ARG002 (it is on the local disk already)
        return self.root / path

    def _temporary(self, path: str) -> Path:
        """A name for an unfinished file, in its folder, which exists afterwards."""
        folder = (self.root / path).parent
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            sync(folder.parent)
        target = self.root / path
        return target.with_name(f".{target.name}.{uuid.uuid4().hex}{UNFINISHED}")

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(str(self.root / path), error.strerror or str(error)) from error


class _ObjectStorage(TableStorage):
    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        super().__init__(url, options)
        from obstore.store import from_url

        config: dict[str, Any] = {"config": {}, "client_options": {}}
        for name, value in options.items():
            short = name.lower().removeprefix("aws_")
            if short in _CLIENT_OPTIONS:
                config["client_options"][short] = value
            else:
                config["config"][name.lower()] = value
        with self._errors(""):
            self._store: Any = from_url(url, **config)

    def local(self, path: str = "") -> None:  # noqa: ARG002
        return None

    def stat(self, path: str) -> StoredFile:
        import obstore

        with self._errors(path):
            return _stored(obstore.head(self._store, path))

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        import obstore

        with self._errors(path):
            if length is not None:
                return bytes(obstore.get_range(self._store, path, start=start, length=length)) if length else b""
            options: Any = {"range": {"offset": start}} if start else None
            return bytes(obstore.get(self._store, path, options=options).bytes())

    def open(self, path: str) -> IO[bytes]:
        return io.BufferedReader(_ObjectReader(self, path, self.size(path)), _BUFFER)

    def write(self, path: str, data: bytes) -> None:
        import obstore

        with self._errors(path):
            obstore.put(self._store, path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._errors(path):
            try:
                obstore.put(self._store, path, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredFile]:
        import obstore

        with self._errors(prefix):
            for page in obstore.list(self._store, prefix.rstrip("/") or None, offset=after or None, chunk_size=1000):
                yield from map(_stored, page)

    def delete(self, paths: Iterable[str]) -> None:
        import obstore

        wanted = [*paths]
        with self._errors(wanted[0] if wanted else ""), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, wanted)

    @contextlib.contextmanager
    def new_file(self, path: str, *, durable: bool = True, cache: Path | None = None) -> Iterator[Path]:  # noqa: ARG002
        import obstore

        with contextlib.ExitStack() as stack:
            if cache is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="upriver-"))
                file = Path(folder, path.rpartition("/")[2])
            else:
                file = _unfinished(self._copy(path, cache))
                stack.callback(file.unlink, missing_ok=True)
            yield file
            with self._errors(path):
                obstore.put(self._store, path, file)
                if cache is not None:
                    os.replace(file, self._copy(path, cache))

    def _copy(self, path: str, cache: Path) -> Path:
        """The place of a file in a cache."""
        return cache / hashlib.sha256(self.url.encode()).hexdigest()[:16] / path

    def fetched(self, path: str, cache: Path) -> Path:
        import obstore

        copy = self._copy(path, cache)
        if not copy.exists():
            temporary = _unfinished(copy)
            try:
                with self._errors(path), open(temporary, "wb") as file:
                    for chunk in obstore.get(self._store, path).stream():
                        file.write(chunk)
                sync(temporary)
                os.replace(temporary, copy)
            finally:
                temporary.unlink(missing_ok=True)
        return copy

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        from obstore.exceptions import BaseError, NotFoundError

        name = without_password(f"{self.url}/{path}" if path else self.url)
        try:
            yield
        except (FileNotFoundError, NotFoundError) as error:
            raise FileNotFoundError(errno.ENOENT, "not found", name) from error
        except (OSError, BaseError) as error:
            raise StorageError(name, str(error).strip().split("\n")[0]) from error


class _ObjectReader(io.RawIOBase):
    """A file in an object store, read by ranges."""

    def __init__(self, storage: _ObjectStorage, path: str, size: int) -> None:
        self._storage = storage
        self._path = path
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = max(min(len(buffer), self._size - self._position), 0)
        buffer[:length] = self._storage.read(self._path, self._position, length)
        self._position += length
        return length


def _unfinished(copy: Path) -> Path:
    """A name for an unfinished copy, in its folder, which exists afterwards."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    return copy.with_name(f".{copy.name}.{uuid.uuid4().hex}{UNFINISHED}")


def _stored(found: Any) -> StoredFile:
    return StoredFile(found["path"], found["size"], found["last_modified"].timestamp())
