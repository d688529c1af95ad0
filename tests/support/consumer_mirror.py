"""What a consumer has made of the changes, and what the source holds: the two must be equal in the end."""

import asyncio
from collections.abc import Callable

from upriver.client import Batch, Consumer, KvClient
from upriver.model import Change, Event
from upriver.node import EmbeddedNode

PATIENCE_S = 60.0


class Mirror:
    """A store that does what a consumer tells it, and repairs itself after a rollback as the rules say."""

    def __init__(self) -> None:
        self.held: dict[int, dict[bytes, Change]] = {}
        self.events: list[str] = []
        self.batches = 0

    @property
    def contents(self) -> dict[bytes, bytes]:
        """The live values."""
        return {
            key: change.value
            for held in self.held.values()
            for key, change in held.items()
            if change.event is Event.MUTATION
        }

    async def apply(self, batch: Batch, kv: KvClient | None = None) -> None:
        """Take a batch."""
        self.batches += 1
        if batch.event is not None:
            self.events.append(type(batch.event).__name__)
            await self._apply_event(batch, kv)
            return
        for change in batch.changes():
            self.held.setdefault(change.vbucket, {})[change.key] = change

    async def _apply_event(self, batch: Batch, kv: KvClient | None) -> None:
        event = batch.event
        assert event is not None
        if event.event is not Event.ROLLBACK:
            self.held.pop(event.vbucket, None)
            return
        assert kv is not None
        held = self.held.setdefault(event.vbucket, {})
        for key in [key for key, change in held.items() if change.seqno > event.seqno]:
            item = await kv.get(key)
            if item is None:
                del held[key]
            else:
                held[key] = Change(
                    vbucket=event.vbucket, event=Event.MUTATION, seqno=event.seqno, key=key, value=item.value
                )


async def follow(consumer: Consumer, mirror: Mirror, done: Callable[[], bool], kv: KvClient | None = None) -> None:
    """Apply what comes until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not done():
            try:
                async with asyncio.timeout(0.1):
                    batch = await anext(consumer)
            except TimeoutError:
                continue
            await mirror.apply(batch, kv)


def contents_of(node: EmbeddedNode) -> dict[bytes, bytes]:
    """What the node holds."""

    def look() -> dict[bytes, bytes]:
        return {
            change.key: change.value
            for vbucket in node.bucket
            for snapshot in vbucket.changes()
            for change in snapshot
            if change.event is Event.MUTATION
        }

    return node.call(look)
