"""Statements of the TAP text, each over a real socket."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.command_peers import SocketPeer
from tests.support.node_process import Client, wait_until
from tests.support.tap_peer import (
    ACK,
    BACKFILL,
    DUMP,
    FUTURE,
    KEYS_ONLY,
    LIST,
    REGISTERED,
    TAKEOVER,
    brief,
    connect_with,
)
from tests.support.tap_sockets import Listener, Relay
from upriver import model
from upriver.model import HEADER
from upriver.node import EmbeddedNode, start
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.wire import Message, Response, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import DeregisterTapClient, Get, SaslAuth, SetVbucket, VbucketState
from upriver.wire.dialects.tap import Control, TapFlag

VBUCKETS = 4
SEVEN = (BACKFILL, DUMP, LIST, TAKEOVER, ACK, KEYS_ONLY, REGISTERED)


@pytest.fixture
def node() -> Iterator[EmbeddedNode]:
    with start(vbuckets=VBUCKETS) as made:
        yield made


@pytest.fixture
def writer(node: EmbeddedNode) -> Iterator[Client]:
    with Client(node.port) as made:
        yield made


def brings(key: bytes) -> Callable[[Message], bool]:
    return lambda message: isinstance(message, tap.Mutation) and message.key == key


# Connect


@pytest.mark.parametrize(
    ("flags", "date", "found"),
    [(0, 0, ["old=v", "new=v"]), (BACKFILL, 0, ["old=v", "new=v"]), (BACKFILL, FUTURE, ["new=v"])],
    ids=["no flag", "everything", "minus one"],
)
def test_only_a_date_in_the_future_leaves_existing_items_out(
    node: EmbeddedNode, writer: Client, flags: int, date: int, found: list[str]
) -> None:
    writer.set(b"old", b"v", vbucket=1)
    with Listener(node.port, connect_with(b"node1", flags | ACK, date)) as listener:
        listener.next()  # the first control message: it is connected
        writer.set(b"new", b"v", vbucket=1)
        messages = brief(list(listener.until(brings(b"new"))))
    assert [text for text in messages if "=" in text] == found


@pytest.mark.parametrize("name", [b"node1", b""], ids=["named", "nameless"])
def test_all_128_combinations_are_served(node: EmbeddedNode, writer: Client, name: bytes) -> None:
    for flags in (sum(chosen) for n in range(8) for chosen in itertools.combinations(SEVEN, n)):
        for number in range(VBUCKETS):
            writer.ask(SetVbucket(vbucket=number, state=VbucketState.ACTIVE))
            writer.set(b"k%d" % number, b"v%d" % number, vbucket=number)
        listed = (1,) if flags & LIST else tuple(range(VBUCKETS))
        with Listener(node.port, connect_with(name, flags, 0, (1,) if flags & LIST else ())) as listener:
            values = _values(listener, len(listed))
            if flags & (DUMP | TAKEOVER):
                assert "#close_tap_stream" in brief(list(iter(listener.next, None)))
        keys_only = flags & KEYS_ONLY and not flags & TAKEOVER
        assert values == {number: b"" if keys_only else b"v%d" % number for number in listed}, hex(flags)
        if flags & REGISTERED:
            _deregister_all(node, writer)


def _values(listener: Listener, count: int) -> dict[int, bytes]:
    """The values of the next mutations, by vbucket."""
    out: dict[int, bytes] = {}
    while len(out) < count:
        message = listener.next()
        assert message is not None
        if isinstance(message, tap.Mutation):
            out[message.vbucket] = message.value
    return out


def _deregister_all(node: EmbeddedNode, writer: Client) -> None:
    for client in node.call(lambda: list(node.node.state.tap.clients)):
        assert writer.ask(DeregisterTapClient(name=client.name.encode())).status == 0


# Engine-private sections


def raw(
    opcode: int, extras: bytes = b"", private: bytes = b"", key: bytes = b"", value: bytes = b"", vbucket: int = 1
) -> bytes:
    """A TAP message that asks for an acknowledgement, with these bytes of engine-private data."""
    extras = len(private).to_bytes(2, "big") + b"\0\1\xff\0\0\0" + extras
    body = extras + private + key + value
    return HEADER.pack(0x80, opcode, len(key), len(extras), 0, vbucket, len(body), 7, 0) + body


@pytest.mark.parametrize("length", [0, 1, 3, 7, 8, 9, 10, 24, 1000])
def test_engine_private_data_of_any_length_is_accepted(node: EmbeddedNode, writer: Client, length: int) -> None:
    private = b"\x01" * length
    messages = [
        raw(0x41, bytes(8), private, b"k", b"v"),
        raw(0x42, b"", private, b"other"),
        raw(0x44, b"", b"\xff" + private),
        raw(0x46, b"", private),
        raw(0x46, bytes(8), private, b"checkpoint_start", bytes(8)),
        raw(0x47, b"", private),
    ]
    with SocketPeer(node.host, node.port) as peer:
        assert [answer.status for answer in peer.send(*messages)] == [Status.SUCCESS] * len(messages)
        assert writer.get(b"k", vbucket=1) == b"v"
        assert [answer.status for answer in peer.send(raw(0x43, b"", private))] == [Status.SUCCESS]
    assert writer.ask(Get(key=b"k", vbucket=1)).status == Status.KEY_ENOENT


def test_the_printed_opaque_message_is_acknowledged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    printed = bytes.fromhex("80440000080003ff0000000c00000000000000000000000000040000ff000000ffffffff")
    asking = printed[:26] + b"\0\1" + printed[28:]
    with start(vbuckets=1024) as node, SocketPeer(node.host, node.port) as peer:
        assert peer.send(printed) == []
        assert [answer.status for answer in peer.send(asking, asking)] == [Status.SUCCESS] * 2
        with Listener(node.port, connect_with(b"client", BACKFILL | LIST, FUTURE, (1,))) as listener:
            listener.socket.sendall(asking)
            answer = listener.next()
            assert isinstance(answer, Response)
            assert answer.status is Status.SUCCESS
    assert sum("unknown control message 0xffffffff" in line for line in caplog.messages) == 2  # one per connection


# Flush


def flush(private: bytes = b"") -> bytes:
    return raw(0x43, b"", private)


@pytest.mark.parametrize("private", [b"", b"8 bytes!", b"other engine's data"])
def test_a_flush_is_passed_on_once_and_the_same_bytes_are_another_flush(private: bytes) -> None:
    with start(vbuckets=1024) as node, Client(node.port) as writer, SocketPeer(node.host, node.port) as peer:
        writer.set(b"old", b"v", vbucket=5)
        with Listener(node.port, connect_with(b"next", BACKFILL | ACK, 0)) as listener:
            assert len(list(listener.until(brings(b"old"))))
            for key in (b"first", b"second"):
                assert [answer.status for answer in peer.send(flush(private))] == [Status.SUCCESS]
                assert writer.ask(Get(key=b"old", vbucket=5)).status == Status.KEY_ENOENT
                writer.set(key, b"v", vbucket=900)
                found = brief(list(listener.until(brings(key))))
                assert found.count("flush") == 1


def test_a_client_of_the_next_node_that_saw_the_flush_loses_nothing() -> None:
    with start(vbuckets=64) as first, start(vbuckets=64) as second:
        with Client(first.port) as here, Client(second.port) as there, SocketPeer(first.host, first.port) as peer:
            for vbucket in range(64):
                here.set(b"old", b"v", vbucket=vbucket)
            with Relay(first.port, second.port, connect_with(b"next", BACKFILL | ACK, 0)):
                wait_until(lambda: _count(second) == 64, "the next node has everything")
                peer.send(flush())
                wait_until(lambda: _count(second) == 0, "the next node is flushed")
                for vbucket in range(64):
                    there.set(b"mine", b"v", vbucket=vbucket)
                for vbucket in range(64):
                    here.set(b"last", b"v", vbucket=vbucket)
                wait_until(lambda: _count(second) >= 128, "both have come")
                assert all(there.get(b"mine", vbucket=vbucket) == b"v" for vbucket in range(64))


def _count(node: EmbeddedNode) -> int:
    return node.call(lambda: sum(len(vbucket.table.live_keys()) for vbucket in node.bucket))


# Copies


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[EmbeddedNode]:
    users = Users()
    users.add(User.create("writer", "secret", Role.WRITE))
    users.add(User.create("admin", "secret", Role.ADMIN | Role.WRITE))
    users.save(tmp_path / "users.json")
    with start(vbuckets=4, users=str(tmp_path / "users.json")) as node:
        yield node


def login(node: EmbeddedNode, user: bytes) -> SocketPeer:
    peer = SocketPeer(node.host, node.port)
    (answer,) = peer.send(SaslAuth(mechanism=b"PLAIN", value=b"\0%s\0secret" % user))
    assert answer.status is Status.SUCCESS
    return peer


def made(node: EmbeddedNode, state: model.VbucketState) -> None:
    """Vbucket 1 is a copy that a stream with seqnos has filled."""

    def make() -> None:
        vbucket = node.bucket.vbucket(1)
        vbucket.set_state(model.VbucketState.REPLICA)
        vbucket.replace_failover_log(model.FailoverLog((model.FailoverEntry(77, 0),)))
        vbucket.begin_snapshot(0, 1)
        vbucket.apply(model.Change(vbucket=1, seqno=1, event=model.Event.MUTATION, key=b"mine", value=b"v", cas=1))
        vbucket.set_state(state)

    node.call(make)


def describe(node: EmbeddedNode) -> tuple[object, ...]:
    vbucket = node.bucket.vbucket(1)
    return node.call(
        lambda: (vbucket.state, vbucket.failover_log, vbucket.high_seqno, sorted(vbucket.table.live_keys()))
    )


CHANGES = [raw(0x41, bytes(8), b"", b"mine", b"foreign"), raw(0x42, b"", b"", b"mine")]


@pytest.mark.parametrize("state", [model.VbucketState.REPLICA, model.VbucketState.PENDING])
def test_the_role_write_does_not_change_a_copy(roles: EmbeddedNode, state: model.VbucketState) -> None:
    made(roles, state)
    before = describe(roles)
    with login(roles, b"writer") as peer:
        assert [answer.status for answer in peer.send(*CHANGES)] == [Status.EACCESS] * 2
    assert describe(roles) == before


def test_a_pending_copy_takes_nothing_but_its_takeover(roles: EmbeddedNode) -> None:
    made(roles, model.VbucketState.PENDING)
    before = describe(roles)
    states = [tap.SetVbucket(vbucket=1, state=state, tap_flags=TapFlag.ACK) for state in VbucketState]
    begin = tap.Opaque(vbucket=1, control=Control.INITIAL_VBUCKET_STREAM, tap_flags=TapFlag.ACK)
    with login(roles, b"admin") as peer:
        answers = peer.send(*CHANGES, begin, *states)
        assert {answer.status for answer in answers} == {Status.NOT_MY_VBUCKET}
        assert len(answers) == 3 + len(states)
        assert [answer.status for answer in peer.send(flush())] == [Status.SUCCESS]
    assert describe(roles) == before


def test_the_takeover_that_made_a_copy_pending_fills_it_and_a_later_one_replaces_it(roles: EmbeddedNode) -> None:
    made(roles, model.VbucketState.REPLICA)
    pending = tap.SetVbucket(vbucket=1, state=VbucketState.PENDING, tap_flags=TapFlag.ACK)
    begin = tap.Opaque(vbucket=1, control=Control.INITIAL_VBUCKET_STREAM, tap_flags=TapFlag.ACK)
    change = raw(0x41, bytes(8), b"", b"taken", b"over")
    with login(roles, b"admin") as first, login(roles, b"admin") as second:
        assert {answer.status for answer in first.send(pending, begin, change)} == {Status.SUCCESS}
        assert [answer.status for answer in second.send(change)] == [Status.NOT_MY_VBUCKET]
        assert {answer.status for answer in second.send(pending, begin, change)} == {Status.SUCCESS}
        assert [answer.status for answer in first.send(change)] == [Status.NOT_MY_VBUCKET]
    active = tap.SetVbucket(vbucket=1, state=VbucketState.ACTIVE, tap_flags=TapFlag.ACK)
    with login(roles, b"admin") as third:
        assert [answer.status for answer in third.send(active)] == [Status.NOT_MY_VBUCKET]
        assert {answer.status for answer in third.send(pending, active)} == {Status.SUCCESS}
    assert describe(roles)[0] is model.VbucketState.ACTIVE
