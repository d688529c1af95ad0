"""The three drafts as a consumer meets them: every message in its place, every hole filled, garbage and all."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import examples
from tests.support.in_memory_node import InMemoryNode, Peer
from tests.support.stat_groups import stat_group
from tests.support.stream_client import StreamClient
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.node.auth.users_file import Users
from upriver.node.options import ListenAddress
from upriver.protocol.producer.dialects import STREAM_DIALECTS, opaque_of, put_opaque
from upriver.wire import (
    DIALECTS,
    AnyResponse,
    Message,
    Response,
    dcp,
    memcached,
    upr,
    upr_draft1,
    upr_draft2,
    upr_draft3,
)
from upriver.wire.codes import Status

DRAFTS = ["upr_draft1", "upr_draft2", "upr_draft3"]
SHORT = DRAFTS[:2]
END = 2**64 - 1


def node_with_peer(name: str, *keys: bytes, vbucket: int = 0) -> tuple[InMemoryNode, Peer]:
    node = InMemoryNode()
    node.bucket.create_vbucket(vbucket)
    node.write(vbucket, *keys)
    return node, connect(node, name)


def connect(node: InMemoryNode, name: str, peer: str = "peer") -> Peer:
    """Pinned where bytes cannot tell."""
    listen_address = ListenAddress(dialect=name) if name == "upr_draft1" else None
    return node.connect(peer, DIALECTS[name], listen_address)


def request(name: str, vbucket: int = 0, opaque: int = 0xDEADBEEF, **fields: object) -> Message:
    message = STREAM_DIALECTS[name].request(vbucket=vbucket, **fields)  # type: ignore[call-arg]
    put_opaque(message, opaque)
    return message


def log_request(name: str, vbucket: int | None, opaque: int = 5) -> Message:
    given = {} if vbucket is None else {"vbucket": vbucket}
    message = STREAM_DIALECTS[name].failover_log_request(**given)
    put_opaque(message, opaque)
    return message


def brief(messages: list[Message]) -> list[str]:
    """Messages as short texts: ``k@3`` a mutation, ``-k@4`` a deletion, ``!k@5`` an expiration, titles otherwise."""
    return [_brief(message) for message in messages]


def _brief(message: Message) -> str:
    change = message.declaration.change if not isinstance(message, AnyResponse) else None
    if change is not None:
        mark = {"MUTATION": "", "DELETION": "-", "EXPIRATION": "!"}[change.name]
        return f"{mark}{message.key.decode()}@{message.by_seqno}"  # type: ignore[attr-defined]
    if isinstance(message, Response) and message.status:
        return message.status.name.lower()
    if isinstance(message, AnyResponse):
        return "ok"
    match message:
        case upr_draft1.StreamEnd() | upr_draft3.StreamEnd():
            return f"end {int(message.reason)}"
        case upr_draft1.RollbackRequired():
            return "rollback"
        case upr_draft1.RequestError():
            return f"error {message.status.name.lower()}"
        case upr_draft3.SetVbucketState():
            return f"state {message.state.name.lower()}"
    return message.title()


# Streams


@pytest.mark.parametrize("name", DRAFTS)
def test_a_stream_from_its_request_to_its_end(name: str) -> None:
    node, peer = node_with_peer(name, b"a", b"b", b"c")
    node.bucket.vbucket(0).delete(b"a")
    messages = peer.send(request(name, end_seqno=5, group_id=b"replication_12"))
    assert brief(messages) == ["ok", "stream start", "snapshot start", "b@2", "c@3", "-a@4", "snapshot end"]
    assert {opaque_of(message) for message in messages} == {0xDEADBEEF}
    node.write(0, b"d", b"e")
    node.settle()
    assert brief(peer.take()) == ["snapshot start", "d@5", "snapshot end", "end 0"]


@pytest.mark.parametrize("name", DRAFTS)
def test_deletions_and_expirations_say_when_as_the_metadata_of_the_key_does(name: str) -> None:
    node, peer = node_with_peer(name, b"gone")
    vbucket = node.bucket.vbucket(0)
    vbucket.set(b"over", b"x", expiry=int(node.clock()) + 5)
    vbucket.delete(b"gone")
    node.pass_by(10)
    node.bucket.maintain(1.0)
    said = {m.key: m.expiration for m in peer.send(request(name)) if hasattr(m, "expiration")}  # type: ignore[attr-defined]
    assert said == {key: vbucket.get_meta(key).expiry for key in (b"gone", b"over")}
    assert said == {b"gone": int(node.clock()) - 10, b"over": int(node.clock())}


@pytest.mark.parametrize("name", DRAFTS)
def test_what_changes_say(name: str) -> None:
    node, peer = node_with_peer(name)
    vbucket = node.bucket.vbucket(0)
    cas, _ = vbucket.set(b"key", b"value", flags=7, expiry=int(node.clock()) + 100)
    vbucket.set(b"other", b"x")
    message = next(m for m in peer.send(request(name)) if getattr(m, "key", b"") == b"key")
    assert message.value == b"value"  # type: ignore[attr-defined]
    assert message.flags == 7  # type: ignore[attr-defined]
    assert message.expiration == int(node.clock()) + 100  # type: ignore[attr-defined]
    assert message.cas == cas  # type: ignore[attr-defined]
    node.pass_by(200)
    node.bucket.maintain(1.0)
    node.settle()
    assert "!key@3" in brief(peer.take())


@pytest.mark.parametrize(("name", "tail"), [("upr_draft1", []), ("upr_draft2", ["flush"]), ("upr_draft3", ["flush"])])
def test_a_flush_is_told_where_there_is_a_message_and_ends_the_stream(name: str, tail: list[str]) -> None:
    node, peer = node_with_peer(name, b"a")
    peer.send(request(name))
    node.bucket.vbucket(0).flush()
    node.settle()
    assert brief(peer.take()) == [*tail, "end 1"]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_changed_state_ends_the_stream(name: str) -> None:
    node, peer = node_with_peer(name, b"a")
    peer.send(request(name))
    node.bucket.vbucket(0).set_state(VbucketState.REPLICA)
    node.settle()
    assert brief(peer.take()) == ["end 1"]


def state_of(node: InMemoryNode) -> VbucketState:
    return node.bucket.vbucket(0).state


def test_the_third_draft_hands_over() -> None:
    node, peer = node_with_peer("upr_draft3", b"a")
    messages = peer.send(request("upr_draft3", flags=upr.StreamFlag.TAKEOVER))
    assert brief(messages)[-3:] == ["a@1", "snapshot end", "state pending"]
    assert state_of(node) is VbucketState.ACTIVE
    assert brief(peer.send(AnyResponse(opcode=0x5A, opaque=0xDEADBEEF))) == ["state active"]
    assert state_of(node) is VbucketState.DEAD
    assert brief(peer.send(AnyResponse(opcode=0x5A, opaque=0xDEADBEEF))) == ["end 0"]
    # And to no other connection, not even to a later one from the same peer.
    other = node.connect("other").open(b"other")
    asked = dcp.StreamRequest(end_seqno=2**64 - 1, flags=dcp.StreamFlag.TAKEOVER)
    assert brief(other.send(asked)) == ["not_my_vbucket"]
    assert peer.session.stream is not None
    peer.session.stream.lose()
    node.pass_by(1)
    again = connect(node, "upr_draft3")
    assert brief(again.send(request("upr_draft3", flags=upr.StreamFlag.TAKEOVER))) == ["not_my_vbucket"]


# Refusals


@pytest.mark.parametrize("name", DRAFTS)
def test_no_such_vbucket(name: str) -> None:
    _, peer = node_with_peer(name, b"a")
    short = name in SHORT
    assert brief(peer.send(request(name, vbucket=9))) == ["not my vbucket" if short else "not_my_vbucket"]
    assert brief(peer.send(log_request(name, 9))) == ["not my vbucket" if short else "not_my_vbucket"]
    assert not peer.closed


@pytest.mark.parametrize("name", DRAFTS)
def test_rollback(name: str) -> None:
    node, peer = node_with_peer(name, b"a", b"b")
    for uuid, high in ((0xBAD, 0), (node.bucket.vbucket(0).failover_log.newest.vbucket_uuid, 1)):
        (answer,) = peer.send(request(name, start_seqno=2, vbucket_uuid=uuid, high_seqno=high))
        assert answer.seqno == 0  # type: ignore[attr-defined]
        assert brief([answer]) == ["rollback"]
        assert opaque_of(answer) == 0xDEADBEEF


@pytest.mark.parametrize("name", DRAFTS)
def test_a_consumer_resumes_where_it_stood(name: str) -> None:
    node, peer = node_with_peer(name, b"a", b"b", b"c")
    uuid = node.bucket.vbucket(0).failover_log.newest.vbucket_uuid
    messages = peer.send(request(name, start_seqno=2, vbucket_uuid=uuid))
    assert brief(messages) == ["ok", "stream start", "snapshot start", "c@3", "snapshot end"]


@pytest.fixture(scope="module")
def served() -> Iterator[EmbeddedNode]:
    listen = " ".join(f"127.0.0.1:0,dialect={name}" for name in DRAFTS)
    with start(vbuckets=1, listen=listen) as node:
        for number in range(6):
            node.call(node.bucket.vbucket(0).set, b"k%d" % number, b"v")
        yield node


def client_of(node: EmbeddedNode, name: str) -> StreamClient:
    port = next(each.port for each in node.node.listen_addresses if each.dialect == name)
    return StreamClient(node, wire=DIALECTS[name], port=port)


@pytest.mark.parametrize("start_seqno", [7, 100, END])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_consumer_ahead_of_the_producer_rolls_back_to_its_high_seqno(
    served: EmbeddedNode, name: str, start_seqno: int
) -> None:
    uuid = served.bucket.vbucket(0).failover_log.newest.vbucket_uuid
    with client_of(served, name) as client:
        answer = client.ask(request(name, start_seqno=start_seqno, vbucket_uuid=uuid))
        assert isinstance(answer, upr_draft1.RollbackRequired | upr_draft3.RollbackRequired)
        assert answer.seqno == 6


@pytest.mark.parametrize("kind", [request, log_request])
def test_not_my_vbucket_has_no_body_in_the_third_draft(served: EmbeddedNode, kind: Any) -> None:
    with client_of(served, "upr_draft3") as client:
        client.send(kind("upr_draft3", 999, opaque=0x2D))
        answer = client.socket.recv(65536)
        assert answer.hex() == f"81{'50' if kind is request else '51'}000000000007000000000000002d0000000000000000"


@pytest.mark.parametrize("name", DRAFTS)
def test_other_refusals_say_why(name: str) -> None:
    _, peer = node_with_peer(name, b"a")
    peer.send(request(name, opaque=1))
    for wrong, status in (
        (request(name, opaque=2), Status.KEY_EEXISTS),
        (request(name, start_seqno=5, end_seqno=4), Status.ERANGE),
        (request(name, group_id=b"g" * 251), Status.EINVAL),
    ):
        (answer,) = peer.send(wrong)
        assert answer.status is status  # type: ignore[attr-defined]
        assert len(answer.text) > 10  # type: ignore[attr-defined]
    assert not peer.closed


@pytest.mark.shows("open_issues:request-id")
@pytest.mark.parametrize("name", SHORT)
def test_streams_that_only_a_request_id_tells_apart_have_one_each(name: str) -> None:
    node, peer = node_with_peer(name, b"a")
    node.bucket.create_vbucket(1)
    node.write(1, b"b")
    peer.send(request(name, opaque=1))
    assert brief(peer.send(request(name, vbucket=1, opaque=1))) == ["error key_eexists"]
    assert "b@1" in brief(peer.send(request(name, vbucket=1, opaque=2)))


@pytest.mark.parametrize("name", DRAFTS)
def test_the_failover_log(name: str) -> None:
    node, peer = node_with_peer(name, b"a")
    (answer,) = peer.send(log_request(name, 0, opaque=77))
    log = node.bucket.vbucket(0).failover_log
    assert [(e.vbucket_uuid, e.seqno) for e in answer.log] == [  # type: ignore[attr-defined]
        (e.vbucket_uuid, e.seqno) for e in log
    ]
    assert opaque_of(answer) == 77


@pytest.mark.parametrize("name", SHORT)
def test_a_failover_log_request_without_a_vbucket_means_the_last_one(name: str) -> None:
    _, peer = node_with_peer(name, b"a")
    assert brief(peer.send(log_request(name, None))) == ["not my vbucket"]
    peer.send(request(name))
    (answer,) = peer.send(log_request(name, None))
    assert answer.log  # type: ignore[attr-defined]


# Bytes


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize(
    ("garbage", "offset"),
    [
        (b"\x80" + bytes(23), 0),  # another header
        (b"\x01\0\0\0\0\0\0\1\xff\xff\xff\xff", 8),  # a length beyond everything
        (b"\x01\0\0\0\0\0\0\1\0\0\0\1\x09", 12),  # an unknown type
        (b"\x01\0\0\0\0\0\0\1\0\0\0\0", 8),  # no type at all
        (b"\x01\0\0\0\0\0\0\1\0\0\0\4\1\0\0\0", None),  # half a stream request
        (b"\x03\0\0\0\0\0\0\1\0\0\0\0", 0),  # what only a producer says
    ],
)
def test_what_cannot_be_understood_is_told_and_closes(name: str, garbage: bytes, offset: int | None) -> None:
    node = InMemoryNode()
    node.bucket.create_vbucket(0)
    before = log_request(name, 0)
    peer = node.connect(wire=DIALECTS[name], listen_address=ListenAddress(dialect=name))
    answer, error = peer.send(before, garbage)
    assert isinstance(answer, upr_draft1.Ok)
    assert isinstance(error, upr_draft1.DecodeError)
    if offset is not None:
        assert error.offset == len(before.encode()) + offset
    assert b"expected" in error.text
    assert peer.closed


@settings(max_examples=examples(60), deadline=None)
@given(name=st.sampled_from(DRAFTS), cuts=st.lists(st.integers(1, 60), max_size=20))
def test_requests_may_come_in_any_pieces(name: str, cuts: list[int]) -> None:
    node = InMemoryNode(vbuckets=4)
    node.bucket.create_vbuckets()
    for vbucket in range(4):
        node.write(vbucket, b"a", b"b")
    data = b"".join(
        [
            log_request(name, 2).encode(),
            *(request(name, vbucket=vbucket, opaque=vbucket, group_id=b"g").encode() for vbucket in range(4)),
        ]
    )
    peer, at = connect(node, name), 0
    for cut in [*cuts, len(data)]:
        peer.put(data[at : at + cut])
        at += cut
        node.settle()
    received = brief(peer.take())
    assert received.count("a@1") == received.count("b@2") == received.count("snapshot end") == 4
    assert not peer.closed


@settings(max_examples=examples(150), deadline=None)
@given(name=st.sampled_from(SHORT), data=st.binary(max_size=120), good=st.booleans())
def test_garbage_harms_no_other_client(name: str, data: bytes, good: bool) -> None:
    node, peer = node_with_peer(name, b"a")
    other = connect(node, name, "other")
    other.send(request(name))
    peer.send((request(name).encode() if good else b"\x01") + data)
    node.write(0, b"b")
    node.settle()
    assert brief(other.take())[-2:] == ["b@2", "snapshot end"]


def test_the_first_byte_tells_the_second_draft() -> None:
    node, peer = node_with_peer("upr_draft2", b"a")
    peer.send(request("upr_draft2"))
    assert [stream.wire for stream in node.service] == [upr_draft2.upr_draft2]


def test_the_third_draft_begins_with_either_of_its_requests_and_leaves_commands_alone() -> None:
    for first in (request("upr_draft3"), log_request("upr_draft3", 0)):
        node, peer = node_with_peer("upr_draft3", b"a")
        peer.send(first)
        assert [stream.wire for stream in node.service] == [upr_draft3.upr_draft3]
        (answer,) = peer.send(memcached.Get(key=b"a"))
        assert isinstance(answer, memcached.GetResponse)
        assert not peer.closed
        peer.send(upr_draft3.SnapshotStart())
        assert peer.closed


@pytest.mark.parametrize("name", DRAFTS)
def test_no_other_client_can_take_the_name_that_is_made_up(name: str) -> None:
    node, peer = node_with_peer(name, b"a")
    tells = [name + ":peer", f"\\{name}:peer"]
    others = [node.connect(f"other {told}").open(told.encode()) for told in tells]
    for other in others:
        other.send(dcp.StreamRequest(end_seqno=END))
    assert "a@1" in brief(peer.send(request(name)))
    for told in tells:
        node.connect(f"third {told}").open(told.encode())
    assert [other.closed for other in others] == [True, True]
    assert not peer.closed
    node.write(0, b"b")
    assert "b@2" in brief(peer.send())


# Statistics


@pytest.mark.shows("open_issues:vbucket-filter", "open_issues:useful-name")
@pytest.mark.parametrize("name", DRAFTS)
def test_statistics_show_the_group_id(name: str) -> None:
    node, peer = node_with_peer(name, b"a", b"b")
    peer.send(request(name, group_id=b"replication_12"))
    numbers = stat_group(node, b"upr")
    assert numbers["ep_upr_count"] == "1"
    prefix = f"eq_uprq:\\{name}:peer"
    assert numbers[f"{prefix}:stream_0_group_id"] == "replication_12"
    assert numbers[f"{prefix}:items_sent"] == numbers[f"{prefix}:stream_0_items_sent"] == "2"
    assert numbers[f"{prefix}:stream_0_opaque"] == str(0xDEADBEEF)


# Permissions


@pytest.mark.shows("open_issues:security")
def test_users_keep_the_short_drafts_away_but_from_an_anonymous_listener() -> None:
    node = InMemoryNode()
    node.bucket.create_vbucket(0)
    node.write(0, b"a")
    node.state.users = Users(None)
    for listen_address in (None, ListenAddress(dialect="upr_draft2")):
        peer = node.connect("stranger", upr_draft2.upr_draft2, listen_address)
        (answer,) = peer.send(request("upr_draft2"))
        assert isinstance(answer, upr_draft2.RequestError)
        assert answer.status is Status.AUTH_ERROR
        assert b"anonymous" in answer.text
        assert peer.closed
    peer = node.connect("anonymous", upr_draft2.upr_draft2, ListenAddress("", 0, "upr_draft2", anonymous=True))
    assert "a@1" in brief(peer.send(request("upr_draft2")))


def test_the_third_draft_needs_the_role_of_streams() -> None:
    node, peer = node_with_peer("upr_draft3", b"a")
    node.state.users = Users(None)
    assert brief(peer.send(request("upr_draft3"))) == ["auth_error"]
    assert not list(node.service)


@pytest.mark.parametrize(
    ("pinned", "message", "welcome"),
    [
        ("upr", dcp.Open(name=b"x", flags=dcp.OpenFlag.PRODUCER), True),
        ("dcp", dcp.Open(name=b"x", flags=dcp.OpenFlag.PRODUCER), True),
        ("tap", dcp.Open(name=b"x", flags=dcp.OpenFlag.PRODUCER), False),
        ("upr_draft3", dcp.Open(name=b"x", flags=dcp.OpenFlag.PRODUCER), False),
        ("dcp", upr_draft3.FailoverLogRequest(), False),
        ("upr_draft3", upr_draft3.FailoverLogRequest(), True),
        ("upr", memcached.Noop(), True),
    ],
)
def test_a_pinned_listener_speaks_one_dialect_and_plain_commands(pinned: str, message: Message, welcome: bool) -> None:
    node = InMemoryNode()
    node.bucket.create_vbucket(0)
    wire = upr_draft3.upr_draft3 if pinned == "upr_draft3" else dcp.dcp
    (answer,) = node.connect(wire=wire, listen_address=ListenAddress(dialect=pinned)).send(message)
    assert isinstance(answer, Response)
    assert (answer.status is Status.SUCCESS) is welcome
    assert welcome or answer.status is Status.EINVAL


@pytest.mark.parametrize(("pinned", "extras"), [("upr", 48), ("dcp", 40)])
def test_a_pinned_listener_refuses_the_other_stream_request(pinned: str, extras: int) -> None:
    node = InMemoryNode()
    node.bucket.create_vbucket(0)
    peer = node.connect(listen_address=ListenAddress(dialect=pinned)).open()
    wrong = bytes((0x80, 0x53, 0, 0, extras)) + bytes(6) + bytes((extras,)) + bytes(12 + extras)
    (answer,) = peer.send(wrong)
    assert isinstance(answer, Response)
    assert answer.status is Status.EINVAL
    assert not peer.closed


# Real sockets


@pytest.fixture
def node(tmp_path: Path) -> Iterator[EmbeddedNode]:
    with start(vbuckets=8, data=tmp_path, listen="127.0.0.1:0,dialect=upr_draft1") as running:
        yield running


def port_of(node: EmbeddedNode, name: str) -> int:
    return next((each.port for each in node.node.listen_addresses if each.dialect == name), node.port)


@pytest.mark.parametrize("name", DRAFTS)
def test_every_draft_end_to_end(node: EmbeddedNode, name: str) -> None:
    vbucket = node.bucket.vbucket(3)
    for number in range(2000):
        node.call(vbucket.set, b"key%d" % number, b"value%d" % number)
    contents: dict[bytes, bytes] = {}
    with StreamClient(node, wire=DIALECTS[name], port=port_of(node, name)) as client:
        client.send(request(name, vbucket=3, opaque=9))
        received = follow(client, contents, 1500)
        assert brief(received[:3]) == ["ok", "stream start", "snapshot start"]
    # Cut off, it resumes where it stood.
    uuid = node.call(lambda: vbucket.failover_log.newest.vbucket_uuid)
    with StreamClient(node, wire=DIALECTS[name], port=port_of(node, name)) as client:
        client.send(request(name, vbucket=3, opaque=9, start_seqno=1500, vbucket_uuid=uuid))
        follow(client, contents, 2000)
        node.call(vbucket.delete, b"key7")
        node.call(vbucket.set, b"late", b"x")
        follow(client, contents, 2002)
    expected = {b"key%d" % number: b"value%d" % number for number in range(2000) if number != 7}
    assert contents == {**expected, b"late": b"x"}


def follow(client: StreamClient, contents: dict[bytes, bytes], upto: int) -> list[Message]:
    received = []
    for message in iter(client.next, None):
        received.append(message)
        if message is None or isinstance(message, AnyResponse) or message.declaration.change is None:
            continue
        key, seqno = message.key, message.by_seqno  # type: ignore[attr-defined]
        if message.declaration.change.name == "MUTATION":
            contents[key] = message.value  # type: ignore[attr-defined]
        else:
            contents.pop(key, None)
        if seqno >= upto:
            return received
    raise AssertionError("the connection was closed")


@pytest.mark.parametrize("name", SHORT)
def test_garbage_on_a_socket_is_answered_and_closed_and_the_node_lives(node: EmbeddedNode, name: str) -> None:
    with StreamClient(node, wire=DIALECTS[name], port=port_of(node, name)) as client:
        client.socket.sendall(log_request(name, 0).encode() + b"\xff" * 1000)
        assert isinstance(client.next(), upr_draft1.Ok)
        assert isinstance(client.next(), upr_draft1.DecodeError)
        assert client.next() is None
    with StreamClient(node, b"good") as client:
        assert isinstance(client.ask(memcached.Noop()), Response)


@pytest.mark.shows("open_issues:compatibility")
def test_every_dialect_at_once_on_one_port(node: EmbeddedNode) -> None:
    node.call(node.bucket.vbucket(0).set, b"key", b"value")
    clients = [
        StreamClient(node, wire=upr_draft2.upr_draft2),
        StreamClient(node, wire=upr_draft3.upr_draft3),
        StreamClient(node, b"dcp"),
    ]
    clients[0].send(request("upr_draft2", opaque=1))
    clients[1].send(request("upr_draft3", opaque=1))
    clients[2].send(dcp.StreamRequest(opaque=1))
    try:
        for client in clients:
            message: Message | None
            while getattr(message := client.next(), "key", None) != b"key":
                assert message is not None
    finally:
        for client in clients:
            client.socket.close()


def test_a_listener_of_its_own(node: EmbeddedNode) -> None:
    port = port_of(node, "upr_draft1")
    assert port != node.port
    with socket.create_connection((node.host, port)) as peer:
        peer.sendall(memcached.Noop().encode())
        packet = peer.recv(4096)
        assert isinstance(upr_draft1.upr_draft1.decode(packet), upr_draft1.DecodeError)
        assert peer.recv(1) == b""
