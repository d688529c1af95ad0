"""Prometheus metrics and ``/healthz``, on a separate listener.

The listener speaks just enough HTTP for a scraper and a probe: one request per connection. It runs in the node's event
loop, so a probe gets no reply when the node is blocked.
"""

import asyncio
import socket
from collections.abc import Iterator
from typing import Final, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from upriver.network import KEEPALIVE_S
from upriver.node.listener import Listener
from upriver.node.logs import of_connection
from upriver.node.state import NodeState
from upriver.node.streams.statistics import stream_numbers

REQUEST_BYTES_MAX: Final = 8192
#: The time limit for a request and for reading its response.
REQUEST_WAIT_S: Final = 5.0
CONNECTIONS_MAX: Final = 64
_TEXT: Final = "text/plain; charset=utf-8"


class NodeCollector(Collector):
    """Reads the node's numbers on each scrape."""

    def __init__(self, node: NodeState) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        numbers, counters = self._node.bucket.statistics(), self._node.counters
        for name, value, text in (
            ("upriver_connections", counters.connections, "Open connections"),
            ("upriver_items", numbers.items, "Live items, in active and other vbuckets"),
            ("upriver_active_items", numbers.active_items, "Live items in active vbuckets"),
            ("upriver_tombstones", numbers.tombstones, "Tombstones of deleted items"),
            ("upriver_memory_bytes", numbers.memory_bytes, "Memory used by items and history"),
            ("upriver_memory_quota_bytes", numbers.quota_bytes, "Memory limit for items; 0 for no limit"),
            ("upriver_resident_ratio", numbers.resident_ratio, "Share of live items whose value is in memory"),
            ("upriver_disk_bytes", numbers.disk_bytes, "Size of the store on disk"),
            ("upriver_disk_queue_bytes", numbers.queue_bytes, "Changes that are not on disk yet"),
            ("upriver_disk_queue_age_seconds", numbers.queue_age_s, "Age of the oldest change that is not on disk yet"),
            ("upriver_healthy", int(not problems(self._node)), "1 if /healthz reports no problem"),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, value, text in (
            ("upriver_connections_accepted", counters.connections_total, "Connections accepted"),
            ("upriver_connections_refused", counters.connections_refused, "Connections refused"),
            ("upriver_handshakes_failed", counters.handshakes_failed, "TLS handshakes that failed"),
            ("upriver_logins_failed", counters.logins_failed, "Logins that failed"),
            ("upriver_received_bytes", counters.bytes_read, "Bytes received from clients"),
            ("upriver_sent_bytes", counters.bytes_written, "Bytes sent to clients"),
            ("upriver_commits", numbers.commits, "Groups committed to disk"),
            ("upriver_disk_written_bytes", numbers.bytes_written, "Bytes written to disk"),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield from _of_streams(self._node)
        operations = CounterMetricFamily("upriver_operations", "Operations by kind", labels=["kind"])
        for kind, count in sorted(numbers.operations.items()):
            operations.add_metric([kind], count)
        yield operations
        states = GaugeMetricFamily("upriver_vbuckets", "Vbuckets by state", labels=["state"])
        found = [vbucket.state.value for vbucket in self._node.bucket]
        for state in sorted(set(found)):
            states.add_metric([state], found.count(state))
        yield states


def _of_streams(node: NodeState) -> Iterator[Metric]:
    numbers = stream_numbers(node)
    connections = GaugeMetricFamily("upriver_stream_connections", "Connections that stream, by type", labels=["type"])
    for kind, count in sorted(numbers.connections.items()):
        connections.add_metric([kind], count)
    yield connections
    yield GaugeMetricFamily("upriver_streams", "Open streams", value=numbers.streams)
    yield GaugeMetricFamily("upriver_stream_backlog_changes", "Seqnos that streams have yet to read", numbers.backlog)
    yield CounterMetricFamily("upriver_stream_sent_bytes", "Bytes that streams have sent", numbers.bytes_sent)
    yield CounterMetricFamily("upriver_stream_sent_changes", "Changes that streams have sent", numbers.changes_sent)


def problems(node: NodeState) -> list[str]:
    """Why the node is not healthy; empty if it is."""
    found = []
    age_s = node.bucket.flusher.queue_age_s
    if age_s > node.stall_s:
        found.append(f"the disk queue stalls: the oldest change has waited for {age_s:.1f} s")
    if node.bucket.ledger.refusal:
        found.append(f"the store refuses writes: {node.bucket.ledger.refusal}")
    return found + node.stall_check.problems(node.ticks(), node.stall_s)


class MetricsServer:
    """A small HTTP listener with two pages."""

    def __init__(self, node: NodeState, sockets: list[socket.socket], keepalive_s: float = KEEPALIVE_S) -> None:
        self._node = node
        self._registry = CollectorRegistry()
        self._registry.register(NodeCollector(node))
        #: The oldest first.
        self.requests: dict[HttpRequest, None] = {}
        self._listeners = [Listener(each, lambda: HttpRequest(self), node.log, keepalive_s) for each in sockets]
        self.port = self._listeners[0].port

    async def close(self) -> None:
        """Stop listening and close all connections."""
        for listener in self._listeners:
            await listener.close()
        for request in list(self.requests):
            request.abort()
        while self.requests:
            await asyncio.sleep(0)

    def admit(self, request: "HttpRequest") -> None:
        """Accept a connection; if there are too many, close the oldest, so that a probe never waits for idle peers."""
        if len(self.requests) >= CONNECTIONS_MAX:
            oldest = next(iter(self.requests))
            del self.requests[oldest]
            oldest.abort()
            log = of_connection(self._node.log, "", self._node.log_limit)
            log.warning("closed the oldest connection to the metrics: more than %d are open", CONNECTIONS_MAX)
        self.requests[request] = None

    def page(self, method: str, path: str) -> tuple[str, str, bytes]:
        """Status, content type and body of a page."""
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", _TEXT, b"only GET and HEAD\n"
        match path.partition("?")[0]:
            case "/metrics":
                return "200 OK", CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)
            case "/healthz":
                found = problems(self._node)
                if found:
                    return "503 Service Unavailable", _TEXT, ("\n".join(found) + "\n").encode()
                return "200 OK", _TEXT, b"ok\n"
            case _:
                return "404 Not Found", _TEXT, b"not found; use /metrics or /healthz\n"


class HttpRequest(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, metrics: MetricsServer) -> None:
        self._metrics = metrics
        self._received = bytearray()
        self._answered = False
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._metrics.admit(self)
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_WAIT_S, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._metrics.requests.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        self._received += data
        if b"\r\n\r\n" in self._received:  # closing before all headers have arrived would lose the response
            self._answer_request(bytes(self._received[: self._received.index(b"\r\n")]))
        elif len(self._received) > REQUEST_BYTES_MAX:
            self._answer("400 Bad Request", _TEXT, b"the request is too long\n")

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _answer_request(self, line: bytes) -> None:
        parts = line.decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/"):
            self._answer("400 Bad Request", _TEXT, b"not an HTTP request\n")
            return
        method, path, _ = parts
        self._answer(*self._metrics.page(method, path), headers_only=method == "HEAD")

    def _answer(self, status: str, content_type: str, body: bytes, headers_only: bool = False) -> None:
        assert self._transport is not None
        self._answered = True
        head = (
            f"HTTP/1.1 {status}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            "\r\n",
        )
        self._transport.write("\r\n".join(head).encode() + (b"" if headers_only else body))
        self._transport.close()
