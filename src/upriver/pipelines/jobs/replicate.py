"""Copies changes from cluster to cluster with their metadata: one way, or both ways without loops.

Each change is written with the revision and CAS of its source, and the newer version wins. A change that returns to its
origin is not newer there, so an echo ends after one round. When the source has rolled back, a repair follows
(``apply.repair``), after the batch is written and before it is complete.

A document that is in another vbucket than its key's stays in its vbucket. If the clusters have different numbers of
vbuckets, or keys are renamed, it has no place in the target, and the pipeline fails.
"""

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import re2

from upriver.client import Cluster
from upriver.client.transport import Address
from upriver.errors import OptionError, RowsRefused
from upriver.model import Event
from upriver.options import as_flag, option
from upriver.pipelines.apply.repair import Mark, Repair, Selection
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.options import PipelineOptions, connection
from upriver.pipelines.core.pipeline import Pipeline
from upriver.pipelines.core.row_pipeline import InTask, RowPipeline
from upriver.spark import RowWriter, WriteOptions, WriteOutcome, as_address
from upriver.wire.codec import key_vbuckets

_OUTCOMES: Final = pa.schema([("vbucket", pa.int32()), ("written", pa.int64()), ("known", pa.int64())])
_MARKS: Final = "repairs.json"
#: The maximum number of refused rows in a message.
_SAMPLES_MAX: Final = 5


def as_rename(value: str) -> tuple[str, str]:
    """``OLD=NEW``: replace the prefix OLD by NEW; one of them may be empty."""
    old, equals, new = value.partition("=")
    if not equals or old == new:
        raise ValueError("OLD=NEW, two different key prefixes")
    return old, new


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateOptions(PipelineOptions):
    """The options of replicate."""

    to: Address | None = option(None, as_address, "cluster that gets the changes", "HOST:PORT or a URL")
    rename: tuple[str, str] | None = option(
        None, as_rename, "copy only keys that start with OLD, and replace OLD by NEW", "OLD=NEW"
    )
    both: bool = option(False, as_flag, "replicate in both directions; the newer version wins")

    def __post_init__(self) -> None:
        if self.to is None:
            raise OptionError("to", "", "give the cluster that gets the changes")
        if self.rename is not None and self.key_filter is not None:
            raise OptionError("key-filter", self.key_filter, "it cannot be combined with rename: use key-prefix")
        old, new = self.rename or ("", "")
        if not (self.key_prefix or old).startswith(old):
            raise OptionError("key-prefix", self.key_prefix or "", f"rename copies only keys that start with {old!r}")
        same = self.source.endpoints == self.to.endpoints and self.source.bucket == self.to.bucket
        if same and (self.rename is None or new.startswith(old) or self.both):
            raise OptionError(
                "to", str(self.to), "it is the source itself: choose another cluster, or rename keys one way"
            )

    @property
    def prefix(self) -> str:
        """The prefix of copied keys at the source."""
        return self.key_prefix or (self.rename or ("", ""))[0]

    def reversed(self) -> "ReplicateOptions":
        """The options of the reverse direction."""
        assert self.to is not None
        old, new = self.rename or ("", "")
        prefix = new + self.prefix[len(old) :]
        rename = None if self.rename is None else (new, old)
        return dataclasses.replace(self, source=self.to, to=self.source, rename=rename, key_prefix=prefix or None)


class Replicate(RowPipeline):
    """Writes the changes of one cluster to another."""

    name = "replicate"
    options_type = ReplicateOptions
    options: ReplicateOptions

    def __init__(self, options: ReplicateOptions, *, back: bool = False) -> None:
        super().__init__(options)
        if back:
            self.name = "replicate-back"  # it has its own checkpoint
        assert options.to is not None
        self._to = options.to
        self._written = WriteOutcome()
        self._rolled_back = 0
        self._marks: dict[int, Mark] = {}
        self._repair = Repair(
            options.source, self._to, selection(options), _consumer_filters(options), merge=options.both
        )

    def legs(self) -> list[Pipeline]:
        """This direction and, if wanted, the reverse one."""
        return [self, Replicate(self.options.reversed(), back=True)] if self.options.both else [self]

    def reader_options(self) -> dict[str, str]:
        """The stream contains only copied keys."""
        prefix = {"keyPrefix": self.options.prefix} if self.options.prefix else {}
        return {**super().reader_options(), **prefix}

    def open(self, directory: RunDirectory) -> None:
        """Load the marks of repairs that may have to be repeated."""
        super().open(directory)
        kept = directory.read(_MARKS) or {}
        self._marks = {int(number): Mark(*mark) for number, mark in kept.items()}

    def in_task(self) -> InTask:
        """Write the changes."""
        return _Writing(self.options.source, self._to, self.options.rename)

    def apply(self, found: pa.Table, batch_number: int) -> None:  # noqa: ARG002
        """The changes are written: repair what the source has lost."""
        written, known = (pc.sum(found.column(name)).as_py() or 0 for name in ("written", "known"))
        self._written += WriteOutcome(written, known)
        rolled_back = set(found.column("vbucket").drop_null().to_pylist())
        self._rolled_back += len(rolled_back)
        if rolled_back or self._marks:
            asyncio.run(self._put_right(rolled_back))

    def idle(self) -> None:
        """Check the marks: a failover without new changes may have lost documents that a repair has read."""
        if self._marks and self._working.acquire(blocking=False):
            try:
                asyncio.run(self._put_right(set()))
            finally:
                self._working.release()

    def counts(self) -> dict[str, int]:
        """Counts of written, known and repaired changes."""
        return {
            "written": self._written.written,
            "known": self._written.known,
            "rollbacks": self._rolled_back,
            "repaired": self._repair.keys,
        }

    async def _put_right(self, rolled_back: set[int]) -> None:
        assert self.directory is not None
        directory = self.directory
        done = directory.reached().vbuckets
        before, due = dict(self._marks), set(rolled_back)
        # Ask after reading the stream's seqno: the stream has read on this basis or an earlier one.
        for number, ground in (await self._repair.grounds(before) if before else {}).items():
            mark, place = before[number], done.get(number)
            if ground != mark.ground:
                due.add(number)
            elif (
                place is not None
                and place.vbucket_uuid == mark.vbucket_uuid
                and place.consistent_seqno >= mark.high_seqno
            ):
                del self._marks[number]
        if due:
            self._marks |= await self._repair.run(due)
        if self._marks != before:
            directory.write(_MARKS, self._marks)


