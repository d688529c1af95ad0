"""Keeps a table equal to the documents of a bucket: the driver's side.

Theory of operation. Before each batch the keeper reads the table's log and plans: which files the table has, and which
vbuckets were read ahead of the stream. The tasks work with that plan. The keeper then merges their results into one
commit, which also has the number of the batch and the end of its ranges, so a batch that Spark repeats is recognised.

Numbers alone prove nothing: in an old or a second copy of a checkpoint, other batches get the same numbers. If the last
batch in the table is not one of this checkpoint, the keeper *starts over*: all vbuckets are read again, and batches are
recorded under another name. A process that used the table until then notices that, and ends.

If the log has moved on meanwhile, the old versions are located again from the lists of keys that the tasks have saved,
never from the nodes. Rows that another program has changed are repaired: the vbuckets concerned are read from the nodes
and replaced. What is due is recorded in a property of the table, in the commit that first knows of it, so a crash
forgets nothing.
"""

import hashlib
import json
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyroaring import BitMap

from upriver.errors import (
    CheckpointError,
    CorruptData,
    FilesLost,
    ForeignData,
    OptionError,
    OtherBucket,
    TableConflict,
)
from upriver.pipelines.apply.task_apply import Connect, TaskSource, outlook, still_ahead
from upriver.pipelines.core.range_pipeline import RunTasks
from upriver.pipelines.core.workers import Workers
from upriver.pipelines.targets.tables.error_file import ErrorPlace
from upriver.pipelines.targets.tables.foreign_rows import touched_vbuckets
from upriver.pipelines.targets.tables.history import History
from upriver.pipelines.targets.tables.table_task import Growth, TableTask, TaskResult, packed_vbuckets
from upriver.pipelines.targets.tables.table_work import FileWork, rewritten
from upriver.pipelines.targets.target import ReadAhead
from upriver.spark import BucketIdentity, Offset
from upriver.tables import Add, Commit, Edit, FieldReport, NewFile, Table, TableSchema, TableStorage, require_files

#: Properties of the table.
QUERY, BUCKET, SEED, AHEAD, DUE, NUMBERING = (
    f"upriver.{name}" for name in ("query", "bucket", "seed", "ahead", "due", "numbering")
)
#: The operation of a commit after which no earlier process may write.
START_OVER: Final = "START OVER"
#: How often a batch may add columns. Each time its tasks run again, and may see other documents with other fields.
#: Later only integers become decimals.
GROWTHS_MAX: Final = 4
#: How often a batch may lose the files of its tasks.
RUNS_MAX: Final = 4
#: How often the tasks of a batch may run.
ROUNDS_MAX: Final = 64
#: In a table of at least this size a field becomes a column when its share of this many documents is reached.
DOCUMENTS_MIN: Final = 1000
#: Time between two looks at the log while there are no batches.
LOOK_S: Final = 5.0
#: Number of changes that one task reads again, about; and the number that is worth a task.
REPAIR_CHANGES: Final = 256 * 1024
REPAIR_CHANGES_MIN: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class KeeperSettings:
    """How a table is kept."""

    #: The columns that the user wants; None if documents decide.
    schema: TableSchema | None = None
    share: float = 0.01
    #: Whether deletion vectors hide old versions; None keeps the table's setting, which is on for a new table.
    vectors: bool | None = None
    #: Take over a table of another query, and replace what it holds.
    adopt: bool = False
    #: Where documents go that cannot be written.
    errors: TableStorage | None = None


@dataclass
class KeptCounts:
    """Counts since the start."""

    replayed: int = 0
    undone: int = 0
    read_again: int = 0
    commits: int = 0
    conflicts: int = 0
    refused: int = 0


