"""A Delta table that Upriver writes: open, create, refresh and commit.

Theory of operation. A ``Table`` has a snapshot. The caller computes an ``Edit`` from it: new files, positions of rows
that are dead now, files to remove. ``commit`` reads the log first, writes the merged deletion vectors into one file and
then puts the next version into the log, unless another writer has put one. The commit takes effect with that one file;
before it there are only files that nothing references, and vacuum removes those.

What an edit depends on. Another commit since the edit's base is a *conflict*, and the caller must compute the edit
again, if it

- adds or removes a file whose rows the edit hides or whose place the edit's files take. This includes a changed vector;
- changes data, and the edit is a *batch*: it changes data, or records a transaction. New rows may have the keys of the
  batch, and changed rows are a matter for the caller: see below;
- records a transaction of the same application: another process runs the same query, or our own earlier attempt
  succeeded after all;
- changes schema, properties or features. The caller computes the edit from the new schema, so no column is lost.

All other commits do not matter, and ``commit`` tries the next version by itself: transactions of other applications,
and OPTIMIZE, compaction or (for a compaction) data changes of files that the edit does not touch. An OPTIMIZE of other
files cannot hide a key from a batch: if the moved rows had a key of the batch, the batch would touch their old file.

Foreign changes of data. INSERT, DELETE, UPDATE and RESTORE by other programs change rows that belong to the keys of a
node. ``refresh``, or the conflict, reports each commit of another writer once; ``changed_rows`` says which rows it
changed. A batch over a foreign change that was not reported is a conflict, so our newest batch in the log knows of all
foreign changes before it. A table that is opened reports the foreign commits after that batch again, so a crash between
the report and the repair loses nothing; if the log was cleaned up meanwhile, ``is_log_cut`` says that there may be
others. The caller must repair the rows, or record the repair as a property, in the next batch that it commits. If it
fails before that, ``report_again`` takes the commits back.

A file that an edit adds may be gone, because somebody runs vacuum with a short retention. Such an edit is refused with
``FilesLost`` just before the put: the caller must write its files again.

If a put fails, for example by a timeout, the commit may be in the log all the same. Each commit has a unique id, by
which ``commit`` recognises it.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pyroaring import BitMap

from upriver import __version__
from upriver.errors import FilesLost, ForeignData, NewerFormat, OldLayout, StorageError, TableConflict
from upriver.files import UNFINISHED, sync
from upriver.tables.actions import Action, Add, CommitInfo, Metadata, Remove, Txn, encode
from upriver.tables.deletion_vectors import read_vector, vector_path, write_vectors
from upriver.tables.features import USE_VECTORS, VECTORS, protocol_for, require_supported, with_vectors, without_vectors
from upriver.tables.log import ENGINE, LOG, Commit, TableSnapshot, commit_path, digest_of, load, newer, read_commit
from upriver.tables.storage import TableStorage

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from upriver.tables.schema import TableSchema

#: The layout that this version writes, and the property that has it.
LAYOUT: Final = "2"
_LAYOUT_PROPERTY: Final = "upriver.layout"
#: The partition column and the link of the layouts before.
_OLD_PART: Final = "upriver_part"
_OLD_LINK: Final = "current"
#: How long files stay after they were removed from the table, and commits in the log.
RETENTION: Final = "interval 7 days"
#: Write a log checkpoint after this many commits; later, if checkpoints took more than this part of the time; but not
#: later than after the second number of commits.
CHECKPOINT_COMMITS: Final = 10
CHECKPOINT_SHARE: Final = 0.1
CHECKPOINT_COMMITS_MAX: Final = 100
_READERS: Final = 16


@dataclass(frozen=True)
class Edit:
    """What a commit changes."""

    #: The name of the operation in the table's history.
    operation: str
    added: Sequence[Add] = ()
    #: File -> positions of rows that are dead from now on, besides those that are dead already. Also for added files.
    dead: Mapping[str, BitMap] = field(default_factory=dict)
    removed: Collection[str] = ()
    schema: "TableSchema | None" = None
    #: Properties to set, or to remove (None). Others stay.
    properties: Mapping[str, str | None] = field(default_factory=dict)
    #: Switch deletion vectors on or off. Without them, no file of the table may have one afterwards.
    vectors: bool | None = None
    #: Application and version.
    txn: tuple[str, int] | None = None
    #: Other numbers that applications keep in the table.
    numbers: Mapping[str, int] = field(default_factory=dict)
    #: False if rows only move.
    data_change: bool = True
    #: The version that the edit was computed from; the table's snapshot if None.
    base: int | None = None

    @property
    def depends_on(self) -> set[str]:
        """The files of the table that must stay as they are until the commit."""
        return {*self.dead, *self.removed} - {file.path for file in self.added}

    @property
    def is_batch(self) -> bool:
        """Whether the edit was computed from all rows of the table."""
        return self.data_change or self.txn is not None


class DescribesColumns(Protocol):
    """The columns of a new table."""

    def delta(self) -> str:
        """The ``schemaString`` of Delta's metadata."""


