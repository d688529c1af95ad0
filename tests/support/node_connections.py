"""The connections of a node: how many there are, and what the log says of them."""

import pytest

from tests.support.node_process import Client, wait_until
from upriver.node.connection import ServerConnection
from upriver.node.embedded import EmbeddedNode


def connections(node: EmbeddedNode) -> int:
    return node.call(lambda: node.node.state.counters.connections)


def only_connection(node: EmbeddedNode) -> ServerConnection:
    wait_until(lambda: connections(node) == 1)
    (connection,) = node.call(lambda: set(node.node.state.connections))
    return connection


def logged(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """The log lines with this text, each with the name of its connection."""
    return [f"{getattr(r, 'connection', '')}: {r.getMessage()}" for r in caplog.records if text in r.getMessage()]


def name_of(client: Client) -> str:
    host, port = client.socket.getsockname()[:2]
    return f"{host}:{port}"
