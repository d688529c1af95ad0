"""The driver's view of the cluster: the owner and the state of each vbucket."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from upriver.client.cluster import (
    Cluster,
    VbucketStatus,
    VisibleEnd,
    active_vbuckets,
    failover_logs,
    item_counts,
    owners,
    statistics,
    visible_ends,
)
from upriver.client.transport import Address, Backoff, Endpoint
from upriver.errors import ClusterMapError, NodeUnavailable
from upriver.model import FailoverLog
from upriver.spark.batch_planner import SourceState
from upriver.spark.offsets import Offset

T = TypeVar("T")
#: The driver tolerates an unreachable node for this long, because a restarted node is soon back.
PATIENCE_S: Final = 60.0
#: The driver waits this long for an owner, because a vbucket has none for a moment while it moves.
MOVING_S: Final = 10.0
#: The longest pause between two attempts: while the driver waits, nothing goes on.
PAUSE_S: Final = 0.25


#: A node looks at some ten thousand records to answer how far a range may go; it is asked again this many times.
COUNTING_ROUNDS_MAX: Final = 8

#: How a node without a disk calls its files.
_IN_MEMORY: Final = ":memory:"


class BucketIdentity(NamedTuple):
    """Which bucket a cluster serves."""

    uuid: str
    #: Whether a restart empties it, and gives it another uuid.
    is_in_memory: bool


class ClusterView:
    """Requests of a driver to a cluster, one at a time."""

    def __init__(self, address: Address, vbuckets: tuple[int, ...] | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._cluster = Cluster(address)
        self._vbuckets = vbuckets
        #: Vbuckets without an owner, which the next call does not wait for again.
        self._missed: frozenset[int] = frozenset()
        #: The last estimate of the size of a change.
        self._change_bytes = 1

    def vbuckets(self) -> list[int]:
        """The vbuckets that the query reads: the chosen ones, or all."""
        if self._vbuckets is not None:
            return list(self._vbuckets)
        return list(range(self.count()))

    def restrict(self, vbuckets: Iterable[int]) -> None:
        """Look at these vbuckets only."""
        self._vbuckets = tuple(vbuckets)

    def has_upriver_nodes(self) -> bool:
        """Whether all owners are Upriver nodes, which support filters."""
        return self._run(self._has_upriver_nodes())

    def count(self) -> int:
        """The number of vbuckets of the cluster."""
        return self._run(self._cluster.open()).vbuckets

    def states(self, known: Offset | None = None) -> dict[int, SourceState]:
        """The states of the active copies. Failover logs are fetched only where ``known`` has another branch."""
        return self._run(self._states(known))

    def owners(self, numbers: Iterable[int]) -> dict[Endpoint, list[int]]:
        """The owners of these vbuckets."""
        return self._run(owners(self._cluster, list(numbers)))

    def bytes_per_change(self) -> int:
        """An estimate of the average size of a change: by the nodes that answer, or the last one if none does."""
        return self._run(self._bytes_per_change())

    def item_counts(self) -> dict[int, int]:
        """The number of keys of each vbucket, deleted ones included, of which no range delivers more changes.

        Vbuckets of nodes that cannot tell are missing.
        """
        return self._run(self._item_counts())

    def visible_ends(self, asked: Mapping[int, tuple[int, int]]) -> dict[int, VisibleEnd]:
        """How far ranges may go that start at these seqnos and deliver at most this many changes.

        Vbuckets of nodes that cannot tell are missing.
        """
        return self._run(self._visible_ends(asked))

    def bucket(self) -> BucketIdentity:
        """Which bucket the nodes serve."""
        try:
            return self._run(self._bucket())
        except NodeUnavailable:  # the connection to a node that was restarted is dead, and only its use shows that
            return self._run(self._bucket())

    def close(self) -> None:
        """Close the connections."""
        if not self._loop.is_closed():
            self._run(self._cluster.close())
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def _states(self, known: Offset | None) -> dict[int, SourceState]:
        await self._cluster.open()
        wanted = None if self._vbuckets is None else list(self._vbuckets)
        began, backoff = self._loop.time(), Backoff(longest_s=PAUSE_S)
        is_newest = False
        while True:
            waited_s = self._loop.time() - began
            try:
                found = await self._with_logs(await active_vbuckets(self._cluster, wanted), known)
                missing = frozenset(range(self._cluster.map.vbuckets) if wanted is None else wanted) - found.keys()
                if not missing or (is_newest and (missing <= self._missed or waited_s > MOVING_S)):
                    self._missed = missing
                    return found
            except NodeUnavailable:
                if waited_s > PATIENCE_S:
                    raise
            # A node is unreachable or a vbucket has moved: a newer map may name the owner.
            if is_newest:
                await asyncio.sleep(backoff.pause_s())
            with contextlib.suppress(NodeUnavailable):  # the next attempt raises it
                await self._cluster.refresh(self._cluster.map)
            is_newest = True

    async def _with_logs(self, found: dict[int, VbucketStatus], known: Offset | None) -> dict[int, SourceState]:
        """Add the failover logs; vbuckets that have moved meanwhile are left out."""
        offsets = {} if known is None else known.vbuckets
        branched = [
            number
            for number, status in found.items()
            if number in offsets and offsets[number].seqno and offsets[number].vbucket_uuid != status.vbucket_uuid
        ]
        logs: dict[int, FailoverLog] = {}
        for endpoint, numbers in (await owners(self._cluster, branched)).items():
            logs |= await failover_logs(await self._cluster.connection(endpoint), numbers)
        logs |= {number: _fresh_log(found[number].vbucket_uuid) for number in found.keys() - set(branched)}
        return {
            number: SourceState(logs[number], status.high_seqno, status.purge_seqno, status.exact_from)
            for number, status in found.items()
            if number in logs
        }

    async def _has_upriver_nodes(self) -> bool:
        connections = [await self._cluster.connection(endpoint) for endpoint in await owners(self._cluster)]
        return all(connection.is_upriver_node for connection in connections)

    async def _item_counts(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for endpoint, numbers in (await owners(self._cluster, self._vbuckets)).items():
            with contextlib.suppress(NodeUnavailable):
                here = await item_counts(await self._cluster.connection(endpoint))
                found |= {number: here[number] for number in numbers if number in here}
        return found

    async def _visible_ends(self, asked: Mapping[int, tuple[int, int]]) -> dict[int, VisibleEnd]:
        """Ask again where a node has looked at enough records for one answer, but not for ever."""
        found: dict[int, VisibleEnd] = {}
        open_ = dict(asked)
        for _ in range(COUNTING_ROUNDS_MAX):
            if not open_:
                break
            answers: dict[int, VisibleEnd] = {}
            for endpoint, numbers in (await owners(self._cluster, list(open_))).items():
                with contextlib.suppress(NodeUnavailable):
                    connection = await self._cluster.connection(endpoint)
                    answers |= await visible_ends(connection, {number: open_[number] for number in numbers})
            following: dict[int, tuple[int, int]] = {}
            for number, (end_seqno, changes) in answers.items():
                after, most = open_[number]
                found[number] = VisibleEnd(end_seqno, found.get(number, VisibleEnd(0, 0)).changes + changes)
                if changes < most and end_seqno > after:
                    following[number] = end_seqno, most - changes
            open_ = following
        return found

    async def _bucket(self) -> BucketIdentity:
        known = await self._cluster.open()
        if known.is_empty:
            known = await self._cluster.refresh(known)
        if known.is_empty:  # the map of a node that is alone and has nothing says nothing about the bucket
            raise ClusterMapError(f"no node of {self._cluster.address} that answers has vbuckets")
        kinds = set()
        for endpoint in await owners(self._cluster):
            numbers = await statistics(await self._cluster.connection(endpoint))
            kinds.add(numbers.get("ep_dbname") == _IN_MEMORY or numbers.get("ep_bucket_type") == "ephemeral")
        return BucketIdentity(known.bucket_uuid, True in kinds)

    async def _bytes_per_change(self) -> int:
        items = size = 0
        for endpoint in await owners(self._cluster):
            with contextlib.suppress(NodeUnavailable):  # an estimate must not end a query: see PATIENCE_S
                numbers = await statistics(await self._cluster.connection(endpoint))
                items += int(numbers.get("curr_items", 0))
                size += int(numbers.get("mem_used", 0))
        if items:
            self._change_bytes = max(1, size // items)
        return self._change_bytes


@lru_cache(maxsize=4096)
def _fresh_log(vbucket_uuid: int) -> FailoverLog:
    """Cached, because each micro-batch needs the same logs."""
    return FailoverLog.fresh(vbucket_uuid)
