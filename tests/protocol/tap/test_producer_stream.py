"""What a TAP connection sends of one vbucket: backfill, what follows, breaks in the history, takeover."""

import logging

import pyarrow as pa
import pytest

from tests.support.in_memory_node import Laboratory
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
from upriver.engine.maintenance import Retention
from upriver.model import Change, Event, FailoverEntry, FailoverLog, VbucketState
from upriver.model.compression import SNAPPY
from upriver.model.position import NO_END
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.wire import AnyResponse, Message, dcp, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import TapFlag


def stage(*written: bytes) -> Laboratory:
    laboratory = Laboratory()
    laboratory.bucket.create_vbucket(1)
    laboratory.write(1, *written)
    return laboratory


def follow(laboratory: Laboratory, flags: int, date: int = 0) -> TapPeer:
    return TapPeer(laboratory, connect(b"client", flags | LIST, date, vbuckets=(1,)))


def copied() -> tuple[Laboratory, TapPeer]:
    """Two vbuckets, and who has all of them."""
    laboratory = stage(b"a")
    laboratory.bucket.create_vbucket(2)
    laboratory.write(2, b"b")
    peer = TapPeer(laboratory, connect(b"client", BACKFILL))
    peer.run()
    return laboratory, peer


# From where


def test_everything_and_then_what_comes() -> None:
    laboratory = stage(b"a", b"b", b"a")
    laboratory.bucket.vbucket(1).delete(b"b")
    peer = follow(laboratory, BACKFILL)
    assert brief(peer.run()) == ["#initial_vbucket_stream", "a=v", "-b", "#close_backfill"]
    laboratory.write(1, b"c", b"a")
    assert brief(peer.run()) == ["c=v", "a=v"]


def test_from_a_time_on() -> None:
    laboratory = stage(b"old")
    laboratory.pass_by(100)
    since = int(laboratory.clock())
    laboratory.write(1, b"new")
    peer = follow(laboratory, BACKFILL, since)
    # Not a whole copy: so nobody is told to start over.
    assert brief(peer.run()) == ["new=v", "#close_backfill"]
    laboratory.write(1, b"old")
    assert brief(peer.run()) == ["old=v"]


def test_what_comes_is_sent_even_if_the_clock_goes_back() -> None:
    laboratory = stage(b"old")
    peer = follow(laboratory, BACKFILL, int(laboratory.clock()))
    peer.run()
    laboratory.scheduler.now -= 1000
    laboratory.write(1, b"new")
    assert brief(peer.run()) == ["new=v"]


@pytest.mark.parametrize(("flags", "date"), [(0, 0), (BACKFILL, FUTURE)])
def test_only_what_comes(flags: int, date: int) -> None:
    laboratory = stage(b"old")
    peer = follow(laboratory, flags, date)
    assert peer.run() == []
    laboratory.write(1, b"new", b"old")
    assert brief(peer.run()) == ["new=v", "old=v"]


def test_a_dump_holds_what_is_there_and_ends() -> None:
    laboratory = stage(b"a", b"b")
    laboratory.disk_works = False  # nothing of it is on disk
    peer = follow(laboratory, DUMP)
    assert brief(peer.run()) == ["#initial_vbucket_stream", "a=v", "b=v", "#close_backfill", "#close_tap_stream"]
    assert peer.closed


def test_a_dump_of_nothing_ends_too(caplog: pytest.LogCaptureFixture) -> None:
    laboratory = stage()
    assert brief(follow(laboratory, DUMP).run()) == ["#initial_vbucket_stream", "#close_backfill", "#close_tap_stream"]
    missing = TapPeer(laboratory, connect(b"", DUMP | LIST, vbuckets=(5,)))
    assert brief(missing.run()) == ["#close_tap_stream"]
    assert missing.closed
    assert "vbucket 5 is not sent" in caplog.text


