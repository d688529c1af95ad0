"""Collects the streams that requests wake, for the connection that received the requests.

A change wakes the streams that wait for it. While a session answers requests, the queue collects these streams; the
session returns them with its answers, and its connection decides in which order all of it is sent. A stream that is
woken at any other time (by a timer, by the disk, by the embedding program) sends in the event loop's next turn.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from upriver.wire import Buffer

if TYPE_CHECKING:
    from upriver.node.packet_handlers import SessionStream
    from upriver.node.state import Scheduler

T = TypeVar("T")


class WakeQueue:
    """The woken streams of one node."""

    __slots__ = ("_collected", "_scheduler")

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        #: The streams woken in the current turn; None between turns.
        self._collected: list[SessionStream] | None = None

    def add(self, stream: "SessionStream") -> None:
        """Let the stream send: after the current turn's requests, or in the next turn."""
        if self._collected is None:
            self._scheduler.later(0.0, stream.flush)
        else:
            self._collected.append(stream)

    def collect(self, answer: Callable[[Buffer, int], T], data: Buffer, size: int) -> "tuple[T, list[SessionStream]]":
        """Answer requests; return the result and the streams woken. If that fails, they send in the next turn."""
        woken: list[SessionStream] = []
        self._collected = woken
        try:
            return answer(data, size), woken
        except BaseException:
            for stream in woken:
                self._scheduler.later(0.0, stream.flush)
            raise
        finally:
            self._collected = None
