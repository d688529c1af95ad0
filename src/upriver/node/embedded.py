"""A node inside another program: its own thread, its own event loop, the same code."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from upriver.engine import Bucket
from upriver.node.options import NodeOptions
from upriver.node.server import Node

P = ParamSpec("P")
T = TypeVar("T")


class EmbeddedNode:
    """A node that runs in a thread of its own until it is closed."""

    def __init__(self, options: NodeOptions) -> None:
        #: The node. It belongs to its thread: while it runs, use it only through ``call``.
        self.node: Node
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._closed = False
        opened: Future[Node] = Future()
        self._thread = threading.Thread(target=self._run, args=(options, opened), name="upriver-node", daemon=True)
        self._thread.start()
        try:
            self.node = opened.result()
        except Exception:
            self._thread.join()
            raise

    def _run(self, options: NodeOptions, opened: "Future[Node]") -> None:
        try:
            asyncio.run(self._serve(options, opened))
        except BaseException as error:
            if opened.done():
                self._failure = error
            else:
                opened.set_exception(error)

    async def _serve(self, options: NodeOptions, opened: "Future[Node]") -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        node = await Node.open(options)
        opened.set_result(node)
        try:
            await self._stop.wait()
        finally:
            await node.close()

    def __enter__(self) -> "EmbeddedNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def host(self) -> str:
        """The host that it listens on."""
        return self.node.options.host

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self.node.port

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return self.node.address

    @property
    def metrics_port(self) -> int | None:
        """The port of ``/metrics`` and ``/healthz``; None if they are not served."""
        return self.node.metrics_port

    @property
    def bucket(self) -> Bucket:
        """The bucket. It belongs to the node's thread: while the node runs, use it only through ``call``."""
        return self.node.state.bucket

    def call(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run a function in the node's thread, where nothing else runs meanwhile, and return its result."""
        if threading.current_thread() is self._thread:
            return function(*arguments, **options)
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function(*arguments, **options))
            except BaseException as error:
                done.set_exception(error)

        with self._lock:  # so that the loop cannot end between the check and the call
            if self._closed:
                raise RuntimeError("the node is closed")
            self._loop.call_soon_threadsafe(run)
        return done.result()

    def close(self) -> None:
        """Stop the node: close connections, write everything. Closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def start(**options: Any) -> EmbeddedNode:
    """Start a node in this process, with the options of ``upriver serve``; the default is a free port."""
    return EmbeddedNode(NodeOptions(**{"port": 0, **options}))
