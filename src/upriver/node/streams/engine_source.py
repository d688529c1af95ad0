"""The engine as a producer's source: it joins storage, which has no dialects, and protocol, which has no disk.

Callbacks reach the protocol in the sessions' thread: the flusher's thread passes its callbacks to the scheduler.
"""

from collections.abc import Callable
from typing import Final

from upriver.engine import Cursor, KeyPattern, Options, Vbucket, read_json
from upriver.engine import ValueFilter as EngineValueFilter
from upriver.errors import InvalidArguments
from upriver.model import VbucketState
from upriver.node.state import NodeState
from upriver.protocol.producer import StreamOptions

_FILTER_FORM: Final = '{"field": "a.b", "equals": …} or {"field": "a.b", "contains": …}'


class EngineSource:
    """A node's bucket, as the source of its producers."""

    __slots__ = ("_last", "_node")

    def __init__(self, node: NodeState) -> None:
        self._node = node
        # A connection requests many streams with the same options.
        self._last = StreamOptions(), Options()

    def vbucket(self, number: int) -> Vbucket | None:
        """The vbucket in any state; None if it does not exist."""
        return self._node.bucket.existing(number)

    def vbuckets(self) -> list[int]:
        """The numbers of all vbuckets, in any state."""
        return self._node.bucket.numbers()

    def check(self, options: StreamOptions) -> None:
        """Refuse invalid filters."""
        engine_options(options)

    def cursor(self, vbucket: int, name: str, start: int, end: int, options: StreamOptions) -> Cursor:
        """Open a cursor."""
        known, wanted = self._last
        if options is not known:
            wanted = engine_options(options)
            self._last = options, wanted
        cursor = self._node.bucket.vbucket(vbucket).open_cursor(name, start, end, wanted)
        cursor.deliver = self._node.scheduler.from_thread
        cursor.large_values = self._node.bucket.large_values
        return cursor

    def set_state(self, vbucket: int, state: VbucketState, *, successor: str = "") -> None:
        """Change the role of a vbucket."""
        self._node.bucket.vbucket(vbucket).set_state(state, successor=successor)

    def confirm_takeover(self, vbucket: int, successor: str) -> None:
        """Note that the successor is active."""
        copy = self._node.bucket.existing(vbucket)
        if copy is not None:
            copy.confirm_takeover(successor)

    def when_durable(self, callback: Callable[[], object]) -> None:
        """Call back when all changes so far are on disk."""
        self._node.bucket.flusher.barrier(lambda: self._node.scheduler.from_thread(callback))


def engine_options(options: StreamOptions) -> Options:
    """The engine's options for a stream."""
    return Options(
        keys_only=options.keys_only,
        key_pattern=KeyPattern(options.key_filter) if options.key_filter else None,
        value_filter=value_filter(options.value_filter) if options.value_filter else None,
        persisted_only=options.persisted_only,
        exact_end=options.exact_end,
        history=options.history,
    )


def value_filter(text: str) -> EngineValueFilter:
    """Parse the value of a control into a filter."""
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