class ChangedRows(NamedTuple):
    """Rows of a data file that a commit added or removed."""

    path: str
    #: None: all rows of the file.
    positions: BitMap | None


class Table:
    """A table and the snapshot that was read last. Not thread-safe."""

    def __init__(self, storage: TableStorage, snapshot: TableSnapshot) -> None:
        self.storage = storage
        self.snapshot = snapshot
        #: Commits of other writers that ``refresh`` has not reported.
        self._unreported: list[Commit] = []
        #: Whether the log does not go back to our newest batch, so that foreign commits may be missing in the report.
        self.is_log_cut = False
        #: No log checkpoint before this time.
        self._checkpoint_due_s = 0.0

    @classmethod
    def find(cls, storage: TableStorage, *, replaceable: bool = False) -> "Table | None":
        """The table in this place; None if nothing is there. Anything else is refused.

        With ``replaceable`` a mirror of an earlier layout becomes an empty table first.
        """
        try:
            return cls._find(storage)
        except OldLayout:
            if not replaceable:
                raise
            from upriver.tables.schema import TableSchema

            return cls.replace(storage, TableSchema())

    @classmethod
    def _find(cls, storage: TableStorage) -> "Table | None":
        # Before the log, which another process may begin at this moment.
        occupied = any(not file.path.endswith(UNFINISHED) for file in storage.list())
        snapshot = load(storage)
        link = storage.local(_OLD_LINK)
        if snapshot is None and link is not None and link.is_symlink():
            raise _old_layout(storage)
        if snapshot is None:
            if occupied:
                raise ForeignData(storage.url, "not a Delta table, and not empty; choose another directory")
            return None
        if _OLD_PART in snapshot.metadata.partition_columns:
            raise _old_layout(storage)
        layout = snapshot.metadata.properties.get(_LAYOUT_PROPERTY)
        if layout is None:
            raise ForeignData(storage.url, "not an Upriver mirror; choose another directory")
        if layout != LAYOUT:
            raise NewerFormat(storage.url, f"a later version of Upriver wrote the table, in layout {layout}")
        require_supported(storage.url, snapshot.protocol, snapshot.metadata)
        table = cls(storage, snapshot)
        table._unreported, table.is_log_cut = _foreign_since_batch(storage, snapshot.version)
        return table

    @classmethod
    def open(cls, storage: TableStorage) -> "Table":
        """The table in this place."""
        table = cls.find(storage)
        if table is None:
            raise StorageError(storage.url, "there is no table")
        return table

    @classmethod
    def create(
        cls,
        storage: TableStorage,
        schema: DescribesColumns,
        properties: Mapping[str, str] | None = None,
        *,
        vectors: bool = True,
    ) -> "Table":
        """A new table without rows. If another process creates it at the same time, one of them decides."""
        now_ms = _now_ms()
        info = _info("CREATE TABLE", now_ms)
        content = encode([info, *_first_actions(schema, properties or {}, vectors, now_ms)])
        if _put(storage, 0, content, info.id) and storage.local() is None and _put(storage, 0, content, ""):
            raise StorageError(
                storage.url,
                "the object store ignores conditional writes, so writers could destroy each other's commits",
            )
        return cls.open(storage)

    @classmethod
    def replace(
        cls,
        storage: TableStorage,
        schema: DescribesColumns,
        properties: Mapping[str, str | None] | None = None,
        *,
        vectors: bool = True,
    ) -> "Table":
        """An empty table in the place of another one, whose rows stay in its earlier versions."""
        given = {name: value for name, value in (properties or {}).items() if value is not None}
        while True:
            snapshot, now_ms = load(storage), _now_ms()
            if snapshot is None:
                return cls.create(storage, schema, given, vectors=vectors)
            info = _info("REPLACE TABLE", now_ms)
            removed = [Remove.of(file, now_ms, data_change=True) for file in snapshot.files.values()]
            content = encode([info, *_first_actions(schema, given, vectors, now_ms), *removed])
            if _put(storage, snapshot.version + 1, content, info.id):
                return cls.open(storage)

    @property
    def schema(self) -> "TableSchema":
        """The columns."""
        from upriver.tables.schema import TableSchema

        return TableSchema.of_delta(self.snapshot.metadata.schema)

    @property
    def properties(self) -> Mapping[str, str]:
        """The table's properties."""
        return self.snapshot.metadata.properties

    @property
    def vectors(self) -> bool:
        """Whether changed rows are hidden by deletion vectors; otherwise their files are written again."""
        return self.allows_vectors and self.properties.get(USE_VECTORS, "false").lower() == "true"

    @property
    def allows_vectors(self) -> bool:
        """Whether readers must know deletion vectors, because files may have some."""
        return VECTORS in (self.snapshot.protocol.writer_features or ())

    def refresh(self) -> list[Commit]:
        """Read the log; returns the commits of other writers that were not reported yet."""
        self.read_log()
        found, self._unreported = self._unreported, []
        return found

    def report_again(self, commits: Iterable[Commit]) -> None:
        """Report commits a second time, because the caller could not act on them."""
        known = {commit.version: commit for commit in (*commits, *self._unreported)}
        self._unreported = [known[version] for version in sorted(known)]

    def changed_rows(self, commit: Commit) -> list[ChangedRows]:
        """Which rows a commit changed: those of new and removed files, and where vectors differ."""
        before = {action.path: action.deletion_vector for action in commit.removed if action.data_change}
        after = {action.path: action.deletion_vector for action in commit.added if action.data_change}
        found = [ChangedRows(path, None) for path in sorted(before.keys() ^ after.keys())]
        for path in sorted(before.keys() & after.keys()):
            changed = read_vector(self.storage, before[path]) ^ read_vector(self.storage, after[path])
            if changed:
                found.append(ChangedRows(path, changed))
        return found

    def commit(self, edit: Edit) -> int:
        """Commit an edit; returns the new version. See the module for what raises ``TableConflict``."""
        base = self.snapshot.version if edit.base is None else edit.base
        since = [read_commit(self.storage, version) for version in range(base + 1, self.snapshot.version + 1)]
        files: list[Action] | None = None
        while True:
            since += self.read_log()
            why = _conflict(edit, since)
            if not why and edit.is_batch and any(commit.changes_data for commit in self._unreported):
                why = "another writer changed rows of the table"
            if why:
                known = {commit.version: commit for commit in (*self._unreported, *since)}
                self._unreported = []
                raise TableConflict(self.storage.url, why, [known[version] for version in sorted(known)])
            require_supported(self.storage.url, self.snapshot.protocol, self.snapshot.metadata)
            if missing := edit.depends_on - self.snapshot.files.keys():
                raise TableConflict(self.storage.url, f"{min(missing)} is not in version {self.snapshot.version}")
            if files is None:
                files = self._file_actions(edit)
            require_files(self.storage, [file.path for file in edit.added])
            if self._put(edit, files):
                self._write_checkpoint()
                return self.snapshot.version

    def read_log(self) -> list[Commit]:
        """Advance the snapshot; returns the commits of other writers. ``refresh`` will report them."""
        commits = newer(self.storage, self.snapshot)
        snapshot = self.snapshot
        for commit in commits:
            snapshot = snapshot.after(commit)
        if snapshot.metadata.id != self.snapshot.metadata.id:
            raise ForeignData(self.storage.url, "another table has taken the place of this one")
        self.snapshot = snapshot
        self._unreported += commits
        return commits

    def lost_files(self) -> list[str]:
        """The files of the table that the storage does not have, or whose vector it does not have."""
        stored = {file.path for file in self.storage.list()}

        def is_stored(file: Add) -> bool:
            vector = file.deletion_vector and vector_path(file.deletion_vector, self.storage)
            return file.path in stored and (not vector or vector in stored)

        files = self.snapshot.files
        return [path for path, file in files.items() if "://" not in path and not is_stored(file)]

    def _file_actions(self, edit: Edit) -> list[Action]:
        """The files that an edit adds, removes or gives a new vector. Writes the vectors."""
        now_ms = _now_ms()
        files = self.snapshot.files
        added = {file.path: replace(file, data_change=edit.data_change) for file in edit.added}
        removed = [Remove.of(files[path], now_ms, data_change=edit.data_change) for path in edit.removed]
        touched = {path: added.get(path) or files[path] for path in edit.dead}
        vectors = {}
        for path, dead, rows in self._merged(edit.dead, touched):
            if path not in added:
                if len(dead) == touched[path].dead:
                    continue
                removed.append(Remove.of(touched[path], now_ms, data_change=edit.data_change))
            if len(dead) < rows:
                vectors[path] = dead
                added[path] = replace(touched[path], stats=_loosened(touched[path], rows), data_change=edit.data_change)
            else:
                added.pop(path, None)
        if vectors and not self.vectors:
            raise StorageError(
                self.storage.url, "deletion vectors are off for this table: write its files again instead"
            )
        for path, vector in write_vectors(self.storage, vectors).items():
            added[path] = replace(added[path], deletion_vector=vector)
        if edit.vectors is False:
            left = {path for path, file in files.items() if file.deletion_vector} - set(edit.removed)
            if left:  # another program has added one meanwhile
                raise TableConflict(self.storage.url, f"{min(left)} has a vector now")
        return [*removed, *added.values()]

    def _merged(self, dead: Mapping[str, BitMap], touched: Mapping[str, Add]) -> Iterable[tuple[str, BitMap, int]]:
        """All dead positions of each file, and its number of rows."""

        def merged(path: str) -> tuple[str, BitMap, int]:
            file = touched[path]
            positions = read_vector(self.storage, file.deletion_vector) | dead[path]
            rows = file.rows
            if rows is None:
                rows = _stored_rows(self.storage, path)
            assert not positions or positions.max() < rows, f"{path} has {rows} rows"
            positions.run_optimize()
            return path, positions, rows

        if self.storage.local() is not None:
            return [merged(path) for path in dead]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(merged, dead))

    def _put(self, edit: Edit, files: Sequence[Action]) -> bool:
        """Put the next version into the log; False if another writer was faster."""
        now_ms = _now_ms()
        info = _info(edit.operation, now_ms)
        actions: list[Action] = [info]
        if edit.vectors is not None:
            actions.append((with_vectors if edit.vectors else without_vectors)(self.snapshot.protocol))
        if edit.schema is not None or edit.properties or edit.vectors is not None:
            actions.append(self._metadata(edit))
        txns = [] if edit.txn is None else [edit.txn]
        actions += [Txn(*each, now_ms) for each in (*txns, *edit.numbers.items())]
        actions += files
        content = encode(actions)
        version = self.snapshot.version + 1
        if not _put(self.storage, version, content, info.id):
            return False
        self.snapshot = self.snapshot.after(Commit(version, tuple(actions), digest_of(content)))
        return True

    def _metadata(self, edit: Edit) -> Metadata:
        metadata = self.snapshot.metadata
        if edit.schema is not None:
            schema = edit.schema.delta()
            lost = _column_names(metadata.schema) - _column_names(schema)
            assert not lost, f"the new schema lacks {', '.join(sorted(lost))}"
            metadata = replace(metadata, schema=schema)
        properties = {**metadata.properties, **edit.properties}
        if edit.vectors is not None:
            properties[USE_VECTORS] = "true" if edit.vectors else None
        return replace(metadata, properties={name: value for name, value in properties.items() if value is not None})

    def _write_checkpoint(self) -> None:
        """Write a log checkpoint if it is due. Readers can do without, so a failure does not matter.

        A table that changes often has many removed files, which stay in its checkpoints for a week. So the time for
        checkpoints is limited, too.
        """
        waiting = self.snapshot.version - self.snapshot.checkpoint
        started = time.monotonic()
        if waiting < (CHECKPOINT_COMMITS if started >= self._checkpoint_due_s else CHECKPOINT_COMMITS_MAX):
            return
        write_checkpoint(self.storage)
        self.snapshot = replace(self.snapshot, checkpoint=self.snapshot.version)
        now = time.monotonic()
        self._checkpoint_due_s = now + (now - started) / CHECKPOINT_SHARE


