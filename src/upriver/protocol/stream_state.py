"""The states of one stream, as one table for both sides.

The producer moves through the table by what it sends, the consumer by what it receives. A message that the table does
not allow in the present state is a protocol violation. The diagram in the documentation is drawn from this table.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from upriver.errors import ProtocolViolation


class StreamState(enum.Enum):
    """The state of a stream."""

    __hash__ = object.__hash__  # the hash of Enum is slow, and each change looks into the table

    REQUESTED = "requested"  #: requested, not answered yet
    OPEN = "open"  #: accepted; between two snapshots
    SNAPSHOT = "in a snapshot"  #: after a marker; changes follow
    PENDING = "handing over: pending"  #: the consumer was told to become pending and has not answered yet
    DRAINING = "handing over: draining"  #: it is pending; the rest is sent, and the source becomes dead
    ACTIVATING = "handing over: active"  #: the consumer was told to become active and has not answered yet
    ENDED = "ended"


class StreamEvent(enum.Enum):
    """What moves a stream to its next state."""

    __hash__ = object.__hash__

    ACCEPT = "accept"
    REFUSE = "refuse"
    START = "stream start"
    MARKER = "snapshot marker"
    SNAPSHOT_END = "snapshot end"
    CHANGE = "change"
    ADVANCE = "seqno advanced"
    FLUSH = "flush"
    SET_PENDING = "set vbucket state pending"
    PENDING_ANSWERED = "answer to pending"
    SET_ACTIVE = "set vbucket state active"
    SET_OUT_OF_ORDER = "set vbucket state out of order"  #: replica, dead, or a step of the takeover was left out
    END = "stream end"
    CLOSE = "close stream"
    LOSE = "connection lost"


_S, _E = StreamState, StreamEvent
_LEAVE: Final = {_E.END: _S.ENDED, _E.CLOSE: _S.ENDED, _E.LOSE: _S.ENDED}

TRANSITIONS: Final[Mapping[StreamState, Mapping[StreamEvent, StreamState]]] = MappingProxyType(
    {
        _S.REQUESTED: {_E.ACCEPT: _S.OPEN, _E.REFUSE: _S.ENDED, _E.CLOSE: _S.ENDED, _E.LOSE: _S.ENDED},
        _S.OPEN: {
            _E.START: _S.OPEN,
            _E.MARKER: _S.SNAPSHOT,
            _E.FLUSH: _S.OPEN,
            _E.SET_PENDING: _S.PENDING,
            _E.SET_OUT_OF_ORDER: _S.DRAINING,
            **_LEAVE,
        },
        _S.SNAPSHOT: {
            _E.MARKER: _S.SNAPSHOT,
            _E.CHANGE: _S.SNAPSHOT,
            _E.ADVANCE: _S.SNAPSHOT,
            _E.SNAPSHOT_END: _S.OPEN,
            _E.FLUSH: _S.OPEN,
            _E.SET_PENDING: _S.PENDING,
            _E.SET_OUT_OF_ORDER: _S.DRAINING,
            **_LEAVE,
        },
        _S.PENDING: {
            _E.PENDING_ANSWERED: _S.DRAINING,
            _E.SET_OUT_OF_ORDER: _S.DRAINING,
            _E.FLUSH: _S.PENDING,
            **_LEAVE,
        },
        _S.DRAINING: {
            _E.MARKER: _S.DRAINING,
            _E.CHANGE: _S.DRAINING,
            _E.ADVANCE: _S.DRAINING,
            _E.SNAPSHOT_END: _S.DRAINING,
            _E.FLUSH: _S.DRAINING,
            _E.SET_ACTIVE: _S.ACTIVATING,
            _E.SET_OUT_OF_ORDER: _S.DRAINING,
            **_LEAVE,
        },
        _S.ACTIVATING: {_E.SET_OUT_OF_ORDER: _S.DRAINING, **_LEAVE},
        _S.ENDED: {},
    }
)


class StreamLife:
    """The state of one stream; refuses events that the table does not allow."""

    __slots__ = ("state", "vbucket")

    def __init__(self, vbucket: int) -> None:
        self.vbucket = vbucket
        self.state = StreamState.REQUESTED

    def move(self, event: StreamEvent) -> None:
        """Move to the next state."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ProtocolViolation(self.vbucket, event.value, self.state.value)
        self.state = following

    @property
    def ended(self) -> bool:
        """Whether the stream has ended."""
        return self.state is StreamState.ENDED


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {StreamState.REQUESTED.name}"]
    for state, events in TRANSITIONS.items():
        by_target: dict[StreamState, list[str]] = {}
        for event, target in events.items():
            by_target.setdefault(target, []).append(event.value)
        lines += [f"    {state.name} --> {target.name}: {', '.join(names)}" for target, names in by_target.items()]
    return "\n".join([*lines, f"    {StreamState.ENDED.name} --> [*]", ""])
