"""The directory in which a pipeline remembers how far it is: Spark's checkpoint, and what the pipeline keeps besides.

A directory belongs to one pipeline from one source to one target. That stands in ``pipeline.json``, so that a directory
of another one is refused, and a lock keeps two runners from working in it at once. Whatever fails, nothing in it is
ever removed.
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
#: Options that say what is read: with another value the same checkpoint would mean something else.
_SELECTING: Final = ("vbuckets", "key_prefix", "key_filter", "value_filter", "rename")


class RunDirectory:
    """The directory of one job, held while it runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def default(cls, job: Job) -> Self:
        """Where a job is remembered if nobody says where: the same place for the same source and target."""
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
                "another process runs a pipeline with this checkpoint: stop it, or name another --checkpoint",
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def claim(self, job: Job) -> None:
        """Make it this job's, or see that it is; refuse that of another."""
        mine = identity(job)
        theirs = self.read(_IDENTITY)
        if theirs is None:
            if (self.path / "offsets").exists() or (self.path / "metadata").exists():
                raise CheckpointError(str(self.path), "it holds a checkpoint of Spark that no pipeline made")
            self.write(_IDENTITY, mine)
            return
        wrong = [name for name in mine if theirs.get(name) != mine[name]]
        if wrong:
            told = "; ".join(f"{name} is {theirs.get(name)!r} there and {mine[name]!r} here" for name in wrong)
            raise CheckpointError(
                str(self.path), f"it belongs to another pipeline ({told}): name another --checkpoint, or remove it"
            )

    def leg(self, name: str) -> "RunDirectory":
        """The directory of one leg of a job that has several."""
        path = self.path / name
        path.mkdir(exist_ok=True)
        return RunDirectory(path)

    @property
    def spark(self) -> Path:
        """Where Spark keeps its checkpoint."""
        return self.path / "spark"

    def read(self, name: str) -> Any:
        """What ``write`` has kept under a name; None if nothing."""
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(str(self.path / name), f"it is damaged ({error}): restore it") from None

    def write(self, name: str, value: Any) -> None:
        """Keep something: after a crash it is there whole, or what was there before."""
        write_atomically(self.path / name, json.dumps(value).encode())

    def batch(self) -> "LoggedBatch | None":
        """The batch that was planned last; None before the first."""
        logged = _numbers(self.spark / "offsets")
        if not logged:
            return None
        number = logged[-1]
        end = _offset(self.spark / "offsets" / str(number))
        before = [each for each in logged if each < number]
        start = _offset(self.spark / "offsets" / str(before[-1])) if before else Offset(())
        return LoggedBatch(number, start, end, number in _numbers(self.spark / "commits"))

    def reached(self) -> Offset:
        """Up to where all batches are done; without any place before the first is."""
        batch = self.batch()
        if batch is None:
            return Offset(())
        return batch.end if batch.is_done else batch.start


class LoggedBatch(NamedTuple):
    """What Spark's log says of a batch."""

    number: int
    start: Offset
    end: Offset
    is_done: bool

    @property
    def done(self) -> int:
        """The last batch that is done; -1 before the first."""
        return self.number if self.is_done else self.number - 1

    @property
    def ranges(self) -> dict[int, Range]:
        """What it reads of which vbucket."""
        return {asked.place.vbucket: asked for asked in ranges(self.start, self.end)}


def identity(job: Job) -> dict[str, Any]:
    """What makes a checkpoint this job's."""
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