@pytest.mark.parametrize("vbuckets", [(5,), (2, 5), ()])
def test_a_takeover_of_nothing_is_refused(vbuckets: tuple[int, ...]) -> None:
    laboratory = Laboratory()
    laboratory.bucket.create_vbucket(2, VbucketState.REPLICA)
    peer = TapPeer(laboratory, connect(b"taker", TAKEOVER | LIST, vbuckets=vbuckets))
    assert brief(peer.run()) == ["not_my_vbucket"]
    assert peer.closed


def test_a_vbucket_that_is_named_twice_is_sent_once() -> None:
    laboratory = stage(b"a")
    peer = TapPeer(laboratory, connect(b"", DUMP | LIST, vbuckets=(1, 1)))
    assert keys(peer.run()) == ["a"]


def test_an_expiration_is_a_deletion() -> None:
    laboratory = stage()
    laboratory.bucket.vbucket(1).set(b"k", b"v", expiry=10)
    peer = follow(laboratory, BACKFILL)
    peer.run()
    laboratory.pass_by(20)
    laboratory.bucket.vbucket(1).table.expire(b"k")
    assert brief(peer.run()) == ["-k"]


def test_keys_only_sends_no_values_and_says_so() -> None:
    laboratory = stage()
    laboratory.bucket.vbucket(1).set(b"k", b"value", flags=0xABCD)
    (message,) = [m for m in follow(laboratory, DUMP | KEYS_ONLY).run() if isinstance(m, tap.Mutation)]
    assert (message.key, message.value, message.flags) == (b"k", b"", 0xABCD)
    assert message.tap_flags == TapFlag.NO_VALUE


@pytest.mark.parametrize("flags", [BACKFILL, DUMP, BACKFILL | ACK, BACKFILL | KEYS_ONLY])
def test_a_compressed_value_is_sent_inflated(flags: int) -> None:
    laboratory, value = stage(), b"value " * 100
    vbucket = laboratory.bucket.vbucket(1)
    vbucket.set(b"plain", value)
    vbucket.set(b"packed", pa.Codec("snappy").compress(value, asbytes=True), datatype=SNAPPY)
    found = {m.key: (m.value, m.datatype) for m in follow(laboratory, flags).run() if isinstance(m, tap.Mutation)}
    assert found == dict.fromkeys((b"plain", b"packed"), (b"" if flags & KEYS_ONLY else value, 0))


def test_the_byte_order_of_flags_is_told_to_those_who_ask() -> None:
    laboratory = stage()
    laboratory.bucket.vbucket(1).set(b"k", b"value", flags=0x01020304)
    for flags, mark in ((DUMP, TapFlag(0)), (DUMP | BYTE_ORDER, TapFlag.NETWORK_BYTE_ORDER)):
        (message,) = [m for m in follow(laboratory, flags).run() if isinstance(m, tap.Mutation)]
        assert (message.flags, message.tap_flags) == (0x01020304, mark)


# Checkpoints


def test_checkpoints_only_for_those_who_asked() -> None:
    laboratory = stage(b"a")
    plain, told = (
        follow(laboratory, BACKFILL),
        TapPeer(laboratory, connect(b"t", BACKFILL | CHECKPOINT | LIST, 0, (1,))),
    )
    assert brief(told.run()) == [
        "#enable_checkpoint_sync",
        "#initial_vbucket_stream",
        "a=v",
        "#close_backfill",
        "start of 1",
    ]
    laboratory.write(1, b"b")
    told.run()
    laboratory.node.checkpoints.create(laboratory.bucket.vbucket(1))
    laboratory.write(1, b"c")
    assert brief(told.run()) == ["end of 1", "start of 2", "c=v"]
    assert not [m for m in plain.run() if isinstance(m, tap.CheckpointStart)]
    assert keys(plain.received) == ["a", "b", "c"]