class TableKeeper:
    """The table of one query."""

    def __init__(
        self,
        storage: TableStorage,
        connect: Connect,
        nodes: TaskSource,
        settings: KeeperSettings,
        *,
        query: str,
        bucket: Callable[[], BucketIdentity],
        reached: Callable[[], Offset],
        logged: int,
        end_of: Callable[[int], Offset],
        history: TableStorage | None = None,
    ) -> None:
        """``nodes`` serves the driver, ``bucket`` returns the identity of the source, and ``reached`` the end of the
        completed batches. ``logged`` is the last batch that the checkpoint knows, -1 without any; ``end_of`` returns
        the end of a batch, an empty offset if the checkpoint does not have it."""
        self.counts = KeptCounts()
        #: For all uses of the table: a compaction commits from a thread of its own.
        self.lock = threading.RLock()
        self._connect = connect
        self._nodes = nodes
        self._settings = settings
        self._query = query
        self._bucket = bucket
        self._reached = reached
        self._end_of = end_of
        self._history_storage = history
        #: Reads ahead of the stream that could not be checked before the batch.
        self._unseen: set[int] = set()
        #: Fields without a column, over all batches of this process.
        self._fields = FieldReport()
        #: Declared columns of whole numbers for which documents have decimals.
        self.decimals: frozenset[str] = frozenset()
        self._looked_at = 0.0
        #: The last batch in the table that proved to be one of this checkpoint, with the fingerprint of its end.
        self._known_batch: tuple[int, int | None] | None = None
        #: Whether the batches are numbered from the beginning again, and all vbuckets are read again.
        self.starts_over = False
        self.table = self._opened(storage, logged)
        #: The name under which the table records batches.
        self.application = application(self.table)
        self.history = None if history is None else History(history, query, self.application, adopt=settings.adopt)

    # Opening

    def _opened(self, storage: TableStorage, logged: int) -> Table:
        """The table, which belongs to this query afterwards.

        If it has batches that the checkpoint does not know, then a part of the checkpoint was removed, or an old copy
        is in its place. Other batches will get the numbers of these, so the table needs another numbering.
        """
        bucket = self._bucket()
        table = opened(storage, self._settings)
        owner = table.properties.get(QUERY)
        if owner is None:
            table.commit(Edit("SET OWNER", properties=self._identity(bucket), data_change=False))
        elif owner != self._query:
            if not self._settings.adopt:
                raise ForeignData(
                    storage.url,
                    "the table belongs to another mirror, or its checkpoint is lost. Choose another place, or use "
                    "--adopt to replace what it holds",
                )
            table = Table.replace(
                storage, first_schema(self._settings), {**new_properties(), **self._identity(bucket)},
                vectors=self._settings.vectors is not False,
            )  # fmt: skip
        elif table.properties[BUCKET] != bucket.uuid:
            if not bucket.is_in_memory and not self._settings.adopt:
                raise OtherBucket(storage.url, table.properties[BUCKET], bucket.uuid)
            # The stream reports a reset of every vbucket, as it does when a node without a disk was restarted.
            table.commit(Edit("SET BUCKET", properties=self._identity(bucket), data_change=False))
        if lost := table.lost_files():  # by vacuum with a short retention, or with a part of the disk
            table.refresh()  # all is read again, and so is what other programs have changed
            everything = {DUE: json.dumps(sorted(self._vbuckets()))}
            table.commit(Edit("NOTE LOST FILES", removed=lost, properties=everything))
        if (errors := error_place(table, self._settings)) is not None:
            errors.discard()  # a start over would forget them
        if table.snapshot.txns.get(application(table), -1) > logged:
            self.starts_over = True
            table.commit(self._new_numbering())
        if table.is_log_cut and (due := sorted(self._vbuckets())) != json.loads(table.properties.get(DUE, "[]")):
            # Other programs may have changed rows in versions that the log no longer has.
            table.commit(Edit("NOTE LOST VERSIONS", properties={DUE: json.dumps(due)}, data_change=False))
        wanted = self._declared(table.schema)
        if wanted != table.schema and not wanted.widens(table.schema):  # otherwise the first batch does it, in tasks
            table.commit(Edit("ADD COLUMNS", schema=wanted, data_change=False))
        return table

    def _declared(self, schema: TableSchema) -> TableSchema:
        """The schema with the columns that the user wants; whole numbers become decimals if that is declared."""
        wanted = () if self._settings.schema is None else self._settings.schema.columns
        return schema.widened(name for name, kind in wanted if kind == "float").with_columns(wanted)

    def _new_numbering(self) -> Edit:
        properties = {NUMBERING: secrets.token_hex(8), DUE: json.dumps(sorted(self._vbuckets()))}
        return Edit(START_OVER, properties=properties, data_change=False)

    def _identity(self, bucket: BucketIdentity) -> dict[str, str | None]:
        return {QUERY: self._query, BUCKET: bucket.uuid}

    # Planning

    @property
    def batch_number(self) -> int:
        """The last batch in the table; -1 before the first."""
        return self.table.snapshot.txns.get(self.application, -1)

    def has_batch(self, application: str, number: int) -> bool:
        """Whether the table has this batch."""
        return application == self.application and number <= self.batch_number

    def plan(self, batch_number: int, workers: Workers) -> TableTask | None:
        """The work of a batch's tasks; None if the table has the batch."""
        with self.lock:
            self._refresh()
            if not self._knows_last_batch(batch_number):
                self._start_over()
            if batch_number == self.batch_number:
                self.counts.replayed += 1
                return None
            self._switch_vectors(workers)
            self._declare_columns(workers)
            self.repair(workers)
            return self._task()

    def _knows_last_batch(self, batch_number: int) -> bool:
        """Whether the last batch in the table is one of this checkpoint, up to this number."""
        last, end = self.batch_number, self.table.snapshot.txns.get(ends_of(self.application))
        if last < 0 or (last <= batch_number and (last, end) == self._known_batch):
            return True
        known = self._end_of(last)
        if last > batch_number or (known and end is not None and fingerprint(known) != end):
            return False
        self._known_batch = last, end
        return True

    def _start_over(self) -> None:
        """Read all vbuckets again, and record batches under another name."""
        self._commit(self._new_numbering)
        self.application = application(self.table)
        if self.history is not None:
            self.history.application = self.application

    def _task(self) -> TableTask:
        return table_task(self.table, self._connect, self._settings, self._history_storage, self._fields.documents)

    def work(self) -> FileWork:
        """Work on the table's files."""
        return FileWork(self.table.storage, self.table.schema, seed_of(self.table))

    @property
    def _ahead(self) -> dict[int, ReadAhead]:
        return reads_ahead(self.table)

    @property
    def _due(self) -> set[int]:
        """Vbuckets that must be read again, because another program has changed their rows."""
        return set(json.loads(self.table.properties.get(DUE, "[]")))

    def _switch_vectors(self, workers: Workers) -> None:
        """Give the table the vectors that the settings want. Without them, files that have one are written again."""
        wanted = self._settings.vectors
        if wanted is None or wanted == self.table.vectors == self.table.allows_vectors:
            return

        def edit() -> Edit:
            if wanted:
                return Edit("ENABLE VECTORS", vectors=True, data_change=False)
            hidden = [path for path, file in self.table.snapshot.files.items() if file.deletion_vector]
            new = rewritten(self.work(), self.table, dict.fromkeys(hidden, BitMap()), workers)
            return Edit("DISABLE VECTORS", _added(new), removed=hidden, vectors=False, data_change=False)

        self._commit(edit)

    def _declare_columns(self, workers: Workers) -> None:
        """Give the table the columns that the settings want."""
        if self._declared(self.table.schema) != self.table.schema:
            self._commit(lambda: self._schema_edit(self._declared, workers))

    def _schema_edit(self, changed: Callable[[TableSchema], TableSchema], workers: Workers) -> Edit:
        """The edit that changes the schema."""
        before = self.table.schema  # which another program may have changed since
        after = changed(before)
        if not after.widens(before):
            return Edit("ADD COLUMNS", schema=after, data_change=False)
        # A data file must have the types of the schema, so all are written again, once.
        files = list(self.table.snapshot.files)
        work = FileWork(self.table.storage, after, seed_of(self.table))
        new = rewritten(work, self.table, dict.fromkeys(files, BitMap()), workers)
        return Edit("WIDEN COLUMNS", _added(new), removed=files, schema=after, data_change=False)

    # Changes by other programs

    def _refresh(self) -> None:
        """Read the log, and record the vbuckets whose rows other programs have changed."""
        self.record(self.table.refresh())

    def record(self, commits: Iterable[Commit]) -> None:
        """Record in the table which vbuckets these commits have touched."""
        with self.lock:
            commits = list(commits)
            try:
                touched = self._touched(commits)
                while touched - self._due:
                    properties = {DUE: json.dumps(sorted(self._due | touched))}
                    try:
                        self.table.commit(Edit("NOTE CHANGED ROWS", properties=properties, data_change=False))
                    except TableConflict as conflict:
                        commits += conflict.commits
                        touched |= self._touched(conflict.commits)
            except BaseException:  # for example, the storage fails in the thread that merges files
                self.table.report_again(commits)
                raise

    def _touched(self, commits: Collection[Commit]) -> set[int]:
        if any(commit.info.operation == START_OVER and not commit.foreign for commit in commits):
            raise CheckpointError(
                self._query, "another process uses the table with a copy of this checkpoint: only one may"
            )
        foreign = [commit for commit in commits if commit.foreign]
        if any(commit.info.operation.upper() == "RESTORE" for commit in foreign):
            return self._vbuckets()  # properties were restored too, and what they said about repairs is lost
        try:
            changed = [rows for commit in foreign for rows in self.table.changed_rows(commit)]
        except (CorruptData, FilesLost):  # a vector that the table no longer needs is gone
            return self._vbuckets()
        found = touched_vbuckets(self.table.storage, changed)
        return self._vbuckets() if found is None else found

    def _vbuckets(self) -> set[int]:
        return set(self._nodes.vbuckets())

    def rebuild(self) -> None:
        """Read all vbuckets again before the next batch, because the table has lost batches."""
        self._commit(
            lambda: Edit(
                "NOTE LOST BATCHES",
                properties={DUE: json.dumps(sorted(self._due | self._vbuckets()))},
                data_change=False,
            )
        )

    # Repairs

    def look(self, workers: Workers) -> None:
        """Repair between batches; the log is read now and then."""
        with self.lock:
            if time.monotonic() - self._looked_at >= LOOK_S:
                self._looked_at = time.monotonic()
                self._refresh()
            self._switch_vectors(workers)
            self._declare_columns(workers)
            self.repair(workers)

    def repair(self, workers: Workers) -> None:
        """Read vbuckets again where that is due."""
        with self.lock:
            ahead, due = self._ahead, self._due
            self._unseen = set()
            if not ahead and not due:
                return
            states = self._nodes.states(ahead.keys() | due)
            found = outlook(ahead, self._reached(), states)
            self._unseen = found.unseen
            if found.ahead != ahead:  # stored, so that it is not checked again when tombstones are purged later
                self._commit(lambda: Edit("FOLLOW STREAM", properties=_ahead_property(found.ahead), data_change=False))
            sizes = {number: state.high_seqno for number, state in states.items()}
            items = _shares(found.left | due, sizes, workers.count)
            if items:

                def run(task: TableTask) -> list[bytes]:
                    return workers.map(task.repair, items)

                self._commit_parts(self._grown(run(self._task()), run, workers), workers, "REPAIR", None)

    # Batches

    def commit(self, results: Sequence[bytes], batch_number: int, run: RunTasks, workers: Workers) -> int:
        """Commit the results of a batch's tasks; returns the number of changes. If their files are gone, the tasks run
        again."""
        for _ in range(RUNS_MAX - 1):
            try:
                return self._commit_results(results, batch_number, run, workers)
            except FilesLost:
                with self.lock:
                    self._refresh()
                    task = self._task()
                results = run(task)
        return self._commit_results(results, batch_number, run, workers)

    def _commit_results(self, results: Sequence[bytes], batch_number: int, run: RunTasks, workers: Workers) -> int:
        with self.lock:
            found = self._grown(results, run, workers)
            self._check_passed(found)
            undone = sum(each.outcome.undone for each in found)
            if undone:
                self._check_bucket()
            if self.history is not None:
                self.history.append([each.history for each in found if each.history is not None], batch_number)
            self._commit_parts(found, workers, "BATCH", batch_number)
            self.counts.undone += undone
            return sum(each.outcome.changes for each in found)

    def _check_bucket(self) -> None:
        """A source that has lost everything may be another bucket under the same address."""
        bucket, held = self._bucket(), self.table.properties[BUCKET]
        if bucket.uuid != held and not bucket.is_in_memory:
            raise OtherBucket(self.table.storage.url, held, bucket.uuid)

    def _check_passed(self, found: Iterable[TaskResult]) -> None:
        """Keep the reads that the stream has passed on another basis.

        The node may have purged a tombstone after the plan and before a task read from the beginning. Then neither the
        read nor the stream has reported that deletion.
        """
        ahead = self._ahead
        passed = {number: ahead[number] for each in found for number in each.outcome.passed}
        if passed:
            now = outlook(passed, Offset(()), self._nodes.states(passed))
            self._unseen |= now.left | now.unseen

    def _grown(
        self, results: Sequence[bytes], run: Callable[[TableTask], list[bytes]], workers: Workers
    ) -> list[TaskResult]:
        """The results on the present basis, with a schema that fits the documents; else the tasks run again."""
        for round_ in range(ROUNDS_MAX):
            found = [TaskResult.of_bytes(each) for each in results]
            agreed = self._with_columns(found)
            reports = [each.sample for each in found] if agreed is None else [each.report for each in agreed]
            report = sum(reports, self._fields)
            changed = self._grow(report if round_ < GROWTHS_MAX else replace(report, unknown={}), workers)
            if not changed and agreed is not None and all(map(self._is_current, agreed)):
                self._fields = FieldReport(report.documents, report.unknown)
                self.decimals |= report.decimals
                return agreed
            self._drop(found)
            # A task has chosen columns by a sample. If all samples together justify no column, none may choose.
            task = self._task()
            results = run(task if changed else replace(task, growth=None))
        raise TableConflict(self.table.storage.url, "other programs change the table faster than tasks can run", [])

    def _with_columns(self, found: Sequence[TaskResult]) -> list[TaskResult] | None:
        """The results, after the table has got the columns that the tasks have written with; None if they disagree."""
        schemas = {each.schema for each in found if each.sample.documents}
        if any(each.part is None for each in found) or len(schemas) > 1:
            return None
        columns = [column for schema in schemas for column in schema.columns]
        if set(columns) <= set(self.table.schema.columns):
            return list(found)
        before = self.table.snapshot.version
        try:
            self._commit(lambda: Edit("ADD COLUMNS", schema=self.table.schema.with_columns(columns), data_change=False))
        except OptionError:  # another program uses a name
            return None
        now = self.table.snapshot.version
        if now > before + 1:
            return list(found)
        return [replace(each, version=now) if each.version == before else each for each in found]

    def _is_current(self, result: TaskResult) -> bool:
        """Whether a result has the basis and the columns of the table as it is now."""
        return result.basis == basis_of(self.table) and not self.table.schema.widens(result.schema)

    def _grow(self, report: FieldReport, workers: Workers) -> bool:
        """Change the schema if the documents need it; returns whether it has changed."""
        growth = self._task().growth
        if growth is None or growth.grown(self.table.schema, report) == self.table.schema:
            return False
        self._commit(lambda: self._schema_edit(lambda schema: growth.grown(schema, report), workers))
        return True

    def _drop(self, results: Iterable[TaskResult]) -> None:
        """Remove the files of results that are not needed; otherwise vacuum would."""
        for each in results:
            if each.part is not None:
                self.table.storage.delete(filter(None, [*(file.path for file in each.part.files), each.part.keys]))
            if each.history is not None and self._history_storage is not None:
                self._history_storage.delete([each.history.path])
            if each.errors and self._settings.errors is not None:
                self._settings.errors.delete([each.errors])

    def _commit_parts(
        self, found: Sequence[TaskResult], workers: Workers, operation: str, batch_number: int | None
    ) -> None:
        """One commit for all parts."""
        self.counts.refused += sum(each.refused for each in found)
        parts = [each.part for each in found if each.part is not None]
        added = [file for part in parts for file in part.files]
        keys = [part.keys for part in parts if part.keys]
        errors = [each.errors for each in found if each.errors]
        replaced = {number: read for each in found for number, read in each.outcome.replaced.items()}
        cleared = {number for each in found for number in each.outcome.cleared}
        passed = {number: seen for each in found for number, seen in each.outcome.passed.items()}
        dead = _merged(each.dead for each in found)
        base = min((each.version for each in found), default=self.table.snapshot.version)
        while True:
            ahead, due = self._ahead, self._due
            properties: dict[str, str | None] = {}
            if (left := still_ahead(ahead, passed, self._unseen) | replaced) != ahead:
                properties |= _ahead_property(left)
            if due & (replaced.keys() | cleared):
                properties[DUE] = json.dumps(sorted(due - replaced.keys() - cleared))
            edit = Edit(
                operation,
                _added(added),
                dead | {file.path: file.dead_rows for file in added if file.dead},
                properties=properties,
                txn=None if batch_number is None else (self.application, batch_number),
                numbers={**self._end_number(batch_number), **self._error_number(errors)},
                base=base,
            )
            if not added and not dead and not properties and not errors:
                self.table.storage.delete(keys)
                return  # a batch that only records a proof; repeating it costs nothing
            try:
                self.table.commit(edit if self.table.vectors else self._written_again(edit, workers))
                break
            except FilesLost:
                raise
            except TableConflict as conflict:
                self.counts.conflicts += 1
                self.record(conflict.commits)
                if batch_number is not None and self.batch_number >= batch_number:
                    raise CheckpointError(
                        self._query, "another process has committed this batch: only one may use a checkpoint"
                    ) from None
                if not all(map(self._is_current, found)):
                    raise  # the files have columns that the table does not have any more; the batch must run again
                base = self.table.snapshot.version
                require_files(self.table.storage, keys)
                dead = _merged(map(pickle.loads, workers.map(self._task().relocate, [each.encode() for each in keys])))
        self.counts.commits += 1
        self.counts.read_again += len(replaced)
        self.table.storage.delete(keys)

    def _end_number(self, batch_number: int | None) -> dict[str, int]:
        end = None if batch_number is None else self._end_of(batch_number)
        return {ends_of(self.application): fingerprint(end)} if end else {}

    def _error_number(self, paths: Collection[str]) -> dict[str, int]:
        """The number that makes files with refused documents a part of the commit; other attempts have none then."""
        place = error_place(self.table, self._settings)
        if place is None or not paths:  # most batches need not look what is in that place
            return {}
        place.discard(but=paths)
        return {errors_of(self.application): place.number}

    def _written_again(self, edit: Edit, workers: Workers) -> Edit:
        """The edit for a table without vectors: files with dead rows are written again."""
        if not edit.dead.keys() <= self.table.snapshot.files.keys():
            return edit  # a conflict
        new = rewritten(self.work(), self.table, edit.dead, workers)
        return replace(edit, added=[*edit.added, *_added(new)], removed=[*edit.removed, *edit.dead], dead={})

    def _commit(self, edit: Callable[[], Edit]) -> None:
        """Commit an edit that is made again after a conflict."""
        with self.lock:
            while True:
                try:
                    self.table.commit(edit())
                except TableConflict as conflict:
                    self.record(conflict.commits)
                else:
                    return


