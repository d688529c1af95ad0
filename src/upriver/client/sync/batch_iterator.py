"""Iterates over the batches of a consumer from synchronous code.

A call into the event loop costs more than a small batch, so each call takes all batches that are waiting. They are
acknowledged together when the caller has finished the last of them, or on ``close``.
"""

from collections import deque
from collections.abc import Callable, Iterator

from upriver.client.consumer.batches import Batch, VbucketEvent
from upriver.client.consumer.consumer import Consumer
from upriver.client.transport.sync import SyncClient
from upriver.model import Change


class BatchIterator(SyncClient[Consumer]):
    """The hand-written part of ``SyncConsumer``."""

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._waiting: deque[Batch] = deque()
        self._given = 0
        super().__init__(make)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if not self._waiting:
                given, self._given = self._given, 0
                self._waiting.extend(self._wait(self._client.several(given)))
            if not self._waiting:
                return
            self._given += 1
            yield self._waiting.popleft()

    def changes(self) -> Iterator[Change | VbucketEvent]:
        """Yield single changes, and the events of whole vbuckets."""
        for batch in self:
            if batch.event is not None:
                yield batch.event
            else:
                yield from batch.changes()

    def close(self) -> None:
        """Close the consumer and stop its event loop.

        The batch that was returned last is not acknowledged, because the caller may not have finished it. All batches
        before it are.
        """
        if self._runner.is_running and self._given > 1:
            given, self._given = self._given, 0
            self._wait(self._client.leave(given - 1))
        super().close()