def test_a_registered_client_learns_where_the_open_checkpoint_begins() -> None:
    laboratory = stage(b"a")
    peer = follow(laboratory, BACKFILL | REGISTERED)
    assert brief(peer.run()) == ["#initial_vbucket_stream", "a=v", "#close_backfill", "#open_checkpoint"]
    laboratory.node.checkpoints.create(laboratory.bucket.vbucket(1))
    laboratory.write(1, b"b")
    assert brief(peer.run()) == ["#open_checkpoint", "b=v"]


# Breaks


def test_a_flush_is_one_message_and_then_everything_is_new() -> None:
    laboratory, peer = copied()
    laboratory.bucket.flush()
    laboratory.write(1, b"c")
    laboratory.write(2, b"d")
    messages = peer.run()
    assert brief(messages)[0] == "flush"
    assert sorted(brief(messages)[1:]) == ["c=v", "d=v"]
    assert state_of(peer.received) == {b"c": b"v", b"d": b"v"}


def test_who_asked_for_what_comes_hears_of_a_flush_too() -> None:
    laboratory = stage(b"a")
    peer = follow(laboratory, 0)
    peer.run()
    laboratory.bucket.flush()
    laboratory.write(1, b"c")
    # It has heard nothing of this vbucket yet, and the flush means what it has heard of.
    assert brief(peer.run()) == ["#close_backfill", "flush", "c=v"]
    laboratory.bucket.flush()
    assert brief(peer.run()) == ["flush"]


@pytest.mark.parametrize("date", [None, 5])
@pytest.mark.parametrize("heard", ["away", "not acknowledged", "acknowledged"])
def test_a_client_that_comes_back_hears_of_a_flush_it_has_not_acknowledged(
    date: int | None, heard: str, caplog: pytest.LogCaptureFixture
) -> None:
    laboratory, flags = stage(b"old"), ACK if date is None else ACK | BACKFILL
    peer = follow(laboratory, flags, date or 0)
    peer.run()
    laboratory.write(1, b"held")
    peer.run()
    if heard == "away":
        peer.leave()
        laboratory.bucket.flush()
    else:
        laboratory.bucket.flush()
        peer.judge = lambda _: None if heard == "not acknowledged" else Status.SUCCESS
        assert brief(peer.run()) == ["flush"]
        peer.leave()
    laboratory.write(1, b"after")
    caplog.clear()
    again = brief(follow(laboratory, flags, date or 0).run())
    anew = heard != "acknowledged"
    assert again[1:] == ["#initial_vbucket_stream", "after=v"] if anew else ["after=v", "#close_backfill"]
    assert ("the place of the client is no more" in caplog.text) == anew


def test_who_may_hold_something_behind_a_flush_that_was_not_answered_starts_over_after_the_next() -> None:
    laboratory = stage()
    peer = follow(laboratory, ACK)
    peer.run()
    peer.judge = lambda _: None
    laboratory.bucket.flush()
    laboratory.write(1, b"held")
    assert brief(peer.run()) == ["#close_backfill", "flush", "held=v"]
    peer.leave()
    laboratory.bucket.flush()
    assert brief(follow(laboratory, ACK).run()) == ["#enable_auto_nack", "#initial_vbucket_stream"]


