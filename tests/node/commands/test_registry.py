import inspect
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.command_peers import Peer, SessionPeer, assert_refusal, decoded, open_manual_node
from tests.support.depth import examples
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.commands import COMMANDS, run_command
from upriver.node.commands.registry import command, success
from upriver.wire import AnyRequest, AnyResponse, Request
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Feature,
    Get,
    GetResponse,
    Hello,
    Noop,
    SaslAuth,
    SaslListMechanisms,
    SaslStep,
    VbucketState,
    memcached,
)

#: What some requests cannot do without.
NEEDED: dict[str, Any] = {"key": b"k", "name": b"n", "vbucket_uuid": 1, "seqno": 1, "state": VbucketState.ACTIVE}


def made(request: type[Request]) -> Request:
    """A request with what it needs."""
    parameters = inspect.signature(request).parameters.values()
    return request(**{each.name: NEEDED[each.name] for each in parameters if each.default is each.empty})


def test_every_declared_request_has_a_command() -> None:
    declared = {message for message in memcached.messages if issubclass(message, Request)}
    assert declared == set(COMMANDS)


def test_what_may_be_asked_before_a_login() -> None:
    """Nothing that reads or changes anything."""
    free = {request.__name__ for request, (_, role) in COMMANDS.items() if role is None}
    login = {request.__name__ for request in (SaslAuth, SaslStep, SaslListMechanisms, Hello)}
    assert free == login | {"GetErrorMap", "Quit", "QuitQ"}


@pytest.mark.parametrize("lacking", [Role.READ, Role.WRITE, Role.STREAM])
def test_without_its_role_no_command_runs(lacking: Role) -> None:
    """The refusal names the role, and it comes before anything else is looked at."""
    users = Users(Path("unused"))
    roles = (Role.READ | Role.WRITE | Role.STREAM) & ~lacking
    users.add(User.create("u", "p", roles, iterations=4096))
    manual = open_manual_node(users=users)
    with manual.bucket:
        peer = manual.peer()
        peer.ask(SaslAuth(mechanism=b"PLAIN", value=b"\0u\0p"))
        for request, (_, role) in COMMANDS.items():
            if role is not None and role & ~roles:
                peer.session.run(made(request), run_command)
                (answer,) = peer.receive()
                assert_refusal(answer, Status.EACCESS)
                assert isinstance(answer, AnyResponse)
                expected = "admin" if role is Role.ADMIN else str(lacking.name).lower()
                assert answer.text == f"the user u lacks the role {expected}"


def test_what_hands_out_a_value_needs_the_right_to_read() -> None:
    reading = {request.__name__ for request, (_, role) in COMMANDS.items() if role == Role.READ | Role.WRITE}
    assert reading == {"Gat", "GatQ", "GetLocked"}


def test_a_request_has_one_command() -> None:
    with pytest.raises(AssertionError, match="Noop"):
        command(Noop, role=Role.READ)(lambda session, request: None)


def test_success_answers_as_declared() -> None:
    assert success(Get(key=b"k", opaque=3), value=b"v") == GetResponse(value=b"v", opaque=3)
    assert success(Noop(opaque=3)) == AnyResponse(opcode=0x0A, opaque=3)


UNKNOWN = sorted(set(range(256)) - {request.declaration.opcode for request in COMMANDS if issubclass(request, Request)})


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


KNOWN = sorted(set(range(256)) - set(UNKNOWN))


@pytest.mark.parametrize("opcode", KNOWN)
def test_malformed_bodies_of_all(session_peer: SessionPeer, opcode: int) -> None:
    for key in (b"", b"key"):
        session_peer.refused(AnyRequest(opcode=opcode, extras=bytes(200), key=key, opaque=9), Status.EINVAL)
    assert session_peer.ask(Noop()).status is Status.SUCCESS


_plausible = st.sampled_from([b"", b"k", b"default", b"vbucket 0", b"PLAIN", b"k" * 251])
_numbers = st.sampled_from([bytes(4), b"\0\0\0\1", bytes(8), bytes(7) + b"\1", b"\xff" * 8, bytes(20), b"\0\1\0\1k"])


@settings(max_examples=examples(600), deadline=None)
@given(
    st.lists(
        st.builds(
            AnyRequest,
            opcode=st.sampled_from(KNOWN),
            vbucket=st.sampled_from([0, 0, 0, 1, 2, 5, 8]),
            datatype=st.sampled_from([0, 0, 1]),
            cas=st.sampled_from([0, 0, 1, 2**64 - 1]),
            extras=st.one_of(st.just(b""), _numbers, st.binary(max_size=32)),
            key=_plausible,
            value=st.one_of(st.just(b""), _plausible, _numbers, st.binary(max_size=64)),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_no_request_is_an_error_of_ours(requests: list[AnyRequest]) -> None:
    manual = open_manual_node()
    with manual.bucket:
        peer = manual.peer()
        peer.hello(Feature.JSON, Feature.MUTATION_SEQNO)
        peer.send(*requests)
        manual.commit()
        manual.time.pass_by(100)
        for request in requests:
            if peer.session.closing:
                break
            answers = peer.send(request)
            manual.commit()
            answers += decoded(peer.session.data_to_send())
            assert all(answer.status is not Status.EINTERNAL for answer in answers)
