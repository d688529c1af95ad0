"""Synchronous clients run an asynchronous one in an event loop of their own."""

import asyncio
import threading
from typing import Self

import pytest

from upriver.client.transport.sync import LoopThread, SyncClient


class Thing:
    """An asynchronous client."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self.refuses = refuses
        self.closed = False
        self.opened = False

    async def __aenter__(self) -> Self:
        if self.refuses:
            raise LookupError("refused")
        self.opened = True
        return self

    async def close(self) -> None:
        self.closed = True

    async def double(self, number: int, *, plus: int = 0) -> int:
        await asyncio.sleep(0)
        return 2 * number + plus

    def thread(self) -> str:
        return threading.current_thread().name


class SyncThing(SyncClient[Thing]):
    """The same with methods that block."""

    @property
    def thing(self) -> Thing:
        return self._client

    def double(self, number: int, *, plus: int = 0) -> int:
        return self._wait(self._client.double(number, plus=plus))

    def thread(self) -> str:
        return self._call(self._client.thread)

    def thread_from_inside(self) -> str:
        async def inside() -> str:
            return self.thread()

        return self._wait(inside())


def client_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "upriver-client"]


def test_methods_block_and_run_in_the_loop() -> None:
    with SyncThing(Thing) as thing:
        assert thing.thing.opened
        assert thing.double(2, plus=1) == 5
        assert thing.thread() == "upriver-client"
        assert thing.thread_from_inside() == "upriver-client"
    assert thing.thing.closed
    assert thing.thread() == threading.current_thread().name
    assert thing.thing.loop.is_closed()
    assert not client_threads()


def test_a_closed_client_says_so() -> None:
    with SyncThing(Thing) as thing:
        pass
    with pytest.raises(RuntimeError, match="the client is closed; open another one"):
        thing.double(2)


def test_a_client_that_cannot_be_made_leaves_no_thread() -> None:
    def make() -> Thing:
        raise LookupError("never")

    with pytest.raises(LookupError, match="never"):
        SyncThing(make)
    assert not client_threads()


def test_a_client_that_cannot_be_opened_is_closed() -> None:
    thing = SyncThing(lambda: Thing(refuses=True))
    with pytest.raises(LookupError, match="refused"), thing:
        pytest.fail("it was opened")
    assert thing.thing.closed
    assert not client_threads()


def test_a_loop_does_not_wait_for_itself() -> None:
    runner = LoopThread()

    async def inside() -> None:
        runner.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="own event loop"):
        runner.run(inside())
    runner.stop()
    runner.stop()
