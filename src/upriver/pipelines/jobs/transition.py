"""Moves vbuckets from node to node, verifies the result, and undoes it if wanted.

A few vbuckets move at a time. Before a move, a record of the source is written: every key with its seqno and version,
but no values. After the move, the destination must have all these keys, unchanged or changed since, and no others from
that time. The records stay on disk until they are verified, so that an interrupted transition can resume. The client's
``Mover`` moves the vbuckets.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import feather

from upriver.client import PARALLEL, Address, Cluster, Consumer, Mover, Step
from upriver.client.cluster import SingleNode, VbucketStatus, vbuckets_of
from upriver.client.transport import PATIENCE_S
from upriver.errors import CheckpointError, OptionError, PipelineFailed, UpriverError
from upriver.files import storage_errors, write_atomically
from upriver.model import CHANGES, Event, VbucketState
from upriver.options import as_count, as_flag, as_seconds, option
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.options import JobOptions, same_as
from upriver.pipelines.core.pipeline import Task
from upriver.protocol.move import Goal, Phase
from upriver.spark import as_address

#: Changes to record at a time; at least those of one vbucket.
CHANGES_MAX: Final = 512 * 1024
_STATE: Final = "transition.json"
_COLUMNS: Final = ("vbucket", "seqno", "rev_seqno", "cas", "event", "key")
_RECORD: Final = pa.schema([CHANGES.field(name) for name in _COLUMNS])
_LOOK_S: Final = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransitionOptions(JobOptions):
    """The options of transition."""

    to: Address | None = option(None, as_address, "node that gets the vbuckets", "HOST:PORT or a URL")
    vbuckets: tuple[int, ...] | None = same_as(
        "vbuckets", "vbuckets to move; by default all that are active on the source", "0-511,700"
    )
    undo: bool = option(False, as_flag, "move the vbuckets back, and undo interrupted moves")
    verify: bool = option(True, as_flag, "verify that every document has arrived")
    parallel: int = option(PARALLEL, as_count, "number of vbuckets to move in parallel")
    step_patience: float = option(PATIENCE_S, as_seconds, "give up on a vbucket that makes no progress for this long")

    def __post_init__(self) -> None:
        if self.to is None:
            raise OptionError("to", "", "give the node that gets the vbuckets")
        if self.to.endpoints[0] == self.source.endpoints[0]:
            raise OptionError("to", str(self.to), "it is the source itself: choose another node")


class Transition(Task):
    """Moves vbuckets from one node to another, and verifies each."""

    name = "transition"
    options_type = TransitionOptions
    options: TransitionOptions

    def __init__(self, options: TransitionOptions) -> None:
        super().__init__(options)
        assert options.to is not None
        self._to = options.to
        self._counts = {"vbuckets": 0, "moved": 0, "verified": 0, "undone": 0, "bytes": 0}
        self._tell: Callable[[], object] = lambda: None

    def counts(self) -> dict[str, int]:
        """Counts of vbuckets by progress."""
        return dict(self._counts)

    def carry_out(self, directory: Path, tell: Callable[[], object], stop: threading.Event) -> None:
        """Move all vbuckets, or move them back."""
        self._tell = tell
        asyncio.run(self._carry_out(RunDirectory(directory), stop))

    async def _carry_out(self, directory: RunDirectory, stop: threading.Event) -> None:
        source, destination = self.options.source, self._to
        known: dict[str, str] = directory.read(_STATE) or {}
        here, there = await asyncio.gather(_held(source), _held(destination))
        wanted = self._wanted(here, known)
        self._counts["vbuckets"] = len(wanted)
        if self.options.undo:
            moved = [number for number in wanted if _is_active(there, number)]
            broken = [number for number in wanted if not _is_active(there, number)]
            await self._go(directory, known, _Way(source, destination, Goal.UNDO), broken, stop)
            await self._go(directory, known, _Way(destination, source, Goal.TAKE_OVER), moved, stop)
        else:
            await self._go(directory, known, _Way(source, destination, Goal.TAKE_OVER), wanted, stop)

    def _wanted(self, here: dict[int, VbucketStatus], known: dict[str, str]) -> list[int]:
        """The vbuckets: those in the options, else those of an earlier run and those of the source."""
        if self.options.vbuckets is not None:
            return list(self.options.vbuckets)
        mine = set() if self.options.undo else {number for number in here if _is_active(here, number)}
        return sorted(mine | {int(number) for number in known})

    async def _go(
        self, directory: RunDirectory, known: dict[str, str], way: "_Way", numbers: list[int], stop: threading.Event
    ) -> None:
        # A completed move counts only while it is still in effect.
        there = await _held(way.home)
        for group in await _groups(way.source, numbers):
            if stop.is_set():
                return
            todo = [n for n in group if known.get(str(n)) != way.done or not _is_active(there, n)]
            verified = self.options.verify and way.goal is Goal.TAKE_OVER
            if verified:
                await self._record(directory, way, todo)
            known |= dict.fromkeys(map(str, todo), way.doing)
            directory.write(_STATE, known)
            await self._move(directory, way, todo, stop)
            if stop.is_set():
                return
            if verified:
                await self._verify(directory, way, todo)
            for number in todo:  # first: the next move of this vbucket must not find this record
                way.record_path(directory, number).unlink(missing_ok=True)
            known |= dict.fromkeys(map(str, todo), way.done)
            directory.write(_STATE, known)

    async def _move(self, directory: RunDirectory, way: "_Way", numbers: list[int], stop: threading.Event) -> None:
        def on_step(step: Step) -> None:
            if step.phase in (Phase.MOVED, Phase.UNDONE):
                self._counts["moved" if step.phase is Phase.MOVED and not self.options.undo else "undone"] += 1
            self._counts["bytes"] = passed_before + mover.bytes_passed_on
            self._tell()
            if stop.is_set():  # on_step may have set it: take no further step
                mover.stop()

        passed_before = self._counts["bytes"]
        mover = Mover(
            way.source, way.destination, numbers, way.goal, parallel=self.options.parallel,
            patience_s=self.options.step_patience, on_step=on_step,
        )  # fmt: skip
        watching = asyncio.create_task(_stop_with(stop, mover))
        try:
            steps = await mover.carry_out()
        except UpriverError as error:
            where = f"{_span(numbers)}, {way}"
            raise PipelineFailed(self.name, "move", where, str(error), str(directory.path)) from error
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await mover.close()
        if stop.is_set():
            return
        wanted = Phase.UNDONE if way.goal is Goal.UNDO else Phase.MOVED
        for step in steps:
            if step.phase is not wanted:
                where, why = f"vbucket {step.vbucket}, {way}", step.reason or step.phase.value
                raise PipelineFailed(self.name, step.phase.name.lower(), where, why, str(directory.path))

    async def _record(self, directory: RunDirectory, way: "_Way", numbers: list[int]) -> None:
        """Record what the source holds; records from before an interruption stay valid."""
        missing = [number for number in numbers if not way.record_path(directory, number).exists()]
        held = await _held(way.source)
        ready = [number for number in missing if _is_active(held, number)]
        tables = await _read(way.source, {number: held[number].high_seqno for number in ready})
        for number in ready:
            table = tables[number].replace_schema_metadata({"high": str(held[number].high_seqno)})
            write_record(way.record_path(directory, number), table)

    async def _verify(self, directory: RunDirectory, way: "_Way", numbers: list[int]) -> None:
        held, left = await asyncio.gather(_held(way.destination), _held(way.source))
        recorded = [number for number in numbers if way.record_path(directory, number).exists()]
        arrived = await _read(way.destination, {n: held[n].high_seqno for n in recorded if _is_active(held, n)})
        for number in numbers:
            why = ""
            if not _is_active(held, number):
                why = f"it is not active on {way.destination}"
            elif _is_active(left, number):
                why = f"it is still active on {way.source}"
            elif number in recorded:
                why = difference(read_record(way.record_path(directory, number)), arrived[number])
            if why:
                where = f"vbucket {number}, {way}"
                raise PipelineFailed(self.name, "verify", where, why, str(directory.path))
            self._counts["verified"] += 1
        self._tell()


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """Source, destination and goal."""

    source: Address
    destination: Address
    goal: Goal

    def __str__(self) -> str:
        return f"{self.source} to {self.destination}"

    @property
    def home(self) -> Address:
        """The node with the active copy at the end."""
        return self.source if self.goal is Goal.UNDO else self.destination

    @property
    def doing(self) -> str:
        """The entry of a vbucket that is being moved."""
        return "undoing" if self.goal is Goal.UNDO else f"to {self.destination}"

    @property
    def done(self) -> str:
        """The entry of a vbucket that has moved."""
        return "undone" if self.goal is Goal.UNDO else f"at {self.destination}"

    def record_path(self, directory: RunDirectory, number: int) -> Path:
        """The file of a vbucket's record."""
        endpoint = str(self.destination.endpoints[0]).replace(":", "-")
        return directory.path / f"vbucket-{number}-to-{endpoint}.arrow"