@contextlib.contextmanager
def files_expected(storage: TableStorage) -> Iterator[None]:
    """For work on the files of a table, which another program may remove and vacuum meanwhile."""
    try:
        yield
    except FileNotFoundError as error:
        raise FilesLost(storage.url, f"a file of the table was deleted during the work: {error}") from error


def require_files(storage: TableStorage, paths: Sequence[str]) -> None:
    """Refuse to go on without files that a task has written."""

    def is_gone(path: str) -> bool:
        try:
            storage.stat(path)
        except FileNotFoundError:
            return True
        return False

    if storage.local() is not None:
        gone = [path for path in paths if is_gone(path)]
    else:
        with ThreadPoolExecutor(_READERS) as pool:
            gone = [path for path, is_lost in zip(paths, pool.map(is_gone, paths), strict=True) if is_lost]
    if gone:
        raise FilesLost(storage.url, f"{gone[0]} was deleted before the commit that adds it: see vacuum's retention")


def write_checkpoint(storage: TableStorage) -> bool:
    """Write a log checkpoint through delta-rs, which keeps deletion vectors; returns whether it succeeded."""

    def write() -> None:
        table = _delta_rs(storage)
        table.create_checkpoint()
        # Other readers trust a checkpoint, and delta-rs does not sync its files.
        for name in (f"{table.version():020}.checkpoint.parquet", "_last_checkpoint", ""):
            if (path := storage.local(LOG + name)) is not None:
                sync(path)

    return _succeeds(write)


