"""The answers of one connection, in the order of its requests.

Most answers are ready at once. An answer that waits (for the disk, or for the delay after a failed login) is a
``Deferred``: it takes its place in the queue and holds back the answers behind it.
"""

from collections import deque
from collections.abc import Callable, Iterable

from upriver.errors import StatusError
from upriver.node.session.refusals import refusal
from upriver.node.state import Scheduler
from upriver.wire import Message, Request, Response


class Deferred:
    """The place of an answer that is not ready yet."""

    __slots__ = ("_queue", "give_up", "packets")

    def __init__(self, queue: "AnswerQueue") -> None:
        self._queue = queue
        #: Refuses a request that may wait for long; None where the next commit to disk ends the wait.
        self.give_up: Callable[[], object] | None = None
        self.packets: bytes | None = None

    @property
    def ended(self) -> bool:
        """Whether it is answered."""
        return self.packets is not None

    def complete(self, *answers: Message) -> None:
        """Answer, unless it is answered already, and release the answers behind it."""
        if not self.ended:
            self.give_up = None
            self._queue.hold(self, b"".join(answer.encode() for answer in answers))
            self._queue.release_soon()

    def fail(self, request: Request, error: StatusError) -> None:
        """Refuse the request."""
        self.complete(refusal(request, error))


#: The result of a command: one answer, several, none (quiet forms), or one that comes later.
Answer = Response | Iterable[Response] | Deferred | None


class AnswerQueue:
    """The answers that are ready to be sent, and those that wait."""

    __slots__ = ("_ready", "_releasing", "_scheduler", "on_output", "ready_bytes", "waiting", "waiting_bytes")

    def __init__(self, scheduler: Scheduler, on_output: Callable[[], object] | None) -> None:
        self._scheduler = scheduler
        #: Called when there is something to send.
        self.on_output = on_output
        #: The answers that are ready and not taken yet. They are joined only once: a large one is not copied.
        self._ready: list[bytes] = []
        #: The number of their bytes.
        self.ready_bytes = 0
        self.waiting: deque[Deferred] = deque()
        #: The number of bytes of answers that wait for one before them.
        self.waiting_bytes = 0
        self._releasing = False

    def take(self) -> bytes:
        """Take the answers that are ready."""
        ready, self._ready, self.ready_bytes = self._ready, [], 0
        return ready[0] if len(ready) == 1 else b"".join(ready)

    def add(self, packets: bytes) -> None:
        """Add answers that are ready."""
        if packets:
            self._ready.append(packets)
            self.ready_bytes += len(packets)

    def append(self, answer: Deferred) -> None:
        """Add an answer behind all others."""
        self.waiting.append(answer)
        if answer.packets is not None:
            self.release()

    def append_packets(self, packets: bytes) -> None:
        """Add an answer that is complete but waits for those before it."""
        behind = Deferred(self)
        self.hold(behind, packets)
        self.waiting.append(behind)

    def hold(self, answer: Deferred, packets: bytes) -> None:
        """Keep an answer until those before it are sent."""
        self.waiting_bytes += len(packets) - len(answer.packets or b"")
        answer.packets = packets

    def release_soon(self) -> None:
        """Release answers once for all that are completed together: a commit to disk completes thousands."""
        if not self._releasing:
            self._releasing = True
            self._scheduler.from_thread(self.release)

    def release(self) -> None:
        """Move completed answers from the queue to those that are ready."""
        self._releasing = False
        while self.waiting and (packets := self.waiting[0].packets) is not None:
            self.waiting.popleft()
            self.waiting_bytes -= len(packets)
            self.add(packets)
        if self.on_output is not None:
            self.on_output()

    def give_up(self) -> None:
        """Refuse all requests that may wait for long: the peer has half-closed, or the node stops."""
        for answer in list(self.waiting):
            if answer.give_up is not None:
                answer.give_up()

    def drop(self) -> None:
        """Refuse and forget all answers that wait: the connection is closed."""
        self.on_output = None
        self.give_up()
        self.waiting.clear()
        self.waiting_bytes = 0
