"""The engine as a consumer's sink."""

import pytest

from tests.support.in_memory_node import InMemoryNode
from upriver.errors import KeyExists, NotMyVbucket, OutOfRange
from upriver.model import FailoverEntry, FailoverLog, Snapshot, VbucketState
from upriver.model.position import NO_END
from upriver.node.streams.engine_sink import EngineCopy, EngineSink
from upriver.protocol.consumer.sink import Sink, SinkVbucket
from upriver.wire import dcp, upr

LOG = FailoverLog((FailoverEntry(7, 0),))


@pytest.fixture
def node() -> InMemoryNode:
    node = InMemoryNode(vbuckets=4)
    node.bucket.create_vbucket(0, VbucketState.REPLICA)
    node.bucket.create_vbucket(1, VbucketState.ACTIVE)
    node.bucket.create_vbucket(3, VbucketState.DEAD)
    return node


def test_only_copies_that_are_there_and_neither_active_nor_dead_are_fed_by_one_stream(node: InMemoryNode) -> None:
    sink = EngineSink(node.state)
    for number in (1, 2, 3):
        with pytest.raises(NotMyVbucket):
            sink.open(number)
    copy = sink.open(0)
    with pytest.raises(KeyExists):
        sink.open(0)
    copy.close()
    assert sink.open(0).number == 0


def test_changes_of_dcp_and_upr_are_kept_as_they_came(node: InMemoryNode) -> None:
    copy = EngineSink(node.state).open(0)
    copy.replace_failover_log(LOG)
    copy.begin_snapshot(Snapshot(0, 4), 1)
    frames = b"".join(
        message.encode()
        for message in (
            dcp.Mutation(by_seqno=1, rev_seqno=5, key=b"a", value=b"1", flags=3, cas=77),
            dcp.Mutation(by_seqno=2, key=b"b", value=b"23", meta=b"metadata"),
            dcp.Deletion(by_seqno=4, rev_seqno=6, key=b"a", cas=78),
        )
    )
    copy.apply(frames, dcp.dcp, 4, 3)
    assert copy.position.seqno == copy.position.consistent_seqno == 4
    copy.begin_snapshot(Snapshot(4, NO_END), 0)
    frames = upr.Mutation(by_seqno=6, key=b"c", value=b"3").encode() + upr.Expiration(by_seqno=7, key=b"b").encode()
    copy.apply(frames, upr.upr, 7, 2)
    assert copy.position.consistent_seqno == 4
    copy.complete_snapshot()
    assert copy.position.consistent_seqno == 7
    table = node.bucket.vbucket(0).table
    assert list(table.live_keys()) == [b"c"]
    deleted = table.find(b"a")
    assert deleted is not None
    assert (deleted.cas, deleted.rev_seqno, deleted.seqno) == (78, 6, 4)
    assert copy.failover_log == LOG


def test_what_does_not_follow_is_refused(node: InMemoryNode) -> None:
    copy = EngineSink(node.state).open(0)
    copy.begin_snapshot(Snapshot(0, 4), 1)
    with pytest.raises(OutOfRange):
        copy.apply(dcp.Mutation(by_seqno=5, key=b"a").encode(), dcp.dcp, 5, 1)
    node.bucket.vbucket(0).set_state(VbucketState.ACTIVE)
    with pytest.raises(OutOfRange):
        copy.begin_snapshot(Snapshot(0, 4), 1)


def test_a_state_is_told_when_it_is_on_disk(node: InMemoryNode) -> None:
    sink = EngineSink(node.state)
    done: list[bool] = []
    sink.set_state(0, VbucketState.ACTIVE, lambda: done.append(True))
    assert node.bucket.vbucket(0).state is VbucketState.ACTIVE
    assert not done
    node.settle()
    assert done


def test_going_back_and_starting_over(node: InMemoryNode) -> None:
    copy = EngineSink(node.state).open(0)
    for seqno in (1, 2, 3):
        copy.begin_snapshot(Snapshot(seqno - 1, seqno), 1)
        copy.apply(dcp.Mutation(by_seqno=seqno, key=b"k%d" % seqno).encode(), dcp.dcp, seqno, 1)
    assert copy.roll_back(2) == 2
    copy.begin_snapshot(Snapshot(2, 5), 1)
    copy.advance(5)
    assert copy.position.seqno == 5
    copy.clear()
    assert copy.position.seqno == 0


def test_the_engine_has_all_that_a_consumer_needs() -> None:
    # mypy checks the signatures; this checks that no name is missing.
    for wanted, offered in ((Sink, EngineSink), (SinkVbucket, EngineCopy)):
        names = {name for name in vars(wanted) if not name.startswith("_")}
        assert names
        assert names <= set(dir(offered))
