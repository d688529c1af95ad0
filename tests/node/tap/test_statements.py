"""Statements of the TAP text, each over a real socket."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.command_peers import SocketPeer
from tests.support.node_process import PATIENCE_S, Client, wait_until
from tests.support.tap_peer import (
    ACK,
    BACKFILL,
    CHECKPOINT,
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
from upriver.wire import Message, Response, memcached, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    CreateCheckpoint,
    DeregisterTapClient,
    Get,
    SaslAuth,
    SetVbucket,
    VbucketState,
)
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


@pytest.mark.shows("tap:backfill-future", "tap:use-replication")
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


@pytest.mark.shows("tap:values-optional", "tap:keys-preference", "tap:mix")
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
    for client in node.call(lambda: list(node.node.state.tap.clients if node.node.state.tap else ())):
        assert writer.ask(DeregisterTapClient(name=client.name.encode())).status == 0


# Engine-private sections


def raw(
    opcode: int, extras: bytes = b"", private: bytes = b"", key: bytes = b"", value: bytes = b"", vbucket: int = 1
) -> bytes:
    """A TAP message that asks for an acknowledgement, with these bytes of engine-private data."""
    extras = len(private).to_bytes(2, "big") + b"\0\1\xff\0\0\0" + extras
    body = extras + private + key + value
    return HEADER.pack(0x80, opcode, len(key), len(extras), 0, vbucket, len(body), 7, 0) + body


@pytest.mark.shows("tap:response-private-any", "tap:flush-private", "tap:delete-private")
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


@pytest.mark.shows("tap:opaque-printed")
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
    assert sum("unknown control message 0xffffffff" in line for line in caplog.messages) == 1


def test_the_log_has_each_unknown_control_once_and_not_too_many_of_them(
    node: EmbeddedNode, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        for number in range(30):
            with SocketPeer(node.host, node.port) as peer:
                answers = peer.send(raw(0x44, private=(1000 + number).to_bytes(4, "big")))
            assert [answer.status for answer in answers] == [Status.SUCCESS]
    found = [line for line in caplog.messages if "unknown control message" in line]
    assert len(found) == len(set(found)) == 16


# Backfill


@pytest.mark.shows("tap:opaque-initial", "tap:opaque-close-backfill")
@pytest.mark.parametrize("date", [0, 1, 5], ids=["everything", "a date", "another date"])
def test_every_backfill_is_announced_and_closed(node: EmbeddedNode, writer: Client, date: int) -> None:
    writer.set(b"old", b"v", vbucket=1)
    with Listener(node.port, connect_with(b"node1", BACKFILL | LIST | ACK, date, (1,))) as listener:
        found = list(listener.until(lambda message: brief([message]) == ["#close_backfill"]))
    assert brief(found) == ["#enable_auto_nack", "#initial_vbucket_stream", "old=v", "#close_backfill"]
    assert found[1].cas == date  # type: ignore[attr-defined]


def test_a_copy_keeps_what_is_older_than_the_date_of_a_backfill(node: EmbeddedNode, writer: Client) -> None:
    with start(vbuckets=VBUCKETS, initial_vbuckets="none") as copy, SocketPeer(copy.host, copy.port) as peer:
        copy.call(copy.bucket.create_vbucket, 1, model.VbucketState.REPLICA)
        peer.send(raw(0x41, bytes(8), b"", b"older", b"v"))
        writer.set(b"new", b"v", vbucket=1)
        with Relay(node.port, copy.port, connect_with(b"dated", BACKFILL | LIST | ACK, 5, (1,))):
            wait_until(lambda: _count(copy) == 2, "the new one has come, and the older one has stayed")
        with Relay(node.port, copy.port, connect_with(b"full", BACKFILL | LIST | ACK, 0, (1,))):
            wait_until(lambda: _count(copy) == 1, "everything was sent, so the older one is gone")


# Checkpoints


def checkpointed(node: EmbeddedNode, writer: Client, *checkpoints: tuple[bytes, ...]) -> list[int]:
    """Write keys into checkpoints of vbucket 1; return their ids."""
    vbucket, ids = node.bucket.vbucket(1), []
    for number, keys in enumerate(checkpoints):
        if number:
            assert writer.ask(CreateCheckpoint(vbucket=1)).status == 0
        for key in keys:
            writer.set(key, b"v", vbucket=1)
        ids.append(node.call(lambda: vbucket.checkpoints.open_id))
    return ids


def resumed(node: EmbeddedNode, writer: Client, checkpoint: int, flags: int = ACK, name: bytes = b"node1") -> list[str]:
    """What a client gets that has this checkpoint, up to a new change."""
    held = (tap.VbucketCheckpoint(vbucket=1, checkpoint=checkpoint),)
    with Listener(node.port, connect_with(name, flags | LIST | CHECKPOINT, 0, (1,), held)) as listener:
        listener.next()
        writer.set(b"last", b"v", vbucket=1)
        return brief(list(listener.until(brings(b"last"))))


@pytest.mark.shows("tap:opaque-initial-behind")
@pytest.mark.parametrize("flags", [0, ACK, ACK | BACKFILL])
def test_a_checkpoint_that_we_have_is_continued_without_a_backfill(
    node: EmbeddedNode, writer: Client, flags: int
) -> None:
    ids = checkpointed(node, writer, (b"a", b"b"), (b"c",), (b"d",))
    for place, expected in ((2, ["d"]), (1, ["c", "d"]), (0, ["a", "b", "c", "d"])):
        found = resumed(node, writer, ids[place], flags, b"node%d" % place)
        assert "#initial_vbucket_stream" not in found
        assert "#close_backfill" not in found
        assert [text[0] for text in found if "=" in text and text != "last=v"] == expected


@pytest.mark.shows("tap:opaque-initial-behind")
@pytest.mark.parametrize("which", ["older", "newer", "flushed", "purged"])
def test_a_checkpoint_that_we_do_not_have_is_a_backfill_of_everything(
    node: EmbeddedNode, writer: Client, which: str
) -> None:
    ids = checkpointed(node, writer, (b"a", b"gone"), (b"b",))
    claimed = {"older": ids[0] - 1, "newer": ids[-1] + 1}.get(which, ids[0])
    if which == "flushed":
        assert writer.ask(memcached.Flush()).status == 0
        writer.set(b"a", b"v", vbucket=1)
        writer.set(b"b", b"v", vbucket=1)
    elif which == "purged":
        writer.ask(memcached.Delete(key=b"gone", vbucket=1))
        node.call(lambda: setattr(node.bucket.vbucket(1).table, "purge_seqno", node.bucket.vbucket(1).high_seqno))
    found = resumed(node, writer, claimed)
    assert "#initial_vbucket_stream" in found
    assert {"a=v", "b=v"} <= set(found)


@pytest.mark.shows("tap:opaque-initial-behind")
@pytest.mark.parametrize("how", ["moved", "restarted"])
def test_a_checkpoint_of_another_copy_is_a_backfill_of_everything(node: EmbeddedNode, writer: Client, how: str) -> None:
    """Each copy has closed as many checkpoints as the other, and their ids name different places."""
    held = checkpointed(node, writer, (b"a",), (b"b",), (b"c", b"d"))
    with start(vbuckets=VBUCKETS, initial_vbuckets="none" if how == "moved" else "all") as other:
        if how == "moved":
            relay = Relay(node.port, other.port, connect_with(b"mover", TAKEOVER | LIST | ACK, 0, (1,)))
            wait_until(lambda: relay.ended, "the vbucket is handed over")
            relay.join()
        with Client(other.port) as there:
            given = checkpointed(other, there, (b"e",), (b"f",), (b"g",))
            everything = {"e=v", "f=v", "g=v"} | ({"a=v", "b=v", "c=v", "d=v"} if how == "moved" else set())
            for place, checkpoint in enumerate(held):
                found = resumed(other, there, checkpoint, name=b"client%d" % place)
                assert "#initial_vbucket_stream" in found
                assert everything <= set(found)
            assert "#initial_vbucket_stream" not in resumed(other, there, given[-1], name=b"its own")


# Clients that are gone


def test_a_client_that_acknowledges_stays_and_one_that_does_not_is_closed() -> None:
    with start(vbuckets=1, tap_noop_interval_s=0.1) as node, Client(node.port) as writer:
        with Listener(node.port, connect_with(b"idle", BACKFILL | ACK, 0)) as idle:
            noops = 0
            while noops < 5:  # it never answers one
                message = idle.next()
                assert message is not None, "the node closed the connection"
                noops += isinstance(message, memcached.Noop)
            writer.set(b"k", b"v", vbucket=0)
            list(idle.until(brings(b"k")))
        with socket.create_connection((node.host, node.port), timeout=20) as silent:
            silent.sendall(connect_with(b"silent", BACKFILL | ACK, 0).encode())
            wait_until(lambda: not silent.recv(1 << 16), "the node keeps the connection", 10)


# Flush


def flush(private: bytes = b"") -> bytes:
    return raw(0x43, b"", private)


@pytest.mark.shows("tap:flush-replicates")
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
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(start(vbuckets=64)) for _ in range(2))
        here, there = (stack.enter_context(Client(node.port)) for node in (first, second))
        peer = stack.enter_context(SocketPeer(first.host, first.port))
        for vbucket in range(64):
            here.set(b"old", b"v", vbucket=vbucket)
        stack.enter_context(Relay(first.port, second.port, connect_with(b"next", BACKFILL | ACK, 0)))
        wait_until(lambda: _count(second) == 64, "the next node has everything")
        peer.send(flush())
        wait_until(lambda: _count(second) == 0, "the next node is flushed")
        for vbucket in range(64):
            there.set(b"mine", b"v", vbucket=vbucket)
        for vbucket in range(64):
            here.set(b"last", b"v", vbucket=vbucket)
        wait_until(lambda: _count(second) >= 128, "both have come")
        assert all(there.get(b"mine", vbucket=vbucket) == b"v" for vbucket in range(64))


@pytest.mark.shows("tap:flush-all")
def test_a_flush_empties_everything_that_its_sender_may_write(node: EmbeddedNode, writer: Client) -> None:
    for vbucket in range(VBUCKETS):
        writer.set(b"k", b"v", vbucket=vbucket)
    with SocketPeer(node.host, node.port) as peer:
        refused = peer.send(raw(0x45, private=b"\0\0\0\2", vbucket=3))  # it stays active
        stored = peer.send(raw(0x41, bytes(8), b"", b"k", b"w", vbucket=1))
        flushed = peer.send(flush())
    assert [answer.status for answer in refused + stored + flushed] == [Status.KEY_EEXISTS, 0, 0]
    left = [vbucket for vbucket in range(VBUCKETS) if writer.ask(Get(key=b"k", vbucket=vbucket)).status == 0]
    assert left == [3]


@pytest.mark.shows("tap:flush-all")
def test_two_nodes_that_feed_each_other_keep_what_was_written_after_both_were_flushed() -> None:
    """The flush of the first reaches the second late, after the second's own flush and a new write there."""
    written = threading.Event()

    def hold(message: Message) -> None:
        if isinstance(message, tap.Flush):
            assert written.wait(PATIENCE_S)

    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(start(vbuckets=2, initial_vbuckets=str(number))) for number in (0, 1)]
        clients = [stack.enter_context(Client(node.port)) for node in nodes]
        for number, client in enumerate(clients):
            assert client.ask(SetVbucket(vbucket=1 - number, state=VbucketState.REPLICA)).status == 0
            client.set(b"old", b"v", vbucket=number)
        for number, node in enumerate(nodes):
            request = connect_with(b"copy", BACKFILL | LIST | ACK, 0, (number,))
            stack.enter_context(Relay(node.port, nodes[1 - number].port, request, hold))
        wait_until(lambda: [_count(node) for node in nodes] == [2, 2], "both have everything")
        for client in clients:
            assert client.ask(memcached.Flush()).status == 0
        clients[1].set(b"new", b"v", vbucket=1)
        written.set()
        wait_until(lambda: [_count(node) for node in nodes] == [1, 1], "both are flushed, and have the new one")
        clients[0].set(b"last", b"v", vbucket=0)
        wait_until(lambda: [_count(node) for node in nodes] == [2, 2], "what follows the flush has come")
        assert clients[1].get(b"new", vbucket=1) == b"v"


def test_a_client_of_future_changes_gets_a_flush_as_one_message() -> None:
    with (
        start(vbuckets=1024) as node,
        Client(node.port) as writer,
        Listener(node.port, connect_with(b"cache", BACKFILL, FUTURE)) as listener,
    ):
        wait_until(lambda: node.call(lambda: len(list(node.node.state.tap or ()))), "the client is connected")
        writer.set(b"old", b"v", vbucket=7)
        list(listener.until(brings(b"old")))
        assert writer.ask(memcached.Flush()).status == 0
        writer.set(b"new", b"v", vbucket=900)
        assert brief(list(listener.until(brings(b"new")))) == ["flush", "new=v"]


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
