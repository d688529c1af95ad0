"""The high seqnos and branches of a pipeline's source, looked up while Spark works.

Spark looks at the source only when it plans a batch, but the source advances while a long batch runs. So a thread asks
the nodes. A vbucket of an unreachable node keeps its last known seqno. Failover logs are fetched when a vbucket has
another uuid than before.
"""

import asyncio
import contextlib
from typing import Final, Self

from upriver.client.cluster import Cluster, VbucketStatus, failover_logs, owners, vbuckets_of
from upriver.client.transport import Address, Endpoint, LoopThread
from upriver.errors import UpriverError
from upriver.model import FailoverLog, VbucketState
from upriver.spark import Offset

#: Time between two requests to the nodes.
LOOK_S: Final = 1.0


class SourceWatch:
    """Watches the vbuckets of a cluster in a thread, while it is entered."""

    def __init__(self, address: Address, vbuckets: tuple[int, ...] | None = None) -> None:
        self._cluster = Cluster(address)
        self._vbuckets = vbuckets
        #: The high seqno of each vbucket, replaced after each request; empty before the first.
        self.high_seqnos: dict[int, int] = {}
        self._logs: dict[int, FailoverLog] = {}

    def held(self, offset: Offset) -> dict[int, int]:
        """Up to which seqno the source still has what was read: 0 after a flush, which begins another history."""
        found: dict[int, int] = {}
        for each in offset:
            log = self._logs.get(each.vbucket)
            if log is None:
                found[each.vbucket] = each.seqno
                continue
            place = log.index(each.vbucket_uuid)
            found[each.vbucket] = 0 if place is None else min(each.seqno, log.upper(place, each.seqno))
        return found

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
        found = {number: status.high_seqno for look in looks for number, status in look.items()}
        self.high_seqnos = self.high_seqnos | found
        if len(found) < len(wanted):  # a node is unreachable or a vbucket has moved: get a newer map
            await self._cluster.refresh(known)

    async def _look_at(self, endpoint: Endpoint, wanted: set[int]) -> dict[int, VbucketStatus]:
        """A node's active copies; empty if the node does not answer."""
        with contextlib.suppress(UpriverError, OSError):
            connection = await self._cluster.connection(endpoint)
            told = await vbuckets_of(connection)
            active = {n: each for n, each in told.items() if each.state is VbucketState.ACTIVE and n in wanted}
            branched = [n for n, each in active.items() if each.vbucket_uuid != self._newest_uuid(n)]
            logs = await failover_logs(connection, branched)
            self._logs = self._logs | logs
            return active
        return {}

    def _newest_uuid(self, number: int) -> int | None:
        return self._logs[number].newest.vbucket_uuid if number in self._logs else None
