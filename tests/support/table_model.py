"""A mirror between a modelled cluster and a real table, and everything that may happen to it.

The plan of the query is the real one, and so are tasks, commits, compaction and the table in its directory. Modelled
are the nodes, Spark (batches that run again with other rows, attempts that are abandoned, a driver and tasks that end
at any operation on files, lost checkpoints) and other programs that write to the table.
"""

import contextlib
import json
import random
import shutil
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from pyroaring import BitMap

from tests.support.crashing_storage import CrashingStorage, StorageCrash
from tests.support.modelled_source import failover_log
from tests.support.pipeline_model import SCHEMA, Cluster, row
from upriver.errors import CheckpointError, DataLoss, StorageError, StreamRefused, TableConflict
from upriver.pipelines.apply.task_apply import TaskSource
from upriver.pipelines.core.workers import LocalWorkers, Work
from upriver.pipelines.targets.tables import table_keeper
from upriver.pipelines.targets.tables.compactor import Compactor
from upriver.pipelines.targets.tables.foreign_rows import touched_vbuckets
from upriver.pipelines.targets.tables.table_keeper import KeeperSettings, TableKeeper, opened, table_task
from upriver.pipelines.targets.tables.table_task import TableTask
from upriver.spark import BucketIdentity, Range, Rules, SourceState, packed_ranges
from upriver.spark.batch_planner import answered_with_rollback, next_offset, ranges
from upriver.spark.offsets import Offset, VbucketOffset
from upriver.spark.rows import rollback_value, signed
from upriver.tables import Table, TableStorage, documents_of, read, read_vector, vacuum_table
from upriver.tables.actions import CommitInfo, Metadata, Remove, encode
from upriver.tables.deletion_vectors import write_vectors
from upriver.tables.log import Commit, commit_path, load, read_commit

#: What a mirror reads with.
RULES: Final = Rules("emit", flush_resets=True)
#: The model's keys as a node has them: text, text beyond ASCII, other bytes, a long one, a zero byte.
NAMES: Final = "abcdefghij"
KEYS: Final = {"a": b"a", "b": "b\u00e9".encode(), "c": b"\xff\xfe", "d": b"d" * 250, "e": b"\x00"}
#: By vbucket and key: seqno and document.
Held = dict[tuple[int, bytes], tuple[int, bytes]]


def document(number: int) -> bytes:
    """The value that the model calls by a number."""
    match number % 16:
        case 0:
            return b"plain %d \xff" % number
        case 1:
            return b""
        case 2:
            return b'{"n": %d.5}' % number
        case 3:
            return b'{"n": 12345678901234567890123, "text": null}'
        case 4:
            return b'{"n": %d, "whole": %d}' % (2**53 + number, number)
        case 5:
            return b'{"deep": {"a": null, "b": [1, null, {}]}, "n": null}'
        case 6:
            return b'{"n": 1, "n": 2}'
        case 7:
            return b"[1, 2]"
        case 8 | 9:
            return b'{"n": %d, "whole": 1.25, "rare%d": "x"}' % (number, number)
        case _:
            return b'{"n": %d, "text": "word%d", "only%d": true}' % (number, number, number % 4)


class TableCluster(Cluster):
    """A cluster with documents and keys of all kinds."""

    def __init__(self, choose: random.Random, vbuckets: int, *, exact: bool) -> None:
        super().__init__(choose, vbuckets, exact=exact)
        #: What a test has put; by vbucket and the model's number of the value.
        self._put: dict[tuple[int, int], bytes] = {}

    def put(self, number: int, key: str, value: bytes | None) -> None:
        """Set a document, or delete it."""
        vbucket = self.vbuckets[number]
        vbucket.write(key, delete=value is None)
        if value is not None:
            self._put[number, vbucket.values] = value

    @property
    def held(self) -> Held:
        """What a table must hold."""
        return {
            (number, _key(key)): (seqno, self._value(number, value))
            for number, vbucket in self.vbuckets.items()
            for key, (seqno, value) in {k: (s, v) for s, k, v in vbucket.versions}.items()
            if value is not None
        }

    def change(self, number: int, seqno: int, key: str, value: int | None, **shared: Any) -> dict[str, Any]:
        """A change as a row of Spark."""
        if value is None:
            return row(number, seqno, "deletion" if seqno % 2 else "expiration", _key(key), None, **shared)
        return row(number, seqno, "mutation", _key(key), self._value(number, value), **shared)

    def _value(self, number: int, value: int) -> bytes:
        return self._put.get((number, value), document(value))

    def disturb(self, times: int) -> None:
        """Things happen to the vbuckets."""
        for _ in range(self.choose.randrange(times)):
            vbucket = self.choose.choice(list(self.vbuckets.values()))
            match self.choose.randrange(20):
                case 0 | 1:
                    vbucket.fail_over(self.choose.randrange(6))
                case 2 | 3 if not self.exact:
                    vbucket.purge()
                case 2:
                    vbucket.forget()
                case 4:
                    vbucket.versions.clear()  # a flush: another history from 0
                    vbucket.purge_seqno = vbucket.floor = 0
                    vbucket.uuids += 1
                    vbucket.log = failover_log((vbucket.uuids, 0))
                case _:
                    vbucket.write(self.choose.choice(NAMES), delete=self.choose.random() < 0.25)