def test_where_only_some_were_flushed_who_asked_for_what_comes_starts_over_with_those() -> None:
    laboratory = stage(b"a")
    laboratory.bucket.create_vbucket(2)
    peer = TapPeer(laboratory, connect(b"client"))
    peer.run()
    laboratory.write(2, b"b")
    peer.run()
    laboratory.bucket.vbucket(1).flush()
    laboratory.write(1, b"c")
    messages = peer.run()
    assert brief(messages) == ["#initial_vbucket_stream", "c=v"]
    assert {message.vbucket for message in messages} == {1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("wish", [DUMP, TAKEOVER])
def test_a_copy_is_whole_whatever_its_name_was_used_for_before(wish: int) -> None:
    laboratory = stage(b"a", b"b")
    live = follow(laboratory, ACK)
    live.run()
    laboratory.write(1, b"c")
    live.run()
    live.leave()
    assert keys(follow(laboratory, ACK | wish).run()) == ["a", "b", "c"]


def test_the_values_come_after_the_keys() -> None:
    laboratory = stage(b"a", b"b")
    bare = follow(laboratory, ACK | BACKFILL | KEYS_ONLY)
    bare.run()
    bare.leave()
    assert state_of(follow(laboratory, ACK | BACKFILL).run()) == {b"a": b"v", b"b": b"v"}


def test_where_only_some_vbuckets_were_flushed_the_copy_of_those_starts_over() -> None:
    laboratory, peer = copied()
    laboratory.bucket.vbucket(1).flush()
    laboratory.write(1, b"c")
    messages = peer.run()
    assert brief(messages) == ["#initial_vbucket_stream", "c=v", "#close_backfill"]
    assert {message.vbucket for message in messages} == {1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("date", [None, 5])
def test_a_flush_does_not_reach_what_a_dump_has_done_with(date: int | None) -> None:
    laboratory = stage(b"a")
    laboratory.bucket.create_vbucket(2)
    laboratory.write(2, *(b"b%d" % i for i in range(20)), value=bytes(100_000))
    peer = TapPeer(laboratory, connect(b"client", DUMP if date is None else DUMP | BACKFILL, date or 0))
    while "#close_backfill" not in brief(peer.peer.received):
        peer.peer.collect()  # piece by piece
    assert "b19" not in keys(peer.peer.received)
    laboratory.bucket.vbucket(2).flush()
    laboratory.write(2, b"c")
    peer.run()
    assert "flush" not in brief(peer.received)
    of_2 = [message for message in peer.received if message.vbucket == 2]  # type: ignore[attr-defined]
    assert brief(of_2)[-3:] == ["#initial_vbucket_stream", "c=v", "#close_backfill"]
    assert peer.closed


def test_a_flush_does_not_reach_a_copy_that_was_not_flushed() -> None:
    laboratory = stage(b"a")
    replica = laboratory.bucket.create_vbucket(2, VbucketState.REPLICA)
    replica.receive(Event.MUTATION, b"old", b"v")
    peer = TapPeer(laboratory, connect(b"client", LIST, vbuckets=(1, 2)))
    peer.run()
    replica.receive(Event.MUTATION, b"held", b"v")
    laboratory.write(1, b"b")
    peer.run()
    laboratory.bucket.flush()
    laboratory.write(1, b"c")
    messages = peer.run()
    assert brief(messages) == ["#initial_vbucket_stream", "c=v"]
    assert {message.vbucket for message in messages} == {1}  # type: ignore[attr-defined]


def test_a_change_of_state_does_not_end_it() -> None:
    laboratory = stage(b"a")
    peer = follow(laboratory, BACKFILL)
    peer.run()
    vbucket = laboratory.bucket.vbucket(1)
    vbucket.set_state(VbucketState.REPLICA)
    assert peer.run() == []
    vbucket.set_state(VbucketState.ACTIVE)
    laboratory.write(1, b"b")
    assert brief(peer.run()) == ["b=v"]


@pytest.mark.parametrize("cut", [True, False])
def test_what_was_purged_before_it_began_does_not_break_it_half_way(
    cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither if it is cut off below the purge seqno, nor if the vbucket takes another role then."""
    laboratory = Laboratory(tap_settings=TapSettings(ack_interval=1, window_messages_max=2))
    vbucket = laboratory.bucket.create_vbucket(1)
    laboratory.write(1, b"a", b"b", b"c", b"gone")
    vbucket.delete(b"gone")
    laboratory.write(1, b"d")
    laboratory.bucket.maintenance.retention = Retention(history_s=0, history_bytes=0, tombstone_s=1)
    laboratory.pass_by(3)
    laboratory.bucket.maintenance.run_all()
    assert vbucket.table.purge_seqno == 5
    peer = follow(laboratory, BACKFILL | ACK, int(laboratory.clock()) - 50)
    peer.judge = succeed_until("b")
    messages = peer.run()
    assert 0 < len(keys(messages)) < 4
    if cut:
        peer.leave()
        peer = follow(laboratory, ACK)
    else:
        vbucket.set_state(VbucketState.REPLICA)
        vbucket.set_state(VbucketState.ACTIVE)
        peer.judge = succeed
        last = messages[-1]
        assert isinstance(last, tap.Mutation)
        peer.peer.put(AnyResponse(opcode=last.code, opaque=last.opaque, status=Status.SUCCESS))
    messages += peer.run()
    assert set(keys(messages)) == {"a", "b", "c", "d"}
    assert "#initial_vbucket_stream" not in brief(messages)
    assert caplog.text == ""


def test_a_rollback_starts_the_copy_over(caplog: pytest.LogCaptureFixture) -> None:
    laboratory = Laboratory()
    replica = laboratory.bucket.create_vbucket(1, VbucketState.REPLICA)
    replica.replace_failover_log(FailoverLog((FailoverEntry(77, 0),)))
    replica.begin_snapshot(0, 2)
    for seqno, key in ((1, b"a"), (2, b"b")):
        replica.apply(Change(vbucket=1, event=Event.MUTATION, seqno=seqno, key=key, value=b"v"))
    replica.begin_snapshot(2, 3)
    replica.apply(Change(vbucket=1, event=Event.MUTATION, seqno=3, key=b"lost", value=b"v"))
    peer = follow(laboratory, BACKFILL)
    assert keys(peer.run()) == ["a", "b", "lost"]
    with caplog.at_level(logging.WARNING):
        replica.roll_back(2)
        assert brief(peer.run()) == ["#initial_vbucket_stream", "a=v", "b=v", "#close_backfill"]
    assert "sent anew" in caplog.text
    assert state_of(peer.received) == {b"a": b"v", b"b": b"v"}


def test_a_vbucket_that_is_removed_stops_and_a_new_one_is_followed() -> None:
    laboratory = stage(b"a")
    laboratory.bucket.create_vbucket(2)
    peer = TapPeer(laboratory, connect(b"client", BACKFILL))
    peer.run()
    laboratory.bucket.delete_vbucket(1)
    assert peer.run() == []
    laboratory.bucket.create_vbucket(1)
    laboratory.bucket.create_vbucket(3)
    laboratory.write(1, b"b")
    laboratory.write(3, b"c")
    assert sorted(keys(peer.run())) == ["b", "c"]
    assert not peer.closed


# Hops


def test_a_change_without_hops_left_is_not_passed_on_but_is_copied() -> None:
    laboratory = stage()
    replica = laboratory.bucket.create_vbucket(2, VbucketState.REPLICA)
    replica.receive(Event.MUTATION, b"tired", b"v", ttl=0)
    replica.receive(Event.MUTATION, b"fresh", b"v", ttl=1)
    live = TapPeer(laboratory, connect(b"live", BACKFILL | LIST, vbuckets=(2,)))
    dump = TapPeer(laboratory, connect(b"dump", DUMP | LIST, vbuckets=(2,)))
    assert keys(live.run()) == ["fresh"]
    dumped = [message for message in dump.run() if isinstance(message, tap.Mutation)]
    assert [(message.key, message.ttl) for message in dumped] == [(b"tired", 1), (b"fresh", 1)]


# Takeover


def test_a_takeover_hands_everything_over_and_leaves_the_source_dead() -> None:
    laboratory = stage(b"a", b"b")
    vbucket = laboratory.bucket.vbucket(1)
    peer = follow(laboratory, TAKEOVER | BACKFILL | ACK | CHECKPOINT)
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


def test_active_is_not_sent_before_the_death_is_on_disk() -> None:
    laboratory = stage(b"a")
    laboratory.disk_works = False
    peer = follow(laboratory, TAKEOVER)
    assert "state active" not in brief(peer.run())
    assert laboratory.bucket.vbucket(1).state is VbucketState.DEAD
    laboratory.disk_works = True
    assert brief(peer.run()) == ["state active", "#close_tap_stream"]
    assert peer.closed


def test_active_is_not_sent_before_everything_is_acknowledged() -> None:
    laboratory = stage(b"a", b"b")
    peer = follow(laboratory, TAKEOVER | ACK)
    held: list[Message] = []

    def judge(message: Message) -> Status | None:
        if isinstance(message, tap.Mutation):
            held.append(message)
            return Status.ETMPFAIL if message.key == b"b" and len(held) < 3 else Status.SUCCESS
        return Status.SUCCESS

    peer.judge = judge
    assert "state active" not in brief(peer.run())
    laboratory.pass_by(6)
    assert brief(peer.run()) == ["b=v", "#close_backfill", "state active", "#close_tap_stream"]


def test_nobody_dies_before_the_other_side_is_pending() -> None:
    laboratory = stage(b"a")
    peer = follow(laboratory, TAKEOVER | ACK)
    peer.judge = lambda _: None
    peer.run()
    assert laboratory.bucket.vbucket(1).state is VbucketState.ACTIVE
    laboratory.write(1, b"still taken")
    refuser = TapPeer(laboratory, connect(b"other", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    refuser.judge = lambda m: Status.NOT_MY_VBUCKET if isinstance(m, tap.SetVbucket) else Status.SUCCESS
    refuser.run()
    assert laboratory.bucket.vbucket(1).state is VbucketState.ACTIVE


def test_a_consumer_that_is_lost_half_way_leaves_the_source_as_it_is() -> None:
    laboratory = stage(b"a")
    peer = follow(laboratory, TAKEOVER | ACK)
    peer.judge = lambda m: None if brief([m]) == ["state active"] else Status.SUCCESS
    peer.run()
    peer.leave()
    assert laboratory.bucket.vbucket(1).state is VbucketState.DEAD
    again = follow(laboratory, TAKEOVER | ACK)
    assert brief(again.run())[-2:] == ["state active", "#close_tap_stream"]


def test_active_that_is_refused_for_now_is_said_again_and_then_it_is_over() -> None:
    laboratory = stage(b"a")
    peer = follow(laboratory, TAKEOVER | ACK)
    statuses = [Status.ETMPFAIL, Status.EBUSY]
    peer.judge = lambda m: statuses.pop() if brief([m]) == ["state active"] and statuses else Status.SUCCESS
    assert brief(peer.run())[-1:] == ["state active"]
    for _ in range(2):
        assert not laboratory.bucket.vbucket(1).taken_over
        laboratory.pass_by(6)
        peer.run()
    assert brief(peer.received)[-3:] == ["state active", "state active", "#close_tap_stream"]
    assert laboratory.bucket.vbucket(1).taken_over


@pytest.mark.parametrize("status", [Status.NOT_MY_VBUCKET, Status.EINVAL])
def test_who_refuses_to_be_active_for_good_does_not_have_it(status: Status) -> None:
    laboratory = stage(b"a")
    peer = follow(laboratory, TAKEOVER | ACK)
    peer.judge = lambda m: status if brief([m]) == ["state active"] else Status.SUCCESS
    peer.run()
    assert peer.closed
    assert not laboratory.bucket.vbucket(1).taken_over
    assert brief(follow(laboratory, TAKEOVER | ACK).run())[-2:] == ["state active", "#close_tap_stream"]


@pytest.mark.parametrize("meanwhile", ["nothing", "left", "active", "deleted"])
def test_a_takeover_ends_when_it_is_on_disk_that_it_is_over(meanwhile: str) -> None:
    laboratory = stage(b"a")
    peer = follow(laboratory, TAKEOVER | ACK)
    vbucket = laboratory.bucket.vbucket(1)

    def judge(message: Message) -> Status:
        laboratory.disk_works = brief([message]) != ["state active"]
        return Status.SUCCESS

    peer.judge = judge
    assert brief(peer.run())[-1:] == ["state active"]
    assert vbucket.taken_over
    if meanwhile == "left":
        peer.leave()
    elif meanwhile == "active":
        vbucket.set_state(VbucketState.ACTIVE)
    elif meanwhile == "deleted":
        laboratory.bucket.delete_vbucket(1)
    laboratory.disk_works = True
    assert brief(peer.run()) == ([] if meanwhile == "left" else ["#close_tap_stream"])
    assert peer.closed


def test_a_dead_vbucket_goes_to_nobody_but_the_one_it_died_for(caplog: pytest.LogCaptureFixture) -> None:
    laboratory = stage(b"a")
    laboratory.bucket.create_vbucket(2)
    peer = TapPeer(laboratory, connect(b"successor", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    peer.judge = lambda m: None if brief([m]) == ["state active"] else Status.SUCCESS
    peer.run()
    peer.leave()
    assert laboratory.bucket.vbucket(1).state is VbucketState.DEAD
    other = TapPeer(laboratory, connect(b"other", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    assert brief(other.run()) == ["not_my_vbucket"]
    other = TapPeer(laboratory, connect(b"other", TAKEOVER | ACK | LIST, vbuckets=(1, 2)))
    with caplog.at_level(logging.WARNING):
        assert "a=v" not in brief(other.run())
    assert "vbucket 1 is not handed over: died for 'tap:successor', who may own it" in caplog.text
    assert laboratory.bucket.vbucket(2).state is VbucketState.DEAD
    takeover = dcp.StreamRequest(vbucket=1, flags=dcp.StreamFlag.TAKEOVER, opaque=3)
    for name in (b"mover", b"successor", b"tap:successor", b"\\tap:successor"):
        assert brief(laboratory.connect().open(name).send(takeover)) == ["not_my_vbucket"]
    successor = TapPeer(laboratory, connect(b"successor", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    assert brief(successor.run())[-2:] == ["state active", "#close_tap_stream"]
    again = TapPeer(laboratory, connect(b"successor", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    assert brief(again.run()) == ["not_my_vbucket"], "who has it may have handed it on since"


def test_a_dead_vbucket_does_not_go_to_a_client_whose_name_only_looks_like_that_of_a_connection() -> None:
    laboratory = stage(b"a")
    takeover = dcp.StreamRequest(vbucket=1, flags=dcp.StreamFlag.TAKEOVER, opaque=3, end_seqno=NO_END)
    peer = laboratory.connect().open(b"tap:successor")
    messages = peer.send(takeover)
    while laboratory.bucket.vbucket(1).state is not VbucketState.DEAD:
        asked = [m for m in messages if isinstance(m, dcp.SnapshotMarker | dcp.SetVbucketState)]
        messages = peer.send(*(AnyResponse(opcode=m.code, opaque=m.opaque, status=Status.SUCCESS) for m in asked))
    other = TapPeer(laboratory, connect(b"successor", TAKEOVER | ACK | LIST, vbuckets=(1,)))
    assert brief(other.run()) == ["not_my_vbucket"]
    assert brief(laboratory.connect().open(b"tap:successor").send(takeover))[0] == "success"


@pytest.mark.parametrize("acks", [0, ACK])
def test_nothing_dies_for_who_has_no_name_to_come_back_under(acks: int) -> None:
    laboratory = stage(b"a")
    peer = TapPeer(laboratory, connect(b"", TAKEOVER | LIST | acks, vbuckets=(1,)))
    assert brief(peer.run()) == ["einval"]
    assert peer.closed
    assert laboratory.bucket.vbucket(1).state is VbucketState.ACTIVE


def test_a_takeover_that_nobody_read_is_repeated_under_its_name() -> None:
    laboratory = stage(b"a")
    request = connect(b"taker", TAKEOVER | LIST, vbuckets=(1,))
    unread = TapPeer(laboratory, request)
    laboratory.settle()
    unread.leave()
    assert laboratory.bucket.vbucket(1).state is VbucketState.DEAD
    assert brief(TapPeer(laboratory, request).run())[-2:] == ["state active", "#close_tap_stream"]


def test_copies_are_not_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    laboratory = stage()
    replica = laboratory.bucket.create_vbucket(2, VbucketState.REPLICA)
    replica.receive(Event.MUTATION, b"k")
    with caplog.at_level(logging.WARNING):
        peer = TapPeer(laboratory, connect(b"taker", TAKEOVER | LIST, vbuckets=(1, 2)))
        assert brief(peer.run())[-2:] == ["state active", "#close_tap_stream"]
    assert "vbucket 2 is not handed over: a replica copy" in caplog.text
    assert replica.state is VbucketState.REPLICA


# Vbuckets that come to be


def test_who_asked_for_what_comes_gets_all_of_what_was_not_there_yet() -> None:
    laboratory = stage(b"old")
    replica = laboratory.bucket.create_vbucket(2, VbucketState.REPLICA)
    everything = TapPeer(laboratory, connect(b"all"))
    named = TapPeer(laboratory, connect(b"named", LIST, vbuckets=(1, 2, 3)))
    for peer in (everything, named):
        assert peer.run() == []
    replica.receive(Event.MUTATION, b"copied", b"v")
    laboratory.bucket.create_vbucket(3)
    laboratory.write(3, b"new")
    assert keys(everything.run()) == ["new"]
    assert sorted(keys(named.run())) == ["copied", "new"]


@pytest.mark.parametrize("flags", [0, ACK, LIST, LIST | ACK])
def test_who_was_away_when_a_vbucket_came_to_be_gets_all_of_it_too(flags: int) -> None:
    laboratory = stage(b"old")
    copy = laboratory.bucket.create_vbucket(2, VbucketState.REPLICA)
    request = connect(b"client", flags, vbuckets=(1, 2, 3))
    peer = TapPeer(laboratory, request)
    peer.run()
    peer.leave()
    copy.receive(Event.MUTATION, b"copied", b"v")
    copy.set_state(VbucketState.ACTIVE)
    laboratory.bucket.create_vbucket(3)
    laboratory.write(3, b"new")
    assert sorted(keys(TapPeer(laboratory, request).run())) == ["copied", "new"]


def test_who_asks_for_more_vbuckets_than_before_gets_what_comes_of_those() -> None:
    laboratory = stage(b"old")
    laboratory.bucket.create_vbucket(2)
    laboratory.write(2, b"old")
    peer = follow(laboratory, ACK)
    peer.run()
    peer.leave()
    laboratory.write(1, b"new")
    for wish in (LIST, 0):
        again = TapPeer(laboratory, connect(b"client", ACK | wish, vbuckets=(1, 2)))
        assert keys(again.run()) == (["new"] if wish else [])
        again.leave()


def test_who_asked_for_what_comes_gets_a_promoted_copy_from_where_it_stood() -> None:
    laboratory = stage()
    replica = laboratory.bucket.create_vbucket(2, VbucketState.REPLICA)
    replica.receive(Event.MUTATION, b"old", b"v")
    peer = TapPeer(laboratory, connect(b"all"))
    peer.run()
    replica.receive(Event.MUTATION, b"meanwhile", b"v")
    replica.set_state(VbucketState.ACTIVE)
    laboratory.write(2, b"new")
    assert keys(peer.run()) == ["meanwhile", "new"]
