"""Reports vbuckets that do not advance although their source is ahead."""

import logging
from collections.abc import Callable
from typing import Final

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.node_queries import active_seqnos
from upriver.client.consumer.end_positions import EndPositions
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.errors import UpriverError

LOG: Final = logging.getLogger("upriver.client")


class StallWatch:
    """Compares the position of each vbucket with the previous one, and with the high seqno of its source."""

    def __init__(
        self,
        cluster: Cluster,
        ends: EndPositions,
        tracked: TrackedVbuckets,
        *,
        has_seqnos: bool,
        on_stalled: Callable[[int], object],
    ) -> None:
        """``has_seqnos`` is False for TAP, whose streams have no positions."""
        self._cluster = cluster
        self._ends = ends
        self._tracked = tracked
        self._has_seqnos = has_seqnos
        self._on_stalled = on_stalled
        self._before: dict[int, int] = {}
        self._stalled: dict[int, str] = {}

    @property
    def stalled(self) -> dict[int, str]:
        """Vbuckets that do not advance although they should, each with the reason."""
        return {number: why for number, why in self._stalled.items() if number in self._ends.unfinished}

    async def look(self) -> None:
        """Ask the sources for their high seqnos, and compare."""
        high = await self._high_seqnos()
        for number in sorted(self._ends.unfinished):
            seqno = self._tracked[number].position.seqno
            before, self._before[number] = self._before.get(number), seqno
            if number not in high:
                self._report(number, "no node has it active")
                self._on_stalled(number)
            elif self._has_seqnos and before == seqno < min(high[number], self._ends.wanted_end(number)):
                self._report(number, f"its position is {seqno}, the high seqno of its source {high[number]}")
                self._on_stalled(number)
            else:
                self._stalled.pop(number, None)

    def _report(self, vbucket: int, why: str) -> None:
        if vbucket not in self._stalled:
            LOG.warning("vbucket %d does not advance: %s", vbucket, why)
        self._stalled[vbucket] = why

    async def _high_seqnos(self) -> dict[int, int]:
        out: dict[int, int] = {}
        for endpoint in self._cluster.map.owned():
            try:
                out |= await active_seqnos(await self._cluster.connection(endpoint))
            except UpriverError:
                continue
        return out
