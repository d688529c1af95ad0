"""A short soak with each kind of fault, and one that must be noticed."""

import asyncio
from pathlib import Path

import pytest

from tests.soak.cluster import soak_cluster
from tests.soak.ledger import Ledger, number_in
from tests.soak.run import read_back, soak
from tests.soak.writer import SoakWriter
from tests.support.node_process import wait_until
from upriver.client import KvClient


@pytest.mark.slow
def test_nothing_is_lost(tmp_path: Path) -> None:
    result = asyncio.run(soak(tmp_path, 60, seed=1))
    assert not result.failed, str(result)
    assert result.ledger.acknowledged > 1000
    assert len(set(result.faults)) >= 3


@pytest.mark.slow
def test_a_lost_write_is_noticed(tmp_path: Path) -> None:
    """Somebody else deletes a key behind the writer's back, as if a node had lost it."""

    async def run() -> Ledger:
        ledger = Ledger()
        with soak_cluster(tmp_path) as (first, _):
            writer = SoakWriter("w", first.as_user("writer"), ledger, 1, lambda: str)
            writer.start()
            await asyncio.to_thread(wait_until, lambda: ledger.acknowledged > 200)
            await writer.stop()
            async with KvClient(first.as_user("writer")) as kv:
                for key in ledger:
                    item = await kv.get(key)
                    if item is not None and number_in(item.value) != b"1":
                        await kv.delete(key)
                        break
            await read_back(first.as_user("writer"), ledger)
        return ledger

    ledger = asyncio.run(run())
    assert len(ledger.losses) == 1
    assert ledger.losses[0].found is None
