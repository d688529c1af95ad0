"""TAP beside a stream with seqnos, over real sockets: one of them feeds a copy, and the other is refused."""

from collections.abc import Iterator

import pytest

from tests.support.command_peers import SocketPeer
from tests.support.mover_socket import LOG, MoverSocket
from tests.support.node_process import wait_until
from upriver.errors import UpriverError
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.wire import Request, Status, dcp, memcached, tap
from upriver.wire.dialects.tap import Control, TapFlag

ACK = TapFlag.ACK
FED, ACTIVE = 0, 1


@pytest.fixture
def node() -> Iterator[EmbeddedNode]:
    with start(vbuckets=2, initial_vbuckets="none") as node:
        node.call(node.bucket.create_vbucket, FED, VbucketState.REPLICA)
        node.call(node.bucket.create_vbucket, ACTIVE, VbucketState.ACTIVE)
        yield node


def data() -> list[Request]:
    """What fills a copy or changes it."""
    return [
        tap.Mutation(vbucket=FED, key=b"1", value=b"foreign", tap_flags=ACK, ttl=9),
        tap.Delete(vbucket=FED, key=b"1", tap_flags=ACK, ttl=9),
        tap.Opaque(vbucket=FED, control=Control.INITIAL_VBUCKET_STREAM, tap_flags=ACK, ttl=9),
        tap.SetVbucket(vbucket=FED, state=memcached.VbucketState.PENDING, tap_flags=ACK, ttl=9),
        tap.SetVbucket(vbucket=FED, state=memcached.VbucketState.ACTIVE, tap_flags=ACK, ttl=9),
    ]


def found(node: EmbeddedNode) -> tuple[VbucketState, dict[bytes, bytes], int]:
    """The role, the documents and the branch of the copy."""

    def look() -> tuple[VbucketState, dict[bytes, bytes], int]:
        vbucket = node.bucket.vbucket(FED)
        items = {key: vbucket.table.find(key) for key in vbucket.table.live_keys()}
        documents = {key: item.value for key, item in items.items() if item is not None}
        return vbucket.state, documents, vbucket.failover_log.newest.vbucket_uuid

    return node.call(look)


def feed(mover: MoverSocket, seqno: int) -> None:
    change = dcp.Mutation(by_seqno=seqno, key=b"%d" % seqno, value=b"v", rev_seqno=1)
    mover.tell(dcp.SnapshotMarker(start_seqno=seqno - 1, end_seqno=seqno), change)


def test_a_copy_that_an_idle_stream_feeds_accepts_nothing_over_tap(node: EmbeddedNode) -> None:
    with MoverSocket(node) as mover:
        mover.add_stream()
        feed(mover, 1)
        before = (VbucketState.REPLICA, {b"1": b"v"}, LOG[0].vbucket_uuid)
        wait_until(lambda: found(node) == before)
        for message in data():
            with SocketPeer(node.host, node.port) as peer:
                (answer,) = peer.send(message)
                assert answer.status is Status.KEY_EEXISTS, message
                assert found(node) == before
        node.call(node.bucket.vbucket(ACTIVE).set, b"own", b"v")
        with SocketPeer(node.host, node.port) as peer:
            (answer,) = peer.send(tap.Flush(tap_flags=ACK, ttl=9))
            assert answer.status is Status.SUCCESS
        assert not node.call(lambda: list(node.bucket.vbucket(ACTIVE).table.live_keys()))
        assert found(node) == before
        feed(mover, 2)
        wait_until(lambda: found(node)[1] == {b"1": b"v", b"2": b"v"})


@pytest.mark.parametrize("message", [0, 2, 3], ids=["mutation", "initial vbucket stream", "pending"])
def test_a_copy_that_tap_fills_gets_no_stream_until_the_connection_is_closed(node: EmbeddedNode, message: int) -> None:
    with SocketPeer(node.host, node.port) as peer, MoverSocket(node) as mover:
        (answer,) = peer.send(data()[message])
        assert answer.status is Status.SUCCESS
        before = found(node)
        with pytest.raises(UpriverError, match="a TAP connection feeds this vbucket"):
            mover.add_stream(takeover=True)
        assert found(node) == before
    node.call(node.bucket.vbucket(FED).set_state, VbucketState.REPLICA)

    def added() -> bool:
        with MoverSocket(node) as mover:
            try:
                mover.add_stream()
            except UpriverError:
                return False
            return True

    wait_until(added)
    assert found(node)[2] == LOG[0].vbucket_uuid


def test_a_vbucket_that_tap_has_made_active_and_an_operator_a_replica_gets_a_stream(node: EmbeddedNode) -> None:
    with SocketPeer(node.host, node.port) as peer, MoverSocket(node) as mover:
        assert {answer.status for answer in peer.send(*data()[-2:])} == {Status.SUCCESS}
        node.call(node.bucket.vbucket(FED).set_state, VbucketState.REPLICA)
        mover.add_stream()
