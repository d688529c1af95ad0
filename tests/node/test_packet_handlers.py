"""The chain of packet handlers: who is offered a packet, who may overtake, who claims a connection."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.command_peers import ManualNode, decoded, encoded, open_manual_node
from tests.support.in_memory_node import InMemoryNode
from upriver.errors import WireError
from upriver.node.commands import COMMANDS, CommandHandler
from upriver.node.packet_handlers import ConnectionFormat, PacketHandler
from upriver.node.session import Deferred, Session
from upriver.node.streams.draft_connections import DraftFormat, ListenerDialect
from upriver.wire import DRAFT, AnyResponse, Framing, dcp, tap, upr, upr_draft2
from upriver.wire.dialects.memcached import Noop, Verbosity

TAKEN = 0xE0


class Handler(PacketHandler):
    """Takes one opcode, and answers it past the answers that wait."""

    def __init__(self, opcode: int = TAKEN) -> None:
        self.opcode = opcode
        self.offered: list[int] = []

    def handle(self, session: Session, packet: bytes) -> bool:
        self.offered.append(packet[1])
        if packet[1] != self.opcode:
            return False
        session.put(AnyResponse(opcode=self.opcode, opaque=int.from_bytes(packet[12:16], "big")).encode())
        return True

    def may_overtake(self, session: Session, opcode: int) -> bool:
        return opcode == self.opcode


@pytest.fixture
def manual() -> ManualNode:
    return open_manual_node()


def request(opcode: int, opaque: int = 0) -> bytes:
    packet = bytearray(Noop(opaque=opaque).encode())
    packet[1] = opcode
    return bytes(packet)


def test_the_first_handler_that_takes_a_packet_answers_it(manual: ManualNode) -> None:
    first, second = Handler(), Handler(TAKEN + 1)
    manual.node.handlers = (first, second, CommandHandler())
    answers = manual.peer().send(request(TAKEN, 1), request(TAKEN + 1, 2), Noop(opaque=3))
    assert [answer.opaque for answer in answers] == [1, 2, 3]
    assert first.offered == [TAKEN, TAKEN + 1, 0x0A]
    assert second.offered == [TAKEN + 1, 0x0A]


def test_a_request_whose_answer_may_overtake_waits_for_the_answers_before_it(manual: ManualNode) -> None:
    places: list[Deferred] = []

    def put_off(session: Any, request: object) -> Deferred:
        places.append(Deferred(session.answers))
        return places[-1]

    handler = Handler()
    manual.node.handlers = (handler, CommandHandler())
    manual.node.commands = {**COMMANDS, Verbosity: (put_off, None)}
    peer = manual.peer()
    assert peer.send(Verbosity(opaque=1), Noop(opaque=2), request(TAKEN, 3), Noop(opaque=4)) == []
    assert TAKEN not in handler.offered
    assert peer.session.blocked
    places[0].complete(AnyResponse(opcode=0x1B, opaque=1))
    assert [answer.opaque for answer in peer.receive()] == [1, 2]
    assert not peer.session.blocked
    peer.session.resume()
    assert [answer.opaque for answer in decoded(peer.session.data_to_send())] == [3, 4]


def test_without_handlers_nothing_overtakes_and_nothing_is_claimed(manual: ManualNode) -> None:
    command = CommandHandler()
    session = Session(manual.node, "peer")
    assert not command.may_overtake(session, TAKEN)
    assert command.claim(session, 1) is None


def test_a_request_without_the_magic_of_one_ends_the_connection(manual: ManualNode) -> None:
    peer = manual.peer()
    assert peer.send(AnyResponse(opcode=TAKEN).encode()) == []
    assert peer.session.closing


@dataclass
class Upper:
    """A format of its own: every packet has the drafts' header."""

    framing: Framing = DRAFT
    packets: list[bytes] = field(default_factory=list)
    errors: list[WireError] = field(default_factory=list)

    def handle(self, session: Session, packet: bytes) -> None:
        self.packets.append(packet)
        session.put(b"answered")

    def close_on_wire_error(self, session: Session, error: WireError) -> None:
        self.errors.append(error)
        session.closing = True


class Claiming(Handler):
    """Claims connections that begin with the byte 0x01."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = Upper()

    def claim(self, session: Session, first_byte: int) -> ConnectionFormat | None:
        return self.upper if first_byte == 1 else None


def test_a_claimed_connection_goes_past_all_handlers(manual: ManualNode) -> None:
    claiming = Claiming()
    manual.node.handlers = (Handler(), claiming, CommandHandler())
    session = Session(manual.node, "peer")
    packet = upr_draft2.FailoverLogRequest(vbucket=1).encode()
    session.receive(packet[:5])
    assert session.framing is DRAFT
    session.receive(packet[5:] + packet)
    assert claiming.upper.packets == [packet, packet]
    assert session.data_to_send() == b"answeredanswered"
    assert claiming.offered == []
    session.receive(b"\xff" * 12)
    assert len(claiming.upper.errors) == 1
    assert session.closing
    assert session.data_to_send() == b""


def test_other_connections_of_the_same_node_are_not_claimed(manual: ManualNode) -> None:
    manual.node.handlers = (Claiming(), CommandHandler())
    session = Session(manual.node, "peer")
    session.receive(encoded(Noop(opaque=3)))
    assert session.format is None
    assert [answer.opaque for answer in decoded(session.data_to_send())] == [3]


# The node's own chain


def test_the_order_of_the_nodes_handlers() -> None:
    node = InMemoryNode()
    dialect, tap_service, streams, commands = node.state.handlers
    assert isinstance(dialect, ListenerDialect)
    assert (tap_service, streams) == (node.tap, node.service)
    assert isinstance(commands, CommandHandler)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (dcp.Open, True),
        (dcp.StreamRequest, True),
        (dcp.Control, True),
        (upr.CloseStream, True),
        (upr.FailoverLogRequest, True),
        (tap.Connect, True),
        (tap.Mutation, False),
        (dcp.Noop, False),
        (Noop, False),
    ],
)
def test_which_answers_may_overtake(message: Any, expected: bool) -> None:
    node = InMemoryNode()
    session, opcode = node.connect().session, message.declaration.opcode
    assert any(handler.may_overtake(session, opcode) for handler in node.state.handlers) is expected
    consumer = node.connect().open(flags=0).session
    assert not any(handler.may_overtake(consumer, opcode) for handler in node.state.handlers)


def test_streams_claim_the_drafts_with_a_header_of_their_own() -> None:
    node = InMemoryNode()
    assert isinstance(node.service.claim(node.connect().session, 1), DraftFormat)
    assert node.service.claim(node.connect().session, 0x80) is None


def test_a_session_names_no_stream_and_no_tap() -> None:
    """It offers packets to handlers and does not import them."""
    from pathlib import Path

    from upriver.node import session

    text = "".join(path.read_text() for path in Path(session.__file__).parent.glob("*.py"))
    assert "node.streams" not in text
    assert "node.tap" not in text
    assert "DRAFT" not in text
