"""A client of a 12-byte draft talks only to a node that proves that it speaks this draft."""

import asyncio
from typing import cast

import pytest

from upriver.client import Consumer, SyncKvClient
from upriver.client.consumer.settings import DialectName
from upriver.client.transport.address import Address
from upriver.client.transport.connection import Connection
from upriver.client.transport.draft_handshake import DRAFTS, require_draft
from upriver.errors import AuthenticationFailed, ConnectionLost, NotSupported, TimedOut
from upriver.node import EmbeddedNode, start
from upriver.wire import AnyResponse, Status, upr_draft1


@pytest.mark.parametrize("spoken", ["", *DRAFTS])
@pytest.mark.parametrize("asked", DRAFTS)
def test_deletions_are_read_in_the_draft_that_is_spoken_or_not_at_all(asked: str, spoken: str) -> None:
    """Without a listener of its own the first draft would get the second one's deletions, with a key that is wrong."""
    listen = f"127.0.0.1:0,dialect={spoken}" if spoken else ""
    with start(vbuckets=4, listen=listen) as node:
        with SyncKvClient(node.address) as kv:
            kv.set("fruit", "apple")
            kv.delete("fruit")
        port = node.node.listen_addresses[-1].port
        consumer = Consumer.sync(node.address, dialect=cast("DialectName", asked), stream_port=port, end="latest")
        with consumer:
            if asked == (spoken or "upr_draft2"):
                keys = [key for batch in consumer for key in batch.records.column("key").to_pylist()]
                assert keys == [b"fruit"]
            else:
                cure = rf"does not prove that it speaks {asked}: .*--listen HOST:PORT,dialect={asked} .*--stream-port"
                with pytest.raises(NotSupported, match=cure):
                    list(consumer.changes())


def test_a_node_with_users_says_what_the_drafts_need(guarded_node: EmbeddedNode) -> None:
    address = f"upriver://me:secret@{guarded_node.address}"
    with (
        Consumer.sync(address, dialect="upr_draft2", end="latest") as consumer,
        pytest.raises(AuthenticationFailed, match="use a listener that is marked anonymous"),
    ):
        list(consumer)


ANSWERS = {
    "ok": (upr_draft1.Ok().encode(), None),
    "the other draft": (upr_draft1.RequestError(status=Status.EINVAL).encode(), NotSupported),
    "a node that does not know the question": (upr_draft1.DecodeError(offset=12).encode(), NotSupported),
    "a memcached server": (AnyResponse(opcode=0, status=Status.UNKNOWN_COMMAND).encode(), NotSupported),
    "nothing": (b"", TimedOut),
    "the end": (None, ConnectionLost),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_only_ok_is_a_proof(answer: str) -> None:
    said, kind = ANSWERS[answer]

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(14) == upr_draft1.DialectRequest(draft=1).encode()
        if said is not None:
            for byte in said:  # in pieces
                writer.write(bytes((byte,)))
                await writer.drain()
            await reader.read()
        writer.close()

    async def shake() -> None:
        server = await asyncio.start_server(answered, "127.0.0.1", 0)
        address = Address.parse(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        connection = await Connection.open(address.endpoints[0], address, handshake=False)
        try:
            await require_draft(connection, "upr_draft1", timeout_s=0.2 if kind is TimedOut else 10)
        finally:
            await connection.close()
            server.close()

    if kind is None:
        asyncio.run(shake())
    else:
        with pytest.raises(kind):
            asyncio.run(shake())
