"""Connections of the consumer type on the node: what goes into the engine, when it is held back, what is told of it."""

import pytest

from tests.support.in_memory_node import InMemoryNode, Peer
from upriver.errors import TemporaryFailure
from upriver.model import VbucketState
from upriver.node.streams.statistics import stream_statistics
from upriver.wire import AnyResponse, Message, Request, Response, dcp, memcached, upr
from upriver.wire.codes import Status

LOG = (memcached.FailoverEntry(vbucket_uuid=0xABC, seqno=0),)


@pytest.fixture
def node() -> InMemoryNode:
    node = InMemoryNode()
    node.bucket.create_vbucket(0, VbucketState.REPLICA)
    node.bucket.create_vbucket(1, VbucketState.ACTIVE)
    return node


def opened(node: InMemoryNode, dialect: str = "dcp") -> tuple[Peer, int]:
    """A peer that plays mover and producer of a takeover, and the opaque of its stream."""
    peer = node.connect().open(b"move", flags=0)
    request = peer.send(upr.AddStream(opaque=1, flags=upr.AddStreamFlag.TAKEOVER))[-1]
    assert isinstance(request, dcp.StreamRequest)
    if dialect == "upr":
        refused = AnyResponse(opcode=0x53, opaque=request.opaque, status=Status.EINVAL)
        (asked,) = peer.send(refused)
        assert isinstance(asked, upr.FailoverLogRequest)
        (again,) = peer.send(upr.FailoverLogResponse(log=LOG, opaque=asked.opaque))
        assert isinstance(again, upr.StreamRequest)
    (answer,) = peer.send(upr.StreamRequestResponse(log=LOG, opaque=request.opaque))
    assert isinstance(answer, upr.AddStreamResponse)
    assert answer.stream_opaque == request.opaque
    return peer, request.opaque


def of(opaque: int, *messages: Request) -> list[Message]:
    for message in messages:
        message.opaque = opaque
    return list(messages)


def told(node: InMemoryNode, group: str = "dcp") -> dict[str, object]:
    pairs = stream_statistics(node.service, group)  # type: ignore[arg-type]
    return {name.removeprefix(f"eq_{group}q:move:"): value for name, value in pairs}


@pytest.mark.shows("open_issues:vbucket-filter", "open_issues:useful-name")
@pytest.mark.parametrize("dialect", ["dcp", "upr"])
def test_a_replica_is_fed(node: InMemoryNode, dialect: str) -> None:
    peer, opaque = opened(node, dialect)
    if dialect == "dcp":
        messages = of(
            opaque,
            dcp.SnapshotMarker(start_seqno=0, end_seqno=3),
            dcp.Mutation(by_seqno=1, key=b"a", value=b"1", cas=5),
            dcp.Mutation(by_seqno=2, key=b"b", value=b"2", cas=6),
            dcp.Expiration(by_seqno=3, key=b"a", cas=7, delete_time=9),
        )
    else:
        messages = of(
            opaque,
            upr.SnapshotMarker(),
            upr.Mutation(by_seqno=1, key=b"a", value=b"1", cas=5),
            upr.Mutation(by_seqno=2, key=b"b", value=b"2", cas=6),
            upr.Expiration(by_seqno=3, key=b"a", cas=7),
        )
    assert peer.send(*messages) == []
    vbucket = node.bucket.vbucket(0)
    assert list(vbucket.table.live_keys()) == [b"b"]
    assert vbucket.failover_log.newest.vbucket_uuid == 0xABC
    assert vbucket.position.seqno == 3
    statistics = told(node, dialect)
    assert statistics[f"ep_{dialect}_count"] == 1
    assert statistics["type"] == "consumer"
    assert statistics["stream_0_state"] == "in a snapshot"
    assert statistics["stream_0_last_received_seqno"] == statistics["items_received"] == 3
    size = sum(len(message.encode()) for message in messages)
    assert statistics["total_bytes_received"] == statistics["unacked_bytes"] == size


def test_what_was_received_is_acknowledged_after_some_seconds(node: InMemoryNode) -> None:
    peer, opaque = opened(node)
    (marker,) = of(opaque, dcp.SnapshotMarker(start_seqno=0, end_seqno=3))
    assert peer.send(marker) == []
    node.pass_by(5.0)
    (ack,) = peer.take()
    assert isinstance(ack, dcp.BufferAck)
    assert ack.bytes_processed == len(marker.encode())
    statistics = told(node)
    assert statistics["total_acked_bytes"] == statistics["total_bytes_received"]
    assert statistics["unacked_bytes"] == 0