def write_record(path: Path, table: pa.Table) -> None:
    """Store what the source held; it is on disk when this returns, complete or not at all."""
    content = pa.BufferOutputStream()
    feather.write_feather(table, content)
    with storage_errors(path, CheckpointError):
        write_atomically(path, content.getvalue().to_pybytes())


def read_record(path: Path) -> pa.Table:
    """Read what ``write_record`` stored."""
    with storage_errors(path, CheckpointError):
        content = path.read_bytes()
    try:
        return feather.read_table(pa.BufferReader(content))
    except pa.ArrowException as error:
        raise CheckpointError(
            str(path),
            f"damaged record of a vbucket: {error}. Delete the file and run again; the move is not verified then",
        ) from error


def difference(before: pa.Table, after: pa.Table) -> str:
    """The first difference between a record and the destination; empty if there is none."""
    high = int((before.schema.metadata or {}).get(b"high", b"0"))
    noted, arrived = dict(_rows(before)), dict(_rows(after))
    for key, (seqno, version, is_document) in noted.items():
        found = arrived.get(key)
        if found is None:
            if is_document:  # a tombstone may have been purged since
                return f"key {key!r}, change {seqno}, is missing at the destination"
        elif found[0] <= high and found[:2] != (seqno, version):
            return f"key {key!r} is change {found[0]} at the destination, another version than change {seqno}"
    for key, (seqno, _, _) in arrived.items():
        if seqno <= high and key not in noted:
            return f"key {key!r}, change {seqno}, did not exist at the source"
    return ""


