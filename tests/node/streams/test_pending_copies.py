"""A pending copy over real sockets: it may be one of two, so no stream but its takeover changes it."""

from collections.abc import Iterator

import pytest

from tests.support.mover_socket import LOG, MoverSocket
from upriver.model import VbucketState
from upriver.node import EmbeddedNode, start
from upriver.wire import AnyResponse, Request, Response, Status, dcp, memcached, upr

FOREIGN = (memcached.FailoverEntry(vbucket_uuid=8, seqno=0),)
#: The source had a failover at seqno 2.
CONTINUED = (memcached.FailoverEntry(vbucket_uuid=9, seqno=2), *LOG)


@pytest.fixture
def node() -> Iterator[EmbeddedNode]:
    with start(vbuckets=2, initial_vbuckets="none") as node:
        node.call(node.bucket.create_vbucket, 0, VbucketState.REPLICA)
        yield node


@pytest.fixture
def pending(node: EmbeddedNode) -> EmbeddedNode:
    """A takeover has filled vbucket 0 and made it pending, and its mover is gone."""
    with MoverSocket(node) as mover:
        mover.add_stream(takeover=True)
        changes = (dcp.Mutation(by_seqno=seqno, key=b"%d" % seqno, rev_seqno=1) for seqno in (1, 2, 3))
        for end, change in enumerate(changes, 1):  # each is a consistent point
            mover.tell(dcp.SnapshotMarker(start_seqno=end - 1, end_seqno=end), change)
        assert mover.set_state(VbucketState.PENDING) is Status.SUCCESS
    return node


def found(node: EmbeddedNode) -> tuple[VbucketState, int, list[int]]:
    """The role, the high seqno and the branches of the copy."""

    def look() -> tuple[VbucketState, int, list[int]]:
        vbucket = node.bucket.vbucket(0)
        return vbucket.state, vbucket.high_seqno, [entry.vbucket_uuid for entry in vbucket.failover_log]

    return node.call(look)


WAITING = (VbucketState.PENDING, 3, [7])


def add_stream(
    producer: MoverSocket,
    log: tuple[memcached.FailoverEntry, ...],
    *,
    takeover: bool,
    rollback: int | None,
    speaks: str = "dcp",
) -> Response:
    """Add a stream whose producer asks for a rollback once, if the copy is not empty; return the node's answer."""
    flags = upr.AddStreamFlag.TAKEOVER if takeover else upr.AddStreamFlag(0)
    while True:  # until the node has noticed that the last mover is gone
        answer = _added(producer, log, flags, rollback, speaks)
        if answer.status is not Status.KEY_EEXISTS:
            return answer


def _added(
    producer: MoverSocket,
    log: tuple[memcached.FailoverEntry, ...],
    flags: upr.AddStreamFlag,
    rollback: int | None,
    speaks: str,
) -> Response:
    producer.send(upr.AddStream(opaque=1, flags=flags))
    while True:
        message = producer.next()
        answer: Response | None = None
        match message:
            case dcp.Control():
                answer = AnyResponse(opcode=message.code)
            case upr.FailoverLogRequest():
                answer = upr.FailoverLogResponse(log=log)
            case dcp.StreamRequest() if speaks == "upr":
                answer = AnyResponse(opcode=message.code, status=Status.EINVAL)
            case dcp.StreamRequest() | upr.StreamRequest():
                if rollback is not None and message.start_seqno > rollback:
                    answer = upr.RollbackRequired(seqno=rollback)
                else:
                    answer = upr.StreamRequestResponse(log=log)
            case Response():
                return message
        assert message is not None
        assert answer is not None
        assert isinstance(message, Request)
        answer.opaque = message.opaque
        producer.send(answer)


@pytest.mark.parametrize("speaks", ["dcp", "upr"])
@pytest.mark.parametrize("rollback", [None, 0, 2])
@pytest.mark.parametrize("takeover", [False, True])
def test_a_producer_of_another_branch_changes_nothing(
    pending: EmbeddedNode, takeover: bool, rollback: int | None, speaks: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with MoverSocket(pending, b"other") as other:
        answer = add_stream(other, FOREIGN, takeover=takeover, rollback=rollback, speaks=speaks)
        assert answer.status is Status.EINVAL
    assert found(pending) == WAITING
    assert "make it a replica first" in caplog.text


def test_a_stream_that_is_no_takeover_is_refused_on_the_same_branch_too(pending: EmbeddedNode) -> None:
    with MoverSocket(pending, b"other") as other:
        assert add_stream(other, LOG, takeover=False, rollback=0).status is Status.EINVAL
        assert found(pending) == WAITING
        pending.call(pending.bucket.vbucket(0).set_state, VbucketState.REPLICA)
        assert add_stream(other, FOREIGN, takeover=False, rollback=0).status is Status.SUCCESS
    assert found(pending) == (VbucketState.REPLICA, 0, [8])


@pytest.mark.parametrize("speaks", ["dcp", "upr"])
def test_the_takeover_goes_on(pending: EmbeddedNode, speaks: str) -> None:
    with MoverSocket(pending, b"again") as mover:
        answer = add_stream(mover, LOG, takeover=True, rollback=None, speaks=speaks)
        assert isinstance(answer, upr.AddStreamResponse)
        assert found(pending) == WAITING
        mover.opaque = answer.stream_opaque
        assert mover.set_state(VbucketState.ACTIVE) is Status.SUCCESS


@pytest.mark.parametrize("speaks", ["dcp", "upr"])
def test_the_takeover_goes_on_after_a_failover_of_the_source(pending: EmbeddedNode, speaks: str) -> None:
    """The copy is ahead of where the source's branch begins, and the source knows it: it rolls back."""
    with MoverSocket(pending, b"again") as mover:
        answer = add_stream(mover, CONTINUED, takeover=True, rollback=2, speaks=speaks)
        assert isinstance(answer, upr.AddStreamResponse)
        assert found(pending) == (VbucketState.REPLICA, 2, [9, 7])
        mover.opaque = answer.stream_opaque
        for state in (VbucketState.PENDING, VbucketState.ACTIVE):
            assert mover.set_state(state) is Status.SUCCESS


def test_a_copy_that_has_received_nothing_has_nothing_to_lose(node: EmbeddedNode) -> None:
    node.call(node.bucket.vbucket(0).set_state, VbucketState.PENDING)
    with MoverSocket(node) as mover:
        mover.add_stream(takeover=True)
    assert found(node) == (VbucketState.REPLICA, 0, [7])
