"""What a received change does to active vbuckets, to copies, and to those that are neither."""

import pytest

from tests.support.in_memory_node import InMemoryNode
from tests.support.tap_peer import DUMP, LIST, TapPeer, brief, connect, keys
from upriver.errors import KeyExists, NotMyVbucket, TemporaryFailure
from upriver.model import Event, VbucketState
from upriver.model.record import unpack
from upriver.node.tap.engine_sink import EngineTapSink
from upriver.protocol.tap.consumer import ReceivedChange
from upriver.protocol.tap.flush_mark import FlushMark, marked
from upriver.wire import tap
from upriver.wire.dialects.tap import Control, TapFlag

ACTIVE, REPLICA, PENDING, DEAD = 0, 1, 2, 3
#: A connection, and another one.
PEER, OTHER = object(), object()


@pytest.fixture
def node() -> InMemoryNode:
    made = InMemoryNode()
    for number, state in enumerate(
        (VbucketState.ACTIVE, VbucketState.REPLICA, VbucketState.PENDING, VbucketState.DEAD)
    ):
        made.bucket.create_vbucket(number, state)
    return made


@pytest.fixture
def sink(node: InMemoryNode) -> EngineTapSink:
    sink = node.tap.sink
    sink.set_state(PENDING, VbucketState.PENDING, PEER)
    return sink


def change(
    vbucket: int, rev: int = 5, value: bytes = b"v", event: Event = Event.MUTATION, **others: int
) -> ReceivedChange:
    fields = {"cas": 100 + rev, "rev_seqno": rev, "ttl": 9, **others}
    return ReceivedChange(vbucket=vbucket, event=event, key=b"k", value=value, **fields)


def ttl_of(node: InMemoryNode, vbucket: int) -> int:
    with node.bucket.vbucket(vbucket).open_cursor("look") as cursor:
        cursor.next_snapshot()
        return unpack(cursor.read_records()).ttl


@pytest.mark.parametrize("vbucket", [ACTIVE, REPLICA, PENDING])
def test_everything_is_kept(node: InMemoryNode, sink: EngineTapSink, vbucket: int) -> None:
    sink.store(change(vbucket, flags=7, expiry=2_000_000_000, datatype=1), PEER)
    item = node.bucket.vbucket(vbucket).table.find(b"k")
    assert item is not None
    assert (item.value, item.cas, item.rev_seqno) == (b"v", 105, 5)
    assert (item.flags, item.expiry, item.datatype) == (7, 2_000_000_000, 1)
    assert ttl_of(node, vbucket) == 9
    sink.store(change(vbucket, 6, b"", Event.DELETION), PEER)
    item = node.bucket.vbucket(vbucket).table.find(b"k")
    assert item is not None
    assert (item.event, item.cas, item.rev_seqno) == (Event.DELETION, 106, 6)


def test_an_active_vbucket_keeps_what_is_newer(node: InMemoryNode, sink: EngineTapSink) -> None:
    sink.store(change(ACTIVE, 5), PEER)
    high = node.bucket.vbucket(ACTIVE).high_seqno
    sink.store(change(ACTIVE, 5), PEER)  # its own change, come round
    sink.store(change(ACTIVE, 4, b"older"), PEER)
    sink.store(change(ACTIVE, 4, b"", Event.DELETION), PEER)
    assert node.bucket.vbucket(ACTIVE).high_seqno == high
    assert node.bucket.vbucket(ACTIVE).get(b"k").value == b"v"


@pytest.mark.parametrize("vbucket", [REPLICA, PENDING])
def test_a_copy_takes_what_it_is_told(node: InMemoryNode, sink: EngineTapSink, vbucket: int) -> None:
    sink.store(change(vbucket, 5), PEER)
    sink.store(change(vbucket, 4, b"older"), PEER)
    item = node.bucket.vbucket(vbucket).table.find(b"k")
    assert item is not None
    assert (item.value, item.rev_seqno) == (b"older", 4)


@pytest.mark.parametrize("vbucket", [ACTIVE, REPLICA])
def test_a_peer_that_tells_no_revision_wins(node: InMemoryNode, sink: EngineTapSink, vbucket: int) -> None:
    sink.store(change(vbucket, 5), PEER)
    sink.store(change(vbucket, rev_seqno=0, cas=0, value=b"plain"), PEER)
    item = node.bucket.vbucket(vbucket).table.find(b"k")
    assert item is not None
    assert (item.value, item.rev_seqno) == (b"plain", 6)
    assert item.cas


def test_a_locked_key_is_tried_again_later(node: InMemoryNode, sink: EngineTapSink) -> None:
    vbucket = node.bucket.vbucket(ACTIVE)
    vbucket.set(b"k", b"v")
    vbucket.get_and_lock(b"k")
    with pytest.raises(TemporaryFailure):
        sink.store(change(ACTIVE, 50), PEER)


@pytest.mark.parametrize("vbucket", [DEAD, 40])
def test_a_dead_or_missing_copy_takes_nothing(sink: EngineTapSink, vbucket: int) -> None:
    with pytest.raises(NotMyVbucket):
        sink.store(change(vbucket), PEER)


