"""One soak: start the cluster, let clients write and things go wrong, then read everything back."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.soak.cluster import SoakNode, soak_cluster
from tests.soak.faults import Faults
from tests.soak.ledger import Ledger, number_in
from tests.soak.writer import TIMEOUT_S, SoakWriter
from upriver.client import KvClient

WRITERS = 8
#: Between two faults; clients can catch up meanwhile.
REST_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a soak found."""

    ledger: Ledger
    faults: list[str]
    failed_commits: int
    breaches: list[str]

    @property
    def failed(self) -> bool:
        return bool(self.ledger.losses or self.breaches)

    def __str__(self) -> str:
        ledger = self.ledger
        happened = ", ".join(f"{count} × {kind}" for kind, count in sorted(Counter(self.faults).items()))
        during = f", during: {ledger.longest_wait_during}" if ledger.longest_wait_during else ""
        lines = [
            f"what happened:        {happened or 'nothing'}",
            f"acknowledged writes:  {ledger.acknowledged}",
            f"unknown outcomes:     {ledger.unknown}",
            f"lost writes:          {len(ledger.losses)}",
            f"longest wait:         {ledger.longest_wait_s:.1f} s{during}",
            f"commits that failed:  {self.failed_commits} (full disk)",
            f"breaches of a role:   {len(self.breaches)}",
        ]
        return "\n".join([*lines, *map(str, ledger.losses[:20]), *self.breaches[:20]])


async def soak(directory: Path, seconds: float, seed: int) -> Result:
    """Run for this long, then compare what the nodes hold with what was acknowledged."""
    chance, ledger = random.Random(seed), Ledger()
    with soak_cluster(directory) as nodes:
        address = _all_of(nodes)
        writers: list[SoakWriter] = []
        faults = Faults(nodes, writers, ledger, chance)
        writers += [
            SoakWriter(f"w{number}", address, ledger, chance.randrange(2**32), faults.watch)
            for number in range(WRITERS)
        ]
        for writer in writers:
            writer.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(chance.uniform(0, REST_S_MAX))
            await faults.strike()
        for writer in writers:
            await writer.stop()
        await _restart(nodes)
        await read_back(address, ledger)
        return Result(ledger, faults.history, faults.failed_commits, faults.breaches)


def _all_of(nodes: tuple[SoakNode, ...]) -> str:
    return f"upriver://writer:writer@{','.join(node.address for node in nodes)}"


async def _restart(nodes: tuple[SoakNode, ...]) -> None:
    """Only what is on disk counts."""
    for node in nodes:
        await asyncio.to_thread(node.kill)
        await asyncio.to_thread(node.start)


async def read_back(address: str, ledger: Ledger) -> None:
    """Compare what the nodes hold with what was acknowledged."""
    async with KvClient(address, timeout_s=TIMEOUT_S) as kv:
        for key in ledger:
            item = await kv.get(key)
            ledger.check(key, None if item is None else number_in(item.value))
