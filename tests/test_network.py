"""What stays on the machine is not paced; what leaves it is sent as the system wants."""

import asyncio
import logging
import socket

import pytest

from upriver.client.transport.address import Address, Endpoint
from upriver.client.transport.connection import Connection
from upriver.network import do_not_pace, is_loopback
from upriver.node.listener import Listener, bind


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::1%lo", "localhost"])
def test_what_stays_here(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "::ffff:10.0.0.1", "", "localhost.example"]
)
def test_what_leaves(host: str) -> None:
    assert not is_loopback(host)


choosable = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="the system has no choice of congestion controls"
)


def congestion(peer: socket.socket) -> bytes:
    return peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@choosable
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_to_ourselves_is_not_paced(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"there is no {host} here")
    with listener, socket.create_connection(listener.getsockname()[:2]) as peer:
        do_not_pace(peer)
        assert congestion(peer) == b"reno"


def test_what_has_no_peer_or_no_network_stays_as_it_is() -> None:
    with socket.socket() as alone:
        do_not_pace(alone)
    left, right = socket.socketpair()
    with left, right:
        do_not_pace(left)


@choosable
def test_neither_a_node_nor_a_client_is_paced() -> None:
    async def run() -> None:
        accepted: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

        class Node(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted.set_result(transport)

        (listening,) = await bind("127.0.0.1", 0)
        listener = Listener(listening, Node, logging.getLogger("upriver.node"))
        endpoint = Endpoint("127.0.0.1", listener.port)
        client = await Connection.open(endpoint, Address((endpoint,)), handshake=False)
        node = await asyncio.wait_for(accepted, 30)
        for transport in (node, client._transport):
            assert congestion(transport.get_extra_info("socket")) == b"reno"
        node.close()
        await client.close()
        await listener.close()

    asyncio.run(run())
