"""Why a query has ended: in which stage, where, and whether a retry may help.

An error in ``apply`` is available as an exception. An error in Spark's processes (planning, reading, writing) arrives
as Spark's text; the last line of the Python traceback in it names the error.
"""

import re
from typing import Final, NamedTuple

from upriver import errors
from upriver.errors import (
    Busy,
    ClusterMapError,
    DataLoss,
    DurabilityAmbiguous,
    Locked,
    LoginImpossible,
    NodeUnavailable,
    NoSuchVbucket,
    NotMyVbucket,
    OutOfMemory,
    RowsRefused,
    StreamRefused,
    TableConflict,
    TemporaryFailure,
    UpriverError,
)
from upriver.pipelines.core.directory import LoggedBatch

#: Temporary errors: a node is unreachable, full or busy, a vbucket has moved, or another program writes to a table.
_TEMPORARY: Final = (
    NodeUnavailable, TemporaryFailure, Busy, OutOfMemory, DurabilityAmbiguous, NotMyVbucket, StreamRefused,
    ClusterMapError, TableConflict, ConnectionError, TimeoutError,
)  # fmt: skip
_OURS: Final = re.compile(r"upriver\.errors\.(\w+): (.*)")
_VBUCKET: Final = re.compile(r"\bvbucket (\d+)")
#: While a vbucket moves, it may have no owner for a moment.
_UNOWNED: Final = re.compile(r"no node (?:of the cluster )?has it")
#: A client holds a lock on a key; locks expire.
_LOCKED: Final = f"status 0x{Locked.status:02x}"
#: Temporary errors of Spark itself. The Spark of a killed runner may still be writing to the log. A leftover checksum
#: makes Spark take its own log entry for a foreign one; the next start finds it. On a busy machine a worker connects
#: too late, or is killed when memory is short. Two queries of one Spark share maps, and one may change a map while the
#: other serializes its tasks.
_OF_SPARK: Final = (
    "CONCURRENT_STREAM_LOG_UPDATE",
    "Multiple streaming queries are concurrently using",
    "Python worker failed to connect back",
    "Python worker exited unexpectedly",
    "Task serialization failed",
)
_CHARACTERS_MAX: Final = 400


class Trouble(NamedTuple):
    """A failure of a query."""

    #: plan, read, apply or write.
    stage: str
    why: str
    is_temporary: bool
    #: The vbucket, if the failure concerns one.
    vbucket: int | None = None

    def where(self, batch: LoggedBatch | None) -> str:
        """The place in the source's history where it failed."""
        if batch is None:
            return (
                "before the first batch" if self.vbucket is None else f"vbucket {self.vbucket}, before the first batch"
            )
        asked = batch.ranges
        if self.vbucket is not None:
            place = batch.end.vbuckets.get(self.vbucket)
            seqno = 0 if place is None else place.seqno
            found = asked.get(self.vbucket)
            told = f"after change {seqno}"
            if found is not None and not batch.is_done:
                told = f"changes {found.start.seqno} to {found.end_seqno}"
            return f"batch {batch.number}, vbucket {self.vbucket} ({told})"
        if batch.is_done or not asked:
            return f"after batch {batch.number}, which ended at {_highest(batch)}"
        first = next(iter(asked.values()))
        several = f"{len(asked)} vbuckets, first " if len(asked) > 1 else ""
        span = f"changes {first.start.seqno} to {first.end_seqno}"
        return f"batch {batch.number}, {several}vbucket {first.start.vbucket} ({span})"


def _highest(batch: LoggedBatch) -> str:
    place = max(batch.end, key=lambda place: place.seqno, default=None)
    return "nothing" if place is None else f"vbucket {place.vbucket} change {place.seqno} and others"


def trouble(error: BaseException | str, *, applying: bool) -> Trouble:
    """The failure behind an error or Spark's text about one. ``applying``: it comes from a pipeline's ``apply``."""
    text = str(error)
    if isinstance(error, UpriverError) or (isinstance(error, Exception) and not _is_of_spark(error)):
        vbucket = getattr(error, "vbucket", None)
        named = text if isinstance(error, UpriverError) else f"{type(error).__name__}: {text}"
        return Trouble("apply" if applying else "plan", named, is_temporary(error), vbucket or _vbucket(text))
    ours = _OURS.findall(text)
    kind = getattr(errors, ours[-1][0], None) if ours else None
    why = ours[-1][1] if ours else _last_words(text)
    temporary = isinstance(kind, type) and issubclass(kind, BaseException) and _may_pass(kind, why)
    temporary = temporary or (not ours and any(words in text for words in _OF_SPARK))
    return Trouble(_stage(text, applying), why, temporary, _vbucket(why))


def is_temporary(error: BaseException) -> bool:
    """Whether a retry may help."""
    return _may_pass(type(error), str(error))


def _may_pass(kind: type[BaseException], why: str) -> bool:
    if issubclass(kind, LoginImpossible | NoSuchVbucket):
        return False
    if issubclass(kind, DataLoss):
        return _UNOWNED.search(why) is not None
    if issubclass(kind, RowsRefused):
        return _LOCKED in why
    return issubclass(kind, _TEMPORARY)


def _is_of_spark(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j")


def _stage(text: str, applying: bool) -> str:
    if "spark/row_writer.py" in text:
        return "write"
    if "spark/range_reader.py" in text:
        return "read"
    return "apply" if applying else "plan"


def _vbucket(text: str) -> int | None:
    found = _VBUCKET.search(text)
    return None if found is None else int(found[1])


def _last_words(text: str) -> str:
    """The most useful line of a long text: the last one of a Python traceback, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    python = [line for line in lines if re.match(r"[\w.]+(?:Error|Exception|Refused): ", line)]
    return (python or lines or ["Spark ended the query without a message"])[-1 if python else 0][:_CHARACTERS_MAX]