class _Writing(InTask):
    """The work of a Spark task: write the rows, and return the vbuckets that have rolled back."""

    columns = ("*",)
    schema = _OUTCOMES

    def __init__(self, source: Address, to: Address, rename: tuple[str, str] | None) -> None:
        self._source = source
        self._options = {**connection(to), "mode": "meta"}
        self._rename = rename

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        went_back: list[int] = []
        vbuckets = asyncio.run(_number_of_vbuckets(self._source))

        def changes() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                whole = pc.is_null(batch.column("key"))
                if pc.any(whole).as_py():
                    went_back.extend(batch.column("vbucket").filter(whole).to_pylist())
                    batch = batch.filter(pc.invert(whole))
                if batch.num_rows:
                    yield batch if self._rename is None else renamed(in_place(batch, vbuckets), self._rename)

        options = WriteOptions.read({**self._options, "sourceVbuckets": str(vbuckets)})
        outcome = RowWriter(options).write(changes())
        rows: list[dict[str, Any]] = [{"vbucket": number, "written": 0, "known": 0} for number in went_back]
        rows.append({"vbucket": None, "written": outcome.written, "known": outcome.known})
        yield pa.RecordBatch.from_pylist(rows, schema=_OUTCOMES)


async def _number_of_vbuckets(address: Address) -> int:
    cluster = Cluster(address)
    try:
        return (await cluster.open()).vbuckets
    finally:
        await cluster.close()


def in_place(batch: pa.RecordBatch, vbuckets: int) -> pa.RecordBatch:
    """The rows without their vbuckets, as another key has another one; a document must be in the vbucket of its key.

    The deletion of one that is not has nothing to do, because the target never had the document.
    """
    own = key_vbuckets(batch.column("key"), vbuckets)
    misplaced = pc.not_equal(batch.column("vbucket").cast(pa.uint16()), own)
    if pc.any(misplaced).as_py():
        stored = batch.filter(pc.and_(misplaced, pc.equal(batch.column("event"), Event.MUTATION.name.lower())))
        if stored.num_rows:
            rows = stored.select(["key", "vbucket"]).slice(0, _SAMPLES_MAX).to_pylist()
            why = "instead of its key's, so it cannot get another key"
            raise RowsRefused(
                stored.num_rows, [f"{row['key']!r}: it is in vbucket {row['vbucket']} {why}" for row in rows]
            )
        batch = batch.filter(pc.invert(misplaced))
    return batch.drop_columns(["vbucket"])


def renamed(batch: pa.RecordBatch, rename: tuple[str, str]) -> pa.RecordBatch:
    """The rows with the keys of the target."""
    old, new = rename[0].encode(), rename[1].encode()
    keys = [new + key[len(old) :] for key in batch.column("key").to_pylist()]
    place = batch.schema.get_field_index("key")
    return batch.set_column(place, batch.schema.field(place), pa.array(keys, pa.binary()))


def selection(options: ReplicateOptions) -> Selection:
    """Which keys are copied, and their names at the target."""
    old, new = (part.encode() for part in options.rename or ("", ""))
    prefix = options.prefix.encode()
    pattern = None if options.key_filter is None else re2.compile(options.key_filter.encode())

    def chosen(key: bytes) -> bool:
        return key.startswith(prefix) and (pattern is None or pattern.search(key) is not None)

    def there(key: bytes) -> bytes:
        return new + key[len(old) :]

    def back(key: bytes) -> bytes | None:
        return old + key[len(new) :] if key.startswith(new) else None

    return Selection(chosen, there, back, renames=old != new)


def _consumer_filters(options: ReplicateOptions) -> dict[str, Any]:
    prefix = "^" + re2.escape(options.prefix) if options.prefix else None
    said = {"key_filter": prefix or options.key_filter, "value_filter": options.value_filter}
    return {name: value for name, value in said.items() if value is not None}
