"""Set vbucket state over a raw socket: a takeover gives every role, any other stream gives none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mover_socket import MoverSocket
from tests.support.node_process import Client
from tests.support.restartable_node import RestartableNode
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.wire import Status, dcp, memcached, upr

ROLES = list(VbucketState)
#: The codes that the text gives them.
CODES = {VbucketState.ACTIVE: 1, VbucketState.PENDING: 2, VbucketState.REPLICA: 3, VbucketState.DEAD: 4}


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    with start(vbuckets=2, initial_vbuckets="none") as node:
        yield node


@pytest.fixture
def copy(node: EmbeddedNode) -> VbucketState:
    """A fresh replica."""
    if node.call(lambda: node.bucket.existing(0)) is not None:
        node.call(node.bucket.vbucket(0).set_state, VbucketState.DEAD)
        node.call(node.bucket.delete_vbucket, 0)
    node.call(node.bucket.create_vbucket, 0, VbucketState.REPLICA)
    return role_of(node)


def role_of(node: EmbeddedNode) -> VbucketState:
    return node.call(lambda: node.bucket.vbucket(0).state)


@pytest.mark.shows("upr:state-active", "upr:state-pending", "upr:state-replica", "upr:state-dead")
@pytest.mark.parametrize("dialect", ["dcp", "upr"])
@pytest.mark.parametrize("before", ROLES)
def test_a_takeover_gives_every_role_from_every_other(
    node: EmbeddedNode, copy: VbucketState, dialect: str, before: VbucketState
) -> None:
    assert copy is VbucketState.REPLICA
    with MoverSocket(node) as mover:
        mover.add_stream(takeover=True, speaks=dialect)
        for role in ROLES:
            assert mover.set_state(CODES[before]) is Status.SUCCESS
            assert role_of(node) is before
            assert mover.set_state(CODES[role]) is Status.SUCCESS
            assert role_of(node) is role


@pytest.mark.parametrize("dialect", ["dcp", "upr"])
def test_another_stream_gives_no_role(node: EmbeddedNode, copy: VbucketState, dialect: str) -> None:
    with MoverSocket(node) as mover:
        mover.add_stream(speaks=dialect)
        for code in (*CODES.values(), 1):
            assert mover.set_state(code) is Status.EINVAL
            assert role_of(node) is copy
        # The stream goes on.
        marker = dcp.SnapshotMarker(start_seqno=0, end_seqno=1) if dialect == "dcp" else upr.SnapshotMarker()
        change = dcp.Mutation if dialect == "dcp" else upr.Mutation
        mover.tell(marker, change(by_seqno=1, key=b"a", value=b"1"))
        assert mover.set_state(1) is Status.EINVAL
        assert node.call(lambda: node.bucket.vbucket(0).high_seqno) == 1


@pytest.mark.parametrize("state", [0, 5, 255])
def test_an_unknown_state_is_refused(node: EmbeddedNode, copy: VbucketState, state: int) -> None:
    with MoverSocket(node) as mover:
        mover.add_stream(takeover=True)
        assert mover.set_state(state) is Status.EINVAL
        assert role_of(node) is copy


def test_the_copy_is_not_made_active_behind_another_clients_back(node: EmbeddedNode, copy: VbucketState) -> None:
    """Another client has undone the takeover, so the source may be active again."""
    with MoverSocket(node) as mover:
        mover.add_stream(takeover=True)
        assert mover.set_state(VbucketState.PENDING) is Status.SUCCESS
        node.call(node.bucket.vbucket(0).set_state, copy)
        assert mover.set_state(VbucketState.ACTIVE) is Status.EINVAL
        assert role_of(node) is copy


@pytest.mark.parametrize("first", [None, VbucketState.DEAD, VbucketState.PENDING])
def test_active_is_answered_when_everything_is_on_disk(tmp_path: Path, first: VbucketState | None) -> None:
    """Data, failover log and role survive a kill right behind the answer, also if the copy was never pending."""
    node = RestartableNode(tmp_path / "data", "memory", "dcp", 2, "--initial-vbuckets", "none")
    try:
        with Client(node.port) as operator:
            assert operator.ask(memcached.SetVbucket(state=memcached.VbucketState.REPLICA)).status == 0
        with MoverSocket(node) as mover:
            mover.add_stream(takeover=True)
            change = dcp.Mutation(by_seqno=1, key=b"a", value=b"1", rev_seqno=1)
            mover.tell(dcp.SnapshotMarker(start_seqno=0, end_seqno=1), change)
            if first is not None:
                assert mover.set_state(first) is Status.SUCCESS
            assert mover.set_state(VbucketState.ACTIVE) is Status.SUCCESS
            node.kill()
        node.start()
        with Client(node.port) as operator:
            assert operator.ask(memcached.GetVbucket()).body == bytes((0, 0, 0, 1))
            assert operator.ask(memcached.Get(key=b"a")).body[4:] == b"1"
    finally:
        node.kill()
