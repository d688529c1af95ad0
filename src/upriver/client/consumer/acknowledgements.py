"""Which batches are done: progress follows only while none before is missing, so a crash can repeat but never skip."""

from collections import deque
from collections.abc import Callable, Mapping

from upriver.client.consumer.progress import Progress


class Acknowledgements:
    """Batches that were handed out, in their order, and how far everything before the first open one leads."""

    def __init__(self) -> None:
        #: How far each vbucket is that has moved.
        self.progress: dict[int, Progress] = {}
        self._handed_out: deque[tuple[int, Mapping[int, Progress], Callable[[], object] | None]] = deque()
        self._done: set[int] = set()

    def hand_out(
        self, number: int, progress: Mapping[int, Progress], on_done: Callable[[], object] | None = None
    ) -> None:
        """A batch goes out; numbers grow. ``on_done`` is called when it and all before it are done."""
        self._handed_out.append((number, progress, on_done))

    def done(self, number: int) -> bool:
        """A batch is done; whether that moved the progress. What was done already is ignored."""
        if not self._handed_out or number < self._handed_out[0][0]:
            return False
        self._done.add(number)
        moved = False
        while self._handed_out and self._handed_out[0][0] in self._done:
            first, progress, on_done = self._handed_out.popleft()
            self._done.discard(first)
            self.progress.update(progress)
            if on_done is not None:
                on_done()
            moved = True
        return moved

    @property
    def open(self) -> int:
        """How many batches are handed out and not done."""
        return len(self._handed_out) - len(self._done)
