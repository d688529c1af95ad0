"""Roles hold at all times: a stream does not outlive the roles under which it began, in any dialect."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.command_peers import open_manual_node
from tests.support.node_process import Client
from tests.support.stream_client import StreamClient
from upriver.model import VbucketState
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.embedded import EmbeddedNode, start
from upriver.wire import AnyResponse, Dialect, Message, Request, Response, dcp, memcached, tap, upr, upr_draft3
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import Get, Noop, SaslAuth, Set
from upriver.wire.dialects.tap import Control

USERS = [
    User.create("alice", "secret", Role.ADMIN, iterations=4096),
    User.create("reader", "secret", Role.READ, iterations=4096),
    User.create("streamer", "secret", Role.STREAM | Role.READ | Role.WRITE, iterations=4096),
]
ALL = 2**64 - 1
LOG = (memcached.FailoverEntry(vbucket_uuid=0xABC, seqno=0),)


def login(name: str, password: str = "secret") -> SaslAuth:
    return SaslAuth(mechanism=b"PLAIN", value=f"\0{name}\0{password}".encode(), opaque=77)


@dataclass
class Kind:
    """A kind of stream that the node sends."""

    wire: Dialect
    requests: tuple[Request, ...]
    #: The message that tells that the stream has ended; `upr` and the third draft have none.
    is_end: Callable[[Message], bool] = lambda _: False
    is_told: bool = True


def _opened(flags: int, request: Request) -> tuple[Request, ...]:
    return dcp.Open(name=b"reading", flags=dcp.OpenFlag(flags)), request


def _is_tap_end(message: Message) -> bool:
    return isinstance(message, tap.Opaque) and message.control == Control.CLOSE_TAP_STREAM


KINDS = {
    "dcp": Kind(
        dcp.dcp, _opened(1, dcp.StreamRequest(end_seqno=ALL, opaque=9)), lambda each: isinstance(each, dcp.StreamEnd)
    ),
    "upr": Kind(upr.upr, _opened(1, upr.StreamRequest(end_seqno=ALL, opaque=9)), is_told=False),
    "notifier": Kind(
        dcp.dcp,
        _opened(2, dcp.StreamRequest(end_seqno=ALL, opaque=9)),
        lambda each: isinstance(each, dcp.StreamEnd),
    ),
    "upr_draft3": Kind(upr_draft3.upr_draft3, (upr_draft3.StreamRequest(end_seqno=ALL, opaque=9),), is_told=False),
    "tap": Kind(tap.tap, (tap.Connect(name=b"reading", flags=tap.ConnectFlag.BACKFILL, backfill_date=0),), _is_tap_end),
}


@pytest.fixture
def users_path(tmp_path: Path) -> Path:
    path = tmp_path / "users.json"
    with Users.edit(path, create=True) as users:
        for user in USERS:
            users.add(user)
    return path


@pytest.fixture
def node(users_path: Path) -> Iterator[EmbeddedNode]:
    with start(vbuckets=2, users=users_path) as started:
        yield started


@pytest.fixture
def writer(node: EmbeddedNode) -> Iterator[Client]:
    """Another connection, whose changes the streams would show."""
    with Client(node.port) as client:
        assert client.ask(login("alice")).status == 0
        client.set(b"before", b"1")
        yield client


def streaming(node: EmbeddedNode, name: str, user: str = "alice") -> StreamClient:
    """A connection of this user with a stream that has sent the first change, where its kind sends changes."""
    kind = KINDS[name]
    client = StreamClient(node)
    answer = client.ask(login(user))
    assert isinstance(answer, Response)
    assert not answer.status
    client.wire = kind.wire
    client.send(*kind.requests)
    if name == "notifier":
        answers = [client.next(), client.next()]
        assert [getattr(each, "status", None) for each in answers] == [0, 0], answers
    else:
        wanted = next(each for each in iter(client.next, None) if getattr(each, "key", b"") == b"before")
        assert wanted.value == b"1"  # type: ignore[attr-defined]
    return client


def rest(client: StreamClient) -> list[Message]:
    """Everything that comes until the connection is closed."""
    try:
        return list(iter(client.next, None))
    except ConnectionResetError:
        return []


def keys(messages: list[Message]) -> list[bytes]:
    return [message.key for message in messages if getattr(message, "by_seqno", 0) or isinstance(message, tap.Mutation)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("again", "status", "then"),
    [
        (login("reader"), Status.SUCCESS, Status.SUCCESS),
        (login("alice", "wrong"), Status.AUTH_ERROR, Status.AUTH_ERROR),
    ],
    ids=["as a reader", "in vain"],
)
def test_a_new_login_ends_the_streams_of_the_old_one(
    node: EmbeddedNode, writer: Client, name: str, again: SaslAuth, status: Status, then: Status
) -> None:
    with streaming(node, name) as client:
        client.send(again)
        seen: list[Message] = []
        for message in iter(client.next, None):
            seen.append(message)
            if isinstance(message, Response) and message.opaque == again.opaque:
                assert message.status is status
                break
        assert any(map(KINDS[name].is_end, seen)) is KINDS[name].is_told
        writer.set(b"after", b"2")
        client.send(Get(key=b"after", opaque=5))
        answer = client.next()
        assert isinstance(answer, Response)
        assert (answer.opaque, answer.status) == (5, then)
        # The same requests, under the roles of now.
        client.send(KINDS[name].requests[0])
        refused = client.next()
        assert isinstance(refused, Response)
        assert refused.status is (Status.EACCESS if then is Status.SUCCESS else Status.AUTH_ERROR)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("change", ["removed", "reduced"])
def test_a_user_who_is_removed_or_loses_a_role_gets_nothing_more(
    node: EmbeddedNode, writer: Client, users_path: Path, name: str, change: str
) -> None:
    with streaming(node, name, "streamer") as client:
        with Users.edit(users_path) as users:
            if change == "removed":
                users.remove("streamer")
            else:
                users.add(User("streamer", Role.READ, USERS[2].credentials), replace=True)
        seen: list[Message] = []
        for message in iter(client.next, None):
            seen.append(message)
            if KINDS[name].is_end(message):
                break
        writer.set(b"after", b"2")
        seen += rest(client)
        assert any(map(KINDS[name].is_end, seen)) is KINDS[name].is_told
        assert keys(seen) == []


def test_the_same_user_may_stream_again_after_a_new_login(node: EmbeddedNode, writer: Client) -> None:
    with streaming(node, "dcp") as client:
        client.send(login("streamer"))
        assert isinstance(client.next(), dcp.StreamEnd)
        assert client.next() is not None
        client.send(*KINDS["dcp"].requests)
        writer.set(b"after", b"2")
        assert client.changes(2) == {b"before": b"1", b"after": b"2"}


def test_a_takeover_ends_when_its_user_is_no_administrator_any_more(
    node: EmbeddedNode, writer: Client, users_path: Path
) -> None:
    """The role *stream* remains, but a takeover needs *admin*."""
    for number in range(2000):
        writer.set(b"%d" % number, b"x" * 1000)
    with StreamClient(node) as client:
        client.ask(login("alice"))
        client.send(dcp.Open(name=b"taking", flags=dcp.OpenFlag.PRODUCER))
        client.send(dcp.Control(key=b"connection_buffer_size", value=b"1024"))
        client.send(dcp.StreamRequest(end_seqno=ALL, opaque=9, flags=dcp.StreamFlag.TAKEOVER))
        with Users.edit(users_path) as users:
            users.add(User("alice", Role.STREAM, USERS[0].credentials), replace=True)
        rest(client)
        assert node.call(lambda: node.bucket.vbucket(0).state) is VbucketState.ACTIVE
        assert node.call(lambda: list(node.bucket.vbucket(0).cursors)) == []


# Connections that feed the node


def feeding(node: EmbeddedNode) -> tuple[StreamClient, int]:
    """An administrator's connection that feeds vbucket 1, which is a replica, and the opaque of its stream."""
    node.call(lambda: node.bucket.vbucket(1).set_state(VbucketState.REPLICA))
    client = StreamClient(node)
    client.ask(login("alice"))
    client.ask(dcp.Open(name=b"feeding", flags=dcp.OpenFlag(0)))
    client.send(upr.AddStream(vbucket=1, opaque=1))
    request = next(each for each in iter(client.next, None) if isinstance(each, dcp.StreamRequest))
    answer = client.ask(upr.StreamRequestResponse(log=LOG, opaque=request.opaque))
    assert isinstance(answer, upr.AddStreamResponse)
    client.send(*fed(request.opaque, 1))
    assert client.ask(Noop()).opaque == 0  # type: ignore[attr-defined]
    assert high_seqno(node) == 1
    return client, request.opaque


