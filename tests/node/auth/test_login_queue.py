"""Logins in line, and what becomes of open connections when the users change."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_peers import ManualNode, SessionPeer, open_manual_node
from tests.support.node_connections import connections, logged, name_of
from tests.support.node_process import Client, Reply, wait_until
from upriver.node.auth.login_queue import LoginQueue
from upriver.node.auth.sasl import LoginOutcome, SaslExchange
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.embedded import EmbeddedNode, start
from upriver.node.server import add_services
from upriver.wire import AnyRequest, Request, dcp
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    Get,
    GetErrorMap,
    Hello,
    Noop,
    SaslAuth,
    SaslListMechanisms,
    Set,
    Verbosity,
    Version,
)

RIGHT = SaslAuth(mechanism=b"PLAIN", value=b"\0alice\0secret")
WRONG = SaslAuth(mechanism=b"PLAIN", value=b"\0alice\0guess")
ALICE = User.create("alice", "secret", Role.ADMIN, iterations=4096)


@pytest.fixture
def guarded() -> Iterator[ManualNode]:
    """A node without I/O where one has to log in."""
    users = Users()
    users.add(ALICE)
    manual = open_manual_node(users=users)
    with manual.bucket:
        yield manual


def peers_of(manual: ManualNode, count: int, host: str = "10.0.0.1") -> list[SessionPeer]:
    return [SessionPeer(manual.node, f"{host}:{port}") for port in range(1, count + 1)]


def failed(manual: ManualNode) -> int:
    return manual.node.counters.logins_failed


# In line


def test_many_connections_guess_no_faster_than_one(guarded: ManualNode) -> None:
    for peer in peers_of(guarded, 20):
        peer.put(WRONG)
    assert failed(guarded) == 1
    for wait_s, so_far in ((0.25, 2), (0.5, 3), (1.0, 4), (2.0, 5), (2.5, 5), (1.5, 6)):
        guarded.time.pass_by(wait_s)
        assert failed(guarded) == so_far
    assert len(guarded.node.logins) == 14


def test_others_do_not_stand_in_that_line(guarded: ManualNode) -> None:
    for peer in peers_of(guarded, 5):
        peer.put(WRONG)
    (elsewhere,) = peers_of(guarded, 1, "10.0.0.2")
    assert elsewhere.ask(RIGHT).status is Status.SUCCESS
    for number, (same, count) in enumerate((("[2001:db8::1]", 6), ("[2001:db8::2]", 6), ("[2001:db8:0:1::1]", 7))):
        peers_of(guarded, 1, same)[0].put(WRONG)
        assert failed(guarded) - 1 == count - 5, number


def test_a_right_password_waits_for_its_turn_too(guarded: ManualNode) -> None:
    guesser, honest = peers_of(guarded, 2)
    guesser.put(WRONG)
    honest.put(RIGHT, Noop(opaque=5))
    assert honest.receive() == []
    guarded.time.pass_by(0.25)
    assert [answer.status for answer in honest.receive()] == [Status.SUCCESS]
    assert not honest.session.blocked
    assert len(guarded.node.logins) == 0


@pytest.mark.parametrize("leaver", [1, 2, 3])
def test_a_peer_that_leaves_gives_up_its_place(guarded: ManualNode, leaver: int) -> None:
    peers = peers_of(guarded, 4)
    for peer in peers:
        peer.put(WRONG)
    peers[leaver].session.end()
    assert len(guarded.node.logins) == 2
    guarded.time.pass_by(0.25)
    assert failed(guarded) == 2
    guarded.time.pass_by(60)
    assert failed(guarded) == 3
    assert len(guarded.node.logins) == 0
    assert guarded.time.timers == 0


def test_a_login_under_way_counts_even_if_no_peer_waits(guarded: ManualNode, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = []
    monkeypatch.setattr(guarded.time, "beside", lambda work, done: under_way.append((work, done)))
    (peer,) = peers_of(guarded, 1)
    peer.put(WRONG)
    peer.session.end()
    ((work, done),) = under_way
    done(work())
    assert failed(guarded) == 1
    assert guarded.node.throttle.delay_s("10.0.0.1", guarded.time()) > 0
    peer = peers_of(guarded, 1)[0]
    peer.put(RIGHT)
    peer.session.give_up()
    assert peer.session.user is None


def test_an_error_of_ours_does_not_hold_up_the_line(guarded: ManualNode, caplog: pytest.LogCaptureFixture) -> None:
    queue, outcomes = LoginQueue(), list[LoginOutcome]()

    def broken() -> LoginOutcome:
        raise OSError("no entropy")

    queue.enter(guarded.node, "10.0.0.1", broken, outcomes.append)
    queue.enter(guarded.node, "10.0.0.1", lambda: SaslExchange(Users()).step(b""), outcomes.append)
    assert [outcome.why for outcome in outcomes] == ["internal error", "no login is in progress"]
    assert len(queue) == 0
    assert "no entropy" in caplog.text


# Before a login

#: Hello, the three of SASL, the error map and both forms of quit.
OPEN_OPCODES = {0x07, 0x17, 0x1F, 0x20, 0x21, 0x22, 0xFE}


def test_nothing_is_served_before_a_login_but_what_leads_to_one(guarded: ManualNode) -> None:
    (peer,) = peers_of(guarded, 1)
    for request in (
        Noop(),
        Version(),
        Verbosity(level=1),
        Get(key=b"k"),
        AnyRequest(opcode=0x40, extras=bytes(4), key=b"tap"),
        AnyRequest(opcode=0xEE),
        dcp.Open(name=b"stream", flags=dcp.OpenFlag.PRODUCER),
    ):
        peer.refused(request, Status.AUTH_ERROR)
    welcome: tuple[Request, ...] = (Hello(), SaslListMechanisms(), GetErrorMap(version=1), RIGHT, Noop(), Version())
    for each in welcome:
        assert peer.ask(each).status is Status.SUCCESS


@pytest.mark.parametrize("opcode", sorted({*range(256)} - OPEN_OPCODES))
def test_a_peer_without_login_is_not_told_what_is_wrong_with_its_request(guarded: ManualNode, opcode: int) -> None:
    """Whatever it says and in whatever dialect, it is not looked at; the connection stays."""
    (peer,) = peers_of(guarded, 1)
    add_services(guarded.node)
    for extras in (b"", bytes(3), bytes(8), bytes(40)):
        nonsense = AnyRequest(opcode=opcode, extras=extras, key=b"key", value=b"value")
        peer.refused(nonsense, Status.AUTH_ERROR)
    assert peer.ask(RIGHT).status is Status.SUCCESS
    assert peer.ask(Noop()).status is Status.SUCCESS


def users_file(path: Path, *users: User) -> Path:
    with Users.edit(path, create=True) as kept:
        for each in users:
            kept.add(each, replace=True)
    return path


def test_a_peer_that_does_not_log_in_is_closed_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "upriver.node")
    path = users_file(tmp_path / "users.json", ALICE)
    with start(vbuckets=1, users=path, login_s=0.5) as node, Client(node.port) as friend:
        assert friend.ask(RIGHT).status == 0
        with Client(node.port) as stranger:
            assert stranger.ask(Hello()).status == 0
            assert stranger.is_closed()
            assert logged(caplog, "no login") == [f"{name_of(stranger)}: closed: no login within 0.5 s"]
        assert friend.ask(Noop()).status == 0


def test_a_stop_does_not_wait_for_delayed_logins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = users_file(tmp_path / "users.json", ALICE)
    with start(vbuckets=1, users=path) as node:
        throttle = node.node.state.throttle
        for _ in range(8):
            node.call(lambda: throttle.failed("127.0.0.1", node.node.state.clock()))
        clients = [Client(node.port) for _ in range(3)]
        for client in clients:
            client.send(RIGHT)
        wait_until(lambda: node.call(lambda: len(node.node.state.logins)) == 3)
        node.close()
        for client in clients:
            assert client.reply().status == Status.AUTH_ERROR
            assert client.is_closed()
            client.close()
    assert logged(caplog, "cut off") == []


# When the users change


def logged_in(node: EmbeddedNode, *requests: SaslAuth) -> Client:
    client = Client(node.port)
    for request in requests or (RIGHT,):
        assert client.ask(request).status == 0
    return client


def test_a_user_that_was_removed_or_has_another_password_is_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "upriver.node")
    bob = SaslAuth(mechanism=b"PLAIN", value=b"\0bob\0secret")
    carol = SaslAuth(mechanism=b"PLAIN", value=b"\0carol\0secret")
    others = [User.create(name, "secret", Role.READ, iterations=4096) for name in ("bob", "carol")]
    path = users_file(tmp_path / "users.json", ALICE, *others)
    with (
        start(vbuckets=1, users=path) as node,
        logged_in(node) as alice,
        logged_in(node, bob) as removed,
        logged_in(node, carol) as changed,
    ):
        with Users.edit(path) as users:
            users.remove("bob")
            users.add(User.create("carol", "another", Role.READ, iterations=4096), replace=True)
        assert removed.is_closed()
        assert changed.is_closed()
        assert logged(caplog, "closed: ") == [
            f"{name_of(removed)}: closed: user bob was removed",
            f"{name_of(changed)}: closed: the password of user carol was changed",
        ] or sorted(logged(caplog, "closed: ")) == sorted(
            [
                f"{name_of(removed)}: closed: user bob was removed",
                f"{name_of(changed)}: closed: the password of user carol was changed",
            ]
        )
        assert alice.ask(Noop()).status == 0
        assert connections(node) == 1


def test_changed_roles_hold_for_open_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "upriver.node")
    path = users_file(tmp_path / "users.json", ALICE)
    with start(vbuckets=1, users=path) as node, logged_in(node) as plain, logged_in(node) as stream:
        assert stream.ask(dcp.Open(name=b"stream", flags=dcp.OpenFlag.PRODUCER)).status == 0
        plain.set(b"key", b"value")
        users_file(path, User("alice", Role.READ, ALICE.credentials))

        def refused() -> bool:
            reply: Reply = plain.ask(Set(key=b"key", value=b"other"))
            return reply.status == Status.EACCESS

        wait_until(refused)
        assert plain.get(b"key") == b"other" or plain.get(b"key") == b"value"
        assert stream.is_closed()
        why = "the roles of user alice were admin and are read now"
        assert logged(caplog, "roles of user") == [f"{name_of(stream)}: closed: {why}"]
