"""Notices vbuckets that have stopped moving although their source is further, and says so."""

import logging
from collections.abc import Callable
from typing import Final

from upriver.client.cluster.cluster import Cluster
from upriver.client.consumer.end_positions import Ranges
from upriver.client.consumer.feed_factory import active_on
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.errors import UpriverError

LOG: Final = logging.getLogger("upriver.client")


class StallWatch:
    """Compares where each vbucket stands with where it stood at the last look, and with where its source is."""

    def __init__(
        self,
        cluster: Cluster,
        ranges: Ranges,
        copies: TrackedVbuckets,
        *,
        tells_seqnos: bool,
        on_stalled: Callable[[int], object],
    ) -> None:
        """``tells_seqnos`` is False for TAP, where nobody knows how far a copy is."""
        self._cluster = cluster
        self._ranges = ranges
        self._copies = copies
        self._tells_seqnos = tells_seqnos
        self._on_stalled = on_stalled
        self._before: dict[int, int] = {}
        self._stalled: dict[int, str] = {}

    @property
    def stalled(self) -> dict[int, str]:
        """Vbuckets that do not move although they should, each with the reason."""
        return {number: why for number, why in self._stalled.items() if number in self._ranges.unfinished}

    async def look(self) -> None:
        """Ask the sources, and compare."""
        high = await self._high_seqnos()
        for number in sorted(self._ranges.unfinished):
            seqno = self._copies[number].position.seqno
            before, self._before[number] = self._before.get(number), seqno
            if number not in high:
                self._complain(number, "no node says that it has it active")
                self._on_stalled(number)
            elif self._tells_seqnos and before == seqno < min(high[number], self._ranges.wanted_end(number)):
                self._complain(number, f"it stands at {seqno}, its source at {high[number]}")
                self._on_stalled(number)
            else:
                self._stalled.pop(number, None)

    def _complain(self, vbucket: int, why: str) -> None:
        if vbucket not in self._stalled:
            LOG.warning("vbucket %d has stopped moving: %s", vbucket, why)
        self._stalled[vbucket] = why

    async def _high_seqnos(self) -> dict[int, int]:
        out: dict[int, int] = {}
        for endpoint in self._cluster.map.owned():
            try:
                out |= await active_on(await self._cluster.connection(endpoint))
            except UpriverError:
                continue
        return out
