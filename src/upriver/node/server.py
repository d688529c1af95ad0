"""A running node: its listeners, its bucket and its periodic work.

``Node`` runs in an event loop; ``start`` in the package runs one in a thread of its own, for tests and for programs
that embed a node.

Stopping. The node accepts no connections and reads no requests. It writes all changes to disk, answers the requests
that waited for that, and closes its connections. A peer that does not read its last answers is cut off after a while.
"""

import asyncio
import contextlib
import dataclasses
import logging
import resource
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from upriver.engine import Bucket, Retention, keep_for_next_use
from upriver.errors import NotCompiled, StorageError
from upriver.model import VbucketState
from upriver.node.auth.login_queue import take_new_users
from upriver.node.auth.users_file import Users
from upriver.node.bucket_identity import bucket_uuid
from upriver.node.build_info import plain_parts
from upriver.node.cluster_map import NodeClusterMap, single_node
from upriver.node.commands import COMMANDS, CommandHandler
from upriver.node.connection import RECEIVE_BYTES, ServerConnection
from upriver.node.listener import Listener, bind
from upriver.node.options import ListenAddress, NodeOptions, parse_initial_vbuckets, parse_listen
from upriver.node.state import LOGGER, Limits, NodeState
from upriver.node.streams.draft_connections import ListenerDialect
from upriver.node.streams.service import StreamService
from upriver.node.tap.client_registry import TapRegistry
from upriver.node.tap.service import TapService
from upriver.node.tls_transport import ENCRYPTED_BYTES, TlsTransport, server_context
from upriver.options import as_size
from upriver.protocol.tap import TapSettings

try:
    from upriver.node._fast_path import FastPath
except ImportError as error:
    raise NotCompiled.after("upriver.node._fast_path", error) from None

if TYPE_CHECKING:
    from upriver.node.http.metrics import MetricsServer

MAINTENANCE_INTERVAL_S: Final = 0.1
MAINTENANCE_BUDGET_S: Final = 0.005
#: If maintenance has not finished in its time, it goes on in shorter turns, which take a third of the processor.
MAINTENANCE_TURN_S: Final = 0.002
MAINTENANCE_PAUSE_S: Final = 0.004
#: The number of vbuckets checked at a time for checkpoints that are due.
CHECKPOINTS_PER_TURN: Final = 64
SWEEP_INTERVAL_S: Final = 1.0
SWEEP_INTERVAL_S_MIN: Final = 0.01
#: The number of connections swept before the event loop continues.
SWEPT_PER_TURN: Final = 128
#: The threads that check passwords, and those that wait for a disk (the engine has its own).
HASHING_THREADS: Final = 2
DISK_THREADS: Final = 2
#: The most callbacks from other threads in one turn of the event loop.
CALLBACKS_PER_TURN: Final = 1000
#: How long a stop waits for the disk, and then for peers to read their last answers.
STOP_WAIT_S: Final = 2.0
#: Descriptors reserved for files, listeners and the embedding program.
DESCRIPTORS_KEPT: Final = 64
#: The file of the pushed cluster map, in the data directory.
CLUSTER_FILE: Final = "cluster.json"
#: The directory of the registered TAP clients, in the data directory.
TAP_DIRECTORY: Final = "tap-clients"
T = TypeVar("T")


