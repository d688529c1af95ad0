"""TCP keepalive on the sockets of node and client, and a peer that vanishes without a word."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.support.node_connections import connections, only_connection
from tests.support.node_process import wait_until
from tests.support.stream_client import StreamClient
from upriver.client.transport.address import Address
from upriver.client.transport.connection import Connection
from upriver.node import EmbeddedNode, start
from upriver.wire import DIALECTS, dcp, upr, upr_draft1, upr_draft3

TCP_REPAIR = 19


def settings_of(connected: socket.socket) -> tuple[int, int, int, int]:
    tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    is_on = connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return is_on, *(connected.getsockopt(socket.IPPROTO_TCP, name) for name in tcp)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (1, 30, 10, 3)), ({"keepalive_s": 6.0}, (1, 3, 1, 3)), ({"keepalive_s": 0.0}, (0,))],
    ids=["default", "6 s", "off"],
)
def test_every_accepted_socket(options: dict[str, float], expected: tuple[int, ...]) -> None:
    with start(vbuckets=1, **options) as node, StreamClient(node):
        connection = only_connection(node)
        found = node.call(lambda: settings_of(connection._transport.get_extra_info("socket")))  # type: ignore[union-attr]
        assert found[: len(expected)] == expected


@pytest.mark.parametrize(
    ("query", "expected"), [("", (1, 30, 10, 3)), ("?keepalive_s=6", (1, 3, 1, 3)), ("?keepalive_s=0", (0,))]
)
def test_every_socket_of_a_client(upriver_node: EmbeddedNode, query: str, expected: tuple[int, ...]) -> None:
    async def found() -> tuple[int, ...]:
        address = Address.parse(f"upriver://{upriver_node.address}{query}")
        connection = await Connection.open(address.endpoints[0], address)
        try:
            return settings_of(connection._transport.get_extra_info("socket"))
        finally:
            await connection.close()

    assert asyncio.run(found())[: len(expected)] == expected


def vanish(connected: socket.socket) -> None:
    """Forget a connection without a packet, as a machine does that loses its power."""
    try:
        connected.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except PermissionError:
        pytest.skip("only a privileged process can make a connection vanish")
    connected.close()


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    listen = "127.0.0.1:0,dialect=upr_draft1 127.0.0.1:0,dialect=upr"
    with start(vbuckets=1, listen=listen, keepalive_s=2.0) as node:
        yield node


@pytest.mark.shows("open_issues:dead-connections")
@pytest.mark.parametrize("dialect", ["upr_draft1", "upr_draft2", "upr_draft3", "upr"])
def test_the_stream_of_a_vanished_consumer_ends(node: EmbeddedNode, dialect: str) -> None:
    """These dialects have no noop."""
    wait_until(lambda: connections(node) == 0)
    port = next((each.port for each in node.node.listen_addresses if each.dialect == dialect), node.port)
    wire = dcp.dcp if dialect == "upr" else DIALECTS[dialect]
    client = StreamClient(node, b"gone" if dialect == "upr" else b"", wire=wire, port=port)
    request = {"upr": upr.StreamRequest, "upr_draft3": upr_draft3.StreamRequest}.get(dialect, upr_draft1.StreamRequest)
    assert client.ask(request(vbucket=0)) is not None
    with contextlib.closing(client.socket):
        vanish(client.socket)
    wait_until(lambda: connections(node) == 0, "the node does not notice", 10)
