import itertools
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_peers import (
    ManualNode,
    SessionPeer,
    SocketPeer,
    assert_refusal,
    decoded,
    encoded,
    open_manual_node,
)
from upriver.node.auth.users_file import Users
from upriver.node.commands import COMMANDS
from upriver.node.embedded import start
from upriver.node.session import Deferred
from upriver.node.state import Limits
from upriver.wire import AnyRequest, AnyResponse, Request
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Add,
    Delete,
    Feature,
    Flush,
    Get,
    GetK,
    GetKQ,
    GetLocked,
    GetQ,
    GetVbucket,
    Hello,
    Increment,
    Noop,
    Set,
    SetQ,
    Stat,
    Touch,
    Verbosity,
)

#: A conversation with something of everything.
CONVERSATION: list[Request] = [
    Hello(agent=b"test", features=(Feature.XERROR, Feature.JSON), opaque=1),
    Set(key=b"a", value=b"1" * 100, flags=7, opaque=2),
    Get(key=b"a", opaque=3),
    GetQ(key=b"none", opaque=4),
    SetQ(key=b"b", value=b"2", opaque=5),
    GetKQ(key=b"b", opaque=6),
    GetK(key=b"none", opaque=7),
    Add(key=b"a", opaque=8),
    AnyRequest(opcode=0xEE, key=b"unknown", value=b"!" * 50, opaque=9),
    Set(key=b"", opaque=10),
    Increment(key=b"n", initial=5, opaque=11),
    GetLocked(key=b"a", opaque=12),
    Set(key=b"a", value=b"x", opaque=13),
    AnyRequest(opcode=0x00, extras=b"bad!", key=b"a", opaque=14),
    Stat(key=b"vbucket", opaque=15),
    Get(key=b"a", vbucket=7, opaque=16),
    Set(key=b"j", value=b"{}", datatype=1, opaque=17),
    Set(key=b"big", value=bytes(3000), opaque=18),
    Get(key=b"big", opaque=19),
    Touch(key=b"b", expiration=5, opaque=20),
    Delete(key=b"b", opaque=21),
    Noop(opaque=22),
]


def fresh(compiled: bool = False, **options: Any) -> ManualNode:
    return open_manual_node(compiled=compiled, **options)


def whole_conversation(compiled: bool = False) -> bytes:
    manual = fresh(compiled)
    with manual.bucket:
        return manual.peer().send_bytes(encoded(*CONVERSATION))


# Bytes


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7, 23, 24, 25, 100, 1000])
def test_pieces_of_any_size_give_the_same_answers(compiled: bool, size: int) -> None:
    data, expected = encoded(*CONVERSATION), whole_conversation()
    manual = fresh(compiled)
    with manual.bucket:
        peer = manual.peer()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert b"".join(map(peer.send_bytes, pieces)) == expected
        assert peer.session.unread == 0


@pytest.mark.parametrize("compiled", [False, True])
@given(cuts=st.lists(st.integers(0, len(encoded(*CONVERSATION))), max_size=20))
def test_any_split_gives_the_same_answers(compiled: bool, cuts: list[int]) -> None:
    data = encoded(*CONVERSATION)
    places = sorted({0, len(data), *cuts})
    manual = fresh(compiled)
    with manual.bucket:
        peer = manual.peer()
        pieces = [data[start:end] for start, end in itertools.pairwise(places)]
        assert b"".join(map(peer.send_bytes, pieces)) == whole_conversation()


def test_answers_come_in_the_order_of_requests() -> None:
    answers = decoded(whole_conversation())
    opaques = [answer.opaque for answer in answers]
    assert opaques == sorted(opaques)
    assert set(opaques) == set(range(1, 23)) - {4, 5}


def test_answers_are_given_once(session_peer: SessionPeer) -> None:
    session_peer.session.receive(Noop().encode())
    assert len(decoded(session_peer.session.data_to_send())) == 1
    assert session_peer.session.data_to_send() == b""


def test_half_a_request_waits(session_peer: SessionPeer) -> None:
    packet = Set(key=b"k", value=b"v").encode()
    assert session_peer.send_bytes(packet[:-1]) == b""
    assert session_peer.session.unread == len(packet) - 1
    assert len(decoded(session_peer.send_bytes(packet[-1:]))) == 1
    assert session_peer.session.unread == 0


def test_nothing_is_received(session_peer: SessionPeer) -> None:
    assert session_peer.send_bytes(b"") == b""


