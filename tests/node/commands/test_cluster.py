import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_peers import ABSENT, ManualNode, Peer, SocketPeer, open_manual_node
from upriver.node.auth.users import Role, User
from upriver.node.auth.users_file import Users
from upriver.node.embedded import start
from upriver.wire import AnyResponse
from upriver.wire.codes import Status
from upriver.wire.dialects.memcached import (
    DeleteVbucket,
    Feature,
    Get,
    GetClusterConfig,
    GetClusterConfigResponse,
    ListBuckets,
    ListBucketsResponse,
    Observe,
    ObservedKey,
    SaslAuth,
    SelectBucket,
    Set,
    SetClusterConfig,
    SetVbucket,
    VbucketState,
)


def config(peer: Peer, **known: int) -> Any:
    answer = peer.ask(GetClusterConfig(**known))
    assert isinstance(answer, GetClusterConfigResponse)
    return json.loads(answer.config) if answer.config else None


def test_buckets(peer: Peer) -> None:
    assert peer.ask(ListBuckets()) == ListBucketsResponse(names=b"default")
    assert peer.ask(SelectBucket(name=b"default")).status is Status.SUCCESS
    for name in (b"other", b"Default", b"", b"\xff", b"d" * 1000):
        assert "default" in peer.refused(SelectBucket(name=name), Status.KEY_ENOENT)
    assert peer.ask(SelectBucket(name=b"default")).status is Status.SUCCESS


def test_a_bucket_of_another_name() -> None:
    with start(vbuckets=1, bucket="travel") as node, SocketPeer(node.host, node.port) as peer:
        assert peer.ask(ListBuckets()) == ListBucketsResponse(names=b"travel")
        assert peer.ask(SelectBucket(name=b"travel")).status is Status.SUCCESS
        peer.refused(SelectBucket(name=b"default"), Status.KEY_ENOENT)
        assert config(peer)["name"] == "travel"


def test_the_cluster_map() -> None:
    with start(vbuckets=8, initial_vbuckets="0-1") as node, SocketPeer(node.host, node.port) as peer:
        found = config(peer)
        assert (found["revEpoch"], found["name"], found["nodeLocator"]) == (1, "default", "vbucket")
        assert found["rev"] == int(node.node.state.started * 1000)
        assert len(found["uuid"]) == 32
        assert set(found["bucketCapabilities"]) == {"dcp", "cccp", "nodesExt"}
        assert found["nodes"] == [{"hostname": f"$HOST:{node.port}", "ports": {"direct": node.port}}]
        (extended,) = found["nodesExt"]
        assert extended["services"] == {"kv": node.port, "mgmt": node.port}
        assert extended["thisNode"] is True
        assert found["vBucketServerMap"] == {
            "hashAlgorithm": "CRC",
            "numReplicas": 0,
            "serverList": [f"$HOST:{node.port}"],
            "vBucketMap": [[0], [0], [-1], [-1], [-1], [-1], [-1], [-1]],
        }


def test_a_client_that_knows_the_map_gets_none(peer: Peer) -> None:
    rev = config(peer)["rev"]
    assert config(peer, rev_epoch=1, rev=rev - 1)["rev"] == rev
    assert config(peer, rev_epoch=0, rev=rev + 98)["rev"] == rev
    assert config(peer, rev_epoch=1, rev=rev) is None
    assert config(peer, rev_epoch=1, rev=rev + 1) is None


def test_the_map_follows_the_vbuckets(peer: Peer) -> None:
    before = config(peer)["rev"]
    peer.ask(SetVbucket(vbucket=1, state=VbucketState.DEAD))
    peer.ask(SetVbucket(vbucket=ABSENT, state=VbucketState.ACTIVE))
    found = config(peer)
    assert found["rev"] == before + 1  # no client has seen a map in between
    assert found["vBucketServerMap"]["vBucketMap"] == [[0], [-1], [-1], [-1], [-1], [0], [-1], [-1]]
    peer.ask(DeleteVbucket(vbucket=1))
    assert config(peer)["rev"] == before + 1  # it was not in the map any more


