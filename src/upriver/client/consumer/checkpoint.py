"""Saves the progress of a consumer across processes.

A checkpoint holds only progress that was acknowledged without a gap. A consumer that resumes from it may see changes
again and never misses one. The file is replaced atomically, and earlier generations are kept. A file of another program
or a later version is refused; a damaged file is skipped for the generation before it.

A consumer with filters leaves changes out, and its progress passes them. So a checkpoint also holds the consumer's
*selection*: the settings that leave something out. Another selection would never get what this one left out, and is
refused.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from upriver.client.consumer.progress import Progress
from upriver.client.kv import KvClient
from upriver.errors import CheckpointError, PositionError
from upriver.files import write_atomically

FORMAT: Final = 1
_MAGIC: Final = "upriver-checkpoint"
GENERATIONS: Final = 3


class Checkpoint(Protocol):
    """Stores progress."""

    async def load(self) -> Mapping[int, Progress]:
        """The progress that was saved last; empty if nothing was saved."""

    async def save(self, progress: Mapping[int, Progress]) -> None:
        """Save the progress; after the return a crash does not lose it."""


#: The settings of a consumer that leave changes or values out, without those that leave out nothing.
Selection = Mapping[str, str | bool]


@runtime_checkable
class SelectiveCheckpoint(Checkpoint, Protocol):
    """Stores the selection beside the progress, and refuses to load the progress of another selection."""

    def select(self, selection: Selection) -> None:
        """Say what the consumer leaves out; called before ``load``."""


def encoded(progress: Mapping[int, Progress], source: str, selection: Selection | None = None) -> bytes:
    """Encode progress as two lines: a header with a checksum, then the content."""
    vbuckets = {str(number): each.as_json() for number, each in sorted(progress.items())}
    content: dict[str, object] = {"source": source, "vbuckets": vbuckets}
    if selection is not None:
        content["selection"] = dict(selection)
    body = json.dumps(content, separators=(",", ":")).encode()
    head = {"what": _MAGIC, "format": FORMAT, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head).encode() + b"\n" + body + b"\n"


class _Damaged(Exception):
    """The bytes are not a complete checkpoint."""


def decoded(data: bytes, source: str, where: str, selection: Selection | None = None) -> dict[int, Progress]:
    """Decode what ``encoded`` returned; refuses files of another program, a later version, source or selection.

    A checkpoint of an earlier version has no selection and is taken for any.
    """
    head_line, newline, rest = data.partition(b"\n")
    try:
        head: Any = json.loads(head_line)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict) or head.get("what") != _MAGIC:
        if _MAGIC.encode() in head_line[:64] or f'{{"what": "{_MAGIC}'.encode().startswith(data[:20]):
            raise _Damaged("its first line is cut off")
        raise CheckpointError(where, "not an Upriver checkpoint; choose another path")
    if head.get("format") != FORMAT:
        why = f"its format is {head.get('format')!r}, but this version reads {FORMAT}; use a later version of Upriver"
        raise CheckpointError(where, why)
    body = rest[:-1]
    whole = newline and rest.endswith(b"\n") and len(body) == head.get("bytes")
    if not whole or hashlib.sha256(body).hexdigest() != head.get("sha256"):
        raise _Damaged("its checksum is wrong")
    content = json.loads(body)
    if content["source"] != source:
        why = f"it belongs to {content['source']!r}, not to {source!r}; choose another path, or remove it"
        raise CheckpointError(where, why)
    before = content.get("selection")
    if content["vbuckets"] and None not in (selection, before) and before != dict(selection or {}):
        why = (
            f"it was written {_described(before)} and cannot be continued {_described(selection or {})},"
            " because it has passed what was left out; use the same settings, or choose another path"
        )
        raise CheckpointError(where, why)
    try:
        return {int(number): Progress.from_json(each) for number, each in content["vbuckets"].items()}
    except PositionError as error:
        raise CheckpointError(where, str(error)) from None


def _described(selection: Selection) -> str:
    named = (name if value is True else f"{name} {value!r}" for name, value in selection.items())
    return f"with {', '.join(named)}" if selection else "without filters and history"


class FileCheckpoint:
    """Progress in a file, with earlier generations beside it (``name.1``, ``name.2``).

    ``source`` names the source of the changes; a file of another source is refused.
    """

    def __init__(self, path: str | os.PathLike[str], source: str = "", generations: int = GENERATIONS) -> None:
        if generations < 1:
            raise ValueError(f"generations must be at least 1, not {generations}")
        self.path = Path(path)
        self.source = source
        #: The settings that leave something out; None if they are not known.
        self.selection: Selection | None = None
        self.generations = generations
        self._writing = threading.Lock()

    @classmethod
    def existing(cls, path: str | os.PathLike[str], generations: int = GENERATIONS) -> "FileCheckpoint":
        """The checkpoint in a file, with the source and selection that the file has, if a generation is complete."""
        found = cls(path, "", generations)
        for number in range(generations):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
                _, _, body = found._generation(number).read_bytes().partition(b"\n")
                content = json.loads(body)
                found.source, found.selection = str(content["source"]), content.get("selection")
                break
        return found

    def select(self, selection: Selection) -> None:
        """Say what the consumer leaves out."""
        self.selection = selection

    async def load(self) -> dict[int, Progress]:
        """Read the newest complete generation; empty if no file exists."""
        return await asyncio.to_thread(self.read)

    async def save(self, progress: Mapping[int, Progress]) -> None:
        """Write a new generation."""
        await asyncio.to_thread(self.write, progress)

    def read(self) -> dict[int, Progress]:
        """Like ``load``, but synchronous."""
        damaged: list[str] = []
        for number in range(self.generations):
            path = self._generation(number)
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(str(path), f"cannot be read: {error.strerror}") from None
            try:
                return decoded(data, self.source, str(path), self.selection)
            except _Damaged as why:
                damaged.append(f"{path.name}: {why}")
        if damaged:
            text = f"all generations are damaged ({'; '.join(damaged)}); remove the file to start over"
            raise CheckpointError(str(self.path), text)
        return {}

    def write(self, progress: Mapping[int, Progress]) -> None:
        """Like ``save``, but synchronous."""
        try:
            with self._writing:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                data = encoded(progress, self.source, self.selection)
                write_atomically(self.path, data, before_rename=self._keep_older)
        except OSError as error:
            raise CheckpointError(str(self.path), f"cannot be written: {error.strerror}") from None

    def _keep_older(self) -> None:
        for number in range(self.generations - 1, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._generation(number - 1), self._generation(number))
        if self.generations > 1:
            # A link, not a move, so that the file itself exists at every moment.
            with contextlib.suppress(FileNotFoundError):
                self._generation(1).unlink()
            with contextlib.suppress(FileNotFoundError):
                os.link(self.path, self._generation(1))

    def _generation(self, number: int) -> Path:
        return self.path if number == 0 else self.path.with_name(f"{self.path.name}.{number}")


class NodeCheckpoint:
    """Progress in two documents of a cluster, written in turn, so that a lost write leaves the other."""

    def __init__(self, client: KvClient, name: str, source: str = "") -> None:
        self._client = client
        self._keys = [f"_upriver:checkpoint:{name}:{turn}".encode() for turn in range(2)]
        self.source = source
        #: The settings that leave something out; None if they are not known.
        self.selection: Selection | None = None
        self._turn = 0

    def select(self, selection: Selection) -> None:
        """Say what the consumer leaves out."""
        self.selection = selection

    async def load(self) -> dict[int, Progress]:
        """Read the newer of the two documents that is complete."""
        found: list[tuple[int, int, dict[int, Progress]]] = []
        damaged = 0
        for turn, key in enumerate(self._keys):
            item = await self._client.get(key)
            if item is None:
                continue
            try:
                count, _, data = item.value.partition(b"\n")
                progress = decoded(base64.b64decode(data), self.source, key.decode(), self.selection)
                found.append((int(count), turn, progress))
            except (ValueError, _Damaged):
                damaged += 1
        if not found:
            if damaged:
                raise CheckpointError(self._keys[0].decode(), "both documents are damaged; delete them to start over")
            return {}
        self._turn, _, progress = max(found, key=lambda each: each[0])
        return progress

    async def save(self, progress: Mapping[int, Progress]) -> None:
        """Overwrite the older of the two documents."""
        self._turn += 1
        data = b"%d\n" % self._turn + base64.b64encode(encoded(progress, self.source, self.selection))
        await self._client.set(self._keys[self._turn % 2], data)