def clean_log(storage: TableStorage) -> bool:
    """Delete commits before the last log checkpoint, after the table's log retention; returns whether it succeeded."""
    return _succeeds(lambda: _delta_rs(storage).cleanup_metadata())


def _delta_rs(storage: TableStorage) -> "DeltaTable":
    from deltalake import DeltaTable

    return DeltaTable(storage.url, storage_options=storage.options or None)


def _succeeds(action: Callable[[], object]) -> bool:
    try:
        action()
    except Exception:
        return False
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a bug in Rust code, which is not an Exception
            raise
        return False
    return True


def _conflict(edit: Edit, commits: Iterable[Commit]) -> str:
    """Why an edit cannot be committed after these commits; empty if it can."""
    depends_on = edit.depends_on
    for commit in commits:
        who = f"version {commit.version} ({commit.info.operation or 'another writer'})"
        if commit.changes_metadata:
            return f"{who} changed the schema or the properties of the table"
        if edit.txn is not None and edit.txn[0] in commit.txns:
            return f"{who} is a batch of the same query"
        if edit.is_batch and commit.changes_data:
            return f"{who} changed rows of the table"
        if touched := depends_on & {file.path for file in commit.files}:
            return f"{who} changed {min(touched)}"
    return ""


def _foreign_since_batch(storage: TableStorage, version: int) -> tuple[list[Commit], bool]:
    """The foreign commits after our newest batch, and whether the log has lost some of those commits."""
    found: list[Commit] = []
    is_cut = False
    while version >= 0 and not is_cut:
        try:
            commit = read_commit(storage, version)
        except FileNotFoundError:
            is_cut = True
        else:
            if commit.foreign:
                found.append(commit)
            elif commit.changes_data or commit.txns:
                break
            version -= 1
    return found[::-1], is_cut


