"""The synchronous twins: one event loop in a thread of its own, and objects whose coroutines block instead.

There is one bridge for all of them, so the two faces cannot drift apart: whatever the asynchronous class can do, its
twin can do, with the same names and arguments.
"""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a daemon thread until it is stopped."""

    def __init__(self, name: str = "upriver-client") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there, without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for what it gives."""
        if self.is_current:
            work.close()
            raise RuntimeError("a synchronous client cannot be used in its own event loop")
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # interrupted: do not let it go on behind our back
            raise

    @property
    def is_current(self) -> bool:
        """Whether whoever asks runs in it."""
        return threading.current_thread() is self._thread

    @property
    def is_running(self) -> bool:
        """Whether it has not been stopped."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the loop and its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class Synchronous(Generic[T]):
    """An asynchronous object whose methods block and whose iterators are ordinary ones.

    It owns its loop; ``close`` or the end of a ``with`` ends both.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._runner = LoopThread()
        try:
            self._object = self._runner.run(_made(make))
        except BaseException:
            self._runner.stop()
            raise

    def __enter__(self) -> "Synchronous[T]":
        try:
            opened: Any = self._object
            if hasattr(opened, "__aenter__"):
                self._runner.run(opened.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What stands here must not hide a method of the object.

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of the object's in its loop and wait for what it gives."""
        return self._runner.run(work)

    def close(self) -> None:
        """Close the object and its loop."""
        closing: Any = self._object
        try:
            self._runner.run(closing.close())
        finally:
            self._runner.stop()

    def __iter__(self) -> Iterator[Any]:
        iterable: Any = self._object
        return self._iterated(aiter(iterable))

    def _iterated(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        while (item := self._runner.run(_next(items))) is not _END:
            yield item

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._object, name)
        if inspect.iscoroutinefunction(found):
            return partial(self._call, found)
        if inspect.isasyncgenfunction(found):
            return lambda *arguments, **options: self._iterated(found(*arguments, **options))
        if inspect.ismethod(found):
            return partial(self._call_there, found)
        return found

    def _call_there(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call something that does not wait, in the loop: nothing of the object's may be touched from elsewhere."""

        async def call() -> Any:
            return function(*arguments, **options)

        if self._runner.is_current or not self._runner.is_running:
            return function(*arguments, **options)
        return self._runner.run(call())

    def _call(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any, **options: Any) -> Any:
        return self._runner.run(function(*arguments, **options))


async def _made(make: Callable[[], T]) -> T:
    return make()


_END = object()


async def _next(items: AsyncIterator[Any]) -> Any:
    return await anext(items, _END)
