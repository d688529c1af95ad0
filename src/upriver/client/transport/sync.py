"""Synchronous clients: an event loop in its own thread runs an asynchronous client, and the caller's methods block.

``tools.sync_classes`` generates the classes in ``upriver.client.sync`` from the asynchronous ones, on top of
``SyncClient``.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


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
        """Start a coroutine in the loop and return at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result."""
        if self.is_current:
            work.close()
            raise RuntimeError("a synchronous client cannot be used in its own event loop; use the asynchronous client")
        if not self.is_running:
            work.close()
            raise RuntimeError("the client is closed; open another one")
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # interrupted: the coroutine must not go on in the background
            raise

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_running(self) -> bool:
        """Whether the loop has not been stopped."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the loop and end its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class AsyncClient(Protocol):
    """The part of an asynchronous client that every synchronous one uses."""

    async def __aenter__(self) -> Self:
        """Open the client."""
        ...

    async def close(self) -> None:
        """Close the client."""
        ...


C = TypeVar("C", bound=AsyncClient)


class SyncClient(Generic[C]):
    """Runs an asynchronous client in an event loop of its own; ``close`` or the end of a ``with`` stops both."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._runner = LoopThread()
        try:
            self._client = self._runner.run(_made(make))
        except BaseException:
            self._runner.stop()
            raise

    def __enter__(self) -> Self:
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client and stop its event loop."""
        try:
            self._wait(self._client.close())
        finally:
            self._runner.stop()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the client in its loop and return the result."""
        return self._runner.run(work)

    def _call(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a plain method of the client in its loop, because the client is not thread-safe."""

        async def call() -> T:
            return function(*arguments, **options)

        if self._runner.is_current or not self._runner.is_running:
            return function(*arguments, **options)
        return self._runner.run(call())


async def _made(make: Callable[[], T]) -> T:
    return make()