def _put(storage: TableStorage, version: int, content: bytes, id_: str) -> bool:
    """Put a commit into the log; returns whether it is there. A store may fail after it has stored the file."""
    failure: StorageError | None = None
    try:
        if storage.put_if_absent(commit_path(version), content):
            return True
    except StorageError as error:
        failure = error
    with contextlib.suppress(FileNotFoundError):
        return read_commit(storage, version).info.id == id_
    if failure is not None:
        raise failure
    return False


def _first_actions(schema: DescribesColumns, properties: Mapping[str, str], vectors: bool, now_ms: int) -> list[Action]:
    """What makes a table: its features, schema and properties."""
    given = {
        _LAYOUT_PROPERTY: LAYOUT,
        "delta.deletedFileRetentionDuration": RETENTION,
        "delta.logRetentionDuration": RETENTION,
        **({USE_VECTORS: "true"} if vectors else {}),
        **properties,
    }
    metadata = Metadata(str(uuid.uuid4()), schema.delta(), given, created_ms=now_ms)
    return [protocol_for(vectors=vectors), metadata]


def _info(operation: str, now_ms: int) -> CommitInfo:
    return CommitInfo(now_ms, operation, engine=f"{ENGINE}{__version__}", id=str(uuid.uuid4()))


def _loosened(file: Add, rows: int) -> str:
    """Statistics of a file with a vector: the bounds may belong to deleted rows, the count includes them."""
    found: dict[str, Any] = {**file.statistics, "numRecords": rows, "tightBounds": False}
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


def _stored_rows(storage: TableStorage, path: str) -> int:
    import pyarrow.parquet as pq

    with storage.open(path) as file, pq.ParquetFile(file) as parquet:
        return int(parquet.metadata.num_rows)


def _column_names(schema: str) -> set[str]:
    return {column["name"] for column in json.loads(schema)["fields"]}


def _old_layout(storage: TableStorage) -> OldLayout:
    return OldLayout(
        storage.url,
        "an earlier version of Upriver wrote this mirror; "
        f"build it again with: upriver run mirror --adopt --to {storage.url} …",
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
