"""The engine as a producer's source: where storage, which knows no dialect, meets the protocol, which knows no disk.

Callbacks reach the protocol in the thread that runs the sessions, whoever caused them: what waits for the disk is woken
by the flusher's thread and takes the way over the scheduler.
"""

import json
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from upriver.engine import Cursor, KeyPattern, Options, Vbucket
from upriver.engine import ValueFilter as EngineValueFilter
from upriver.errors import InvalidArguments
from upriver.model import Snapshot, VbucketState
from upriver.node.state import NodeState
from upriver.protocol.source import StreamOptions

_FILTER_FORM: Final = '{"field": "a.b", "equals": …} or {"field": "a.b", "contains": …}'


class EngineHistory:
    """A cursor of the engine."""

    __slots__ = ("_cursor", "_node")

    def __init__(self, cursor: Cursor, node: NodeState) -> None:
        self._cursor = cursor
        self._node = node

    @property
    def seqno(self) -> int:
        """Everything up to here was read."""
        return self._cursor.seqno

    @property
    def changes_read(self) -> int:
        """How many changes were read so far."""
        return self._cursor.changes_read

    @property
    def snapshot(self) -> Snapshot | None:
        """The announced snapshot that is not read to its end yet."""
        return self._cursor.snapshot

    @property
    def from_disk(self) -> bool:
        """Does the announced snapshot come from disk?"""
        return self._cursor.from_disk

    @property
    def begins_checkpoint(self) -> bool:
        """Does the announced snapshot begin where a checkpoint does?"""
        snapshot, vbucket = self._cursor.snapshot, self._cursor.vbucket
        return snapshot is not None and self._node.checkpoints.begins_at(vbucket, snapshot.start)

    @property
    def checkpoint(self) -> int:
        """The id of the checkpoint that the next change belongs to."""
        return self._node.checkpoints.id_after(self._cursor.vbucket, self._cursor.seqno)

    @property
    def in_open_checkpoint(self) -> bool:
        """Is that checkpoint still open?"""
        return self._node.checkpoints.end_after(self._cursor.vbucket, self._cursor.seqno) is None

    @property
    def end_reason(self) -> str | None:
        """Why nothing more comes; None before."""
        return None if self._cursor.ended is None else self._cursor.ended.value

    def next_snapshot(self) -> Snapshot | None:
        """Announce the next snapshot; None if there is nothing new, or nothing more comes."""
        cursor = self._cursor
        if cursor.ended is not None:
            return None
        return cursor.next_snapshot(self._node.checkpoints.end_after(cursor.vbucket, cursor.seqno))

    def read(self, max_bytes: int, opaque: int) -> bytes:
        """The next changes of the announced snapshot as `dcp` frames."""
        return self._cursor.read(max_bytes, opaque)

    def read_records(self, max_bytes: int) -> bytes:
        """The next changes of the announced snapshot as records."""
        return self._cursor.read_records(max_bytes)

    def read_columns(self, max_bytes: int) -> pa.RecordBatch:
        """The next changes of the announced snapshot."""
        return self._cursor.read_columns(max_bytes)

    def subscribe(self, callback: Callable[[], object], *, fresh: bool = False) -> None:
        """Call back once when there may be more to read, or when it has ended."""
        if fresh:
            self._cursor.vbucket.when_changed(callback)
        elif self._cursor.options.persisted_only:
            self._cursor.subscribe(lambda: self._node.scheduler.from_thread(callback))
        else:
            self._cursor.subscribe(callback)

    def close(self) -> None:
        """Let go of it."""
        self._cursor.close()


class EngineSource:
    """A node's bucket."""

    __slots__ = ("_last", "_node")

    def __init__(self, node: NodeState) -> None:
        self._node = node
        # A connection asks for many streams with the same options.
        self._last = StreamOptions(), Options()

    def vbucket(self, number: int) -> Vbucket | None:
        """The vbucket in whatever state; None if there is none."""
        return self._node.bucket.existing(number)

    def vbuckets(self) -> list[int]:
        """The numbers of all that there are, in whatever state."""
        return self._node.bucket.numbers()

    def check(self, options: StreamOptions) -> None:
        """Refuse filters that make no sense."""
        engine_options(options)

    def history(self, vbucket: int, name: str, start: int, end: int, options: StreamOptions) -> EngineHistory:
        """Open a cursor."""
        known, wanted = self._last
        if options is not known:
            wanted = engine_options(options)
            self._last = options, wanted
        cursor = self._node.bucket.vbucket(vbucket).open_cursor(name, start, end, wanted)
        return EngineHistory(cursor, self._node)

    def set_state(self, vbucket: int, state: VbucketState, *, heir: str = "") -> None:
        """Give a vbucket another role, and tell clients who own what."""
        bucket = self._node.bucket
        bucket.vbucket(vbucket).set_state(state, heir=heir)
        self._node.cluster.own_vbuckets_changed(v.number for v in bucket if v.state is VbucketState.ACTIVE)

    def when_durable(self, callback: Callable[[], object]) -> None:
        """Call back when everything done so far is on disk."""
        self._node.bucket.flusher.barrier(lambda: self._node.scheduler.from_thread(callback))


def engine_options(options: StreamOptions) -> Options:
    """What a stream shall hold, in the engine's words."""
    return Options(
        keys_only=options.keys_only,
        key_pattern=KeyPattern(options.key_filter) if options.key_filter else None,
        value_filter=value_filter(options.value_filter) if options.value_filter else None,
        persisted_only=options.persisted_only,
        exact_end=options.exact_end,
        history=options.history,
    )


def value_filter(text: str) -> EngineValueFilter:
    """The filter that a control's value describes."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not set(given) <= {"field", "equals", "contains"}:
        raise InvalidArguments(f"a value filter has the form {_FILTER_FORM}")
    field = given.get("field")
    if not isinstance(field, str) or not field:
        raise InvalidArguments(f"a value filter names a field: {_FILTER_FORM}")
    return EngineValueFilter(tuple(field.split(".")), given.get("equals"), given.get("contains"))
