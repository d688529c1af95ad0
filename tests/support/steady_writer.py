"""A writer that keeps changing documents, also while nodes are down and vbuckets move."""

import asyncio
import contextlib
import json
import random
import threading

from upriver.client import KvClient
from upriver.errors import KeyNotFound, UpriverError

_ROUND_S = 0.05


class SteadyWriter(threading.Thread):
    """Changes some of the keys ``k0``, ``k1``, … in each round, and deletes one in ten of them."""

    def __init__(self, address: str, keys: int, changes_per_s: int, seed: int = 0) -> None:
        super().__init__(name="writer")
        self._address = address
        self._keys = keys
        self._each = max(1, int(changes_per_s * _ROUND_S))
        self._random = random.Random(seed)
        self._running = threading.Event()
        self._halt = threading.Event()
        self._idle = threading.Event()
        #: Changes that a node has acknowledged.
        self.changes = 0
        self.failure: BaseException | None = None

    def __enter__(self) -> "SteadyWriter":
        self._running.set()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt.set()
        self._running.set()
        self.join()
        if self.failure is not None:
            raise self.failure

    def pause(self) -> None:
        """Stop writing; returns when no request is under way."""
        if not self._running.is_set():
            return
        self._idle.clear()
        self._running.clear()
        assert self._idle.wait(60) or self.failure is not None

    def resume(self) -> None:
        """Write on."""
        self._running.set()

    def run(self) -> None:
        try:
            asyncio.run(self._write())
        except BaseException as error:
            self.failure = error

    async def _write(self) -> None:
        async with KvClient(self._address, timeout_s=2.0) as kv:
            while not self._halt.is_set():
                if not self._running.is_set():
                    self._idle.set()
                    self._running.wait()
                    continue
                with contextlib.suppress(UpriverError):  # a node is down, or a vbucket is between two owners
                    await self._round(kv)
                await asyncio.sleep(_ROUND_S)

    async def _round(self, kv: KvClient) -> None:
        chosen = self._random.sample(range(self._keys), self._each)
        deleted, changed = chosen[: self._each // 10], chosen[self._each // 10 :]
        refused = await kv.set_many({f"k{number}": self._document() for number in changed})
        self.changes += len(changed) - len(refused)
        for number in deleted:
            try:
                await kv.delete(f"k{number}")
                self.changes += 1
            except KeyNotFound:
                pass  # deleted before

    def _document(self) -> bytes:
        value = self._random.randrange(10**9)
        return json.dumps({"n": value, "tags": ["a", "b"][: value % 3], "text": "x" * (value % 100)}).encode()
