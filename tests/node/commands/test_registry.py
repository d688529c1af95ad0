import pytest

from tests.node.peer import Peer, SessionPeer
from upriver.node.authentication import Role
from upriver.node.commands import COMMANDS
from upriver.node.commands.registry import command, success
from upriver.wire import AnyRequest, AnyResponse, Request
from upriver.wire.codes import Status
from upriver.wire.memcached import Get, GetResponse, Hello, Noop, SaslAuth, SaslListMechanisms, SaslStep, memcached


def test_every_declared_request_has_a_command() -> None:
    declared = {message for message in memcached.messages if issubclass(message, Request)}
    assert declared == set(COMMANDS)


def test_what_may_be_asked_before_a_login() -> None:
    """Nothing that reads or changes anything."""
    free = {request.__name__ for request, (_, role) in COMMANDS.items() if role is None}
    login = {request.__name__ for request in (SaslAuth, SaslStep, SaslListMechanisms, Hello)}
    assert free == login | {"GetErrorMap", "Noop", "Version", "Verbosity", "Quit", "QuitQ"}


def test_a_request_has_one_command() -> None:
    with pytest.raises(AssertionError, match="Noop"):
        command(Noop, role=Role.READ)(lambda session, request: None)


def test_success_answers_as_declared() -> None:
    assert success(Get(key=b"k", opaque=3), value=b"v") == GetResponse(value=b"v", opaque=3)
    assert success(Noop(opaque=3)) == AnyResponse(opcode=0x0A, opaque=3)


UNKNOWN = sorted(set(range(256)) - {request.declaration.opcode for request in COMMANDS})


@pytest.mark.parametrize("opcode", UNKNOWN)
def test_unknown_opcodes(session_peer: SessionPeer, opcode: int) -> None:
    text = session_peer.refused(
        AnyRequest(opcode=opcode, extras=b"e", key=b"k", value=b"v", opaque=9), Status.UNKNOWN_COMMAND
    )
    assert f"0x{opcode:02x}" in text
    assert not session_peer.session.closing


def test_an_unknown_opcode_leaves_the_connection_as_it_is(peer: Peer) -> None:
    answers = peer.send(Noop(opaque=1), AnyRequest(opcode=UNKNOWN[-1], opaque=2), Noop(opaque=3))
    assert [answer.status for answer in answers] == [Status.SUCCESS, Status.UNKNOWN_COMMAND, Status.SUCCESS]
