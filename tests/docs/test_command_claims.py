"""The errors that the pages of the memcached commands and of TAP list, against a node on a real socket."""

import itertools
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scramp import ScramClient

from tests.support.failing_disk import FailingDisk
from tests.support.node_process import wait_until
from tests.support.sample_users import ALICE, users_with
from tests.support.stream_client import StreamClient
from upriver.engine import Bucket
from upriver.model import VBUCKETS_MAX
from upriver.node import EmbeddedNode, start
from upriver.wire import Message, Request, Response, Status, memcached, tap
from upriver.wire.dialects.memcached import VbucketState
from upriver.wire.dialects.tap import ConnectFlag, Control, TapFlag

VBUCKETS = 8
ABSENT = VBUCKETS + 1
NO_CREATION = 0xFFFFFFFF
LARGE = bytes(20 * 2**20 + 1)
#: Each is higher than those of all keys so far, and of those that are created after a deletion.
REVISIONS = itertools.count(2**40, 2**20)
S = Status
Asked = Callable[["Stage", type[Request]], Status]


@dataclass
class Stage:
    """A node that answers writes when they are on disk, its disk, a client, and a key that no other check uses."""

    node: EmbeddedNode
    disk: FailingDisk
    client: StreamClient
    key: bytes

    def ask(self, request: Request) -> Status:
        answer = self.client.ask(request)
        assert isinstance(answer, Response), answer
        return answer.status

    def store(self, value: bytes = b"5") -> None:
        assert self.ask(memcached.Set(key=self.key, value=value)) is S.SUCCESS

    def lock(self, *, xerror: bool) -> None:
        if xerror:
            self.client.ask(memcached.Hello(agent=b"a", features=(memcached.Feature.XERROR,)))
        self.store()
        assert self.ask(memcached.GetLocked(key=self.key)) is S.SUCCESS

    def request(self, kind: type[Request], **given: Any) -> Request:
        """A request for the key with everything that the kind needs."""
        names = {field.name for field in kind.layout.fields}
        needed: dict[str, Any] = {"key": self.key, "state": VbucketState.ACTIVE, "seqno": 2**40, "vbucket_uuid": 5}
        if issubclass(kind, memcached.SetWithMeta):
            needed |= {"rev_seqno": next(REVISIONS), "item_cas": 2**62}
        if kind is memcached.Observe:
            needed["keys"] = (memcached.ObservedKey(vbucket=given.get("vbucket", 0), key=self.key),)
        return kind(**{name: value for name, value in needed.items() if name in names} | given)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedNode, FailingDisk]]:
    directory: Path = tmp_path_factory.mktemp("claims")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("upriver.engine.flusher.RETRY_S", 0.01)
        with start(data=str(directory / "data"), vbuckets=VBUCKETS, ack="disk") as node:
            yield node, FailingDisk(node, patch)


@pytest.fixture
def stage(opened: tuple[EmbeddedNode, FailingDisk], request: pytest.FixtureRequest) -> Iterator[Stage]:
    node, disk = opened
    with StreamClient(node, wire=tap.tap) as client:
        yield Stage(node, disk, client, request.node.name.encode()[-200:])
        disk.work()


# What a client has to do to be refused


def absent_vbucket(stage: Stage, kind: type[Request]) -> Status:
    return stage.ask(stage.request(kind, vbucket=ABSENT))


def absent_key(stage: Stage, kind: type[Request]) -> Status:
    given: dict[str, Any] = {}
    if issubclass(kind, memcached.Set | memcached.SetWithMeta) and kind is not memcached.Replace:
        given["cas"] = 5
    if issubclass(kind, memcached.Increment):
        given["expiration"] = NO_CREATION
    return stage.ask(stage.request(kind, **given))


def other_version(stage: Stage, kind: type[Request]) -> Status:
    stage.store()
    if issubclass(kind, memcached.SetWithMeta):
        return stage.ask(stage.request(kind, rev_seqno=1, item_cas=1))
    return stage.ask(stage.request(kind, cas=0 if kind is memcached.Add else 5))


def large_value(stage: Stage, kind: type[Request]) -> Status:
    if kind is not memcached.Add:
        stage.store()
    return stage.ask(stage.request(kind, value=LARGE))


def locked(stage: Stage, kind: type[Request]) -> Status:
    stage.lock(xerror=True)
    return stage.ask(stage.request(kind, cas=5 if kind in (memcached.Add, memcached.Unlock) else 0))


def locked_for_an_old_client(stage: Stage, kind: type[Request]) -> Status:
    stage.lock(xerror=False)
    return stage.ask(stage.request(kind, cas=5))


def not_locked(stage: Stage, kind: type[Request]) -> Status:
    stage.client.ask(memcached.Hello(agent=b"a", features=(memcached.Feature.XERROR,)))
    stage.store()
    return stage.ask(stage.request(kind, cas=5))


def text(stage: Stage, kind: type[Request]) -> Status:
    stage.store(b"words")
    return stage.ask(stage.request(kind))


