"""Clients that write, check what they wrote, and leave at any moment."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

from tests.soak.ledger import Ledger, contents_after, number_in
from upriver.client import KvClient
from upriver.errors import UpriverError

#: Long enough for a kill, a restart and a move: a client waits rather than fail.
TIMEOUT_S = 120.0
#: Values are padded, so that a full disk is felt soon.
PADDING_BYTES_MAX = 4000


class SoakWriter:
    """Writes a few keys of its own, one write at a time."""

    def __init__(
        self, name: str, address: str, ledger: Ledger, seed: int, watch: Callable[[], Callable[[], str]]
    ) -> None:
        self.name = name
        self._address = address
        self._ledger = ledger
        self._random = random.Random(seed)
        self._watch = watch
        self._generation = 0
        self._task: asyncio.Task[None] | None = None
        self._keys: list[bytes] = []
        self._renew_keys()

    def start(self) -> None:
        self._task = asyncio.create_task(self._write())

    async def disconnect(self) -> None:
        """Cut its connections in the middle of whatever it does, and let it come back."""
        await self.stop()
        self.start()

    async def stop(self) -> None:
        """End; the outcome of a write that is under way stays unknown."""
        assert self._task is not None
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error
        self._task.cancel()
        await asyncio.wait([self._task])

    def _renew_keys(self) -> None:
        self._generation += 1
        self._keys = [b"%s-%d-%d" % (self.name.encode(), self._generation, number) for number in range(20)]

    async def _write(self) -> None:
        while True:
            with contextlib.suppress(UpriverError):  # no node lets it in, because all are busy or down
                async with KvClient(self._address, timeout_s=TIMEOUT_S) as kv:
                    await self._write_to(kv)
            await asyncio.sleep(0.1)

    async def _write_to(self, kv: KvClient) -> None:
        while True:
            key = self._random.choice(self._keys)
            sure = False
            try:
                await self._write_once(kv, key)
                sure = True
            except UpriverError:
                await asyncio.sleep(0.1)
            finally:
                if not sure:
                    self._ledger.unknown += 1
                    self._renew_keys()

    async def _write_once(self, kv: KvClient, key: bytes) -> None:
        number = self._ledger.attempt(key)
        value, happened = contents_after(number), self._watch()
        began = time.monotonic()
        if value is None:
            await kv.delete(key)
        else:
            await kv.set(key, value + b" " * self._random.randrange(1, PADDING_BYTES_MAX))
        self._ledger.acknowledge(key, number, time.monotonic() - began, happened)
        # Before a deletion hides what is there, and now and then.
        if contents_after(number + 1) is None or self._random.random() < 0.1:
            item = await kv.get(key)
            self._ledger.check(key, None if item is None else number_in(item.value))
