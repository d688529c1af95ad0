"""A node inside another program: its own thread, its own event loop, the same code."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

from upriver.engine import Bucket
from upriver.node.options import NodeOptions
from upriver.node.server import Node


class EmbeddedNode:
    """A node that runs in a thread until it is closed."""

    def __init__(self, options: NodeOptions) -> None:
        self._loop = asyncio.new_event_loop()
        opened: Future[Node] = Future()
        self._thread = threading.Thread(target=self._run, args=(options, opened), name="upriver-node", daemon=True)
        self._thread.start()
        try:
            self._node = opened.result()
        except BaseException:
            self._thread.join()
            raise

    def _run(self, options: NodeOptions, opened: "Future[Node]") -> None:
        asyncio.set_event_loop(self._loop)
        try:
            opened.set_result(self._loop.run_until_complete(Node.open(options)))
        except BaseException as error:
            opened.set_exception(error)
        else:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def __enter__(self) -> "EmbeddedNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def host(self) -> str:
        return self._node.options.host

    @property
    def port(self) -> int:
        return self._node.port

    @property
    def address(self) -> str:
        """``host:port``, as clients take it."""
        return self._node.address

    @property
    def metrics_port(self) -> int | None:
        return self._node.metrics_port

    @property
    def bucket(self) -> Bucket:
        """The bucket behind it. Only ``call`` may touch it while the node runs: it belongs to the node's thread."""
        return self._node.state.bucket

    def call(self, function: Any, *arguments: Any) -> Any:
        """Run a function in the node's thread and return what it gives."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(function(*arguments))
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()

    def close(self) -> None:
        """Stop as a server stops: close connections, write everything."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._node.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def start(**options: Any) -> EmbeddedNode:
    """Start a node in this process; options as those of ``upriver serve``, on a free port unless one is named."""
    return EmbeddedNode(NodeOptions(**{"port": 0, **options}))