@pytest.mark.parametrize(
    ("garbage", "why", "status"),
    [
        (b"get k\r\n", "magic", None),
        (b"\x01" + bytes(11), "magic", None),
        (b"\x16\x03\x01\x02\0\x01", "found 0x16 (a TLS client on a plain port?)", None),
        (b"\x80\x00" + bytes(6) + b"\xff\xff\xff\xff" + bytes(12), "length of 4294967295", Status.E2BIG),
        (b"\x80\x00\x00\x05" + bytes(20), "holds the key", Status.EINVAL),
        (b"\x80\x01\x00\x00\x09" + bytes(3) + b"\0\0\0\x08" + bytes(20), "extras", Status.EINVAL),
        (AnyResponse(opcode=0).encode(), "a response", None),
        (AnyResponse(opcode=0x10, extras=b"bad").encode(), "a response", None),
    ],
)
def test_a_peer_that_loses_the_frame_is_told_if_there_was_a_header_and_closed(
    session_peer: SessionPeer, garbage: bytes, why: str, status: Status | None, caplog: pytest.LogCaptureFixture
) -> None:
    first, *others = session_peer.send(Noop(opaque=1), garbage, Noop(opaque=2))
    assert first.opaque == 1
    assert [answer.status for answer in others] == ([] if status is None else [status])
    for answer in others:
        assert_refusal(answer, status or Status.EINVAL)
        assert (answer.opaque, answer.code) == (0, garbage[1])
    assert session_peer.session.closing
    assert why in caplog.text
    assert len(caplog.records) == 1
    assert session_peer.send(Noop()) == []


#: A set with a durability level, as Couchbase's SDKs send it: two bytes of frame extras, and a key length of one byte.
EXTENDED = b"\x08\x01\x02\x01\x08" + bytes(5) + b"\0\x0c" + b"\0\0\0\x07" + bytes(8) + b"\x11\x01" + bytes(8) + b"kv"


@pytest.mark.parametrize("size", [1, 23, 1000])
def test_a_request_with_frame_extras_is_refused_and_passed_over(session_peer: SessionPeer, size: int) -> None:
    data = encoded(Noop(opaque=6), EXTENDED, Noop(opaque=8))
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    before, refused, behind = decoded(b"".join(map(session_peer.send_bytes, pieces)))
    assert_refusal(refused, Status.NOT_SUPPORTED)
    assert (before.opaque, refused.opaque, refused.code, behind.opaque) == (6, 7, 1, 8)
    assert not session_peer.session.closing


def test_a_stranger_is_told_to_log_in_whatever_the_frame() -> None:
    manual = fresh(users=Users())
    with manual.bucket:
        hello = b"\x08\x1f" + EXTENDED[2:]  # a plain one is answered to everybody
        for answer in manual.peer().send(EXTENDED, hello):
            assert_refusal(answer, Status.AUTH_ERROR)


def test_a_length_is_refused_at_the_header(manual: ManualNode) -> None:
    small = fresh(limits=Limits(body_bytes_max=1000))
    with small.bucket:
        peer = small.peer()
        assert peer.ask(Set(key=b"k", value=bytes(991))).status is Status.SUCCESS
        (answer,) = peer.send(Set(key=b"k", value=bytes(992), opaque=7).encode()[:24])
        assert_refusal(answer, Status.E2BIG)
        assert answer.opaque == 7
        assert peer.session.closing


@pytest.mark.parametrize("compiled", [False, True])
def test_the_limit_of_bodies_holds_for_all(compiled: bool) -> None:
    manual = fresh(compiled, limits=Limits(body_bytes_max=1000))
    with manual.bucket:
        peer = manual.peer()
        assert [answer.status for answer in peer.send(Set(key=b"k", value=bytes(992)))] == [Status.E2BIG]
        assert peer.session.closing
        assert manual.bucket.vbucket(0).high_seqno == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_peer_that_does_not_read_gets_no_answers_until_it_does(compiled: bool) -> None:
    manual = fresh(compiled)
    with manual.bucket:
        peer = manual.peer()
        peer.ask(Set(key=b"k", value=b"v"))
        peer.session.paused = True
        assert peer.send(Get(key=b"k", opaque=1), Noop(opaque=2), Get(key=b"k").encode()[:10]) == []
        peer.session.resume()
        assert [answer.opaque for answer in peer.receive()] == [1, 2]
        assert peer.session.unread == 10


# Errors


def test_an_error_of_ours_is_answered_and_logged(manual: ManualNode, caplog: pytest.LogCaptureFixture) -> None:
    def broken(session: object, request: object) -> None:
        raise RuntimeError("a bug")

    manual.node.commands = {**COMMANDS, GetVbucket: (broken, None)}
    peer = manual.peer()
    answers = peer.send(GetVbucket(opaque=1), Noop(opaque=2))
    assert_refusal(answers[0], Status.EINTERNAL)
    assert [answer.opaque for answer in answers] == [1, 2]
    assert "a bug" in caplog.text
    assert vars(caplog.records[0])["connection"] == "127.0.0.1:1"
    assert caplog.records[0].levelno == logging.ERROR
    assert "a bug" not in str(answers[0])


