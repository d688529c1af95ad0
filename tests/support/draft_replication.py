"""A producer of a draft and a replica back to back, with the draft put into the words of `upr` in between."""

from tests.support.in_memory_replication import ConnectionPair, InMemoryReplication
from upriver.errors import WireError
from upriver.protocol.consumer.consumer import ConsumerOptions
from upriver.protocol.consumer.draft_translation import DraftTranslator
from upriver.protocol.producer.dialects import STREAM_DIALECTS
from upriver.wire import Framer, dcp, upr_draft3

#: What a client asks for: a draft knows no settings.
OPTIONS = ConsumerOptions(window_bytes=0, noop_interval_s=0, expirations=False, dialects=("upr",))


class DraftConnectionPair(ConnectionPair):
    """One pair of connections that speak a draft."""

    def __init__(self, world: InMemoryReplication, draft: str) -> None:
        dialect = STREAM_DIALECTS[draft]
        self.wire, self.speaks = dialect.wire, (dialect,)
        super().__init__(world, OPTIONS)
        self._translator = DraftTranslator(draft)
        self._at_consumer = Framer(self.wire.framing)

    def outgoing(self, packet: bytes) -> bytes:
        return self._translator.outgoing(dcp.dcp.decode(packet))

    def incoming(self, piece: bytes) -> None:
        """As a client's feed does it, which hears no more if the source's log has changed under a request."""
        self._at_consumer.feed(piece)
        while not self.given_up and (packet := self._at_consumer.next_packet()) is not None:
            try:
                self._hear(packet)
            except WireError as error:
                if error.expected != "the failover log that the request was made for":
                    raise
                self.given_up = True

    def _hear(self, packet: bytes) -> None:
        for message in self._translator.incoming(self.wire.decode(packet), len(packet)):
            if isinstance(message, upr_draft3.StreamStart | upr_draft3.SnapshotEnd):
                self.replica.receive(message, self.world.clock())
            else:
                self._feeder.feed(message.encode(), self.world.clock())
