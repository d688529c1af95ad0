"""The directory with the progress of a pipeline: Spark's checkpoint, and the pipeline's own files.

A directory belongs to one pipeline, one source and one target. ``pipeline.json`` names them, and the directory of
another pipeline is refused. A lock keeps two runners apart. Nothing in the directory is ever removed, even after a
failure.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from upriver.errors import CheckpointError, OffsetError
from upriver.files import write_atomically
from upriver.pipelines.core.options import PipelineOptions, shown_name
from upriver.pipelines.core.pipeline import Job
from upriver.spark import Offset, Range, ranges

_IDENTITY: Final = "pipeline.json"
_LOCK: Final = "lock"
#: Options that select what is read: with other values, the same checkpoint would have another meaning.
_SELECTING: Final = ("vbuckets", "key_prefix", "key_filter", "value_filter", "rename")


class RunDirectory:
    """The directory of one job, locked while it runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def default(cls, job: Job) -> Self:
        """The default directory of a job: the same for the same source and target."""
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        text = json.dumps(identity(job), sort_keys=True)
        return cls(Path(state) / "upriver" / f"{job.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            raise CheckpointError(
                str(self.path),
                "another process uses this checkpoint: stop it, or choose another --checkpoint",
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def claim(self, job: Job) -> None:
        """Assign the directory to this job; refuse it if it belongs to another one."""
        mine = identity(job)
        theirs = self.read(_IDENTITY)
        if theirs is None:
            if (self.path / "offsets").exists() or (self.path / "metadata").exists():
                raise CheckpointError(
                    str(self.path), "it has a Spark checkpoint, but not of a pipeline: choose another one"
                )
            self.write(_IDENTITY, mine)
            return
        wrong = [name for name in mine if theirs.get(name) != mine[name]]
        if wrong:
            told = "; ".join(f"{name} is {theirs.get(name)!r} there and {mine[name]!r} here" for name in wrong)
            raise CheckpointError(
                str(self.path), f"it belongs to another pipeline ({told}): choose another --checkpoint, or remove it"
            )

    def leg(self, name: str) -> "RunDirectory":
        """The directory of one leg of a job with several."""
        path = self.path / name
        path.mkdir(exist_ok=True)
        return RunDirectory(path)

    @property
    def spark(self) -> Path:
        """The directory of Spark's checkpoint."""
        return self.path / "spark"

    def read(self, name: str) -> Any:
        """The value that ``write`` stored under a name, or None."""
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(str(self.path / name), f"it is damaged ({error}): restore it from a backup") from None

    def write(self, name: str, value: Any) -> None:
        """Store a value under a name, atomically."""
        write_atomically(self.path / name, json.dumps(value).encode())

    def batch(self) -> "LoggedBatch | None":
        """The last planned batch; None before the first."""
        logged = _numbers(self.spark / "offsets")
        if not logged:
            return None
        number = logged[-1]
        end = _offset(self.spark / "offsets" / str(number))
        before = [each for each in logged if each < number]
        start = _offset(self.spark / "offsets" / str(before[-1])) if before else Offset(())
        return LoggedBatch(number, start, end, number in _numbers(self.spark / "commits"))

    def reached(self) -> Offset:
        """The end of the last completed batch; empty before the first."""
        batch = self.batch()
        if batch is None:
            return Offset(())
        return batch.end if batch.is_done else batch.start


class LoggedBatch(NamedTuple):
    """A batch in Spark's log."""

    number: int
    start: Offset
    end: Offset
    is_done: bool

    @property
    def done(self) -> int:
        """The last completed batch; -1 before the first."""
        return self.number if self.is_done else self.number - 1

    @property
    def ranges(self) -> dict[int, Range]:
        """The range that it reads of each vbucket."""
        return {asked.start.vbucket: asked for asked in ranges(self.start, self.end)}


def identity(job: Job) -> dict[str, Any]:
    """The facts by which a checkpoint belongs to a job."""
    options = job.options
    selecting = {
        shown_name(name): None if (value := getattr(options, name)) is None else str(value)
        for name in _SELECTING
        if isinstance(options, PipelineOptions) and hasattr(options, name)
    }
    return {"pipeline": job.name, "from": str(options.source), "to": job.target, **selecting}


def _numbers(directory: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())
    return []


def _offset(path: Path) -> Offset:
    """The offset in an entry of Spark's log: a version, a line about the batch, then a line for each source."""
    for line in _lines(path):
        with contextlib.suppress(ValueError):
            given = json.loads(line)
            if isinstance(given, Mapping) and "places" in given:
                with contextlib.suppress(OffsetError):
                    return Offset.unpacked(given)
    return Offset(())


def _lines(path: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from path.read_text().splitlines()
