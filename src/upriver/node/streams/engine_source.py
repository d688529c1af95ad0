"""The engine as a producer's source: where storage, which knows no dialect, meets the protocol, which knows no disk.

Callbacks reach the protocol in the thread that runs the sessions, whoever caused them: what waits for the disk is woken
by the flusher's thread and takes the way over the scheduler.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from upriver.engine import Cursor, CursorEnd, KeyPattern, Options, Vbucket, read_json
from upriver.engine import ValueFilter as EngineValueFilter
from upriver.errors import InvalidArguments
from upriver.model import Snapshot, VbucketState
from upriver.node.state import NodeState
from upriver.protocol.producer import StreamOptions

_FILTER_FORM: Final = '{"field": "a.b", "equals": …} or {"field": "a.b", "contains": …}'


class EngineHistory(Cursor):
    """A cursor of the engine that knows the node's checkpoints."""

    def __init__(
        self, node: NodeState, vbucket: Vbucket, name: str, start_seqno: int, end_seqno: int, options: Options
    ) -> None:
        super().__init__(vbucket, name, start_seqno, end_seqno, options)
        self._node = node
        #: The announced snapshot begins where a checkpoint does.
        self.begins_checkpoint = False
        #: Why nothing more comes; None before.
        self.end_reason: str | None = None if self.ended is None else self.ended.value

    @property
    def checkpoint(self) -> int:
        """The id of the checkpoint that the next change belongs to."""
        return self._node.checkpoints.id_after(self.vbucket, self.seqno)

    @property
    def in_open_checkpoint(self) -> bool:
        """Is that checkpoint still open?"""
        return self._node.checkpoints.end_after(self.vbucket, self.seqno) is None

    def end(self, reason: CursorEnd) -> None:
        """Nothing more comes; the first reason stays."""
        super().end(reason)
        if self.ended is not None:
            self.end_reason = self.ended.value

    def next_snapshot(self, not_beyond: int | None = None) -> Snapshot | None:
        """Announce the next snapshot; None if there is nothing new, or nothing more comes.

        Unless told otherwise it does not reach beyond the end of a checkpoint.
        """
        if self.ended is not None:
            return None
        begins, end = self._node.checkpoints.around(self.vbucket, self.seqno)
        if self.snapshot is None:
            self.begins_checkpoint = begins
        return super().next_snapshot(end if not_beyond is None else not_beyond)

    def subscribe(self, callback: Callable[[], object], *, fresh: bool = False) -> None:
        """Call back once when there may be more to read, or when it has ended."""
        if fresh:
            self.vbucket.when_changed(callback, owner=self)
        elif self.options.persisted_only:
            super().subscribe(lambda: self._node.scheduler.from_thread(callback))
        else:
            super().subscribe(callback)


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
        return self._node.bucket.vbucket(vbucket).open_place(
            partial(EngineHistory, self._node), name, start, end, wanted
        )

    def set_state(self, vbucket: int, state: VbucketState, *, successor: str = "") -> None:
        """Give a vbucket another role."""
        self._node.bucket.vbucket(vbucket).set_state(state, successor=successor)

    def confirm_takeover(self, vbucket: int, successor: str) -> None:
        """Its successor is active."""
        copy = self._node.bucket.existing(vbucket)
        if copy is not None:
            copy.confirm_takeover(successor)

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
        given = read_json(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not set(given) <= {"field", "equals", "contains"}:
        raise InvalidArguments(f"a value filter has the form {_FILTER_FORM}")
    field = given.get("field")
    if not isinstance(field, str) or not field:
        raise InvalidArguments(f"a value filter names a field: {_FILTER_FORM}")
    return EngineValueFilter(tuple(field.split(".")), **{name: given[name] for name in given if name != "field"})
