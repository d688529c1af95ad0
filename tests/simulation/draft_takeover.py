"""A takeover in the third draft: the destination asks for the vbucket itself, on a connection without a name.

The destination is one of the machines. The project's consumer, which speaks `upr`, and a translation connect it to the
link. If the connection is cut after the source became dead for it, no connection can resume: the operator decides.
"""

from collections.abc import Callable

from tests.simulation.logins import MOVER
from tests.simulation.moves import DESTINATION, SOURCE
from tests.simulation.node import Link, Machine
from upriver.errors import StatusError, WireError
from upriver.protocol.consumer.consumer import ConsumerConnection, ConsumerOptions
from upriver.protocol.consumer.consumer_stream import ConsumerStream
from upriver.protocol.consumer.draft_translation import DraftTranslator
from upriver.protocol.move import mover as steps
from upriver.wire import AnyResponse, Framer, Message, dcp, upr, upr_draft3
from upriver.wire.framing import MEMCACHED

OPTIONS = ConsumerOptions(window_bytes=0, noop_interval_s=0, expirations=False, dialects=("upr",))


class DraftTakeover:
    """One takeover, from its only connection to the end of that."""

    def __init__(self, v: int, machines: dict[steps.Link, Machine], note: Callable[[str], None]) -> None:
        self.v = v
        self.machines = machines
        self.note = note
        self.links: dict[steps.Link, Link] = {}
        self.over = False
        #: It claims that the destination owns the vbucket.
        self.moved = False
        #: It never claims that the source does.
        self.undone = False
        self._starts = machines[DESTINATION].starts

    def __str__(self) -> str:
        return f"draft takeover of vb{self.v} from {self.machines[SOURCE]} by {self.machines[DESTINATION]}"

    @property
    def name(self) -> str:
        """It bears none that others could bear."""
        return f"{self}"

    def connect(self) -> None:
        """Begin, once; later only look whether the destination is still the one that began."""
        source, destination = self.machines[SOURCE], self.machines[DESTINATION]
        link = self.links.get(SOURCE)
        if self.over:
            return
        if link is not None or not source.up or not destination.up:
            self._check_alive()
            return
        self._framer = Framer(MEMCACHED)
        self._translator = DraftTranslator("upr_draft3")
        self._consumer = ConsumerConnection(
            destination.service.sink, destination.clock(), OPTIONS, on_output=self._send, on_end=self._ended
        )
        self.links[SOURCE] = Link(source, self, f"{self}", "upr_draft3", MOVER)
        try:
            self._consumer.add_stream(self.v, self._answered, flags=int(dcp.StreamFlag.TAKEOVER))
        except StatusError as error:
            self._leave(str(error))
            return
        self._send()

    def begin(self, goal: steps.Goal) -> None:
        """A takeover without a name is not replaced by another."""

    def undo(self) -> None:
        """It cannot be taken back, only cut."""
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self.over = True
        link = self.links.pop(SOURCE, None)
        if link is not None:
            link.cut()
            self._consumer.lose()

    def _leave(self, why: str) -> None:
        self.note(f"{self}: {why}")
        self.close()

    def _check_alive(self) -> bool:
        destination = self.machines[DESTINATION]
        if not destination.up or destination.starts != self._starts:
            self._leave("the destination has fallen")
        return not self.over

    def _answered(self, _: ConsumerStream, error: StatusError | None) -> None:
        self.note(f"{self}: {error or 'accepted'}")
        self.over = error is not None

    def _ended(self, stream: ConsumerStream) -> None:
        self.note(f"{self}: the stream ends, {stream.end_reason}")
        self.moved = stream.end_reason == upr.EndReason.OK.label
        self.over = True

    def receive(self, link: Link, data: bytes) -> None:
        """Bytes have come."""
        if link is not self.links.get(SOURCE) or not self._check_alive():
            return
        self._framer.feed(data)
        try:
            while not self.over and (packet := self._framer.next_packet()):
                for message in self._heard(upr_draft3.upr_draft3.decode(packet)):
                    self._consumer.receive(message, self.machines[DESTINATION].clock())
        except WireError as error:
            self._leave(str(error))
        if self.over:
            self.close()
        else:
            self._send()

    def _heard(self, message: Message) -> list[Message]:
        if isinstance(message, upr_draft3.SetVbucketState):
            state = upr.VbucketState(int(message.state))
            return [upr.SetVbucketState(state=state, vbucket=message.vbucket, opaque=message.opaque)]
        return self._translator.incoming(message)

    def _send(self) -> None:
        link = self.links.get(SOURCE)
        if link is None or not self._check_alive():
            return
        framer = Framer(MEMCACHED)
        framer.feed(self._consumer.data_to_send())
        while packet := framer.next_packet():
            link.send(self._said(dcp.dcp.decode(packet)))

    def _said(self, message: Message) -> bytes:
        if isinstance(message, AnyResponse) and message.opcode == upr.SetVbucketState.declaration.opcode:
            message.opcode = upr_draft3.SetVbucketState.declaration.opcode
            return message.encode()
        said = self._translator.outgoing(message)
        if isinstance(message, upr.StreamRequest):  # the translation knows no flags, because a client has none to set
            size = len(said) - MEMCACHED.header_size  # the request for the log follows it
            request = upr_draft3.upr_draft3.decode(said[:size])
            assert isinstance(request, upr_draft3.StreamRequest)
            request.flags = upr.StreamFlag.TAKEOVER
            return request.encode() + said[size:]
        return said

    def lost(self, link: Link) -> None:
        """The connection is gone."""
        if link is self.links.get(SOURCE):
            self._leave("the connection is lost")
