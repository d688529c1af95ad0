"""The bridge between asynchronous objects and those who block."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from upriver.client.transport.sync import LoopThread, Synchronous


class Thing:
    """Something asynchronous."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self.opened = False

    async def __aenter__(self) -> "Thing":
        self.opened = True
        return self

    async def close(self) -> None:
        self.closed = True

    async def double(self, number: int, *, plus: int = 0) -> int:
        await asyncio.sleep(0)
        return 2 * number + plus

    async def fail(self) -> None:
        raise LookupError("no")

    async def count(self, end: int) -> AsyncIterator[int]:
        for number in range(end):
            await asyncio.sleep(0)
            yield number

    def __aiter__(self) -> AsyncIterator[int]:
        return self.count(3)

    def plain(self) -> str:
        return threading.current_thread().name

    async def plain_inside(self, twin: "Synchronous[Thing]") -> str:
        return str(twin.plain())


def test_methods_block_and_iterators_iterate() -> None:
    with Synchronous(Thing) as thing:
        assert thing.opened
        assert thing.double(2, plus=1) == 5
        assert list(thing.count(4)) == [0, 1, 2, 3]
        assert list(thing) == [0, 1, 2]
        assert thing.plain() == "upriver-client"
        assert thing.plain_inside(thing) == "upriver-client"
        with pytest.raises(LookupError, match="no"):
            thing.fail()
        with pytest.raises(AttributeError):
            thing.nothing()
    assert thing.closed
    assert thing.plain() == threading.current_thread().name
    assert thing.loop.is_closed()
    assert not [each for each in threading.enumerate() if each.name == "upriver-client"]


def test_what_cannot_be_made_leaves_no_thread() -> None:
    def make() -> Thing:
        raise LookupError("never")

    with pytest.raises(LookupError):
        Synchronous(make)
    assert not [each for each in threading.enumerate() if each.name == "upriver-client"]


def test_a_loop_does_not_wait_for_itself() -> None:
    runner = LoopThread()

    async def inside() -> None:
        runner.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="own event loop"):
        runner.run(inside())
    runner.stop()
    runner.stop()