def with_ledger(stage: Stage, name: str, value: object, work: Callable[[], Status]) -> Status:
    """Work while the bucket has another limit."""
    bucket: Bucket = stage.node.bucket
    before = stage.node.call(getattr, bucket.ledger, name)
    stage.node.call(setattr, bucket.ledger, name, value)
    try:
        return work()
    finally:
        stage.node.call(setattr, bucket.ledger, name, before)


def refusing_disk(stage: Stage, kind: type[Request]) -> Status:
    if kind is not memcached.Add:
        stage.store()
    return with_ledger(stage, "refusal", "the disk is full", lambda: stage.ask(stage.request(kind)))


def failing_disk(stage: Stage, kind: type[Request]) -> Status:
    if kind is not memcached.Add:
        stage.store()
    stage.disk.failures = 10**9
    return stage.ask(stage.request(kind))


def failing_disk_of_a_vbucket(stage: Stage, kind: type[Request]) -> Status:
    assert stage.ask(memcached.SetVbucket(vbucket=7, state=VbucketState.DEAD)) is S.SUCCESS
    stage.disk.failures = 10**9
    return stage.ask(stage.request(kind, vbucket=7))


def full_memory(stage: Stage, kind: type[Request]) -> Status:
    """Until everything that can be evicted is gone, the refusal is temporary."""
    if kind is not memcached.Add:
        stage.store()
    given = {"expiration": 1000} if kind in (memcached.Touch, memcached.Gat) else {}

    def ask() -> Status:
        wait_until(lambda: stage.ask(stage.request(kind, **given)) is S.ENOMEM, "there is no memory")
        return S.ENOMEM

    return with_ledger(stage, "quota_bytes", 1, ask)


def once(request: Request) -> Asked:
    return lambda stage, _: stage.ask(request)


def twice(kind: type[Request], undo: type[Request]) -> Asked:
    def check(stage: Stage, _: type[Request]) -> Status:
        if kind is memcached.StopPersistence:
            assert stage.ask(kind()) is S.SUCCESS
        try:
            return stage.ask(kind())
        finally:
            if kind is memcached.StopPersistence:
                assert stage.ask(undo()) is S.SUCCESS

    return check


def half_closed(stage: Stage, kind: type[Request]) -> Status:
    """A client that cannot be told later is told at once."""
    stage.client.send(stage.request(kind))
    stage.client.socket.shutdown(socket.SHUT_WR)
    answer = stage.client.next()
    assert isinstance(answer, Response)
    return answer.status


def logged_in(*requests: Request) -> Asked:
    """The answer of a node that has users to the last of these."""

    def check(stage: Stage, _: type[Request]) -> Status:
        path = Path(str(stage.node.node.options.data)).with_name("users.json")
        users_with(ALICE).save(path)
        with start(vbuckets=2, users=str(path)) as node, StreamClient(node) as client:
            answers = [client.ask(request) for request in requests]
        assert isinstance(answers[-1], Response)
        return answers[-1].status

    return check


SCRAM = memcached.SaslAuth(
    mechanism=b"SCRAM-SHA-256", value=ScramClient(["SCRAM-SHA-256"], "alice", "wrong").get_client_first().encode()
)


# TAP


def connect_without_its_value(stage: Stage, _: type[Request]) -> Status:
    packet = bytearray(tap.Connect(name=b"me").encode())
    packet[24:28] = int(ConnectFlag.BACKFILL).to_bytes(4, "big")
    stage.client.socket.sendall(packet)
    return _status(stage.client.next())


def connect_twice(stage: Stage, _: type[Request]) -> Status:
    stage.client.send(tap.Connect(name=b"me"), tap.Connect(name=b"me"))
    return next(_status(each) for each in iter(stage.client.next, None) if isinstance(each, Response))


def no_hops(stage: Stage, kind: type[Request]) -> Status:
    return stage.ask(stage.request(kind, ttl=0))


def failing_disk_of_a_peer(stage: Stage, kind: type[Request]) -> Status:
    """Messages that change nothing wait for those before them."""
    stage.disk.failures = 10**9
    change = tap.Mutation(key=stage.key, rev_seqno=next(REVISIONS), cas=2**62)
    stage.client.send(change, stage.request(kind, tap_flags=TapFlag.ACK))
    return _status(stage.client.next())


def full_memory_of_a_peer(stage: Stage, kind: type[Request]) -> Status:
    def ask() -> Status:
        wait_until(
            lambda: stage.ask(stage.request(kind, rev_seqno=next(REVISIONS), cas=2**62)) is S.ENOMEM, "no memory"
        )
        return S.ENOMEM

    return with_ledger(stage, "quota_bytes", 1, ask)


def copy_of_what_is_active(stage: Stage, kind: type[Request]) -> Status:
    refused = stage.ask(tap.SetVbucket(state=VbucketState.REPLICA))
    return refused if kind is tap.SetVbucket else stage.ask(stage.request(kind))


def _status(answer: Message | None) -> Status:
    assert isinstance(answer, Response), answer
    return answer.status


