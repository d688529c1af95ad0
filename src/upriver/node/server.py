"""A running node: listeners, the bucket behind them and the work that goes on in between.

``Node`` lives in an event loop; ``start`` in the package runs one in a thread of its own, for tests and for programs
that embed a node.
"""

import asyncio
import contextlib
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from upriver.engine import Bucket
from upriver.engine.backend import COMPILED
from upriver.errors import InvalidArguments
from upriver.model import VbucketState
from upriver.node.authentication import Users
from upriver.node.cluster_config import ClusterConfig, single_node
from upriver.node.commands import COMMANDS
from upriver.node.connection import RECEIVE_BYTES, Connection
from upriver.node.health import MetricsServer
from upriver.node.options import NodeOptions, parse_bytes, parse_ranges
from upriver.node.state import Limits, NodeState
from upriver.node.streams import StreamService

MAINTENANCE_INTERVAL_S: Final = 0.1
MAINTENANCE_BUDGET_S: Final = 0.005
_BACKLOG: Final = 4096
T = TypeVar("T")


class LoopScheduler:
    """Gets things done in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def later(self, delay_s: float, callback: Callable[[], object]) -> None:
        self._loop.call_later(delay_s, callback)

    def beside(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        future = self._loop.run_in_executor(None, work)
        future.add_done_callback(lambda finished: finished.cancelled() or done(finished.result()))

    def from_thread(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and so are its connections
            self._loop.call_soon_threadsafe(callback)


class Node:
    """One node: ``await Node.open(options)``, and ``await node.close()`` at the end."""

    def __init__(self, options: NodeOptions, state: NodeState) -> None:
        self.options = options
        self.state = state
        self._servers: list[asyncio.Server] = []
        self._metrics: MetricsServer | None = None
        self._maintenance: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, options: NodeOptions) -> "Node":
        """Open the bucket and listen."""
        users = None if options.users is None else Users.load(Path(options.users))
        context = _tls_context(options)
        bucket = Bucket.open(
            options.data,
            vbuckets=options.vbuckets,
            ack=options.ack,
            quota_bytes=parse_bytes(options.memory_quota),
        )
        try:
            if not bucket.numbers():
                for number in parse_ranges(options.initial_vbuckets, options.vbuckets):
                    bucket.create_vbucket(number)
            state = NodeState(
                bucket=bucket,
                bucket_name=options.bucket,
                scheduler=LoopScheduler(asyncio.get_running_loop()),
                clock=time.time,
                started=time.time(),
                cluster=ClusterConfig({"rev": 0}),
                users=users,
                limits=Limits(
                    connections_max=options.connections_max,
                    body_bytes_max=options.body_bytes_max,
                    unread_answer_bytes_max=options.unread_bytes_max,
                    idle_s=options.idle_s,
                ),
                commands=COMMANDS,
                fast_path=_fast_path(bucket),
            )
            state.streams = StreamService(state)
            node = cls(options, state)
            await node._listen(context)
        except BaseException:
            bucket.close()
            raise
        return node

    async def _listen(self, context: ssl.SSLContext | None) -> None:
        options, state = self.options, self.state
        buffer = memoryview(bytearray(RECEIVE_BYTES))
        loop = asyncio.get_running_loop()
        self._servers.append(
            await loop.create_server(
                lambda: Connection(state, buffer), options.host, options.port, ssl=context, backlog=_BACKLOG
            )
        )
        if options.metrics_port is not None:
            self._metrics = await MetricsServer.open(state, options.host, options.metrics_port)
        state.cluster = ClusterConfig(
            single_node(
                bucket=options.bucket,
                uuid=secrets.token_hex(16),
                kv_port=self.port,
                mgmt_port=self.metrics_port or self.port,
                vbuckets=len(state.bucket),
                active=[vbucket.number for vbucket in state.bucket if vbucket.state is VbucketState.ACTIVE],
            )
        )
        self._maintenance = asyncio.create_task(self._maintain())

    @property
    def port(self) -> int:
        return int(self._servers[0].sockets[0].getsockname()[1])

    @property
    def metrics_port(self) -> int | None:
        return None if self._metrics is None else self._metrics.port

    @property
    def address(self) -> str:
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"{host}:{self.port}"

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(MAINTENANCE_INTERVAL_S)
            try:
                self.state.bucket.maintain(MAINTENANCE_BUDGET_S)
            except Exception:
                self.state.log.exception("maintenance failed and will be tried again")

    async def close(self) -> None:
        """Stop listening, close every connection, write everything."""
        for server in self._servers:
            server.close()
        if self._maintenance is not None:
            self._maintenance.cancel()
        for session in list(self.state.sessions):
            session.closing = True
            if session.on_output is not None:
                session.on_output()
        if self._metrics is not None:
            await self._metrics.close()
        for server in self._servers:
            await server.wait_closed()
        await asyncio.get_running_loop().run_in_executor(None, self.state.bucket.close)


def _fast_path(bucket: Bucket) -> Any:
    """The compiled loop, where it was built and may answer at once."""
    if bucket.ack != "memory" or not COMPILED:
        return None
    try:
        from upriver.node._serve import FastPath
    except ImportError:
        return None
    return FastPath(bucket.tables, bucket.ledger)


def _tls_context(options: NodeOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArguments(f"the certificate {options.tls_cert} cannot be used: {error}") from None
    return context


log = logging.getLogger("upriver.node")