def fed(opaque: int, seqno: int) -> list[Message]:
    return [
        dcp.SnapshotMarker(vbucket=1, start_seqno=seqno, end_seqno=seqno, opaque=opaque, flags=dcp.MarkerFlag.MEMORY),
        dcp.Mutation(vbucket=1, by_seqno=seqno, key=b"fed", value=b"%d" % seqno, cas=seqno, opaque=opaque),
    ]


def high_seqno(node: EmbeddedNode) -> int:
    return node.call(lambda: node.bucket.vbucket(1).high_seqno)


@pytest.mark.parametrize("together", [True, False])
def test_a_reader_on_an_administrators_connection_feeds_no_replica(node: EmbeddedNode, together: bool) -> None:
    client, opaque = feeding(node)
    with client:
        if together:
            client.send(login("reader"), *fed(opaque, 2))
        else:
            client.ask(login("reader"))
            client.send(*fed(opaque, 2))
        rest(client)  # its packets belong to no stream, so the connection is closed
    assert high_seqno(node) == 1


COPY_CHANGES: list[Request] = [
    dcp.Open(name=b"feeding", flags=dcp.OpenFlag(0)),
    tap.Mutation(vbucket=1, key=b"foreign", value=b"1"),
    tap.Delete(vbucket=1, key=b"mine"),
    tap.Flush(),
    tap.SetVbucket(vbucket=1, state=memcached.VbucketState.ACTIVE),
    tap.Opaque(vbucket=1, control=Control.INITIAL_VBUCKET_STREAM),
    memcached.SetVbucket(vbucket=1, state=memcached.VbucketState.ACTIVE),
    memcached.DeleteVbucket(vbucket=1),
    memcached.Flush(),
]
WRITES: list[Request] = [
    Set(vbucket=1, key=b"foreign", value=b"1"),
    memcached.SetWithMeta(vbucket=1, key=b"foreign", value=b"1", rev_seqno=9, item_cas=9),
    memcached.DeleteWithMeta(vbucket=1, key=b"mine", rev_seqno=9, item_cas=9),
]