class LoopScheduler:
    """Runs work in an event loop and its threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: logging.Logger) -> None:
        self._loop = loop
        self._log = log
        #: A pool of its own, so that logins delay nothing else, and small, so that cores stay free.
        self._pool = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="upriver-login")
        self._disk_pool = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="upriver-disk")
        self._soon: deque[Callable[[], object]] = deque()
        self._awake = False

    def later(self, delay_s: float, callback: Callable[[], object]) -> asyncio.Handle:
        """Call back after this many seconds."""
        return self._loop.call_later(delay_s, callback) if delay_s > 0 else self._loop.call_soon(callback)

    def beside(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        """Run work that takes milliseconds in a thread; pass its result to ``done`` in the loop's thread."""
        self._run(self._pool, work, done)

    def on_disk(self, work: Callable[[], T], done: Callable[[T], object]) -> None:
        """Do the same for work that waits for a disk."""
        self._run(self._disk_pool, work, done)

    def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T], done: Callable[[T], object]) -> None:
        future = self._loop.run_in_executor(pool, work)
        future.add_done_callback(lambda finished: finished.cancelled() or done(finished.result()))

    def from_thread(self, callback: Callable[[], object]) -> None:
        """Call back soon in the loop's thread. Callbacks are gathered, so that a commit wakes the loop once."""
        self._soon.append(callback)
        if not self._awake:
            self._awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so are its connections
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._awake = False  # before the first is taken: a later callback wakes the loop again
        for _ in range(CALLBACKS_PER_TURN):
            try:
                callback = self._soon.popleft()
            except IndexError:
                return
            try:
                callback()
            except Exception:
                self._log.exception("a callback failed")
        if not self._awake:
            self._awake = True
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Start no more work, and wait for the work that runs."""
        self._pool.shutdown(cancel_futures=True)
        self._disk_pool.shutdown(cancel_futures=True)


class Node:
    """One node: ``await Node.open(options)``, and ``await node.close()`` at the end."""

    def __init__(self, options: NodeOptions, state: NodeState, scheduler: LoopScheduler) -> None:
        self.options = options
        self.state = state
        self._scheduler = scheduler
        self.port = 0
        #: The addresses it listens on, with their actual ports; the first is the node's own address.
        self.listen_addresses: list[ListenAddress] = []
        self._listeners: list[Listener] = []
        self._looked_at = 0
        self._metrics: MetricsServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, options: NodeOptions) -> "Node":
        """Open the bucket and listen."""
        keep_for_next_use()
        users = None if options.users is None else Users.load(Path(options.users))
        context = None if options.tls_cert is None else server_context(options.tls_cert, options.tls_key)
        bucket = Bucket.open(
            options.data,
            vbuckets=options.vbuckets,
            initial=parse_initial_vbuckets(options.initial_vbuckets, options.vbuckets),
            ack=options.ack,
            quota_bytes=as_size(options.memory_quota),
            replicate_locks=options.replicate_locks,
            retention=Retention(
                history_s=options.history_s, history_bytes=options.history_bytes, tombstone_s=options.tombstone_s
            ),
        )
        try:
            scheduler = LoopScheduler(asyncio.get_running_loop(), logging.getLogger(LOGGER))
            node = cls(options, _state(options, bucket, users, scheduler), scheduler)
        except BaseException:
            bucket.close()
            raise
        try:
            await node._listen(context)
        except BaseException:
            await node.close()
            raise
        if node.state.limits.connections_max < options.connections_max:
            node.state.log.info("the process has descriptors for %d connections", node.state.limits.connections_max)
        if plain := plain_parts():
            node.state.log.warning(
                "not compiled, and therefore many times slower: %s (install again)", ", ".join(plain)
            )
        return node

    async def _listen(self, context: ssl.SSLContext | None) -> None:
        """Bind all addresses, then make the cluster map, then accept: no client meets a node that is half set up."""
        options, state = self.options, self.state
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as taken:
            bound: list[list[socket.socket]] = []
            wanted = [ListenAddress(options.host, options.port), *parse_listen(options.listen)]
            for listen_address in wanted:
                bound.append(await bind(listen_address.host, listen_address.port))
                taken.callback(_close_all, bound[-1])
                self.listen_addresses.append(dataclasses.replace(listen_address, port=_port(bound[-1])))
            measured: list[socket.socket] = []
            if options.metrics_port is not None:
                measured = await bind(options.metrics_host, options.metrics_port)
                taken.callback(_close_all, measured)
            self.port = self.listen_addresses[0].port
            state.cluster = self._cluster(_port(measured) if measured else self.port)
            taken.pop_all()
        if measured:
            from upriver.node.http.metrics import MetricsServer  # imported only where metrics are served

            self._metrics = MetricsServer(state, measured, options.keepalive_s)
        received, encrypted = memoryview(bytearray(RECEIVE_BYTES)), memoryview(bytearray(ENCRYPTED_BYTES))
        for listen_address, sockets in zip(wanted, bound, strict=True):
            plain = partial(ServerConnection, state, received, listen_address)
            factory: Callable[[], asyncio.BaseProtocol] = plain
            if context is not None:
                factory = partial(_encrypted, plain, context, encrypted, options.tls_handshake_s)
            self._listeners += (Listener(each, factory, state.log, options.keepalive_s) for each in sockets)
        self._tasks += (loop.create_task(self._maintain()), loop.create_task(self._sweep()))

    def _cluster(self, mgmt_port: int) -> NodeClusterMap:
        """The first cluster map."""
        options, bucket = self.options, self.state.bucket
        data = None if options.data is None else Path(options.data)
        initial = single_node(
            bucket=options.bucket,
            uuid=bucket_uuid(data, options.bucket),
            kv_port=self.port,
            mgmt_port=mgmt_port,
            tls=options.tls_cert is not None,
            vbuckets=len(bucket),
            active=[vbucket.number for vbucket in bucket if vbucket.state is VbucketState.ACTIVE],
            rev=int(self.state.started * 1000),
        )
        return NodeClusterMap(initial) if data is None else NodeClusterMap.load(initial, data / CLUSTER_FILE)

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics; None if they are not served."""
        return None if self._metrics is None else self._metrics.port

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return _address(self.options.host, self.port)

    @property
    def metrics_address(self) -> str | None:
        """``host:port`` of the metrics; None if they are not served."""
        return None if self._metrics is None else _address(self.options.metrics_host, self._metrics.port)

    async def _maintain(self) -> None:
        more = False
        while True:
            await asyncio.sleep(MAINTENANCE_PAUSE_S if more else MAINTENANCE_INTERVAL_S)
            budget_s, more = MAINTENANCE_TURN_S if more else MAINTENANCE_BUDGET_S, False
            try:
                more = self.state.bucket.maintain(budget_s)
                self._close_checkpoints()
            except Exception:
                self.state.log.exception("maintenance failed and will be tried again")

    def _close_checkpoints(self) -> None:
        """Check some vbuckets each time, so that all are checked within seconds and no turn takes long."""
        state, size = self.state, len(self.state.bucket)
        for number in range(self._looked_at, min(size, self._looked_at + CHECKPOINTS_PER_TURN)):
            if (vbucket := state.bucket.existing(number)) is not None:
                vbucket.checkpoints.close_if_due(state.ticks())
        self._looked_at = (self._looked_at + CHECKPOINTS_PER_TURN) % max(size, CHECKPOINTS_PER_TURN)

    async def _sweep(self) -> None:
        """Close connections that are idle or stuck for too long.

        One timer serves all connections. Connections that may be idle are not even checked.
        """
        state, loop, limits = self.state, asyncio.get_running_loop(), self.state.limits
        shortest_s = min(filter(None, (limits.idle_s, limits.stuck_s, limits.login_s)))
        check_all = limits.idle_s > 0 or state.users is not None
        while True:
            await asyncio.sleep(min(SWEEP_INTERVAL_S, max(SWEEP_INTERVAL_S_MIN, shortest_s / 4)))
            try:
                if state.users is not None:
                    take_new_users(state, state.users)
                state.stall_check.look(state, state.ticks())
                state.log_limit.report()
                for number, connection in enumerate(list(state.connections if check_all else state.watched), 1):
                    connection.sweep(loop.time())
                    if number % SWEPT_PER_TURN == 0:
                        await asyncio.sleep(0)
            except Exception:
                state.log.exception("the sweep of connections failed and will be tried again")

    async def close(self) -> None:
        """Stop listening, answer waiting requests, close every connection, write everything. Closing twice is fine."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        state = self.state
        state.stopping = True
        for listener in self._listeners:
            await listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if state.flush_timer is not None:
            state.flush_timer.cancel()
        if state.streams is not None:
            state.streams.end_streams()
        for connection in list(state.connections):
            connection.leave()
        if any(connection.session is not None and connection.session.waiting for connection in state.connections):
            with contextlib.suppress(StorageError):  # closing the bucket raises it again
                await asyncio.to_thread(state.bucket.sync, STOP_WAIT_S)
        await self._all_gone(STOP_WAIT_S)
        for connection in list(state.connections):
            if connection.session is not None:
                connection.session.log.warning("cut off: the node stops")
            connection.abort()
        await self._all_gone(STOP_WAIT_S)
        while state.tap is not None and not state.tap.idle:  # the positions of clients that were cut off
            await asyncio.sleep(0.005)
        if self._metrics is not None:
            await self._metrics.close()
        state.log_limit.report(at_end=True)
        await asyncio.to_thread(self._scheduler.close)
        await asyncio.to_thread(state.bucket.close)

    async def _all_gone(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while self.state.connections and loop.time() < deadline:
            await asyncio.sleep(0.005)


def _encrypted(
    factory: Callable[[], ServerConnection], context: ssl.SSLContext, buffer: memoryview, handshake_s: float
) -> TlsTransport:
    return TlsTransport(factory(), context, buffer, handshake_s)


def _close_all(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _port(sockets: list[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _state(options: NodeOptions, bucket: Bucket, users: Users | None, scheduler: LoopScheduler) -> NodeState:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = NodeState(
        bucket=bucket,
        bucket_name=options.bucket,
        scheduler=scheduler,
        clock=time.time,
        ticks=time.monotonic,
        started=time.time(),
        cluster=NodeClusterMap({"rev": 0}),
        users=users,
        limits=Limits(
            connections_max=max(1, min(options.connections_max, descriptors - DESCRIPTORS_KEPT)),
            body_bytes_max=options.body_bytes_max,
            unread_answer_bytes_max=options.unread_bytes_max,
            unread_total_bytes_max=options.unread_total_bytes_max,
            idle_s=options.idle_s,
            stuck_s=options.stuck_s,
            tls_handshake_s=options.tls_handshake_s,
            login_s=options.login_s,
            partial_bytes_max=options.partial_bytes_max,
        ),
        commands=COMMANDS,
        fast_path=FastPath(bucket.tables, bucket.ledger, bucket.operations),
        stall_s=options.stall_s,
    )
    add_services(
        state,
        TapSettings(
            ack_interval=options.tap_ack_interval,
            window_messages_max=options.tap_ack_window,
            backoff_s=options.tap_backoff_s,
            keep_alive_s=options.tap_keep_alive_s,
            noop_interval_s=options.tap_noop_interval_s,
        ),
        TapRegistry(None if options.data is None else Path(options.data) / TAP_DIRECTORY),
    )
    return state


def add_services(
    state: NodeState, tap_settings: TapSettings | None = None, tap_registry: TapRegistry | None = None
) -> tuple[StreamService, TapService]:
    """Give a node its streams, TAP and commands, in the order in which they are offered a packet."""
    streams = state.streams = StreamService(state)
    tap = state.tap = TapService(state, tap_settings, tap_registry)
    state.handlers = (ListenerDialect(), tap, streams, CommandHandler())
    return streams, tap
