"""The high seqnos of a pipeline's source, looked up while Spark works.

Spark looks at the source only when it plans a batch, but the source advances while a long batch runs. So a thread asks
the nodes. A vbucket of an unreachable node keeps its last known seqno.
"""

import asyncio
import contextlib
from typing import Final, Self

from upriver.client.cluster import Cluster, owners, vbuckets_of
from upriver.client.transport import Address, Endpoint, LoopThread
from upriver.errors import UpriverError
from upriver.model import VbucketState

#: Time between two requests to the nodes.
LOOK_S: Final = 1.0


class SourceWatch:
    """Watches the vbuckets of a cluster in a thread, while it is entered."""

    def __init__(self, address: Address, vbuckets: tuple[int, ...] | None = None) -> None:
        self._cluster = Cluster(address)
        self._vbuckets = vbuckets
        #: The high seqno of each vbucket, replaced after each request; empty before the first.
        self.high_seqnos: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._loop = LoopThread("upriver-source-watch")
        self._watching = self._loop.start(self._watch())
        return self

    def __exit__(self, *_: object) -> None:
        self._watching.cancel()
        try:
            self._loop.run(self._cluster.close())
        finally:
            self._loop.stop()

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(UpriverError, OSError):  # if it persists, the query reports it
                await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        known = await self._cluster.open()
        wanted = range(known.vbuckets) if self._vbuckets is None else self._vbuckets
        by_owner = await owners(self._cluster, wanted)
        looks = await asyncio.gather(*(self._look_at(endpoint, set(by_owner[endpoint])) for endpoint in by_owner))
        found = {number: seqno for look in looks for number, seqno in look.items()}
        self.high_seqnos = self.high_seqnos | found
        if len(found) < len(wanted):  # a node is unreachable or a vbucket has moved: get a newer map
            await self._cluster.refresh(known)

    async def _look_at(self, endpoint: Endpoint, wanted: set[int]) -> dict[int, int]:
        """The high seqnos of a node's active copies; empty if the node does not answer."""
        with contextlib.suppress(UpriverError, OSError):
            told = await vbuckets_of(await self._cluster.connection(endpoint))
            active = [each for each in told.values() if each.state is VbucketState.ACTIVE]
            return {each.number: each.high_seqno for each in active if each.number in wanted}
        return {}
