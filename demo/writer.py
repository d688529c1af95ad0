"""A writer that keeps changing documents and tolerates a node that is briefly away."""

import asyncio
import json
import random
import threading
import time

from upriver.client import KvClient
from upriver.errors import KeyNotFound, UpriverError

#: A rate that leaves a laptop time for everything else.
CHANGES_PER_S = 2000
_ROUND_S = 0.05
_RIVERS = ("Aare", "Doubs", "Emme", "Reuss", "Rhine", "Rhone", "Ticino", "Thur")
_NOTES = ("high water", "low water", "ice on the banks", "the ferry runs again", "the weir is open", "mill at rest")


class Writer(threading.Thread):
    """Changes documents at random, and deletes one in twenty."""

    def __init__(self, address: str, keys: list[str]) -> None:
        super().__init__(name="writer")
        self._address = address
        self._keys = keys
        self._random = random.Random(7)
        self._halt = threading.Event()
        #: Changes that a node has answered.
        self.changes = 0
        #: Rounds in which a node could not be reached.
        self.interruptions = 0

    def run(self) -> None:
        """Write until it is stopped."""
        asyncio.run(self._write_on())

    def stop(self) -> None:
        """Stop after the current round."""
        self._halt.set()
        self.join()

    async def _write_on(self) -> None:
        async with KvClient(self._address, timeout_s=2.0) as kv:
            next_at = time.monotonic()
            while not self._halt.is_set():
                try:
                    await self._round(kv)
                except UpriverError:
                    self.interruptions += 1
                next_at = max(next_at + _ROUND_S, time.monotonic())
                await asyncio.sleep(next_at - time.monotonic())

    async def _round(self, kv: KvClient) -> None:
        count = min(int(CHANGES_PER_S * _ROUND_S), len(self._keys))
        chosen = self._random.sample(self._keys, count)
        deleted, changed = chosen[: count // 20], chosen[count // 20 :]
        refused = await kv.set_many({key: self._document(key) for key in changed})
        self.changes += len(changed) - len(refused)
        for key in deleted:
            try:
                await kv.delete(key)
                self.changes += 1
            except KeyNotFound:
                pass  # deleted before

    def _document(self, key: str) -> bytes:
        pick = self._random
        document = {
            "number": int(key.rpartition(":")[2]),
            "river": pick.choice(_RIVERS),
            "level_cm": pick.randrange(1000),
            "note": pick.choice(_NOTES),
        }
        return json.dumps(document).encode()