def opened(storage: TableStorage, settings: KeeperSettings) -> Table:
    """The table in this place; a new one if nothing is there."""
    table = Table.find(storage, replaceable=settings.adopt)
    if table is None:
        table = Table.create(storage, first_schema(settings), new_properties(), vectors=settings.vectors is not False)
    elif SEED not in table.properties:
        table.commit(Edit("SET SEED", properties=new_properties(), data_change=False))
    return table


def first_schema(settings: KeeperSettings) -> TableSchema:
    """The columns of a new table."""
    return settings.schema or TableSchema()


def new_properties() -> dict[str, str]:
    """The properties of a new table: a seed, so that no client can construct keys with equal hashes."""
    return {SEED: secrets.token_hex(16)}


def seed_of(table: Table) -> bytes:
    """The seed of a table's hashes."""
    return bytes.fromhex(table.properties[SEED])


def application(table: Table) -> str:
    """The name under which batches are recorded in a table."""
    numbering = table.properties.get(NUMBERING)
    return f"upriver-{table.properties.get(QUERY)}" + (f"-{numbering}" if numbering else "")


def ends_of(application: str) -> str:
    """The name under which a table keeps the end of the last batch of an application."""
    return f"{application}-end"


def errors_of(application: str) -> str:
    """The name under which a table keeps the number of the last commit that had refused documents."""
    return f"{application}-errors"


