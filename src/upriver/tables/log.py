"""The Delta log: commits, checkpoints, and the snapshot of a table that follows from them.

Theory of operation. Version N of a table is the commit file N, applied to version N-1; a checkpoint is the whole state
of a version as Parquet. ``load`` reads the newest checkpoint and the commits after it. It lists the log only to find
checkpoints: ``_last_checkpoint`` is a hint that may be missing or old. ``newer`` asks for the commits after a snapshot
one by one, so that a refresh costs the same in a log of any length.

Old commits and checkpoints may be deleted at any time, also while they are read. A snapshot whose own commit is gone,
or has become another one, cannot be continued: the log was cleaned up during a long pause, or the table was replaced.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from upriver.errors import CorruptData, StorageError, UnsupportedTable
from upriver.tables.actions import KINDS, Action, Add, CommitInfo, Metadata, Protocol, Remove, Txn, decode
from upriver.tables.storage import TableStorage

LOG: Final = "_delta_log/"
#: What our commits call their writer, followed by the version.
ENGINE: Final = "upriver/"
_HINT: Final = f"{LOG}_last_checkpoint"
_COMMIT: Final = re.compile(LOG + r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(LOG + r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_NEW_CHECKPOINT: Final = re.compile(LOG + r"(\d{20})\.checkpoint\.[0-9a-f-]{36}\.(?:json|parquet)")
#: How often to read the log before it counts as damaged: files may be deleted while they are read.
_ATTEMPTS: Final = 3


def commit_path(version: int) -> str:
    """The file of a commit."""
    return f"{LOG}{version:020}.json"


@dataclass(frozen=True)
class Commit:
    """One version of a table: what changed."""

    version: int
    actions: tuple[Action, ...]
    #: Identifies the content of its file.
    digest: bytes = b""

    @cached_property
    def info(self) -> CommitInfo:
        """What the commit says about itself."""
        return next((action for action in self.actions if isinstance(action, CommitInfo)), CommitInfo())

    @cached_property
    def added(self) -> tuple[Add, ...]:
        """New files, and files with a new vector."""
        return tuple(action for action in self.actions if isinstance(action, Add))

    @cached_property
    def removed(self) -> tuple[Remove, ...]:
        """Files that are gone, and files with their former vector."""
        return tuple(action for action in self.actions if isinstance(action, Remove))

    @property
    def files(self) -> list[Add | Remove]:
        """All files that the commit touches."""
        return [*self.added, *self.removed]

    @property
    def txns(self) -> dict[str, int]:
        """The transactions of applications."""
        return {action.app: action.version for action in self.actions if isinstance(action, Txn)}

    @property
    def foreign(self) -> bool:
        """Whether another program wrote it."""
        return not self.info.engine.startswith(ENGINE)

    @property
    def changes_data(self) -> bool:
        """Whether rows changed; OPTIMIZE and compaction only move them."""
        return any(file.data_change for file in self.files)

    @property
    def changes_metadata(self) -> bool:
        """Whether schema, properties or features changed."""
        return any(isinstance(action, Metadata | Protocol) for action in self.actions)


@dataclass(frozen=True)
class TableSnapshot:
    """A version of a table: its files, schema, properties and transactions."""

    version: int
    protocol: Protocol
    metadata: Metadata
    files: Mapping[str, Add]
    txns: Mapping[str, int]
    #: Identifies the version's commit; empty if it was read from a checkpoint.
    commit_digest: bytes = b""
    #: The version of the last checkpoint that is known.
    checkpoint: int = -1

    def after(self, commit: Commit) -> "TableSnapshot":
        """The snapshot of the next version."""
        state = _State(self.protocol, self.metadata, dict(self.files), dict(self.txns))
        state.apply(commit.actions)
        return state.snapshot(commit.version, commit.digest, self.checkpoint)


@dataclass
class _State:
    """A snapshot in the making."""

    protocol: Protocol | None = None
    metadata: Metadata | None = None
    files: dict[str, Add] = field(default_factory=dict)
    txns: dict[str, int] = field(default_factory=dict)

    def apply(self, actions: Iterable[Action]) -> None:
        added = []
        for action in actions:
            match action:
                case Add():
                    added.append(action)
                case Remove():
                    # Of a file that got another vector, only the version with the former one goes.
                    known = self.files.get(action.path)
                    if known is not None and known.file == action.file:
                        del self.files[action.path]
                case Txn():
                    self.txns[action.app] = action.version
                case Metadata():
                    self.metadata = action
                case Protocol():
                    self.protocol = action
        # A commit removes a file with its former vector and adds it with the new one, in any order.
        for action in added:
            self.files[action.path] = action

    def snapshot(self, version: int, digest: bytes, checkpoint: int) -> TableSnapshot:
        if self.protocol is None or self.metadata is None:
            raise CorruptData(commit_path(version), "the log has no protocol or no metadata")
        return TableSnapshot(version, self.protocol, self.metadata, self.files, self.txns, digest, checkpoint)


def digest_of(content: bytes) -> bytes:
    """Identifies the content of a commit. Its size does not: the same table, made twice, has commits of equal sizes."""
    return hashlib.sha256(content).digest()[:16]


def read_commit(storage: TableStorage, version: int) -> Commit:
    """A commit; ``FileNotFoundError`` if the version does not exist."""
    content = storage.read(commit_path(version))
    try:
        return Commit(version, tuple(decode(content)), digest_of(content))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptData(f"{storage.url}/{commit_path(version)}", f"not a commit of a Delta table: {error}") from error


def newer(storage: TableStorage, snapshot: TableSnapshot) -> list[Commit]:
    """The commits after a snapshot, which continues the log that it was read from."""
    if snapshot.commit_digest:
        try:
            same = read_commit(storage, snapshot.version).digest == snapshot.commit_digest
        except FileNotFoundError:
            same = False
        if not same:
            raise StorageError(
                storage.url,
                f"the log no longer has version {snapshot.version}: the table was replaced, or the log cleaned up. "
                "Start again to read the table from the beginning",
            )
    return list(_following(storage, snapshot.version))


def _following(storage: TableStorage, version: int) -> Iterator[Commit]:
    with contextlib.suppress(FileNotFoundError):
        while True:
            version += 1
            yield read_commit(storage, version)


def load(storage: TableStorage) -> TableSnapshot | None:
    """The current snapshot; None if there is no Delta table."""
    failure = CorruptData(f"{storage.url}/{LOG}", "version 0 is missing")
    for attempt in range(_ATTEMPTS):
        try:
            return _load(storage, _listing(storage) if attempt == 0 else _whole_listing(storage))
        except CorruptData as error:
            failure = error
    raise failure


def _load(storage: TableStorage, listing: Collection[str]) -> TableSnapshot | None:
    commits = [int(found[1]) for path in listing if (found := _COMMIT.fullmatch(path))]
    checkpoints = _checkpoints(listing)
    if not commits and not checkpoints:
        _refuse_new_checkpoints(storage, listing)
        return None
    failure: CorruptData | None = None
    # A damaged checkpoint does no harm as long as the log still has what came before it.
    for start in [*sorted(checkpoints, reverse=True), -1]:
        try:
            snapshot = _replayed(storage, start, checkpoints.get(start, []))
            if snapshot.version >= max([*commits, *checkpoints]):
                return snapshot
            failure = _missing(storage, snapshot.version + 1)
        except CorruptData as error:
            failure = failure or error
    _refuse_new_checkpoints(storage, listing)
    assert failure is not None
    raise failure


def _missing(storage: TableStorage, version: int) -> CorruptData:
    return CorruptData(f"{storage.url}/{LOG}", f"version {version} is missing")


def removed_since(storage: TableStorage, since_ms: int, version: int) -> list[Remove]:
    """The files that left the table since then and up to a version, as far as checkpoints remember them."""
    checkpoints = _checkpoints(_listing(storage))
    reached = max(checkpoints, default=-1)
    found = list(_checkpoint_actions(storage, checkpoints.get(reached, []), ["remove"]))
    for commit in _following(storage, reached):
        found += commit.removed
        reached = commit.version
    if reached < version:
        raise _missing(storage, reached + 1)
    return [action for action in found if isinstance(action, Remove) and action.deleted_ms >= since_ms]


def _listing(storage: TableStorage) -> list[str]:
    """The files of the log, at least those from the newest checkpoint on."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        hint = int(json.loads(storage.read(_HINT))["version"])
        listing = [file.path for file in storage.list(LOG, after=f"{LOG}{hint:020}")]
        if _checkpoints(listing):
            return listing
    return _whole_listing(storage)


