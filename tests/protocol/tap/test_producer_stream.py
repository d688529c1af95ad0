"""What a TAP connection sends of one vbucket: backfill, what follows, breaks in the history, takeover."""

import pyarrow as pa
import pytest

from tests.support.fake_node import FakeNode, FakePeer
from tests.support.tap_peer import (
    ACK,
    BACKFILL,
    BYTE_ORDER,
    CHECKPOINT,
    DUMP,
    FUTURE,
    KEYS_ONLY,
    LIST,
    REGISTERED,
    TAKEOVER,
    TapPeer,
    brief,
    connect,
    keys,
    state_of,
    succeed,
    succeed_until,
)
from upriver.model import Event, VbucketState
from upriver.model.compression import SNAPPY
from upriver.model.position import NO_END
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.wire import AnyResponse, Message, dcp, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import TapFlag


def node_with(*written: bytes) -> FakeNode:
    node = FakeNode()
    node.create_vbucket(1)
    node.write(1, *written)
    return node


def follow(node: FakeNode, flags: int, date: int = 0) -> TapPeer[FakePeer]:
    return TapPeer(node, connect(b"client", flags | LIST, date, vbuckets=(1,)))


def copied() -> tuple[FakeNode, TapPeer[FakePeer]]:
    """Two vbuckets, and who has all of them."""
    node = node_with(b"a")
    node.create_vbucket(2)
    node.write(2, b"b")
    peer = TapPeer(node, connect(b"client", BACKFILL))
    peer.run()
    return node, peer


# From where


def test_everything_and_then_what_comes() -> None:
    node = node_with(b"a", b"b", b"a")
    node.vbucket(1).delete(b"b")
    peer = follow(node, BACKFILL)
    assert brief(peer.run()) == ["#initial_vbucket_stream", "a=v", "-b", "#close_backfill"]
    node.write(1, b"c", b"a")
    assert brief(peer.run()) == ["c=v", "a=v"]


def test_from_a_time_on() -> None:
    node = node_with(b"old")
    node.pass_by(100)
    since = int(node.clock())
    node.write(1, b"new")
    peer = follow(node, BACKFILL, since)
    messages = peer.run()
    assert brief(messages) == ["#initial_vbucket_stream", "new=v", "#close_backfill"]
    # Not a complete copy: so the client is not told to start over.
    assert messages[0].cas == since  # type: ignore[attr-defined]
    node.write(1, b"old")
    assert brief(peer.run()) == ["old=v"]


def test_what_comes_is_sent_even_if_the_clock_goes_back() -> None:
    node = node_with(b"old")
    peer = follow(node, BACKFILL, int(node.clock()))
    peer.run()
    node.source.now -= 1000
    node.write(1, b"new")
    assert brief(peer.run()) == ["new=v"]


@pytest.mark.parametrize(("flags", "date"), [(0, 0), (BACKFILL, FUTURE)])
def test_only_what_comes(flags: int, date: int) -> None:
    node = node_with(b"old")
    peer = follow(node, flags, date)
    assert peer.run() == []
    node.write(1, b"new", b"old")
    assert brief(peer.run()) == ["new=v", "old=v"]


def test_a_dump_holds_what_is_there_and_ends() -> None:
    node = node_with(b"a", b"b")
    node.disk_works = False  # nothing of it is on disk
    peer = follow(node, DUMP)
    assert brief(peer.run()) == ["#initial_vbucket_stream", "a=v", "b=v", "#close_backfill", "#close_tap_stream"]
    assert peer.closed


def test_a_dump_of_nothing_ends_too() -> None:
    node = node_with()
    assert brief(follow(node, DUMP).run()) == ["#initial_vbucket_stream", "#close_backfill", "#close_tap_stream"]
    missing = TapPeer(node, connect(b"", DUMP | LIST, vbuckets=(5,)))
    assert brief(missing.run()) == ["#close_tap_stream"]
    assert missing.closed
    assert "vbucket 5 is not sent" in str(node.warnings)