def test_a_dead_copy_keeps_what_its_successor_may_not_have(node: InMemoryNode) -> None:
    node.bucket.create_vbucket(20)
    node.write(20, b"k")
    node.bucket.vbucket(20).set_state(VbucketState.DEAD)
    begin = tap.Opaque(control=Control.INITIAL_VBUCKET_STREAM, vbucket=20, tap_flags=TapFlag.ACK)
    flush = tap.Flush(private=marked(1, {20}), tap_flags=TapFlag.ACK)
    answers = node.connect().send(begin, flush)
    assert brief(answers) == ["not_my_vbucket", "success"]
    assert node.bucket.vbucket(20).table.find(b"k") is not None


def test_starting_over_empties_copies_only(node: InMemoryNode, sink: EngineTapSink) -> None:
    for vbucket in (ACTIVE, REPLICA, PENDING):
        sink.store(change(vbucket), PEER)
        sink.start_over(vbucket, PEER)
    found = [node.bucket.vbucket(vbucket).table.find(b"k") is not None for vbucket in (ACTIVE, REPLICA, PENDING)]
    assert found == [True, False, False]
    with pytest.raises(NotMyVbucket):
        sink.start_over(40, PEER)


@pytest.mark.parametrize(
    ("listed", "spared", "left"),
    [
        (set(), set(), []),
        (set(), {ACTIVE}, [ACTIVE]),
        ({ACTIVE}, set(), [REPLICA, PENDING]),
        ({ACTIVE, REPLICA}, {ACTIVE}, [ACTIVE, PENDING]),
    ],
)
def test_a_flush_empties_what_it_lists_or_everything(
    node: InMemoryNode, sink: EngineTapSink, listed: set[int], spared: set[int], left: list[int]
) -> None:
    for vbucket in (ACTIVE, REPLICA, PENDING):
        sink.store(change(vbucket), PEER)
    sink.flush(FlushMark(5, frozenset(listed)) if listed else None, frozenset(spared), 254, PEER)
    assert [v.number for v in node.bucket if v.table.find(b"k") is not None] == left


def test_a_copy_whose_first_news_is_a_flush_can_be_dumped() -> None:
    node = InMemoryNode()
    node.bucket.create_vbucket(REPLICA, VbucketState.REPLICA)
    stored = tap.Mutation(vbucket=REPLICA, key=b"k", value=b"v")
    node.connect().send(tap.Flush(private=marked(1, {REPLICA})), stored)
    dump = TapPeer(node, connect(b"client", DUMP | LIST, vbuckets=(REPLICA,)))
    assert keys(dump.run()) == ["k"]


def test_a_state_makes_the_vbucket_if_need_be(node: InMemoryNode, sink: EngineTapSink) -> None:
    sink.set_state(9, VbucketState.PENDING, PEER)
    assert node.bucket.vbucket(9).state is VbucketState.PENDING
    sink.set_state(9, VbucketState.ACTIVE, PEER)
    assert node.bucket.vbucket(9).state is VbucketState.ACTIVE


@pytest.mark.parametrize("state", [VbucketState.PENDING, VbucketState.REPLICA])
def test_an_active_vbucket_does_not_become_a_copy_for_a_peer(
    node: InMemoryNode, sink: EngineTapSink, state: VbucketState, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyExists, match="active here"):
        sink.set_state(ACTIVE, state, PEER)
    assert node.bucket.vbucket(ACTIVE).state is VbucketState.ACTIVE
    assert "stays active" in caplog.text
    sink.set_state(REPLICA, state, PEER)
    sink.set_state(ACTIVE, VbucketState.DEAD, PEER)


def test_a_flush_of_nothing_is_no_event_and_the_hops_of_others_are_counted(
    node: InMemoryNode, sink: EngineTapSink
) -> None:
    vbucket = node.bucket.vbucket(ACTIVE)
    uuid = vbucket.failover_log.newest
    sink.flush(None, frozenset(), 3, PEER)
    assert vbucket.failover_log.newest == uuid
    sink.store(change(ACTIVE), PEER)
    sink.flush(None, frozenset(), 3, PEER)
    assert (vbucket.failover_log.newest == uuid, vbucket.high_seqno, vbucket.flush_ttl) == (False, 0, 3)


@pytest.mark.parametrize("held", [True, False])
def test_the_same_flush_is_done_once(node: InMemoryNode, sink: EngineTapSink, held: bool) -> None:
    if held:
        sink.store(change(ACTIVE), PEER)
    sink.flush(FlushMark(77, frozenset({ACTIVE})), frozenset(), 3, PEER)
    assert node.bucket.vbucket(ACTIVE).high_seqno == 0
    sink.store(change(ACTIVE), PEER)
    sink.flush(FlushMark(77, frozenset({ACTIVE})), frozenset(), 2, PEER)
    assert node.bucket.vbucket(ACTIVE).high_seqno == 1
    sink.flush(FlushMark(78, frozenset({ACTIVE})), frozenset(), 2, PEER)
    assert node.bucket.vbucket(ACTIVE).high_seqno == 0
