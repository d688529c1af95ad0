"""Prometheus metrics and ``/healthz``, over a listener of their own."""

import asyncio
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from upriver.node.state import NodeState

#: A queue to the disk that has not moved for so long is stuck.
QUEUE_AGE_S_MAX: Final = 10.0
_REQUEST_BYTES_MAX: Final = 8192
_REQUEST_WAIT_S: Final = 5.0


class NodeCollector(Collector):
    """Reads the node's numbers when somebody asks for them."""

    def __init__(self, node: NodeState) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        numbers, counters = self._node.bucket.statistics(), self._node.counters
        for name, value, text in (
            ("upriver_connections", counters.connections, "Open connections"),
            ("upriver_items", numbers.items, "Live items"),
            ("upriver_tombstones", numbers.tombstones, "Deleted items that are still remembered"),
            ("upriver_memory_bytes", numbers.memory_bytes, "Memory taken by items and history"),
            ("upriver_memory_quota_bytes", numbers.quota_bytes, "Memory that items may take; 0 for no limit"),
            ("upriver_resident_ratio", numbers.resident_ratio, "Share of live items whose value is in memory"),
            ("upriver_disk_bytes", numbers.disk_bytes, "Size of the store on disk"),
            ("upriver_disk_queue_bytes", numbers.queue_bytes, "Changes that are not on disk yet"),
            ("upriver_disk_queue_age_seconds", numbers.queue_age_s, "Age of the oldest of them"),
            ("upriver_healthy", int(not problems(self._node)), "1 if /healthz is green"),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, value, text in (
            ("upriver_connections_accepted", counters.connections_total, "Connections accepted so far"),
            ("upriver_connections_refused", counters.connections_refused, "Connections refused so far"),
            ("upriver_logins_failed", counters.logins_failed, "Logins that failed"),
            ("upriver_received_bytes", counters.bytes_read, "Bytes received from clients"),
            ("upriver_sent_bytes", counters.bytes_written, "Bytes sent to clients"),
            ("upriver_commits", numbers.commits, "Groups committed to disk"),
            ("upriver_disk_written_bytes", numbers.bytes_written, "Bytes written to disk"),
        ):
            yield CounterMetricFamily(name, text, value=value)
        operations = CounterMetricFamily("upriver_operations", "Operations by kind", labels=["kind"])
        for kind, count in sorted(numbers.operations.items()):
            operations.add_metric([kind], count)
        yield operations
        states = GaugeMetricFamily("upriver_vbuckets", "Vbuckets by state", labels=["state"])
        found = [vbucket.state.value for vbucket in self._node.bucket]
        for state in sorted(set(found)):
            states.add_metric([state], found.count(state))
        yield states


def problems(node: NodeState) -> list[str]:
    """Why the node is not healthy; empty if it is."""
    found = []
    age = node.bucket.flusher.queue_age_s
    if age > QUEUE_AGE_S_MAX:
        found.append(f"the queue to disk has been stuck for {age:.0f} s")
    if node.bucket.ledger.refusal:
        found.append(f"the store refuses writes: {node.bucket.ledger.refusal}")
    return found


class MetricsServer:
    """A small HTTP listener with two pages."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._registry = CollectorRegistry()
        self._registry.register(NodeCollector(node))
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, node: NodeState, host: str, port: int) -> "MetricsServer":
        """Listen; port 0 picks a free one."""
        metrics = cls(node)
        metrics._server = await asyncio.start_server(metrics._serve, host, port)
        return metrics

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n"), _REQUEST_WAIT_S)
            method, path, *_ = [*request[:_REQUEST_BYTES_MAX].decode("latin-1").split(" "), "", ""]
            status, content_type, body = self._page(method, path)
            head = (
                f"HTTP/1.1 {status}",
                f"Content-Type: {content_type}",
                f"Content-Length: {len(body)}",
                "Connection: close",
                "\r\n",
            )
            writer.write("\r\n".join(head).encode() + (b"" if method == "HEAD" else body))
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # whoever it was does not speak HTTP, or left
        finally:
            writer.close()

    def _page(self, method: str, path: str) -> tuple[str, str, bytes]:
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "text/plain", b"only GET\n"
        if path == "/metrics":
            return "200 OK", CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)
        if path == "/healthz":
            found = problems(self._node)
            if found:
                return "503 Service Unavailable", "text/plain", ("\n".join(found) + "\n").encode()
            return "200 OK", "text/plain", b"ok\n"
        return "404 Not Found", "text/plain", b"there is /metrics and /healthz\n"