@pytest.mark.parametrize("vbuckets", [(5,), (2, 5), ()])
def test_a_takeover_of_nothing_is_refused(vbuckets: tuple[int, ...]) -> None:
    node = FakeNode()
    node.create_vbucket(2, VbucketState.REPLICA)
    peer = TapPeer(node, connect(b"taker", TAKEOVER | LIST, vbuckets=vbuckets))
    assert brief(peer.run()) == ["not_my_vbucket"]
    assert peer.closed


def test_a_vbucket_that_is_named_twice_is_sent_once() -> None:
    node = node_with(b"a")
    peer = TapPeer(node, connect(b"", DUMP | LIST, vbuckets=(1, 1)))
    assert keys(peer.run()) == ["a"]


def test_an_expiration_is_a_deletion() -> None:
    node = node_with()
    node.vbucket(1).set(b"k", b"v", expiry=10)
    peer = follow(node, BACKFILL)
    peer.run()
    node.pass_by(20)
    node.vbucket(1).expire(b"k")
    assert brief(peer.run()) == ["-k"]


def test_keys_only_sends_no_values_and_says_so() -> None:
    node = node_with()
    node.vbucket(1).set(b"k", b"value", flags=0xABCD)
    (message,) = [m for m in follow(node, DUMP | KEYS_ONLY).run() if isinstance(m, tap.Mutation)]
    assert (message.key, message.value, message.flags) == (b"k", b"", 0xABCD)
    assert message.tap_flags == TapFlag.NO_VALUE


@pytest.mark.parametrize("flags", [BACKFILL, DUMP, BACKFILL | ACK, BACKFILL | KEYS_ONLY])
def test_a_compressed_value_is_sent_inflated(flags: int) -> None:
    node, value = node_with(), b"value " * 100
    vbucket = node.vbucket(1)
    vbucket.set(b"plain", value)
    vbucket.set(b"packed", pa.Codec("snappy").compress(value, asbytes=True), datatype=SNAPPY)
    found = {m.key: (m.value, m.datatype) for m in follow(node, flags).run() if isinstance(m, tap.Mutation)}
    assert found == dict.fromkeys((b"plain", b"packed"), (b"" if flags & KEYS_ONLY else value, 0))


def test_the_byte_order_of_flags_is_told_to_those_who_ask() -> None:
    node = node_with()
    node.vbucket(1).set(b"k", b"value", flags=0x01020304)
    for flags, mark in ((DUMP, TapFlag(0)), (DUMP | BYTE_ORDER, TapFlag.NETWORK_BYTE_ORDER)):
        (message,) = [m for m in follow(node, flags).run() if isinstance(m, tap.Mutation)]
        assert (message.flags, message.tap_flags) == (0x01020304, mark)


# Checkpoints


def test_checkpoints_only_for_those_who_asked() -> None:
    node = node_with(b"a")
    plain, told = (
        follow(node, BACKFILL),
        TapPeer(node, connect(b"t", BACKFILL | CHECKPOINT | LIST, 0, (1,))),
    )
    assert brief(told.run()) == [
        "#enable_checkpoint_sync",
        "#initial_vbucket_stream",
        "a=v",
        "#close_backfill",
        "start of 1",
    ]
    node.write(1, b"b")
    told.run()
    node.vbucket(1).create_checkpoint()
    node.write(1, b"c")
    assert brief(told.run()) == ["end of 1", "start of 2", "c=v"]
    assert not [m for m in plain.run() if isinstance(m, tap.CheckpointStart)]
    assert keys(plain.received) == ["a", "b", "c"]


def test_a_registered_client_learns_where_the_open_checkpoint_begins() -> None:
    node = node_with(b"a")
    peer = follow(node, BACKFILL | REGISTERED)
    assert brief(peer.run()) == ["#initial_vbucket_stream", "a=v", "#close_backfill", "#open_checkpoint"]
    node.vbucket(1).create_checkpoint()
    node.write(1, b"b")
    assert brief(peer.run()) == ["#open_checkpoint", "b=v"]


# Breaks


def test_a_flush_is_one_message_and_then_everything_is_new() -> None:
    node, peer = copied()
    node.flush()
    node.write(1, b"c")
    node.write(2, b"d")
    messages = peer.run()
    assert brief(messages)[0] == "flush"
    assert sorted(brief(messages)[1:]) == ["c=v", "d=v"]
    assert state_of(peer.received) == {b"c": b"v", b"d": b"v"}