def _whole_listing(storage: TableStorage) -> list[str]:
    return [file.path for file in storage.list(LOG)]


def _checkpoints(listing: Iterable[str]) -> dict[int, list[str]]:
    """The complete checkpoints: version -> files."""
    parts: dict[tuple[int, int], list[str]] = {}
    for path in sorted(listing):
        if found := _CHECKPOINT.fullmatch(path):
            parts.setdefault((int(found[1]), int(found[3] or 1)), []).append(path)
    return {version: paths for (version, count), paths in parts.items() if len(paths) == count}


def _refuse_new_checkpoints(storage: TableStorage, listing: Iterable[str]) -> None:
    if any(_NEW_CHECKPOINT.fullmatch(path) for path in listing):
        raise UnsupportedTable(
            storage.url, "the log has checkpoints of version 2 only (ALTER TABLE … DROP FEATURE v2Checkpoint)"
        )


def _replayed(storage: TableStorage, start: int, checkpoint: list[str]) -> TableSnapshot:
    state = _State()
    state.apply(_checkpoint_actions(storage, checkpoint))
    version, digest = start, b""
    for commit in _following(storage, start):
        state.apply(commit.actions)
        version, digest = commit.version, commit.digest
    if version < 0:
        raise _missing(storage, 0)
    return state.snapshot(version, digest, start)


def _checkpoint_actions(
    storage: TableStorage, paths: Iterable[str], kinds: Collection[str] = ("protocol", "metaData", "txn", "add")
) -> Iterator[Action]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in paths:
        try:
            with storage.open(path) as file, pq.ParquetFile(file) as checkpoint:
                table = checkpoint.read([kind for kind in kinds if kind in checkpoint.schema_arrow.names])
        except (pa.ArrowException, OSError) as error:
            raise CorruptData(f"{storage.url}/{path}", f"the checkpoint cannot be read: {error}") from error
        for kind in table.column_names:
            column = table.column(kind)
            for value in column.filter(column.is_valid()).to_pylist():
                yield KINDS[kind].of_json(_as_stored(value))


def _as_stored(value: dict[str, Any]) -> dict[str, Any]:
    """A row of a checkpoint as the JSON of a commit."""
    for name in ("partitionValues", "tags", "configuration"):
        if value.get(name) is not None:
            value[name] = dict(value[name])
    if "format" in value:
        value["format"] = value["format"] | {"options": dict(value["format"].get("options") or ())}
    # Columns that only checkpoints have: they must not come back in a commit.
    value.pop("partitionValues_parsed", None)
    parsed = value.pop("stats_parsed", None)
    if parsed and not value.get("stats") and parsed.get("numRecords") is not None:
        value["stats"] = json.dumps({"numRecords": parsed["numRecords"], "tightBounds": False})
    return value
