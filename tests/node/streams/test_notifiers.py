"""Notifiers over raw sockets: what they may ask for, and when they are told."""

from collections.abc import Iterator

import pytest

from tests.support.stream_client import StreamClient
from upriver.node import EmbeddedNode, start
from upriver.wire import Status, dcp, upr

NOTIFIER = int(dcp.OpenFlag.NOTIFIER)


@pytest.fixture
def node() -> Iterator[EmbeddedNode]:
    with start(vbuckets=1) as node:
        write(node, 6)
        yield node


def write(node: EmbeddedNode, count: int) -> None:
    for number in range(count):
        node.call(node.bucket.vbucket(0).set, b"k%d" % number, b"v")


def uuid_of(node: EmbeddedNode) -> int:
    return node.bucket.vbucket(0).failover_log.newest.vbucket_uuid


@pytest.mark.parametrize("snapshot", [(0, 0), (9, 9), (0, 9)])
@pytest.mark.parametrize("end", [0, 9, 2**64 - 1])
def test_a_notifier_may_start_beyond_the_high_seqno(node: EmbeddedNode, snapshot: tuple[int, int], end: int) -> None:
    """As on deployed servers: it is accepted, and ends when there is a change beyond its start."""
    low, high = snapshot
    with StreamClient(node, b"told", NOTIFIER) as client:
        request = dcp.StreamRequest(
            start_seqno=9, end_seqno=end, vbucket_uuid=uuid_of(node), snapshot_start=low, snapshot_end=high
        )
        assert isinstance(client.ask(request), upr.StreamRequestResponse)
        for _ in range(3):  # up to its start, and not beyond
            write(node, 1)
            assert client.statistics(b"dcp")["eq_dcpq:told:num_streams"] == "1"
        write(node, 1)
        ended = client.next()
        assert isinstance(ended, dcp.StreamEnd)
        assert ended.reason is dcp.EndReason.OK
        assert client.statistics(b"dcp")["eq_dcpq:told:num_streams"] == "0"


def test_a_notifier_of_another_branch_rolls_back(node: EmbeddedNode) -> None:
    with StreamClient(node, b"told", NOTIFIER) as client:
        answer = client.ask(dcp.StreamRequest(start_seqno=9, vbucket_uuid=0xBAD, snapshot_start=9, snapshot_end=9))
        assert isinstance(answer, dcp.RollbackRequired)
        assert (answer.status, answer.seqno) == (Status.ROLLBACK, 0)


def test_a_notifier_behind_the_high_seqno_ends_at_once(node: EmbeddedNode) -> None:
    with StreamClient(node, b"told", NOTIFIER) as client:
        client.send(dcp.StreamRequest(start_seqno=5, vbucket_uuid=uuid_of(node), snapshot_start=5, snapshot_end=5))
        answer, ended = client.next(), client.next()
        assert isinstance(answer, upr.StreamRequestResponse)
        assert isinstance(ended, dcp.StreamEnd)