def test_a_client_of_future_changes_hears_of_a_flush_too() -> None:
    node = node_with(b"a")
    peer = follow(node, 0)
    peer.run()
    node.flush()
    node.write(1, b"c")
    assert brief(peer.run()) == ["flush", "c=v"]  # and no controls, although it has heard nothing of this vbucket yet
    node.flush()
    assert brief(peer.run()) == ["flush"]


@pytest.mark.parametrize("date", [None, 5])
@pytest.mark.parametrize("heard", ["away", "not acknowledged", "acknowledged"])
def test_a_client_that_comes_back_hears_of_a_flush_it_has_not_acknowledged(date: int | None, heard: str) -> None:
    node, flags = node_with(b"old"), ACK if date is None else ACK | BACKFILL
    peer = follow(node, flags, date or 0)
    peer.run()
    node.write(1, b"held")
    peer.run()
    if heard == "away":
        peer.leave()
        node.flush()
    else:
        node.flush()
        peer.judge = lambda _: None if heard == "not acknowledged" else Status.SUCCESS
        assert brief(peer.run()) == ["flush"]
        peer.leave()
    node.write(1, b"after")
    node.warnings.clear()
    again = brief(follow(node, flags, date or 0).run())
    starts_over = heard != "acknowledged"
    over = ["#initial_vbucket_stream", "after=v", "#close_backfill"]
    assert again[1:] == (over if starts_over or date else ["after=v"])
    assert ("the position of the client no longer exists" in str(node.warnings)) == starts_over


def test_a_client_that_may_hold_something_after_an_unanswered_flush_starts_over_after_the_next() -> None:
    node = node_with()
    peer = follow(node, ACK)
    peer.run()
    peer.judge = lambda _: None
    node.flush()
    node.write(1, b"held")
    assert brief(peer.run()) == ["flush", "held=v"]
    peer.leave()
    node.flush()
    again = brief(follow(node, ACK).run())
    assert again == ["#enable_auto_nack", "#initial_vbucket_stream", "#close_backfill"]


