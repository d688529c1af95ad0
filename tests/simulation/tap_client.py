"""A foreign TAP client of one vbucket: it acknowledges what it is asked to, and comes back under its name.

TAP tells no uuids. So after each connect it asks for the failover log. If the log or the machine is another than
before, the client drops everything and starts over under a new name.
"""

from collections.abc import Callable, Sequence

from tests.simulation.node import Link, Machine
from upriver.wire import AnyResponse, Framer, Message, Request, Response, memcached, tap
from upriver.wire.dialects.tap import ConnectFlag, Control, TapFlag
from upriver.wire.framing import MEMCACHED

FLAGS = ConnectFlag.BACKFILL | ConnectFlag.LIST_VBUCKETS | ConnectFlag.SUPPORT_ACK
#: What TAP tells of a key: value, flags, expiry.
Held = tuple[bytes, int, int]


class TapClient:
    """A client that keeps the contents of vbucket 0 by TAP."""

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        self.name = name
        self.note = note
        self.link: Link | None = None
        self.held: dict[bytes, Held] = {}
        self._generation = 0
        #: The machine that it was connected to, and that one's log.
        self._known: tuple[str, object] = ("", None)

    def __str__(self) -> str:
        return self.name

    def connect(self, machine: Machine, wanted: Sequence[int] | None = None) -> None:
        """Ask for the log first."""
        if self.link is not None:
            self.link.cut()
        if machine.owns(0) and (wanted is None or 0 in wanted):
            self._framer = Framer(MEMCACHED)
            self.link = Link(machine, self, self.name)
            self.link.send(memcached.GetFailoverLog(vbucket=0).encode())

    def ask_all(self, wanted: Sequence[int] | None = None) -> None:
        """A connection is all that it asks for."""

    @property
    def idle(self) -> list[int]:
        return [0] if self.link is None else []

    def receive(self, link: Link, data: bytes) -> None:
        """Bytes have come, in whatever pieces."""
        self._framer.feed(data)
        while self.link is link and (packet := self._framer.next_packet()):
            message = tap.tap.decode(packet)
            if isinstance(message, Response):
                self._answered(link, message)
            else:
                self._take(message)
                self._acknowledge(link, message)

    def _answered(self, link: Link, answer: Response) -> None:
        if not isinstance(answer, memcached.GetFailoverLogResponse):
            self.note(f"{self}: refused, {answer.status.label}")
            link.cut()
            return
        known = link.machine.name, answer.log
        if known != self._known:
            self._known = known
            self._generation += 1
            self.held.clear()
        name = f"{self.name}-{self._generation}"
        self.note(f"{self}: connects as {name}")
        link.send(tap.Connect(name=name.encode(), flags=FLAGS, backfill_date=0, vbuckets=(0,)).encode())

    def _take(self, message: Message) -> None:
        match message:
            case tap.Mutation():
                self.held[message.key] = message.value, message.flags, message.expiration
            case tap.Delete():
                self.held.pop(message.key, None)
            case tap.Flush():
                self.held.clear()
            case tap.Opaque(control=Control.INITIAL_VBUCKET_STREAM, cas=0):
                self.note(f"{self}: starts over")
                self.held.clear()

    def _acknowledge(self, link: Link, message: Message) -> None:
        assert isinstance(message, Request)
        if isinstance(message, memcached.Noop) or TapFlag.ACK in message.tap_flags:  # type: ignore[attr-defined]
            link.send(AnyResponse(opcode=message.code, opaque=message.opaque).encode())

    def lost(self, link: Link) -> None:
        """The connection is gone."""
        if link is self.link:
            self.link = None

    def attend(self) -> None:
        """It needs no operator."""
