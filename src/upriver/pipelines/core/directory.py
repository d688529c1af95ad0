"""The directory with the progress of a pipeline: Spark's checkpoint, and the pipeline's own files.

A directory belongs to one pipeline, one source and one target. ``pipeline.json`` names them, and the directory of
another pipeline is refused. A local directory is locked while a runner uses it; elsewhere Spark's log and the target
refuse a second one. Nothing in the directory is ever removed, even after a failure.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from upriver.errors import CheckpointError, OffsetError
from upriver.pipelines.core.checkpoint_files import CheckpointFiles
from upriver.pipelines.core.options import PipelineOptions, shown_name
from upriver.pipelines.core.pipeline import Job
from upriver.spark import Offset, Range, ranges

_IDENTITY: Final = "pipeline.json"
_QUERY: Final = "query"
_SPARK: Final = "spark"
#: Options that select what is read: with other values, the same checkpoint would have another meaning.
_SELECTING: Final = ("vbuckets", "key_prefix", "key_filter", "value_filter", "rename")


class RunDirectory:
    """The directory of one job."""

    def __init__(self, where: str | Path, spark: str = _SPARK) -> None:
        """``spark`` is the folder of Spark's checkpoint, seen from here."""
        self.files = CheckpointFiles.of(where)
        self._spark = spark
        self._used = contextlib.ExitStack()

    @classmethod
    def default(cls, job: Job) -> Self:
        """The default directory of a job: the same for the same source and target."""
        text = json.dumps(identity(job), sort_keys=True)
        return cls(state_directory() / f"{job.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")

    def __enter__(self) -> Self:
        self._used.enter_context(self.files.locked())
        return self

    def __exit__(self, *_: object) -> None:
        self._used.close()

    def __str__(self) -> str:
        return self.files.root

    @property
    def path(self) -> Path:
        """The local directory; refuses one elsewhere."""
        return self.files.path

    @property
    def is_local(self) -> bool:
        """Whether it can be used without Spark."""
        return "://" not in self.files.root

    def claim(self, job: Job) -> None:
        """Assign the directory to this job; refuse it if it belongs to another one."""
        mine = identity(job)
        theirs = self.read(_IDENTITY)
        if theirs is None:
            if {"offsets", "metadata"} & set(self.files.names()):
                raise CheckpointError(str(self), "it has a Spark checkpoint, but not of a pipeline: choose another one")
            self.write(_IDENTITY, mine)
            return
        wrong = [name for name in mine if theirs.get(name) != mine[name]]
        if wrong:
            told = "; ".join(f"{name} is {theirs.get(name)!r} there and {mine[name]!r} here" for name in wrong)
            raise CheckpointError(
                str(self), f"it belongs to another pipeline ({told}): choose another --checkpoint, or remove it"
            )

    def leg(self, name: str) -> "RunDirectory":
        """The directory of one leg of a job with several."""
        return RunDirectory(f"{self.files.root}/{name}")

    @property
    def query(self) -> str:
        """The name of the query with its checkpoint here: created once, the same after every restart."""
        kept = self.files.read(_QUERY)
        if kept is None:
            kept = uuid.uuid4().hex.encode()
            self.files.write(_QUERY, kept)
        return kept.decode()

    @property
    def spark(self) -> str:
        """The location of Spark's checkpoint."""
        return f"{self.files.root}/{self._spark}"

    def read(self, name: str) -> Any:
        """The value that ``write`` stored under a name, or None."""
        kept = self.files.read(name)
        try:
            return None if kept is None else json.loads(kept)
        except ValueError as error:
            raise CheckpointError(f"{self}/{name}", f"it is damaged ({error}): restore it from a backup") from None

    def write(self, name: str, value: Any) -> None:
        """Store a value under a name."""
        self.files.write(name, json.dumps(value).encode())

    def batch(self) -> "LoggedBatch | None":
        """The last planned batch; None before the first."""
        logged = self._numbers("offsets")
        if not logged:
            return None
        number = logged[-1]
        before = [each for each in logged if each < number]
        start = self._offset(before[-1]) if before else Offset(())
        return LoggedBatch(number, start, self._offset(number), number in self._numbers("commits"))

    @property
    def logged(self) -> int:
        """The number of the last planned batch; -1 before the first."""
        return max(self._numbers("offsets"), default=-1)

    def end_of(self, number: int) -> Offset:
        """The end of a planned batch; empty if the log does not have it any more."""
        return self._offset(number)

    def reached(self) -> Offset:
        """The end of the last completed batch; empty before the first."""
        batch = self.batch()
        if batch is None:
            return Offset(())
        return batch.end if batch.is_done else batch.start

    def _numbers(self, folder: str) -> list[int]:
        return sorted(int(name) for name in self.files.names(f"{self._spark}/{folder}") if name.isdigit())

    def _offset(self, number: int) -> Offset:
        """The offset in an entry of Spark's log: a version, a line about the batch, then a line for each source."""
        for line in (self.files.read(f"{self._spark}/offsets/{number}") or b"").decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                given = json.loads(line)
                if isinstance(given, Mapping) and "places" in given:
                    with contextlib.suppress(OffsetError):
                        return Offset.unpacked(given)
        return Offset(())


def state_directory() -> Path:
    """Where checkpoints are by default."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "upriver"


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