#: What leads to a status, whatever the request.
BY_STATUS: dict[Status, Asked] = {
    S.KEY_ENOENT: absent_key,
    S.KEY_EEXISTS: other_version,
    S.E2BIG: large_value,
    S.NOT_STORED: absent_key,
    S.DELTA_BADVAL: text,
    S.NOT_MY_VBUCKET: absent_vbucket,
    S.LOCKED: locked,
    S.ENOMEM: full_memory,
    S.ETMPFAIL: refusing_disk,
    S.SYNC_WRITE_AMBIGUOUS: failing_disk,
}
TAKEN = (tap.Mutation, tap.Delete, tap.Flush, tap.Opaque, tap.SetVbucket, tap.CheckpointStart, tap.CheckpointEnd)
#: Where a request needs something else.
CHECKS: dict[tuple[type[Message], Status], Asked] = {
    (memcached.GetLocked, S.ETMPFAIL): locked_for_an_old_client,
    (memcached.Unlock, S.ETMPFAIL): locked_for_an_old_client,
    (memcached.Unlock, S.NOT_LOCKED): not_locked,
    (memcached.Stat, S.KEY_ENOENT): once(memcached.Stat(key=b"of nothing")),
    (memcached.SaslAuth, S.AUTH_ERROR): logged_in(memcached.SaslAuth(mechanism=b"PLAIN", value=b"\0alice\0wrong")),
    (memcached.SaslAuth, S.AUTH_CONTINUE): logged_in(SCRAM),
    (memcached.SaslStep, S.AUTH_ERROR): logged_in(SCRAM, memcached.SaslStep(mechanism=b"SCRAM-SHA-256", value=b"p=")),
    (memcached.SetVbucket, S.EINVAL): once(memcached.SetVbucket(state=VbucketState(77))),
    (memcached.SetVbucket, S.NOT_MY_VBUCKET): once(
        memcached.SetVbucket(vbucket=VBUCKETS_MAX, state=VbucketState.ACTIVE)
    ),
    (memcached.SetVbucket, S.ETMPFAIL): failing_disk_of_a_vbucket,
    (memcached.DeleteVbucket, S.EINVAL): once(memcached.DeleteVbucket(vbucket=0)),
    (memcached.DeleteVbucket, S.ETMPFAIL): failing_disk_of_a_vbucket,
    (memcached.DeregisterTapClient, S.KEY_ENOENT): once(memcached.DeregisterTapClient(name=b"unknown")),
    (memcached.StopPersistence, S.EINVAL): twice(memcached.StopPersistence, memcached.StartPersistence),
    (memcached.StartPersistence, S.EINVAL): twice(memcached.StartPersistence, memcached.StopPersistence),
    (memcached.SeqnoPersistence, S.ETMPFAIL): half_closed,
    (memcached.SetWithMeta, S.EINVAL): lambda stage, kind: stage.ask(stage.request(kind, rev_seqno=0)),
    (memcached.DeleteWithMeta, S.EINVAL): lambda stage, kind: stage.ask(stage.request(kind, item_cas=0)),
    (memcached.SelectBucket, S.KEY_ENOENT): once(memcached.SelectBucket(name=b"another")),
    (memcached.SetClusterConfig, S.EINVAL): once(memcached.SetClusterConfig(config=b"{")),
    (memcached.GetErrorMap, S.KEY_ENOENT): once(memcached.GetErrorMap(version=0)),
    (tap.Connect, S.EINVAL): connect_without_its_value,
    (tap.Connect, S.NOT_MY_VBUCKET): once(tap.Connect(name=b"me", flags=ConnectFlag.LIST_VBUCKETS, vbuckets=(ABSENT,))),
    (tap.Connect, S.KEY_EEXISTS): connect_twice,
    (tap.Opaque, S.NOT_MY_VBUCKET): once(tap.Opaque(control=Control.INITIAL_VBUCKET_STREAM, vbucket=ABSENT)),
    **{(kind, S.EINVAL): no_hops for kind in TAKEN},
    **{(kind, S.ETMPFAIL): failing_disk_of_a_peer for kind in TAKEN},
    **{(kind, S.ENOMEM): full_memory_of_a_peer for kind in (tap.Mutation, tap.Delete)},
    **{(kind, S.KEY_EEXISTS): copy_of_what_is_active for kind in (tap.Mutation, tap.Delete, tap.SetVbucket)},
}
LISTED = [
    (message, error)
    for dialect in (memcached.memcached, tap.tap)
    for message in dialect.messages
    for error, _ in message.declaration.errors
]


def test_no_check_is_left_over() -> None:
    assert set(CHECKS) <= set(LISTED)


@pytest.mark.parametrize(
    ("message", "error"), LISTED, ids=[f"{kind.declaration.dialect} {kind.__name__} {e.name}" for kind, e in LISTED]
)
def test_every_listed_error_is_sent(stage: Stage, message: type[Request], error: Status) -> None:
    check = CHECKS.get((message, error)) or BY_STATUS[error]
    assert check(stage, message) is error