def test_a_full_disk_queue_holds_the_producer_back_and_loses_nothing(
    node: InMemoryNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, opaque = opened(node)
    table = node.bucket.vbucket(0)
    real, calls = type(table).apply_frames, 0

    def flaky(vbucket: object, frames: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise TemporaryFailure("the queue to disk is full")
        return real(vbucket, frames)  # type: ignore[arg-type]

    monkeypatch.setattr(type(table), "apply_frames", flaky)
    peer.put(
        *of(
            opaque,
            dcp.SnapshotMarker(start_seqno=0, end_seqno=4),
            dcp.Mutation(by_seqno=1, key=b"a"),
            dcp.Mutation(by_seqno=2, key=b"b"),
        )
    )
    peer.put(*of(opaque, dcp.SnapshotMarker(start_seqno=2, end_seqno=4), dcp.Mutation(by_seqno=4, key=b"c")))
    assert node.bucket.vbucket(0).high_seqno == 0
    assert peer.session.stalled
    node.pass_by(0.1)
    assert sorted(node.bucket.vbucket(0).table.live_keys()) == [b"a", b"b", b"c"]
    assert peer.take() == []
    assert not peer.closed


def test_a_takeover_is_answered_from_disk(node: InMemoryNode) -> None:
    peer, opaque = opened(node)
    node.disk_works = False
    for state in (upr.VbucketState.PENDING, upr.VbucketState.ACTIVE):
        (message,) = of(opaque, upr.SetVbucketState(state=state))
        assert peer.send(message) == []
        node.disk_works = True
        node.settle()
        (answer,) = peer.take()
        assert isinstance(answer, Response)
        assert answer.status is Status.SUCCESS
        node.disk_works = False
    assert node.bucket.vbucket(0).state is VbucketState.ACTIVE


@pytest.mark.parametrize("state", [VbucketState.ACTIVE, VbucketState.DEAD])
def test_a_copy_that_is_given_another_role_leaves_its_stream_at_once(node: InMemoryNode, state: VbucketState) -> None:
    peer, opaque = opened(node)
    node.bucket.vbucket(0).set_state(state)
    node.settle()
    (close,) = peer.take()
    assert isinstance(close, upr.CloseStream)
    assert (close.vbucket, close.opaque) == (0, opaque)
    (refused,) = peer.send(*of(opaque, dcp.SnapshotMarker(start_seqno=0, end_seqno=3)))
    assert isinstance(refused, Response)
    assert refused.status is Status.KEY_ENOENT
    node.bucket.vbucket(0).set_state(VbucketState.REPLICA)
    assert isinstance(peer.send(upr.AddStream(opaque=2))[-1], dcp.StreamRequest)


def test_a_copy_that_is_given_another_role_before_the_producer_answers_gets_no_stream(node: InMemoryNode) -> None:
    peer = node.connect().open(b"move", flags=0)
    request = peer.send(upr.AddStream(opaque=1))[-1]
    assert isinstance(request, dcp.StreamRequest)
    node.bucket.vbucket(0).set_state(VbucketState.DEAD)
    node.settle()
    (answer,) = peer.take()
    assert isinstance(answer, Response)
    assert (answer.opaque, answer.status) == (1, Status.ETMPFAIL)
    assert peer.send(upr.StreamRequestResponse(log=LOG, opaque=request.opaque)) == []
    node.bucket.vbucket(0).set_state(VbucketState.REPLICA)
    close, again = peer.send(upr.AddStream(opaque=2))
    assert isinstance(close, upr.CloseStream)
    assert isinstance(again, dcp.StreamRequest)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_copy_that_was_active_meanwhile_gets_no_stream_by_an_earlier_request(
    node: InMemoryNode, rolled_back: bool
) -> None:
    """Though the answers are read before anybody is told of its roles. It was flushed: its own writes have low seqnos,
    and a rollback for the old branch would leave some of them standing as if the producer had them too."""
    peer, opaque = opened(node, "upr")
    changes = (upr.Mutation(by_seqno=seqno, key=b"%d" % seqno) for seqno in range(1, 6))
    peer.send(*of(opaque, upr.SnapshotMarker(), *changes, upr.StreamEnd()))
    first = peer.send(upr.AddStream(opaque=2))[-1]
    assert isinstance(first, dcp.StreamRequest)
    peer.send(AnyResponse(opcode=0x53, opaque=first.opaque, status=Status.EINVAL))
    (request,) = peer.send(upr.FailoverLogResponse(log=LOG, opaque=first.opaque))
    assert isinstance(request, upr.StreamRequest)
    assert request.start_seqno == 5
    vbucket = node.bucket.vbucket(0)
    vbucket.set_state(VbucketState.ACTIVE)
    vbucket.flush()
    for seqno in range(1, 7):
        vbucket.set(b"own %d" % seqno, b"")
    vbucket.set_state(VbucketState.REPLICA)
    own = vbucket.failover_log
    if rolled_back:
        peer.put(upr.RollbackRequired(seqno=4, opaque=request.opaque))
    peer.put(upr.StreamRequestResponse(log=LOG, opaque=request.opaque))
    node.settle()
    (answer,) = peer.take()
    assert isinstance(answer, Response)
    assert (answer.opaque, answer.status) == (2, Status.ETMPFAIL)
    assert vbucket.failover_log == own
    assert vbucket.high_seqno == 6


@pytest.mark.parametrize("state", [VbucketState.PENDING, VbucketState.REPLICA])
def test_a_role_in_which_a_copy_receives_ends_no_stream(node: InMemoryNode, state: VbucketState) -> None:
    peer, opaque = opened(node)
    node.bucket.vbucket(0).set_state(state)
    node.settle()
    assert peer.take() == []
    change = dcp.Mutation(by_seqno=1, key=b"a")
    assert peer.send(*of(opaque, dcp.SnapshotMarker(start_seqno=0, end_seqno=1), change)) == []
    assert node.bucket.vbucket(0).high_seqno == 1


def test_a_second_connection_cannot_feed_the_same_vbucket(node: InMemoryNode) -> None:
    peer, _ = opened(node)
    other = node.connect().open(b"other", flags=0)
    (answer,) = other.send(upr.AddStream(opaque=9))
    assert isinstance(answer, Response)
    assert answer.status is Status.KEY_EEXISTS
    peer.send(dcp.Open(name=b"again"))  # closes it
    assert peer.closed
    assert isinstance(other.send(upr.AddStream(opaque=9))[-1], dcp.StreamRequest)


def test_to_open_the_name_again_ends_what_the_old_connection_had_begun(node: InMemoryNode) -> None:
    old, opaque = opened(node)
    old.send(*of(opaque, upr.SetVbucketState(state=upr.VbucketState.PENDING)))
    node.connect().open(b"move", flags=0)
    assert old.closed
    old.put(*of(opaque, upr.SetVbucketState(state=upr.VbucketState.ACTIVE)))
    node.settle()
    assert node.bucket.vbucket(0).state is VbucketState.PENDING


def test_other_commands_are_answered_as_everywhere(node: InMemoryNode) -> None:
    peer, _ = opened(node)
    (answer,) = peer.send(memcached.GetVbucket(vbucket=1))
    assert isinstance(answer, memcached.GetVbucketResponse)
    assert answer.state is memcached.VbucketState.ACTIVE


def test_a_silent_producer_is_given_up(node: InMemoryNode) -> None:
    peer = node.connect().open(b"move", flags=0)
    for message in peer.send(upr.AddStream(opaque=1)):
        if isinstance(message, dcp.Control):
            peer.put(AnyResponse(opcode=message.code, opaque=message.opaque))
    node.pass_by(359.0)
    assert not peer.closed
    node.pass_by(2.0)
    assert peer.closed


@pytest.mark.parametrize("set_s", [-86_400.0, 86_400.0])
def test_a_clock_that_somebody_sets_neither_cuts_a_producer_nor_hides_a_dead_one(
    node: InMemoryNode, set_s: float
) -> None:
    peer = node.connect().open(b"move", flags=0)
    for message in peer.send(upr.AddStream(opaque=1)):
        if isinstance(message, dcp.Control):
            peer.put(AnyResponse(opcode=message.code, opaque=message.opaque))
    node.clock_set_s = set_s
    peer.send(dcp.Noop(opaque=1))
    node.clock_set_s = 0.0
    node.pass_by(359.0)
    assert not peer.closed
    node.pass_by(2.0)
    assert peer.closed


@pytest.mark.parametrize("now", VbucketState)
@pytest.mark.parametrize("wanted", VbucketState)
def test_a_mover_neither_ends_nor_begins_the_reign_of_a_copy(
    node: InMemoryNode, now: VbucketState, wanted: VbucketState
) -> None:
    """What it was told when it asked may be otherwise by now, because somebody else moves the same vbucket."""
    vbucket = node.bucket.vbucket(0)
    vbucket.set_state(now)
    request = memcached.SetVbucket(vbucket=0, state=memcached.VbucketState[wanted.name])
    peer = node.connect().open(b"move", flags=0)
    (answer,) = peer.send(request)
    assert isinstance(answer, Response)
    allowed = (now is VbucketState.ACTIVE) is (wanted is VbucketState.ACTIVE)
    assert answer.status is (Status.SUCCESS if allowed else Status.KEY_EEXISTS)
    assert vbucket.state is (wanted if allowed else now)
    assert not peer.closed
    (answer,) = node.connect("operator").send(request)
    assert isinstance(answer, Response)
    assert answer.status is Status.SUCCESS
    assert vbucket.state is wanted


@pytest.mark.parametrize("flags", [dcp.OpenFlag.PRODUCER, dcp.OpenFlag(0)], ids=["source", "destination"])
@pytest.mark.parametrize("created_again", [False, True])
def test_a_mover_makes_nothing_active_in_the_place_of_what_was_deleted(
    node: InMemoryNode, flags: dcp.OpenFlag, created_again: bool
) -> None:
    """A mover wants to undo at the source, or to confirm at the destination, a takeover that another mover has ended:
    an empty copy would be active beside the one that holds everything."""
    peer = node.connect().open(b"move", flags=flags)
    node.bucket.delete_vbucket(0)
    if created_again:
        node.bucket.create_vbucket(0, VbucketState.REPLICA)
    request = memcached.SetVbucket(vbucket=0, state=memcached.VbucketState.ACTIVE)
    (answer,) = peer.send(request)
    assert isinstance(answer, Response)
    assert answer.status is Status.KEY_EEXISTS
    left = node.bucket.existing(0)
    assert (left is None) is not created_again
    assert left is None or left.state is VbucketState.REPLICA
    (answer,) = node.connect("operator").send(request)
    assert isinstance(answer, Response)
    assert answer.status is Status.SUCCESS
    assert node.bucket.vbucket(0).state is VbucketState.ACTIVE


def test_a_mover_makes_a_dead_source_active_again(node: InMemoryNode) -> None:
    peer = node.connect().open(b"move", flags=dcp.OpenFlag.PRODUCER)
    node.bucket.vbucket(1).set_state(VbucketState.DEAD, successor="move")
    (answer,) = peer.send(memcached.SetVbucket(vbucket=1, state=memcached.VbucketState.ACTIVE))
    assert isinstance(answer, Response)
    assert answer.status is Status.SUCCESS
    assert node.bucket.vbucket(1).state is VbucketState.ACTIVE


@pytest.mark.parametrize("successor", ["move", "other"])
def test_a_mover_tells_its_dead_source_to_stay_dead(node: InMemoryNode, successor: str) -> None:
    peer = node.connect().open(b"move", flags=dcp.OpenFlag.PRODUCER)
    source = node.bucket.vbucket(1)
    source.set_state(VbucketState.DEAD, successor=successor)
    (answer,) = peer.send(memcached.SetVbucket(vbucket=1, state=memcached.VbucketState.DEAD))
    assert isinstance(answer, Response)
    assert answer.status is Status.SUCCESS
    assert source.may_hand_over_to(successor) is (successor == "other"), "a source with another successor is left alone"
    (answer,) = peer.send(memcached.SetVbucket(vbucket=1, state=memcached.VbucketState.ACTIVE))
    assert isinstance(answer, Response)
    assert answer.status is Status.KEY_EEXISTS


@pytest.mark.parametrize("left", [VbucketState.ACTIVE, VbucketState.REPLICA, None])
def test_a_mover_kills_no_source(node: InMemoryNode, left: VbucketState | None) -> None:
    """Somebody has made it another role since it was asked, or has deleted it."""
    peer = node.connect().open(b"move", flags=dcp.OpenFlag.PRODUCER)
    if left is None:
        node.bucket.delete_vbucket(1)
    else:
        node.bucket.vbucket(1).set_state(left)
    (answer,) = peer.send(memcached.SetVbucket(vbucket=1, state=memcached.VbucketState.DEAD))
    assert isinstance(answer, Response)
    assert answer.status is Status.KEY_EEXISTS
    found = node.bucket.existing(1)
    assert (found and found.state) is left


@pytest.mark.parametrize("now", [VbucketState.ACTIVE, VbucketState.DEAD])
def test_a_stream_that_ends_well_under_a_copy_that_has_another_role_leaves_it(
    node: InMemoryNode, now: VbucketState
) -> None:
    """The connection has not been told yet, but must not take the copy for consistent, nor keep it."""
    peer, opaque = opened(node, "upr")
    peer.send(*of(opaque, upr.SnapshotMarker(), upr.Mutation(by_seqno=1, key=b"a", value=b"1", cas=5)))
    vbucket = node.bucket.vbucket(0)
    vbucket.set_state(now)
    peer.send(*of(opaque, upr.StreamEnd(reason=upr.EndReason.OK)))
    assert not peer.closed
    assert now is VbucketState.ACTIVE or vbucket.consistent_seqno == 0
    vbucket.set_state(VbucketState.REPLICA)
    assert isinstance(peer.send(upr.AddStream(opaque=2))[-1], dcp.StreamRequest)