def test_a_request_without_a_command_is_unknown(manual: ManualNode) -> None:
    manual.node.commands = {}
    manual.peer().refused(Noop(), Status.UNKNOWN_COMMAND)


# Answers that come later


def later(manual: ManualNode) -> list[Deferred]:
    """Make Verbosity answer when the test says so."""
    places: list[Deferred] = []

    def put_off(session: Any, request: Request) -> Deferred:
        places.append(Deferred(session.answers))
        return places[-1]

    manual.node.commands = {**COMMANDS, Verbosity: (put_off, None)}
    return places


def answer_to(opaque: int) -> AnyResponse:
    return AnyResponse(opcode=0x1B, opaque=opaque)


@pytest.mark.parametrize("compiled", [False, True])
def test_requests_behind_a_slow_one_wait(compiled: bool) -> None:
    manual = fresh(compiled)
    with manual.bucket:
        places, peer = later(manual), manual.peer()
        sent = peer.send(
            Set(key=b"k", opaque=1), Verbosity(opaque=2), Get(key=b"k", opaque=3), Verbosity(opaque=4), Noop(opaque=5)
        )
        assert [answer.opaque for answer in sent] == [1]
        places[1].complete(answer_to(4))
        assert peer.receive() == []
        places[0].complete(answer_to(2))
        assert [answer.opaque for answer in peer.receive()] == [2, 3, 4, 5]
        assert peer.send(Noop(opaque=6))[0].opaque == 6


def test_a_late_answer_may_be_none_or_many(manual: ManualNode) -> None:
    places, peer = later(manual), manual.peer()
    peer.send(Verbosity(), Verbosity(), Noop(opaque=9))
    places[0].complete()
    places[1].complete(answer_to(1), answer_to(2))
    assert [answer.opaque for answer in peer.receive()] == [1, 2, 9]
    assert peer.wakes == 2


def test_a_late_answer_may_be_a_refusal(manual: ManualNode) -> None:
    from upriver.errors import Busy

    places, peer = later(manual), manual.peer()
    peer.send(Verbosity(opaque=3))
    places[0].fail(Verbosity(opaque=3), Busy())
    (answer,) = peer.receive()
    assert_refusal(answer, Status.EBUSY)
    assert (answer.opaque, answer.code) == (3, 0x1B)


def test_an_answer_may_be_there_at_once(manual: ManualNode) -> None:
    def prompt(session: Any, request: Request) -> Deferred:
        place = Deferred(session.answers)
        place.complete(answer_to(request.opaque))
        return place

    manual.node.commands = {**COMMANDS, Verbosity: (prompt, None)}
    assert [answer.opaque for answer in manual.peer().send(Verbosity(opaque=1), Noop(opaque=2))] == [1, 2]


def test_what_comes_after_the_end_is_ignored(manual: ManualNode) -> None:
    places, peer = later(manual), manual.peer()
    peer.send(Verbosity())
    peer.session.closing = True
    peer.session.on_output = None
    places[0].complete(answer_to(0))


# A real connection


@pytest.mark.parametrize("ack", ["memory", "disk"])
def test_pieces_over_a_socket(ack: str) -> None:
    data = encoded(*(Set(key=b"%d" % n, value=bytes(n), opaque=n) for n in range(60)), Noop(opaque=60))
    with start(vbuckets=1, ack=ack) as node, SocketPeer(node.host, node.port) as peer:
        for at in range(0, len(data), 97):
            peer.socket.sendall(data[at : at + 97])
        answers = peer.answers()
        assert [next(answers).opaque for _ in range(61)] == list(range(61))


def test_a_pipeline_that_waits_for_the_disk() -> None:
    requests = [Set(key=b"%d" % n, opaque=n) for n in range(2000)]
    with start(vbuckets=1, ack="disk") as node, SocketPeer(node.host, node.port) as peer:
        assert [answer.opaque for answer in peer.send(*requests)] == list(range(2000))
        assert node.call(lambda: node.bucket.vbucket(0).persisted_seqno) == 2000


def test_connections_share_the_data() -> None:
    with (
        start(vbuckets=1) as node,
        SocketPeer(node.host, node.port) as one,
        SocketPeer(node.host, node.port) as two,
    ):
        stored = one.ask(Set(key=b"k", value=b"v"))
        assert two.ask(Get(key=b"k")).cas == stored.cas
        two.ask(Flush())
        one.refused(Get(key=b"k"), Status.KEY_ENOENT)


def test_large_answers_to_a_slow_reader() -> None:
    value = bytes(range(256)) * 2048
    with start(vbuckets=1) as node, SocketPeer(node.host, node.port) as peer:
        peer.ask(Set(key=b"k", value=value))
        peer.socket.sendall(encoded(*(Get(key=b"k", opaque=n) for n in range(40)), Noop(opaque=40)))
        answers = peer.answers()
        assert [next(answers).opaque for _ in range(41)] == list(range(41))
