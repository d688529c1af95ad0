import json
from typing import Any

import pytest

from tests.support.command_peers import ManualNode, Peer, SessionPeer, SocketPeer
from upriver.node.embedded import start
from upriver.wire import AnyRequest, AnyResponse, Request
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Feature,
    GetErrorMap,
    GetErrorMapResponse,
    Hello,
    HelloResponse,
    Noop,
    Quit,
    QuitQ,
    SaslAuth,
    SaslListMechanisms,
    SaslListMechanismsResponse,
    SaslStep,
    Set,
    Verbosity,
    Version,
    VersionResponse,
)

GRANTED = (Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON, Feature.MUTATION_SEQNO, Feature.UPRIVER)


def granted(peer: Peer, *features: Feature) -> tuple[Feature, ...]:
    answer = peer.ask(Hello(agent=b"test", features=features))
    assert isinstance(answer, HelloResponse)
    return answer.features


# Hello


def test_every_feature_that_is_there_is_granted(peer: Peer) -> None:
    assert granted(peer, *GRANTED) == GRANTED


def test_nothing_else_is_granted(peer: Peer) -> None:
    others = [feature for feature in Feature if feature not in GRANTED] + [Feature(0x7777)]
    assert granted(peer, *others) == ()
    assert granted(peer, *Feature) == tuple(feature for feature in Feature if feature in GRANTED)


def test_in_the_order_asked_for_and_once(session_peer: SessionPeer) -> None:
    asked = (Feature.JSON, Feature.COLLECTIONS, Feature.XERROR, Feature.JSON)
    assert granted(session_peer, *asked) == (Feature.JSON, Feature.XERROR)
    assert session_peer.session.features == {Feature.JSON, Feature.XERROR}


def test_a_second_hello_replaces_the_first(session_peer: SessionPeer) -> None:
    granted(session_peer, Feature.JSON)
    assert session_peer.ask(Set(key=b"k", datatype=1)).status is Status.SUCCESS
    assert granted(session_peer) == ()
    session_peer.refused(Set(key=b"k", datatype=1), Status.EINVAL)


def test_the_agent_is_kept_as_far_as_it_makes_sense(session_peer: SessionPeer) -> None:
    session_peer.ask(Hello(agent=b"\xff" + b"a" * 1000))
    assert len(session_peer.session.agent) == 250
    session_peer.ask(Hello())
    assert session_peer.session.agent == ""


def test_half_a_feature_is_malformed(session_peer: SessionPeer) -> None:
    session_peer.refused(AnyRequest(opcode=0x1F, value=b"\0\x07\0"), Status.EINVAL)
    assert session_peer.session.features == frozenset()


# Small talk


def test_noop(peer: Peer) -> None:
    assert peer.ask(Noop(opaque=5)) == AnyResponse(opcode=0x0A, opaque=5)


def test_version_starts_with_a_digit(peer: Peer) -> None:
    answer = peer.ask(Version())
    assert isinstance(answer, VersionResponse)
    assert answer.version[:1].isdigit()


def test_verbosity_is_taken_and_ignored(peer: Peer) -> None:
    assert peer.ask(Verbosity(level=3)).status is Status.SUCCESS
    peer.refused(AnyRequest(opcode=0x1B), Status.EINVAL)


@pytest.mark.parametrize("opcode", [0x0A, 0x0B, 0x07, 0x20])
@pytest.mark.parametrize("body", [{"key": b"k"}, {"value": b"v"}, {"extras": b"e"}])
def test_what_takes_no_body_refuses_one(peer: Peer, opcode: int, body: dict[str, Any]) -> None:
    peer.refused(AnyRequest(opcode=opcode, **body), Status.EINVAL)
    assert peer.ask(Noop()).status is Status.SUCCESS


# Good-byes


def test_quit_is_answered_and_then_nothing_more_is(manual: ManualNode) -> None:
    peer = manual.peer()
    answers = peer.send(Set(key=b"a", opaque=1), Quit(opaque=2), Set(key=b"b", opaque=3))
    assert [answer.opaque for answer in answers] == [1, 2]
    assert peer.session.closing
    assert peer.send(Noop()) == []
    assert manual.bucket.vbucket(0).high_seqno == 1


def test_quiet_quit(manual: ManualNode) -> None:
    peer = manual.peer()
    assert peer.send(QuitQ(), Noop()) == []
    assert peer.session.closing


@pytest.mark.parametrize(("request_", "opcodes"), [(Quit(), [0x07]), (QuitQ(), [])])
def test_the_connection_is_closed_after_the_answer(request_: Request, opcodes: list[int]) -> None:
    with start(vbuckets=1) as node, SocketPeer(node.host, node.port) as peer:
        peer.socket.sendall(Noop().encode() + request_.encode())
        assert [answer.code for answer in peer.answers()] == [0x0A, *opcodes]


# Login, where none is needed


def test_without_users_everybody_is_let_in(peer: Peer) -> None:
    assert peer.ask(SaslListMechanisms()) == SaslListMechanismsResponse(mechanisms=b"PLAIN")
    assert peer.ask(SaslAuth(mechanism=b"PLAIN", value=b"\0a\0b")).status is Status.SUCCESS
    peer.refused(SaslStep(mechanism=b"PLAIN"), Status.AUTH_ERROR)
    assert peer.ask(Set(key=b"k")).status is Status.SUCCESS


# The error map


@pytest.mark.parametrize("version", [1, 2, 0xFFFF])
def test_the_error_map(peer: Peer, version: int) -> None:
    answer = peer.ask(GetErrorMap(version=version))
    assert isinstance(answer, GetErrorMapResponse)
    found = json.loads(answer.error_map)
    assert (found["version"], found["revision"]) == (1, 1)
    assert {int(number, 16) for number in found["errors"]} == {int(status) for status in Status} - {0}
    for number, entry in found["errors"].items():
        assert number == f"{int(number, 16):x}"
        assert set(entry) == {"name", "desc", "attrs"}
        assert entry["name"] == Status(int(number, 16)).name
        assert entry["desc"]
        assert entry["attrs"]
    assert "retry-later" in found["errors"]["86"]["attrs"]
    assert "fetch-config" in found["errors"]["7"]["attrs"]
    assert "item-locked" in found["errors"]["9"]["attrs"]


def test_there_is_no_error_map_0(peer: Peer) -> None:
    peer.refused(GetErrorMap(version=0), Status.KEY_ENOENT)
    peer.refused(AnyRequest(opcode=0xFE), Status.EINVAL)
