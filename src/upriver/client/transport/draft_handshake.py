"""The handshake of the two drafts with the 12-byte header: the node must speak the draft that the client expects.

The two look alike up to their first deletion, which has four more bytes before the key in the second draft. A client
of the wrong draft would take them for a part of the key, or a part of the key for them, and could not notice. So it
asks first. Only a node that knows the question, and speaks the draft, answers *ok*.
"""

import asyncio
from typing import Final

from upriver.client.transport.connection import CONNECT_TIMEOUT_S, Connection
from upriver.errors import AuthenticationFailed, NotSupported, TimedOut, UpriverError, WireError
from upriver.wire import DIALECTS, DRAFT, Framer, Message, upr_draft1

#: The drafts that need the question, and their numbers in it.
DRAFTS: Final = {"upr_draft1": 1, "upr_draft2": 2}


async def require_draft(connection: Connection, dialect: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Return if the node speaks this draft on the connection; raise NotSupported, with the cure, if it does not."""
    answer = _Answer()
    connection.stream_to(answer)
    connection.write(upr_draft1.DialectRequest(draft=DRAFTS[dialect]).encode())
    node = str(connection.endpoint)
    try:
        async with asyncio.timeout(timeout_s):
            message = await answer.message
    except TimeoutError:
        raise TimedOut(node, f"no answer within {timeout_s:g} s to the question whether it speaks {dialect}") from None
    if isinstance(message, upr_draft1.Ok):
        return
    if isinstance(message, upr_draft1.RequestError) and message.status == AuthenticationFailed.status:
        raise AuthenticationFailed(f"{node}: {message.text.decode(errors='replace')}")
    raise NotSupported(
        f"{node} does not prove that it speaks {dialect}: start the node with --listen HOST:PORT,dialect={dialect}"
        " and give that port as stream_port (--stream-port)"
    )


class _Answer:
    """Receives the first packet of a connection; None if it is not a packet of the drafts."""

    def __init__(self) -> None:
        self.message: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
        self._framer = Framer(DRAFT)

    def receive(self, data: memoryview) -> None:
        try:
            self._framer.feed(data)
            packet = self._framer.next_packet()
            message = None if packet is None else DIALECTS["upr_draft1"].decode(packet)
        except WireError:
            self._settle(None)
        else:
            if message is not None:
                self._settle(message)

    def _settle(self, message: Message | None) -> None:
        if not self.message.done():
            self.message.set_result(message)

    def lost(self, error: UpriverError) -> None:
        if not self.message.done():
            self.message.set_exception(error)