def _rows(table: pa.Table) -> Iterator[tuple[bytes, tuple[int, tuple[int, int], bool]]]:
    columns = (table.column(name).to_pylist() for name in ("key", "seqno", "rev_seqno", "cas", "event"))
    for key, seqno, rev_seqno, cas, event in zip(*columns, strict=True):
        yield key, (seqno, (rev_seqno, cas), event == Event.MUTATION)


def _is_active(held: dict[int, VbucketStatus], number: int) -> bool:
    return number in held and held[number].state is VbucketState.ACTIVE


async def _held(address: Address) -> dict[int, VbucketStatus]:
    cluster = Cluster(address)
    try:
        return await vbuckets_of(await cluster.connection(address.endpoints[0]))
    finally:
        await cluster.close()


async def _groups(address: Address, numbers: Iterable[int]) -> list[list[int]]:
    held = await _held(address)
    groups: list[list[int]] = []
    room = 0
    for number in numbers:
        size = held[number].high_seqno if number in held else 0
        if not groups or size > room:
            groups.append([])
            room = CHANGES_MAX
        groups[-1].append(number)
        room -= size
    return groups


async def _read(address: Address, ends: dict[int, int]) -> dict[int, pa.Table]:
    """Every key of these vbuckets of one node, with its version, up to these seqnos."""
    pieces: dict[int, list[pa.RecordBatch]] = {number: [] for number in ends}
    asked = {number: end for number, end in ends.items() if end}
    if asked:
        settings: dict[str, Any] = {"vbuckets": list(asked), "end": asked, "columns": _COLUMNS, "keys_only": True}
        consumer = Consumer(address, active_only=False, **settings)
        consumer.cluster = SingleNode(address, asked)
        async with consumer:
            async for batch in consumer:
                at = 0
                for run in batch.runs:
                    pieces[run.vbucket].append(batch.records.slice(at, run.rows).select(list(_COLUMNS)))
                    at += run.rows
    return {number: pa.Table.from_batches(batches, _RECORD) for number, batches in pieces.items()}


async def _stop_with(stop: threading.Event, mover: Mover) -> None:
    while not stop.is_set():
        await asyncio.sleep(_LOOK_S)
    mover.stop()


def _span(numbers: list[int]) -> str:
    return f"vbucket {numbers[0]}" if len(numbers) == 1 else f"vbuckets {numbers[0]} to {numbers[-1]}"