def error_place(table: Table, settings: KeeperSettings) -> ErrorPlace | None:
    """Where the tasks of the next commit put refused documents."""
    if settings.errors is None:
        return None
    name = application(table)
    return ErrorPlace(settings.errors, name, table.snapshot.txns.get(errors_of(name), 0) + 1)


def fingerprint(end: Offset) -> int:
    """A number for the end of a batch, such as Delta stores beside the number of a transaction."""
    digest = hashlib.sha256(json.dumps(end.packed(), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def reads_ahead(table: Table) -> dict[int, ReadAhead]:
    """The reads ahead of the stream."""
    kept = json.loads(table.properties.get(AHEAD, "{}"))
    return {int(number): ReadAhead(*read) for number, read in kept.items()}


def basis_of(table: Table) -> str:
    """Identifies the table, its way to hide old versions, its reads ahead of the stream, and its refused documents."""
    errors = table.snapshot.txns.get(errors_of(application(table)), 0)
    return f"{table.snapshot.metadata.id} {table.vectors} {table.properties.get(AHEAD, '')} {errors}"


def table_task(
    table: Table, connect: Connect, settings: KeeperSettings, history: TableStorage | None, documents: int = 0
) -> TableTask:
    """The work of a batch's tasks, with the table as it is now. ``documents`` is the number reported so far."""
    files = tuple(table.snapshot.files.values())
    rows = sum((file.rows or 0) - file.dead for file in files)
    at_least = max(1, int(settings.share * min(rows, DOCUMENTS_MIN)), int(settings.share * documents))
    return TableTask(
        storage=table.storage,
        version=table.snapshot.version,
        basis=basis_of(table),
        schema=table.schema,
        seed=seed_of(table),
        files=files,
        connect=connect,
        ahead=reads_ahead(table),
        growth=Growth(share=settings.share, at_least=at_least) if settings.schema is None else None,
        vectors=table.vectors,
        history=history,
        errors=error_place(table, settings),
    )


def _added(files: Iterable[NewFile]) -> list[Add]:
    now_ms = time.time_ns() // 1_000_000
    return [file.add(now_ms) for file in files]


def _shares(vbuckets: Collection[int], sizes: Mapping[int, int], workers: int) -> list[bytes]:
    """Vbuckets divided into tasks of about the same size, at least one for each worker if there is enough to do."""
    total = sum(sizes.get(number, 0) for number in vbuckets)
    wanted = max(1, -(-total // REPAIR_CHANGES), min(workers, -(-total // REPAIR_CHANGES_MIN)))
    shares: list[list[int]] = [[] for _ in range(min(wanted, len(vbuckets)))]
    held = [0] * len(shares)
    for number in sorted(vbuckets, key=lambda number: -sizes.get(number, 0)):
        smallest = held.index(min(held))
        shares[smallest].append(number)
        held[smallest] += sizes.get(number, 0) + 1
    return [packed_vbuckets(share) for share in shares]


def _ahead_property(ahead: Mapping[int, ReadAhead]) -> dict[str, str | None]:
    return {AHEAD: json.dumps({str(number): list(read) for number, read in ahead.items()}) if ahead else None}


def _merged(found: Iterable[Mapping[str, bytes]]) -> dict[str, BitMap]:
    """The dead positions that several tasks have found, by file."""
    merged: dict[str, BitMap] = {}
    for each in found:
        for path, data in each.items():
            positions = BitMap.deserialize(data)
            merged[path] = merged[path] | positions if path in merged else positions
    return merged
