"""Metrics and ``/healthz`` over real sockets."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.node_process import Client, descriptors, served_meanwhile, wait_until
from upriver.engine.storage.interface import WriteBatch
from upriver.errors import StorageError
from upriver.node.embedded import EmbeddedNode, start
from upriver.node.http import metrics
from upriver.wire.dialects.memcached import Get, Set, StartPersistence, StopPersistence

PAGE = Path(__file__).parents[3] / "docs" / "node.md"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[EmbeddedNode]:
    with start(vbuckets=4, initial_vbuckets="0-2", data=tmp_path / "data", metrics_port=0, stall_s=0.05) as node:
        yield node


def page(node: EmbeddedNode, path: str, method: str = "GET") -> tuple[int, str]:
    assert node.metrics_port is not None
    connection = http.client.HTTPConnection("127.0.0.1", node.metrics_port, timeout=30)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def samples(text: str) -> dict[str, float]:
    """Each sample by its name and labels."""
    return {
        sample.name + "".join(f" {label}={value}" for label, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_parse_and_count(node: EmbeddedNode) -> None:
    with Client(node.port) as client:
        client.set(b"key", b"value", vbucket=1)
        client.get(b"key", vbucket=1)
        assert client.ask(Get(key=b"absent", vbucket=1)).status == 1
        status, text = page(node, "/metrics")
    assert status == 200
    found = samples(text)
    assert found["upriver_connections"] == 1
    assert found["upriver_connections_accepted_total"] == 1
    assert found["upriver_items"] == 1
    assert found["upriver_healthy"] in (0, 1)
    assert found["upriver_vbuckets state=active"] == 3
    assert found["upriver_memory_quota_bytes"] == 2**30
    assert found["upriver_received_bytes_total"] > 24 * 3
    assert found["upriver_sent_bytes_total"] > 24 * 3
    assert found["upriver_memory_bytes"] > 0


def test_every_metric_is_documented(node: EmbeddedNode) -> None:
    _, text = page(node, "/metrics")
    documented = PAGE.read_text()
    families = list(text_string_to_metric_families(text))
    assert len(families) > 15
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in documented, f"docs/node.md does not say what {name} is"
        assert family.documentation


def test_healthz_is_green(node: EmbeddedNode) -> None:
    wait_until(lambda: page(node, "/healthz") == (200, "ok\n"))
    wait_until(lambda: page(node, "/healthz?verbose=1") == (200, "ok\n"))


def test_healthz_is_red_while_persistence_is_stopped_and_changes_wait(node: EmbeddedNode) -> None:
    with Client(node.port) as client:
        assert client.ask(StopPersistence()).status == 0
        wait_until(lambda: page(node, "/healthz")[0] == 200)
        client.set(b"key", b"value")
        wait_until(lambda: page(node, "/healthz")[0] == 503)
        wait_until(lambda: page(node, "/healthz")[1].startswith("the disk queue stalls: the oldest change has waited"))
        assert samples(page(node, "/metrics")[1])["upriver_healthy"] == 0
        assert client.ask(StartPersistence()).status == 0
        wait_until(lambda: page(node, "/healthz") == (200, "ok\n"))
        wait_until(lambda: samples(page(node, "/metrics")[1])["upriver_healthy"] == 1)


def test_healthz_is_red_while_a_write_to_disk_hangs(node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    commit = node.bucket.storage.commit

    def hang(batch: WriteBatch) -> None:
        assert release.wait(60)
        commit(batch)

    monkeypatch.setattr(node.bucket.storage, "commit", hang)
    with Client(node.port) as client:
        client.set(b"key", b"value")
        wait_until(lambda: page(node, "/healthz")[0] == 503)
        client.set(b"other", b"value")  # memory still takes it
        release.set()
        wait_until(lambda: page(node, "/healthz") == (200, "ok\n"))


def test_healthz_is_red_while_the_store_refuses_writes(node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, Client(node.port) as client:

        def full(_: WriteBatch) -> None:
            raise StorageError("data", "no space left on device")

        patch.setattr(node.bucket.storage, "commit", full)
        client.set(b"key", b"value")
        wait_until(lambda: "the store refuses writes" in page(node, "/healthz")[1])
        status, text = page(node, "/healthz")
        assert status == 503
        assert "no space left on device" in text
        assert client.ask(Set(key=b"other", value=b"value")).status == 0x86
        assert client.get(b"key") == b"value"
    wait_until(lambda: page(node, "/healthz") == (200, "ok\n"))


def test_other_methods_and_pages(node: EmbeddedNode) -> None:
    wait_until(lambda: page(node, "/healthz", "HEAD") == (200, ""))
    assert page(node, "/metrics", "HEAD") == (200, "")
    assert page(node, "/", "HEAD") == (404, "")
    assert page(node, "/") == (404, "not found; use /metrics or /healthz\n")
    assert page(node, "/metrics", "POST") == (405, "only GET and HEAD\n")


@pytest.mark.parametrize("garbage", [b"\x80\0\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics\r\n\r\n", b"x" * 20_000])
def test_garbage_gets_a_refusal(garbage: bytes, node: EmbeddedNode) -> None:
    assert node.metrics_port is not None
    with socket.create_connection(("127.0.0.1", node.metrics_port), 30) as plain:
        plain.sendall(garbage)
        assert plain.recv(100).startswith(b"HTTP/1.1 400 ")
    wait_until(lambda: page(node, "/healthz")[0] == 200)


def test_a_request_in_pieces(node: EmbeddedNode) -> None:
    assert node.metrics_port is not None
    with socket.create_connection(("127.0.0.1", node.metrics_port), 30) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /nothing HTTP/1.1\r\nHost: here\r\n\r\n":
            plain.sendall(bytes([byte]))
        assert plain.recv(100).startswith(b"HTTP/1.1 404 ")


def test_a_silent_client_is_dropped(node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_WAIT_S", 0.05)
    assert node.metrics_port is not None
    with socket.create_connection(("127.0.0.1", node.metrics_port), 30) as plain, served_meanwhile(node.port):
        plain.sendall(b"GET /metrics")
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(1) == b""


def test_a_probe_does_not_wait_behind_idle_ones(node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTIONS_MAX", 2)
    assert node.metrics_port is not None
    held = [socket.create_connection(("127.0.0.1", node.metrics_port), 30) for _ in range(2)]
    assert node.node._metrics is not None
    wait_until(lambda: node.node._metrics is not None and len(node.node._metrics.requests) == 2)
    assert page(node, "/healthz")[0] in (200, 503)
    with contextlib.suppress(ConnectionResetError):
        assert held[0].recv(1) == b"", "the oldest had to go"
    for each in held:
        each.close()
    wait_until(lambda: node.node._metrics is not None and not node.node._metrics.requests)


def test_closing_while_somebody_is_connected() -> None:
    before = descriptors()
    node = start(vbuckets=1, metrics_port=0)
    assert node.metrics_port is not None
    with socket.create_connection(("127.0.0.1", node.metrics_port), 30):
        wait_until(lambda: node.node._metrics is not None and len(node.node._metrics.requests) == 1)
        node.close()
    wait_until(lambda: descriptors() <= before)


def test_the_metrics_have_an_address_of_their_own() -> None:
    with start(vbuckets=1, metrics_port=0, metrics_host="127.0.0.2") as node:
        assert node.metrics_port is not None
        assert node.node.metrics_address == f"127.0.0.2:{node.metrics_port}"
        with pytest.raises(ConnectionRefusedError):
            page(node, "/healthz")