def test_a_client_of_the_wrong_node_gets_the_map_if_it_can_read_it(peer: Peer) -> None:
    """Clients that selected the bucket read it; to all others it says in words what is wrong."""
    wrong = (Get(key=b"k", vbucket=ABSENT), Set(key=b"k", vbucket=2), Observe(keys=(ObservedKey(vbucket=4, key=b"k"),)))
    for request in wrong:
        assert peer.refused(request, Status.NOT_MY_VBUCKET).startswith("Not my vbucket")
    peer.ask(SelectBucket(name=b"default"))
    for request in wrong:
        assert json.loads(peer.refused(request, Status.NOT_MY_VBUCKET)) == config(peer)
    peer.hello(Feature.JSON)
    answer = peer.ask(wrong[0])
    assert (answer.status, answer.datatype) == (Status.NOT_MY_VBUCKET, 1)
    peer.refused(Get(key=b"k"), Status.KEY_ENOENT)
    peer.ask(push(PUSHED))
    answer = peer.ask(wrong[0])
    assert isinstance(answer, AnyResponse)
    assert json.loads(answer.value) == PUSHED


def test_a_revision_never_goes_back_over_restarts(tmp_path: Path) -> None:
    with start(vbuckets=8, data=tmp_path) as node, SocketPeer(node.host, node.port) as peer:
        for _ in range(3):
            peer.ask(SetVbucket(vbucket=1, state=VbucketState.DEAD))
            peer.ask(SetVbucket(vbucket=1, state=VbucketState.ACTIVE))
        before = config(peer)["rev"]
    with start(vbuckets=8, data=tmp_path) as node, SocketPeer(node.host, node.port) as peer:
        assert config(peer)["rev"] > before
        peer.ask(push(PUSHED))
    with start(vbuckets=8, data=tmp_path) as node, SocketPeer(node.host, node.port) as peer:
        assert config(peer) == PUSHED
        peer.refused(push(PUSHED | {"rev": 6}), Status.KEY_EEXISTS)


PUSHED: dict[str, Any] = {
    "rev": 7,
    "revEpoch": 2,
    "name": "default",
    "vBucketServerMap": {
        "hashAlgorithm": "CRC",
        "numReplicas": 0,
        "serverList": ["a:1", "b:2"],
        "vBucketMap": [[number % 2] for number in range(8)],
    },
}


def push(content: object) -> SetClusterConfig:
    return SetClusterConfig(bucket=b"default", config=json.dumps(content).encode())


def test_a_pushed_map_stands_until_a_newer_one_comes(peer: Peer) -> None:
    assert peer.ask(push(PUSHED)).status is Status.SUCCESS
    assert config(peer) == PUSHED
    peer.ask(SetVbucket(vbucket=1, state=VbucketState.DEAD))
    assert config(peer) == PUSHED
    peer.refused(push(PUSHED | {"rev": 6}), Status.KEY_EEXISTS)
    peer.refused(push(PUSHED | {"rev": 99, "revEpoch": 1}), Status.KEY_EEXISTS)
    peer.ask(push(PUSHED | {"rev": 1, "revEpoch": 3}))
    assert config(peer)["revEpoch"] == 3


def test_the_revision_may_come_in_the_extras_too(peer: Peer) -> None:
    request = push(PUSHED)
    request.rev_epoch, request.rev = 2, 7
    assert peer.ask(request).status is Status.SUCCESS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no JSON",
        b"\xff",
        b"[]",
        b"{}",
        b'{"rev": "1"}',
        b'{"rev": 1, "revEpoch": "x"}',
        b'{"rev": true}',
        b"[" * 9999,
    ],
)
def test_what_is_no_map(peer: Peer, content: bytes) -> None:
    before = config(peer)
    peer.refused(SetClusterConfig(config=content), Status.EINVAL)
    assert config(peer) == before


@pytest.mark.parametrize("role", [Role.READ, Role.WRITE, Role.STREAM])
def test_every_user_may_ask_what_clients_ask_at_the_start(role: Role) -> None:
    users = Users(Path("unused"))
    users.add(User.create("u", "p", role, iterations=4096))
    manual: ManualNode = open_manual_node(users=users)
    with manual.bucket:
        peer = manual.peer()
        for request in (ListBuckets(), SelectBucket(name=b"default"), GetClusterConfig()):
            peer.refused(request, Status.AUTH_ERROR)
        peer.ask(SaslAuth(mechanism=b"PLAIN", value=b"\0u\0p"))
        for request in (ListBuckets(), SelectBucket(name=b"default"), GetClusterConfig()):
            assert peer.ask(request).status is Status.SUCCESS
        peer.refused(push(PUSHED), Status.EACCESS)