def test_where_only_some_were_flushed_who_asked_for_what_comes_starts_over_with_those() -> None:
    node = node_with(b"a")
    node.create_vbucket(2)
    peer = TapPeer(node, connect(b"client"))
    peer.run()
    node.write(2, b"b")
    peer.run()
    node.vbucket(1).flush()
    node.write(1, b"c")
    messages = peer.run()
    assert brief(messages) == ["#initial_vbucket_stream", "c=v", "#close_backfill"]
    assert {message.vbucket for message in messages} == {1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("wish", [DUMP, TAKEOVER])
def test_a_copy_is_whole_whatever_its_name_was_used_for_before(wish: int) -> None:
    node = node_with(b"a", b"b")
    live = follow(node, ACK)
    live.run()
    node.write(1, b"c")
    live.run()
    live.leave()
    assert keys(follow(node, ACK | wish).run()) == ["a", "b", "c"]


def test_the_values_come_after_the_keys() -> None:
    node = node_with(b"a", b"b")
    bare = follow(node, ACK | BACKFILL | KEYS_ONLY)
    bare.run()
    bare.leave()
    assert state_of(follow(node, ACK | BACKFILL).run()) == {b"a": b"v", b"b": b"v"}


def test_where_only_some_vbuckets_were_flushed_the_copy_of_those_starts_over() -> None:
    node, peer = copied()
    node.vbucket(1).flush()
    node.write(1, b"c")
    messages = peer.run()
    assert brief(messages) == ["#initial_vbucket_stream", "c=v", "#close_backfill"]
    assert {message.vbucket for message in messages} == {1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("date", [None, 5])
def test_a_flush_does_not_reach_what_a_dump_has_done_with(date: int | None) -> None:
    node = node_with(b"a")
    node.create_vbucket(2)
    node.write(2, *(b"b%d" % i for i in range(20)), value=bytes(100_000))
    peer = TapPeer(node, connect(b"client", DUMP if date is None else DUMP | BACKFILL, date or 0))
    while "#close_backfill" not in brief(peer.peer.received):
        peer.peer.collect()  # piece by piece
    assert "b19" not in keys(peer.peer.received)
    node.vbucket(2).flush()
    node.write(2, b"c")
    peer.run()
    assert "flush" not in brief(peer.received)
    of_2 = [message for message in peer.received if message.vbucket == 2]  # type: ignore[attr-defined]
    assert brief(of_2)[-3:] == ["#initial_vbucket_stream", "c=v", "#close_backfill"]
    assert peer.closed


def test_a_flush_does_not_reach_a_copy_that_was_not_flushed() -> None:
    node = node_with(b"a")
    replica = node.create_vbucket(2, VbucketState.REPLICA)
    replica.receive(Event.MUTATION, b"old", b"v")
    peer = TapPeer(node, connect(b"client", LIST, vbuckets=(1, 2)))
    peer.run()
    replica.receive(Event.MUTATION, b"held", b"v")
    node.write(1, b"b")
    peer.run()
    node.flush()
    node.write(1, b"c")
    messages = peer.run()
    assert brief(messages) == ["#initial_vbucket_stream", "c=v", "#close_backfill"]
    assert {message.vbucket for message in messages} == {1}  # type: ignore[attr-defined]


def test_a_change_of_state_does_not_end_it() -> None:
    node = node_with(b"a")
    peer = follow(node, BACKFILL)
    peer.run()
    vbucket = node.vbucket(1)
    vbucket.set_state(VbucketState.REPLICA)
    assert peer.run() == []
    vbucket.set_state(VbucketState.ACTIVE)
    node.write(1, b"b")
    assert brief(peer.run()) == ["b=v"]


@pytest.mark.parametrize("cut", [True, False])
def test_what_was_purged_before_it_began_does_not_break_it_half_way(cut: bool) -> None:
    """Neither if it is cut off below the purge seqno, nor if the vbucket takes another role then."""
    node = FakeNode(tap_settings=TapSettings(ack_interval=1, window_messages_max=2))
    vbucket = node.create_vbucket(1)
    node.write(1, b"a", b"b", b"c", b"gone")
    vbucket.delete(b"gone")
    node.write(1, b"d")
    node.pass_by(3)
    vbucket.purge(5)
    peer = follow(node, BACKFILL | ACK, int(node.clock()) - 50)
    peer.judge = succeed_until("b")
    messages = peer.run()
    assert 0 < len(keys(messages)) < 4
    if cut:
        peer.leave()
        peer = follow(node, ACK)
    else:
        vbucket.set_state(VbucketState.REPLICA)
        vbucket.set_state(VbucketState.ACTIVE)
        peer.judge = succeed
        last = messages[-1]
        assert isinstance(last, tap.Mutation)
        peer.peer.put(AnyResponse(opcode=last.code, opaque=last.opaque, status=Status.SUCCESS))
    messages += peer.run()
    assert set(keys(messages)) == {"a", "b", "c", "d"}
    assert all(m.cas for m in messages if brief([m]) == ["#initial_vbucket_stream"])  # type: ignore[attr-defined]
    assert not node.warnings


def test_a_rollback_starts_the_copy_over() -> None:
    node = FakeNode()
    replica = node.create_vbucket(1, VbucketState.REPLICA)
    replica.begin_snapshot(2)
    for seqno, key in ((1, b"a"), (2, b"b")):
        replica.apply(seqno, key)
    replica.begin_snapshot(3)
    replica.apply(3, b"lost")
    peer = follow(node, BACKFILL)
    assert keys(peer.run()) == ["a", "b", "lost"]
    replica.roll_back(2)
    assert brief(peer.run()) == ["#initial_vbucket_stream", "a=v", "b=v", "#close_backfill"]
    assert "starts over" in str(node.warnings)
    assert state_of(peer.received) == {b"a": b"v", b"b": b"v"}


def test_a_vbucket_that_is_removed_stops_and_a_new_one_is_followed() -> None:
    node = node_with(b"a")
    node.create_vbucket(2)
    peer = TapPeer(node, connect(b"client", BACKFILL))
    peer.run()
    node.delete_vbucket(1)
    assert peer.run() == []
    node.create_vbucket(1)
    node.create_vbucket(3)
    node.write(1, b"b")
    node.write(3, b"c")
    assert sorted(keys(peer.run())) == ["b", "c"]
    assert not peer.closed


# Hops


def test_a_change_without_hops_left_is_not_passed_on_but_is_copied() -> None:
    node = node_with()
    replica = node.create_vbucket(2, VbucketState.REPLICA)
    replica.receive(Event.MUTATION, b"tired", b"v", ttl=0)
    replica.receive(Event.MUTATION, b"fresh", b"v", ttl=1)
    live = TapPeer(node, connect(b"live", BACKFILL | LIST, vbuckets=(2,)))
    dump = TapPeer(node, connect(b"dump", DUMP | LIST, vbuckets=(2,)))
    assert keys(live.run()) == ["fresh"]
    dumped = [message for message in dump.run() if isinstance(message, tap.Mutation)]
    assert [(message.key, message.ttl) for message in dumped] == [(b"tired", 1), (b"fresh", 1)]


# Takeover


def test_a_takeover_hands_everything_over_and_leaves_the_source_dead() -> None:
    node = node_with(b"a", b"b")
    vbucket = node.vbucket(1)
    peer = follow(node, TAKEOVER | BACKFILL | ACK | CHECKPOINT)
    states: list[tuple[str, VbucketState]] = []

    def judge(message: Message) -> Status:
        states.append((brief([message])[0], vbucket.state))
        return Status.SUCCESS

    peer.judge = judge
    assert brief(peer.run()) == [
        "#enable_auto_nack",
        "#enable_checkpoint_sync",
        "state pending",
        "#initial_vbucket_stream",
        "a=v",
        "b=v",
        "#close_backfill",
        "start of 1",
        "state active",
        "#close_tap_stream",
    ]
    assert dict(states)["state pending"] is VbucketState.ACTIVE
    assert dict(states)["state active"] is VbucketState.DEAD
    assert peer.closed
    assert vbucket.state is VbucketState.DEAD


def test_active_is_not_sent_before_the_dead_state_is_on_disk() -> None:
    node = node_with(b"a")
    node.disk_works = False
    peer = follow(node, TAKEOVER)
    assert "state active" not in brief(peer.run())
    assert node.vbucket(1).state is VbucketState.DEAD
    node.disk_works = True
    assert brief(peer.run()) == ["state active", "#close_tap_stream"]
    assert peer.closed


def test_active_is_not_sent_before_everything_is_acknowledged() -> None:
    node = node_with(b"a", b"b")
    peer = follow(node, TAKEOVER | ACK)
    held: list[Message] = []

    def judge(message: Message) -> Status | None:
        if isinstance(message, tap.Mutation):
            held.append(message)
            return Status.ETMPFAIL if message.key == b"b" and len(held) < 3 else Status.SUCCESS
        return Status.SUCCESS

    peer.judge = judge
    assert "state active" not in brief(peer.run())
    node.pass_by(6)
    assert brief(peer.run()) == ["b=v", "#close_backfill", "state active", "#close_tap_stream"]


def test_the_source_is_not_dead_before_the_other_side_is_pending() -> None:
    node = node_with(b"a")
    peer = follow(node, TAKEOVER | ACK)
    peer.judge = lambda _: None
    peer.run()
    assert node.vbucket(1).state is VbucketState.ACTIVE
    node.write(1, b"still taken")
    refuser = TapPeer(node, connect(b"other", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    refuser.judge = lambda m: Status.NOT_MY_VBUCKET if isinstance(m, tap.SetVbucket) else Status.SUCCESS
    refuser.run()
    assert node.vbucket(1).state is VbucketState.ACTIVE


def test_a_consumer_that_is_lost_half_way_leaves_the_source_as_it_is() -> None:
    node = node_with(b"a")
    peer = follow(node, TAKEOVER | ACK)
    peer.judge = lambda m: None if brief([m]) == ["state active"] else Status.SUCCESS
    peer.run()
    peer.leave()
    assert node.vbucket(1).state is VbucketState.DEAD
    again = follow(node, TAKEOVER | ACK)
    assert brief(again.run())[-2:] == ["state active", "#close_tap_stream"]


def test_active_that_is_refused_for_now_is_said_again_and_then_it_is_over() -> None:
    node = node_with(b"a")
    peer = follow(node, TAKEOVER | ACK)
    statuses = [Status.ETMPFAIL, Status.EBUSY]
    peer.judge = lambda m: statuses.pop() if brief([m]) == ["state active"] and statuses else Status.SUCCESS
    assert brief(peer.run())[-1:] == ["state active"]
    for _ in range(2):
        assert not node.vbucket(1).taken_over
        node.pass_by(6)
        peer.run()
    assert brief(peer.received)[-3:] == ["state active", "state active", "#close_tap_stream"]
    assert node.vbucket(1).taken_over


@pytest.mark.parametrize("status", [Status.NOT_MY_VBUCKET, Status.EINVAL])
def test_a_destination_that_refuses_to_be_active_for_good_does_not_own_it(status: Status) -> None:
    node = node_with(b"a")
    peer = follow(node, TAKEOVER | ACK)
    peer.judge = lambda m: status if brief([m]) == ["state active"] else Status.SUCCESS
    peer.run()
    assert peer.closed
    assert not node.vbucket(1).taken_over
    assert brief(follow(node, TAKEOVER | ACK).run())[-2:] == ["state active", "#close_tap_stream"]


@pytest.mark.parametrize("meanwhile", ["nothing", "left", "active", "deleted"])
def test_a_takeover_ends_when_it_is_on_disk_that_it_is_over(meanwhile: str) -> None:
    node = node_with(b"a")
    peer = follow(node, TAKEOVER | ACK)
    vbucket = node.vbucket(1)

    def judge(message: Message) -> Status:
        node.disk_works = brief([message]) != ["state active"]
        return Status.SUCCESS

    peer.judge = judge
    assert brief(peer.run())[-1:] == ["state active"]
    assert vbucket.taken_over
    if meanwhile == "left":
        peer.leave()
    elif meanwhile == "active":
        vbucket.set_state(VbucketState.ACTIVE)
    elif meanwhile == "deleted":
        node.delete_vbucket(1)
    node.disk_works = True
    assert brief(peer.run()) == ([] if meanwhile == "left" else ["#close_tap_stream"])
    assert peer.closed


def test_a_dead_vbucket_goes_only_to_its_successor() -> None:
    node = node_with(b"a")
    node.create_vbucket(2)
    peer = TapPeer(node, connect(b"successor", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    peer.judge = lambda m: None if brief([m]) == ["state active"] else Status.SUCCESS
    peer.run()
    peer.leave()
    assert node.vbucket(1).state is VbucketState.DEAD
    other = TapPeer(node, connect(b"other", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    assert brief(other.run()) == ["not_my_vbucket"]
    other = TapPeer(node, connect(b"other", TAKEOVER | ACK | LIST, vbuckets=(1, 2)))
    assert "a=v" not in brief(other.run())
    assert "vbucket 1 is not handed over again: 'tap:successor' may own it now" in str(node.warnings)
    assert node.vbucket(2).state is VbucketState.DEAD
    takeover = dcp.StreamRequest(vbucket=1, flags=dcp.StreamFlag.TAKEOVER, opaque=3)
    for name in (b"mover", b"successor", b"tap:successor", b"\\tap:successor"):
        assert brief(node.connect().open(name).send(takeover)) == ["not_my_vbucket"]
    successor = TapPeer(node, connect(b"successor", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    assert brief(successor.run())[-2:] == ["state active", "#close_tap_stream"]
    again = TapPeer(node, connect(b"successor", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    assert brief(again.run()) == ["not_my_vbucket"], "who has it may have handed it on since"


def test_a_dead_vbucket_does_not_go_to_a_client_whose_name_only_looks_like_that_of_a_connection() -> None:
    node = node_with(b"a")
    takeover = dcp.StreamRequest(vbucket=1, flags=dcp.StreamFlag.TAKEOVER, opaque=3, end_seqno=NO_END)
    peer = node.connect().open(b"tap:successor")
    messages = peer.send(takeover)
    while node.vbucket(1).state is not VbucketState.DEAD:
        asked = [m for m in messages if isinstance(m, dcp.SnapshotMarker | dcp.SetVbucketState)]
        messages = peer.send(*(AnyResponse(opcode=m.code, opaque=m.opaque, status=Status.SUCCESS) for m in asked))
    other = TapPeer(node, connect(b"successor", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    assert brief(other.run()) == ["not_my_vbucket"]
    peer.lose()
    assert brief(node.connect().open(b"tap:successor").send(takeover))[0] == "success"


def test_a_takeover_that_was_not_read_is_repeated_under_its_name() -> None:
    node = node_with(b"a")
    request = connect(b"taker", TAKEOVER | LIST, vbuckets=(1,))
    unread = TapPeer(node, request)
    node.settle()
    unread.leave()
    assert node.vbucket(1).state is VbucketState.DEAD
    assert brief(TapPeer(node, request).run())[-2:] == ["state active", "#close_tap_stream"]


def test_copies_are_not_handed_over() -> None:
    node = node_with()
    replica = node.create_vbucket(2, VbucketState.REPLICA)
    replica.receive(Event.MUTATION, b"k")
    peer = TapPeer(node, connect(b"taker", TAKEOVER | LIST, vbuckets=(1, 2)))
    assert brief(peer.run())[-2:] == ["state active", "#close_tap_stream"]
    assert "vbucket 2 is not handed over: a replica copy" in str(node.warnings)
    assert replica.state is VbucketState.REPLICA


# Vbuckets that come to be


def test_a_client_of_future_changes_gets_all_of_a_new_vbucket() -> None:
    node = node_with(b"old")
    replica = node.create_vbucket(2, VbucketState.REPLICA)
    everything = TapPeer(node, connect(b"all"))
    named = TapPeer(node, connect(b"named", LIST, vbuckets=(1, 2, 3)))
    for peer in (everything, named):
        assert peer.run() == []
    replica.receive(Event.MUTATION, b"copied", b"v")
    node.create_vbucket(3)
    node.write(3, b"new")
    assert keys(everything.run()) == ["new"]
    assert sorted(keys(named.run())) == ["copied", "new"]


@pytest.mark.parametrize("flags", [0, ACK, LIST, LIST | ACK])
def test_a_client_that_was_away_when_a_vbucket_was_created_gets_all_of_it_too(flags: int) -> None:
    node = node_with(b"old")
    copy = node.create_vbucket(2, VbucketState.REPLICA)
    request = connect(b"client", flags, vbuckets=(1, 2, 3))
    peer = TapPeer(node, request)
    peer.run()
    peer.leave()
    copy.receive(Event.MUTATION, b"copied", b"v")
    copy.set_state(VbucketState.ACTIVE)
    node.create_vbucket(3)
    node.write(3, b"new")
    assert sorted(keys(TapPeer(node, request).run())) == ["copied", "new"]


def test_a_client_that_asks_for_more_vbuckets_gets_their_future_changes() -> None:
    node = node_with(b"old")
    node.create_vbucket(2)
    node.write(2, b"old")
    peer = follow(node, ACK)
    peer.run()
    peer.leave()
    node.write(1, b"new")
    for wish in (LIST, 0):
        again = TapPeer(node, connect(b"client", ACK | wish, vbuckets=(1, 2)))
        assert keys(again.run()) == (["new"] if wish else [])
        again.leave()


def test_a_client_of_future_changes_gets_a_promoted_copy_from_its_position() -> None:
    node = node_with()
    replica = node.create_vbucket(2, VbucketState.REPLICA)
    replica.receive(Event.MUTATION, b"old", b"v")
    peer = TapPeer(node, connect(b"all"))
    peer.run()
    replica.receive(Event.MUTATION, b"meanwhile", b"v")
    replica.set_state(VbucketState.ACTIVE)
    node.write(2, b"new")
    assert keys(peer.run()) == ["meanwhile", "new"]
