"""What a consumer connection has sent, as messages."""

from collections.abc import Iterator

from upriver.protocol.consumer import ConsumerOptions
from upriver.wire import Framer, Message, Response, dcp
from upriver.wire.codes import Status
from upriver.wire.framing import MEMCACHED

#: Options with which a consumer says nothing by itself.
QUIET = ConsumerOptions(window_bytes=0, noop_interval_s=0, expirations=False)


def messages(data: bytes) -> Iterator[Message]:
    """The messages in these bytes."""
    framer = Framer(MEMCACHED)
    framer.feed(data)
    while packet := framer.next_packet():
        yield dcp.dcp.decode(packet)


def status_of(sent: list[Message]) -> Status:
    """The status of the only response."""
    (answer,) = sent
    assert isinstance(answer, Response)
    return answer.status