def _key(name: str) -> bytes:
    return KEYS.get(name, name.encode(errors="surrogateescape"))


class ModelledSource(TaskSource):
    """A task's connection to the modelled cluster."""

    def __init__(self, cluster: TableCluster, columns: Sequence[str] = SCHEMA.names) -> None:
        self._cluster = cluster
        self._columns = list(columns)

    def vbuckets(self) -> Collection[int]:
        return list(self._cluster.vbuckets)

    def states(self, vbuckets: Collection[int]) -> Mapping[int, SourceState]:
        """The states; sometimes a vbucket moves and has no owner."""
        if self._cluster.is_busy:
            self._cluster.disturb(2)
            if self._cluster.choose.random() < 0.03:
                vbuckets = list(vbuckets)[1:]
        states = self._cluster.states
        return {number: states[number] for number in vbuckets if number in states}

    def rows(self, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
        """The rows of the ranges, mixed, while things happen."""
        reads = [self._read(asked) for asked in ranges]
        while reads:
            rows: list[dict[str, Any]] = []
            for _ in range(self._cluster.choose.randrange(1, 4)):
                if reads:
                    read = self._cluster.choose.choice(reads)
                    found = next(read, None)
                    if found is None:
                        reads.remove(read)
                    else:
                        rows += found
            if rows:
                yield pa.RecordBatch.from_pylist(rows, SCHEMA).select(self._columns)
            if self._cluster.is_busy:
                self._cluster.disturb(2)

    def _read(self, asked: Range) -> Iterator[list[dict[str, Any]]]:
        """What ``RangePolicy`` makes of a range."""
        number, vbucket = asked.start.vbucket, self._cluster.vbuckets[asked.start.vbucket]
        if (seqno := vbucket.rollback_for(asked.start)) is not None:
            asked = answered_with_rollback(asked, seqno, vbucket.log, RULES)
        uuid = vbucket.state.vbucket_uuid
        if asked.rollback is not None:
            yield [self._mark(asked)]
        if asked.start.vbucket_uuid not in (0, uuid):
            return  # nothing is read on another branch than the planned one
        shared: dict[str, Any] = {"vbucket_uuid": signed(uuid), "branch": asked.start.branch}
        for version in vbucket.read(asked.start.seqno, asked.end_seqno):
            yield [self._cluster.change(number, *version, **shared)]
            if vbucket.state.vbucket_uuid != uuid:  # the connection is lost, and the range is requested again
                place = asked.start._replace(seqno=version[0])
                if (seqno := vbucket.rollback_for(place)) is not None:
                    yield [self._mark(answered_with_rollback(asked, seqno, vbucket.log, RULES))]
                return
            if self._cluster.is_busy and version[0] < vbucket.purge_seqno and self._cluster.choose.random() < 0.2:
                raise StreamRefused(number, "the source was rolled back during the read; the task must run again")

    @staticmethod
    def _mark(asked: Range) -> dict[str, Any]:
        back = asked.rollback
        assert back is not None
        event, value = "rollback" if back.seqno else "reset", rollback_value(back.old_uuid, back.new_uuid)
        shared = {"vbucket_uuid": signed(back.new_uuid), "branch": asked.start.branch}
        return row(asked.start.vbucket, back.seqno, event, None, value, **shared)


class _Meanwhile(LocalWorkers):
    """Something happens between the work of the tasks and the moment that the driver gets its results."""

    def __init__(self, happen: Callable[[], object]) -> None:
        self._happen = happen

    def map(self, work: Work, items: Sequence[bytes], *rest: Any) -> list[bytes]:
        found = super().map(work, items, *rest)
        self._happen()
        return found


class Driver(NamedTuple):
    """A driver, and what its checkpoint says."""

    keeper: TableKeeper | None
    number: int
    logged: int
    ends: dict[int, Offset]
    offset: Offset
    committed: tuple[str, int] | None


class TableRun:
    """One history of a mirror."""

    def __init__(
        self,
        directory: Path,
        seed: int = 0,
        *,
        exact: bool = True,
        history: bool = False,
        vbuckets: int = 3,
        is_quiet: bool = False,
        **settings: Any,
    ) -> None:
        """``is_quiet``: only the test lets things happen. ``settings`` are those of the table's keeper."""
        self.choose = random.Random(seed)
        self.cluster = TableCluster(self.choose, vbuckets, exact=exact)
        self.table = TableStorage.of(directory / "table")
        self.history = TableStorage.of(directory / "history") if history else None
        self.settings = KeeperSettings(**{"share": 0.2, **settings})
        self.query, self.number = "first", 0
        #: The last batch in Spark's log, where a batch is before it runs.
        self.logged = -1
        #: The ends of the batches in that log.
        self.ends: dict[int, Offset] = {}
        self.offset = self.beginning = Offset(map(VbucketOffset, range(vbuckets)))
        #: The batch in the file that a mirror keeps beside its checkpoint.
        self.committed: tuple[str, int] | None = None
        #: Whether all changes came a second time.
        self.is_numbered_again = False
        self.is_fragile = self.cluster.is_busy = not is_quiet
        #: What happened, for the one who reads a failure.
        self.told: list[str] = []
        self._seed = seed
        self._backup = directory / "backup"
        self._backup_of = ""
        self._keeper: TableKeeper | None = None
        #: A copy of the checkpoint, or another driver that uses one.
        self._other: Driver | None = None

    # The driver's process

    @property
    def keeper(self) -> TableKeeper:
        """The driver, started again if its process has ended."""
        if self._keeper is None:
            self.start(self.choose.choice((None, None, self.choose.randrange(60))) if self.is_fragile else None)
        assert self._keeper is not None
        return self._keeper

    def start(self, crash_before: int | None = None) -> None:
        """Start the driver in another process, which ends before this operation on files."""
        self._keeper = None
        storage, settings = CrashingStorage.of(self.table, crash_before), self.settings
        if settings.errors is not None:
            settings = replace(settings, errors=storage.beside(settings.errors))
        self._keeper = keeper = TableKeeper(
            storage,
            self.connect,
            ModelledSource(self.cluster),
            settings,
            query=self.query,
            bucket=lambda: BucketIdentity("bucket", is_in_memory=False),
            reached=lambda: self.offset,
            logged=self.logged,
            end_of=lambda number: self.ends.get(number, Offset(())),
            history=None if self.history is None else storage.beside(self.history),
        )
        if keeper.starts_over:
            self.tell("starts over")
            self.committed = None
        if self.committed is not None and not keeper.has_batch(*self.committed):
            self.tell("rebuild")
            keeper.rebuild()

    def connect(self, columns: Sequence[str]) -> TaskSource:
        """Connect a task."""
        return ModelledSource(self.cluster, columns)

    def tell(self, what: str) -> None:
        self.told.append(what)

    def survives(self, work: Callable[[], object]) -> bool:
        """Whether some work of the driver ends well; otherwise another process continues later."""
        try:
            work()
        except (StorageCrash, DataLoss, StreamRefused, TableConflict, CheckpointError) as error:
            self.tell(f"driver ended: {error!r}")
            self._keeper = None
            return False
        return True

    # Spark

    def batch(self, rows_max: int | None) -> bool:
        """Plan the next batch and run it until it is complete; whether there was one."""
        end = self._next_end(rows_max)
        if end == self.offset:
            return False
        self.tell(f"batch {self.number}")
        while not self.survives(lambda: self.attempt(end)):
            pass
        self.offset, self.number = end, self.number + 1
        return True

    def catch_up(self) -> None:
        """Run a batch with all that there is, in a quiet run. Errors are raised."""
        end = self._next_end(None)
        self.attempt(end)
        self.offset, self.number = end, self.number + 1

    def _next_end(self, rows_max: int | None) -> Offset:
        """The end of the next batch. One that is in the log stays as it is."""
        if self.logged == self.number:
            return self.ends[self.number]
        return next_offset(self.offset, self.cluster.states, RULES, rows_max=rows_max)

    def attempt(self, end: Offset) -> None:
        """Run a batch once."""
        asked = list(ranges(self.offset, end))

        def run(task: Any) -> list[bytes]:
            found = [self._attempts(task, packed_ranges(share)) for share in self._shares(asked)]
            self.meanwhile()
            return found

        keeper, workers = self.keeper, _Meanwhile(self.meanwhile)
        self.logged, self.ends[self.number] = self.number, end  # a driver opens the table before Spark plans
        results: list[bytes] | None = None
        if self.is_fragile and self.choose.random() < 0.3:  # the tasks of a Spark sink make their plan themselves
            table = opened(self.table, self.settings)
            results = run(table_task(table, self.connect, self.settings, self.history))
        task = keeper.plan(self.number, workers)
        if task is None:
            return
        self.meanwhile()
        keeper.commit(run(task) if results is None else results, self.number, run, workers)
        if keeper.batch_number == self.number:
            self.committed = keeper.application, self.number

    def _shares(self, asked: Sequence[Range]) -> list[Sequence[Range]]:
        parts = self.choose.randrange(1, 3)
        return [share for number in range(parts) if (share := asked[number::parts])]

    def _attempts(self, task: TableTask, item: bytes) -> bytes:
        """The result of the last attempt; earlier ones were abandoned, or their process has ended."""
        if self.is_fragile and self.choose.random() < 0.2:
            with contextlib.suppress(StorageCrash, DataLoss, StreamRefused):
                crashing = CrashingStorage.of(self.table, self.choose.choice((None, self.choose.randrange(12))))
                replace(task, storage=crashing)(item)
                self.tell("abandoned attempt")
        return task(item)

    def meanwhile(self) -> None:
        """What happens while tasks run."""
        if self.is_fragile:
            self.cluster.disturb(3)
            if self.choose.random() < 0.15:
                self.foreign_commit()
            if self.choose.random() < 0.04:
                self.vacuum_at_once()
            if self.choose.random() < 0.04:
                self.survives_quietly(lambda: self.compact(LocalWorkers()))

    def survives_quietly(self, work: Callable[[], object]) -> None:
        """Work that may fail without consequences, but not end the process."""
        with contextlib.suppress(TableConflict):
            work()

    # Between batches

    def compact(self, workers: LocalWorkers) -> None:
        """Merge everything, as a thread of the driver does it."""
        keeper = self.keeper
        compactors = [Compactor(keeper.table, keeper.lock, keeper.record)]
        if keeper.history is not None:
            compactors.append(Compactor(keeper.history.table, keeper.lock))
        for each in compactors:
            self.tell(f"compacted {each.compact(workers, everything=True)}")

    def between(self) -> None:
        """What happens between two batches."""
        self.cluster.disturb(20)
        match self.choose.randrange(29):
            case 0:
                self.lose_checkpoint()
            case 14:
                self.lose_log()
            case 15:
                self.switch_vectors()
            case 1 | 2:
                self.foreign_commit()
            case 3 | 4 | 5:
                # A batch is committed while a merge runs.
                self.survives(lambda: self.compact(_Meanwhile(self.a_batch_of_changes)))
            case 6:
                self._keeper = None
            case 7 | 8:
                self.save()
            case 9 | 10:
                self.lose_batches()
            case 11:
                self.survives(lambda: vacuum_table(self.keeper.table, retention_s=0, now_s=time.time() + 60))
                self.tell("vacuum")
            case 21:
                self.clean_log()
            case 22:
                self.survives(self.merge_in_trouble)
            case 16:
                self.copy_checkpoint()
            case 17 | 18:
                self.put_back_checkpoint()
            case 19 | 20:
                self.other_driver()
            case 12 | 13:
                self.survives(lambda: self.keeper.look(_Meanwhile(self.meanwhile)))

    def vacuum_at_once(self) -> None:
        """Somebody deletes all files that the table does not reference, also those of running tasks."""
        if load(self.table) is not None:
            self.tell("vacuum at once")
            vacuum_table(Table.open(self.table), retention_s=0, now_s=time.time() + 7200)

    def merge_in_trouble(self) -> None:
        """Another program changes rows during a merge, and the storage fails when the driver looks what changed."""
        keeper = self.keeper
        failures = [StorageError(self.table.url, "timed out")] * self.choose.randrange(1, 3)

        def record(commits: Iterable[Commit]) -> None:
            with keeper.lock, unittest.mock.patch.object(table_keeper, "touched_vbuckets", failing):
                keeper.record(commits)

        def failing(*given: Any) -> Any:
            if failures:
                raise failures.pop()
            return touched_vbuckets(*given)

        self.tell("merge in trouble")
        compactor = Compactor(keeper.table, keeper.lock, record)
        with contextlib.suppress(StorageError):  # which the thread of a merge only logs
            compactor.compact(_Meanwhile(self.foreign_commit), everything=True)

    def clean_log(self) -> None:
        """The log is cleaned up while the mirror does not run, after a foreign commit perhaps."""
        if self.choose.random() < 0.7:
            self.foreign_commit()
        snapshot = load(self.table)
        if snapshot is not None:
            self._keeper = None
            self.tell(f"log cleaned up to {snapshot.version}")
            DeltaTable(self.table.url).create_checkpoint()
            self.table.delete([commit_path(version) for version in range(snapshot.version)])

    def a_batch_of_changes(self) -> None:
        """Some documents change, and are in the next batch."""
        for vbucket in self.cluster.vbuckets.values():
            vbucket.write(self.choose.choice(NAMES), delete=self.choose.random() < 0.25)
        self.batch(None)

    def lose_checkpoint(self) -> None:
        """The user starts again with ``--adopt``."""
        self.tell("lost checkpoint")
        self._keeper, self.committed, self._other = None, None, None
        self.ends = {}
        self.query, self.number, self.offset = self.query + "again", 0, self.beginning
        self.logged = -1
        self.settings = replace(self.settings, adopt=True)

    def lose_log(self) -> None:
        """Somebody removes Spark's part of the checkpoint, so that batches are numbered from 0 again."""
        self.tell("lost log")
        self._keeper, self.number, self.logged, self.offset = None, 0, -1, self.beginning
        self.ends = {}
        self.is_numbered_again = True

    @property
    def checkpoint(self) -> "Driver":
        """The checkpoint as it is now, and the process that uses it."""
        return Driver(self._keeper, self.number, self.logged, dict(self.ends), self.offset, self.committed)

    @checkpoint.setter
    def checkpoint(self, to: "Driver") -> None:
        self._keeper, self.number, self.logged, self.ends, self.offset, self.committed = to

    def copy_checkpoint(self) -> None:
        """Somebody makes a copy of the checkpoint."""
        self.tell("copied checkpoint")
        self._other = self.checkpoint._replace(keeper=None)

    def put_back_checkpoint(self) -> None:
        """Somebody puts the copy in the place of the checkpoint, while the mirror does not run."""
        if self._other is not None:
            self.tell("old checkpoint")
            self.checkpoint = self._other._replace(keeper=None, ends=dict(self._other.ends))
            self.is_numbered_again = True

    def other_driver(self) -> None:
        """Another driver uses the copy. Both run, and their batches alternate."""
        if self._other is not None:
            self.tell("other driver")
            self.checkpoint, self._other = self._other, self.checkpoint
            self.is_numbered_again = True

    def switch_vectors(self) -> None:
        """The mirror is started again with another ``--deletion-vectors``, or without it."""
        self._keeper = None
        self.settings = replace(self.settings, vectors=self.choose.choice((True, False, None)))
        self.tell(f"vectors {self.settings.vectors}")

    def save(self) -> None:
        """Somebody makes a copy of the table's directory."""
        if self.table.local().exists():  # type: ignore[union-attr]
            shutil.rmtree(self._backup, ignore_errors=True)
            shutil.copytree(self.table.url, self._backup)
            self._backup_of = self.query
            self.tell("backup")

    def lose_batches(self) -> None:
        """Somebody puts the old copy in the place of the table, while the mirror does not run."""
        if self._backup_of == self.query:
            self._keeper = None
            shutil.rmtree(self.table.url)
            shutil.copytree(self._backup, self.table.url)
            self.tell("restored backup")

    # Other programs

    def foreign_commit(self) -> None:
        """Another program writes to the table."""
        snapshot = load(self.table)
        if snapshot is None or "upriver.query" not in snapshot.metadata.properties:
            return
        name = self.choose.choice(("append", "optimize", "delete", "hide", "restore", "column", "sidecars"))
        self.tell(f"foreign {name} after {snapshot.version}")
        getattr(self, f"_foreign_{name}")(snapshot)

    def _foreign_append(self, snapshot: Any) -> None:
        rows = read(self.table.url)
        if rows.num_rows:
            copy = rows.slice(self.choose.randrange(rows.num_rows), 1)
        else:
            values = {"_key": "a", "_vbucket": 0, "_raw": b"foreign"}
            copy = pa.Table.from_pylist([values], rows.schema)
        vbucket = pa.array([self.choose.choice(list(self.cluster.vbuckets))], pa.int32())
        copy = copy.set_column(copy.column_names.index("_vbucket"), "_vbucket", vbucket)
        write_deltalake(self.table.url, copy, mode="append")

    def _foreign_optimize(self, snapshot: Any) -> None:
        DeltaTable(self.table.url).optimize.compact()

    def _foreign_delete(self, snapshot: Any) -> None:
        DeltaTable(self.table.url).delete(self.choose.choice(("_vbucket = 1", "_seqno < 5", "_key = 'a'")))

    def _foreign_restore(self, snapshot: Any) -> None:
        try:  # files may be gone, and the schema of another table differs
            before = max(snapshot.version - self.choose.randrange(1, 8), self._first_version())
            if before < snapshot.version:
                DeltaTable(self.table.url).restore(before)
        except (DeltaError, OSError):
            pass
        except BaseException as error:  # delta-rs panics where vectors were switched on or off in between
            if type(error).__name__ != "PanicException":
                raise

    def _first_version(self) -> int:
        """The first version with the table's present id and owner."""
        snapshot = load(self.table)
        assert snapshot is not None
        first = snapshot.version
        for version in range(snapshot.version, -1, -1):
            try:
                content = self.table.read(commit_path(version))
            except FileNotFoundError:  # the log was cleaned up
                break
            for line in content.splitlines():
                if b'"metaData"' in line and self.query.encode() in line:
                    first = version
                    found = Metadata.of_json(json.loads(line)["metaData"])
                    if found.id != snapshot.metadata.id:
                        return version + 1
        return first

    def _foreign_column(self, snapshot: Any) -> None:
        name = f"theirs{self.choose.randrange(2)}"
        fields = json.loads(snapshot.metadata.schema)["fields"]
        if name in {field["name"] for field in fields}:
            return
        fields.append({"name": name, "type": "date", "nullable": True, "metadata": {}})
        schema = json.dumps({"type": "struct", "fields": fields})
        self._put_foreign(snapshot, [replace(snapshot.metadata, schema=schema)])

    def _foreign_hide(self, snapshot: Any) -> None:
        """As delta-spark deletes rows."""
        if "delta.enableDeletionVectors" not in snapshot.metadata.properties or not snapshot.files:
            return
        file = self.choose.choice(sorted(snapshot.files.values(), key=lambda file: file.path))
        dead = read_vector(self.table, file.deletion_vector)
        live = [position for position in range(file.rows) if position not in dead]
        if len(live) > 1:
            more = BitMap(self.choose.sample(live, self.choose.randrange(1, len(live))))
            vector = write_vectors(self.table, {file.path: dead | more})[file.path]
            stats = json.dumps(file.statistics | {"tightBounds": False})
            added = replace(file, deletion_vector=vector, stats=stats, data_change=True)
            self._put_foreign(snapshot, [Remove.of(file, time.time_ns() // 10**6, data_change=True), added])

    def _foreign_sidecars(self, snapshot: Any) -> None:
        """Somebody tidies up; a sidecar can be built again."""
        self.table.delete([file.path for file in self.table.list("_upriver/") if file.path.endswith(".idx")])

    def _put_foreign(self, snapshot: Any, actions: Iterable[Any]) -> None:
        content = encode([CommitInfo(time.time_ns() // 10**6, "FOREIGN", engine="other/1"), *actions])
        assert self.table.put_if_absent(commit_path(snapshot.version + 1), content)

    # The end

    def run(self, batches: int) -> None:
        """Let things happen, then let the stream come to its end."""
        for vbucket in self.cluster.vbuckets.values():
            for name in NAMES:
                vbucket.write(name, delete=False)
        for _ in range(self.choose.randrange(1, batches)):
            self.between()
            self.batch(self.choose.choice((None, 1, 3)))
        self.is_fragile = self.cluster.is_busy = False
        self._keeper = None
        rest = 4  # one to go back, one to read, the others to see that there is no more
        while rest:
            assert self.number < 1000, "it does not come to an end"
            rest -= not self.batch((None, 3, 9)[self._seed % 3])
            self.keeper.plan(2**62, LocalWorkers())

    def check(self) -> None:
        """The table holds what the cluster does."""
        found, expected = held(self.table), self.cluster.held
        wrong = sorted(name for name in found.keys() | expected.keys() if not same(found.get(name), expected.get(name)))
        lines = [f"{name}: {found.get(name)} instead of {expected.get(name)}" for name in wrong]
        assert not wrong, "\n".join([*self.told, *lines])
        assert not self.keeper._due, "something is still to be repaired"
        if self.history is not None:
            self._check_history()

    def _check_history(self) -> None:
        """Every batch is in the history once. Where nothing was undone, every change of a query is there once, and the
        latest version of each key is among them. After a rollback changes come again, but not all current versions.
        """
        assert self.history is not None
        rows = read(self.history.url).to_pylist()
        undone = {each["vbucket"] for each in rows if each["key"] is None}
        rows = [each for each in rows if each["vbucket"] not in undone]
        if self.query == "first" and not self.is_numbered_again:
            changes = Counter((each["vbucket"], each["vbucket_uuid"], each["seqno"]) for each in rows)
            twice = [change for change, count in changes.items() if count > 1]
            assert not twice, "\n".join([*self.told, f"twice in the history: {twice}"])
        known = {(each["vbucket"], each["key"], each["seqno"], each["value"]) for each in rows}
        held = self.cluster.held.items()
        expected = {(number, key, *version) for (number, key), version in held if number not in undone}
        assert not expected - known, "\n".join([*self.told, f"not in the history: {expected - known}"])
        for app in {f"upriver-{query}" for query in (self.query, "first")}:
            numbers = [commit.txns[app] for commit in _commits(self.history) if app in commit.txns]
            assert numbers == sorted(set(numbers)), f"a batch is in the history twice: {numbers}"


def _commits(storage: TableStorage) -> Iterator[Commit]:
    version = 0
    with contextlib.suppress(FileNotFoundError):
        while True:
            yield read_commit(storage, version)
            version += 1


def held(storage: TableStorage) -> Held:
    """What a table holds. A key that comes twice is an error."""
    rows, schema = read(storage.url, options=storage.options), Table.open(storage).schema
    keys = [
        raw if text is None else text.encode()
        for text, raw in zip(rows["_key"].to_pylist(), rows["_raw_key"].to_pylist(), strict=True)
    ]
    names = list(zip(rows["_vbucket"].to_pylist(), keys, strict=True))
    assert len(set(names)) == len(names), f"a key has two rows: {sorted(names)}"
    documents = documents_of(rows, schema).to_pylist()
    return dict(zip(names, zip(rows["_seqno"].to_pylist(), documents, strict=True), strict=True))


def same(one: tuple[int, bytes] | None, other: tuple[int, bytes] | None) -> bool:
    """Equal seqnos, and equal bytes or equal JSON documents."""
    if one is None or other is None or one[0] != other[0]:
        return one == other
    if one[1] == other[1]:
        return True
    try:
        first, second = (json.loads(value, object_pairs_hook=_pairs) for value in (one[1], other[1]))
    except ValueError:
        return False
    return bool(first == second)


def _pairs(pairs: list[tuple[str, Any]]) -> Any:
    """Fields in the order of their names, so that a duplicate is not lost; their order means nothing."""
    return sorted(pairs, key=lambda pair: pair[0])