@pytest.mark.parametrize("state", [VbucketState.REPLICA, VbucketState.PENDING])
def test_in_every_dialect_a_copy_is_changed_by_administrators_only(node: EmbeddedNode, state: VbucketState) -> None:
    vbucket = node.call(lambda: node.bucket.vbucket(1))
    node.call(vbucket.set, b"mine", b"1")
    node.call(vbucket.set_state, state)

    def found() -> tuple[object, ...]:
        return node.call(
            lambda: (vbucket.state, vbucket.failover_log, vbucket.high_seqno, list(vbucket.table.live_keys()))
        )

    before = found()
    for user, requests, refusal in (
        ("streamer", COPY_CHANGES, Status.EACCESS),
        ("streamer", WRITES, Status.NOT_MY_VBUCKET),
        ("alice", WRITES, Status.NOT_MY_VBUCKET),
    ):
        for request in requests:
            with StreamClient(node, wire=dcp.dcp if isinstance(request, dcp.Open) else tap.tap) as client:
                client.ask(login(user))
                answer = client.ask(request)
                assert isinstance(answer, Response)
                assert answer.status is refusal, request
    assert found() == before


def test_a_former_administrator_feeds_no_replica(node: EmbeddedNode, users_path: Path) -> None:
    client, opaque = feeding(node)
    with client:
        with Users.edit(users_path) as users:
            users.add(User("alice", Role.STREAM | Role.WRITE, USERS[0].credentials), replace=True)
        assert rest(client) == []
        with contextlib.suppress(OSError):  # the node has closed the connection
            client.send(*fed(opaque, 2))
    assert high_seqno(node) == 1


def test_a_stream_that_was_being_added_is_refused(node: EmbeddedNode) -> None:
    node.call(lambda: node.bucket.vbucket(1).set_state(VbucketState.REPLICA))
    with StreamClient(node) as client:
        client.ask(login("alice"))
        client.ask(dcp.Open(name=b"feeding", flags=dcp.OpenFlag(0)))
        client.send(upr.AddStream(vbucket=1, opaque=1), login("reader"))
        answers = [each for each in client.until(memcached.SaslAuthResponse) if isinstance(each, AnyResponse)]
        assert [(each.opcode, each.status) for each in answers if each.opaque == 1] == [(0x51, Status.KEY_ENOENT)]


def test_a_reader_on_an_administrators_connection_sends_no_tap_changes(node: EmbeddedNode, writer: Client) -> None:
    with StreamClient(node, wire=tap.tap) as client:
        client.ask(login("alice"))
        client.send(tap.Mutation(key=b"tapped", value=b"1"), Noop(opaque=3))
        assert getattr(client.next(), "opaque", None) == 3
        client.send(login("reader"), tap.Mutation(key=b"tapped", value=b"2", opaque=4), Get(key=b"tapped", opaque=5))
        answers = [client.next() for _ in range(3)]
        assert [getattr(each, "status", None) for each in answers] == [0, Status.EACCESS, 0]
        assert answers[2].value == b"1"  # type: ignore[union-attr]
    assert writer.ask(Set(key=b"tapped", value=b"3")).status == 0


def test_a_user_who_changes_during_a_login_is_taken_as_it_is_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The password is checked in a thread; the users may change before the outcome is carried out."""
    users = Users()
    for user in USERS[:2]:
        users.add(user)
    manual = open_manual_node(users=users)
    with manual.bucket:
        finish: list[Callable[[], object]] = []

        def beside(work: Callable[[], object], done: Callable[[object], object]) -> None:
            outcome = work()
            finish.append(lambda: done(outcome))

        monkeypatch.setattr(manual.time, "beside", beside)
        reduced, removed = manual.peer(), manual.peer()
        reduced.put(login("alice"))
        users.add(User("alice", Role.READ, USERS[0].credentials), replace=True)
        finish.pop()()
        assert reduced.session.user is not None
        assert reduced.session.user.roles is Role.READ
        removed.put(login("reader"))
        users.remove("reader")
        finish.pop()()
        assert removed.session.user is None
        assert [answer.status for answer in removed.receive()] == [Status.AUTH_ERROR]
