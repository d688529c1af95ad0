"""One stream from its answer to its end: snapshots, ends, filters, state changes, flush, takeover."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.fake_node import FakeNode, FakePeer, node_with_peer
from tests.support.stream_requests import (
    END,
    answer_to,
    ask,
    ask_upr,
    brief,
    control,
    set_state,
    uuid_of,
)
from upriver.errors import CorruptData, NotMyVbucket
from upriver.model import VbucketState
from upriver.wire import AnyResponse, Message, dcp, upr
from upriver.wire.codes import Status


def written(node: FakeNode, peer: FakePeer, *keys: bytes) -> list[str]:
    node.write(0, *keys)
    node.settle()
    return brief(peer.take())


# Snapshots


def test_backfill_then_live_changes() -> None:
    node, peer = node_with_peer(b"a", b"b", b"a")
    answer, marker, *changes = ask(peer)
    assert isinstance(marker, dcp.SnapshotMarker)
    assert marker.flags == dcp.MarkerFlag.MEMORY | dcp.MarkerFlag.CHECKPOINT
    assert brief([answer, marker, *changes]) == ["success", "(0,3]", "b@2", "a@3"]
    assert written(node, peer, b"c") == ["(3,4]", "c@4"]
    assert written(node, peer, b"c", b"d") == ["(4,6]", "c@5", "d@6"]
    assert written(node, peer) == []


def test_a_later_start_begins_no_checkpoint() -> None:
    node, peer = node_with_peer(b"a", b"b")
    marker = ask(peer, 1, vbucket_uuid=uuid_of(node))[1]
    assert isinstance(marker, dcp.SnapshotMarker)
    assert (marker.start_seqno, marker.end_seqno, marker.flags) == (1, 2, dcp.MarkerFlag.MEMORY)


def test_an_announced_snapshot_shows_the_state_at_its_end() -> None:
    node, peer = node_with_peer(b"a", b"b")
    control(peer, b"connection_buffer_size", b"1")
    assert brief(ask(peer)) == ["success", "(0,2]"]
    node.write(0, b"a", b"b")
    assert brief(peer.send(dcp.BufferAck(bytes_processed=1000))) == ["a@1"]
    assert brief(peer.send(dcp.BufferAck(bytes_processed=1000))) == ["b@2"]
    assert brief(peer.send(dcp.BufferAck(bytes_processed=1000))) == ["(2,4]"]


def test_a_replica_ends_its_snapshots_where_it_was_whole() -> None:
    node = FakeNode()
    vbucket = node.create_vbucket(0, VbucketState.REPLICA)
    vbucket.begin_snapshot(2)
    peer = node.connect().open()
    vbucket.apply(1, b"a")
    assert brief(ask(peer)) == ["success"]
    vbucket.apply(2, b"b")
    node.settle()
    assert brief(peer.take()) == ["(0,2]", "a@1", "b@2"]


# The end


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (3, ["success", "(0,5]", "b@2", "c@3", "d@4", "a@5", "end 0"]),
        (5, ["success", "(0,5]", "b@2", "c@3", "d@4", "a@5", "end 0"]),
        (0, ["success", "end 0"]),
    ],
)
def test_dcp_sends_the_whole_snapshot_that_holds_the_end(end: int, expected: list[str]) -> None:
    _, peer = node_with_peer(b"a", b"b", b"c", b"d", b"a")
    assert brief(ask(peer, end=end)) == expected


def test_upr_stops_at_the_end_with_the_state_that_was_current_there() -> None:
    _, peer = node_with_peer(b"a", b"b", b"c", b"d", b"a")
    assert brief(ask_upr(peer, end=3)) == ["success", "marker", "a@1", "b@2", "c@3", "end 0"]
    assert brief(ask_upr(peer, end=0)) == ["success", "end 0"]


def test_exact_end_gives_the_same_on_dcp() -> None:
    _, peer = node_with_peer(b"a", b"b", b"c", b"d", b"a")
    control(peer, b"exact_end")
    assert brief(ask(peer, end=3)) == ["success", "(0,3]", "a@1", "b@2", "c@3", "end 0"]


def test_an_end_in_the_future_is_waited_for() -> None:
    node, peer = node_with_peer(b"a")
    assert brief(ask(peer, end=3)) == ["success", "(0,1]", "a@1"]
    assert written(node, peer, b"b") == ["(1,2]", "b@2"]
    assert written(node, peer, b"c", b"d") == ["(2,4]", "c@3", "d@4", "end 0"]
    assert written(node, peer, b"e") == []
    assert not node.vbucket(0).cursors


def test_start_may_equal_end() -> None:
    node, peer = node_with_peer(b"a", b"b")
    assert brief(ask(peer, 2, 2, vbucket_uuid=uuid_of(node))) == ["success", "end 0"]


def test_to_latest_ends_where_the_history_ended_at_the_request() -> None:
    node, peer = node_with_peer(b"a", b"b")
    assert brief(ask(peer, flags=dcp.StreamFlag.TO_LATEST)) == ["success", "(0,2]", "a@1", "b@2", "end 0"]
    node.create_vbucket(1)
    assert brief(ask(peer, vbucket=1, flags=dcp.StreamFlag.TO_LATEST)) == ["success", "end 0"]


def test_disk_only_ends_with_what_is_on_disk() -> None:
    node, peer = node_with_peer(b"a", b"b")
    node.settle()
    messages = ask(peer, end=1, flags=dcp.StreamFlag.DISK_ONLY)
    assert brief(messages) == ["success", "(0,2]", "a@1", "b@2", "end 0"]
    assert isinstance(messages[1], dcp.SnapshotMarker)
    assert messages[1].flags == dcp.MarkerFlag.DISK


def test_disk_only_waits_for_what_was_there_at_the_request() -> None:
    node, peer = node_with_peer(b"a", b"b")
    node.settle()
    node.disk_works = False
    node.write(0, b"c")
    assert brief(ask(peer, flags=dcp.StreamFlag.DISK_ONLY)) == ["success"]
    node.disk_works = True
    node.settle()
    assert brief(peer.take()) == ["(0,3]", "a@1", "b@2", "c@3", "end 0"]


@pytest.mark.shows("open_issues:lost-after-sending")
def test_persisted_only_waits_for_the_disk() -> None:
    node, peer = node_with_peer(b"a")
    node.settle()
    control(peer, b"persisted_only")
    assert brief(ask(peer)) == ["success", "(0,1]", "a@1"]
    node.disk_works = False
    assert written(node, peer, b"b") == []
    node.disk_works = True
    node.settle()
    assert brief(peer.take()) == ["(1,2]", "b@2"]


def test_a_notifier_need_not_name_an_end() -> None:
    """Those of deployed clusters name 0."""
    node, peer = node_with_peer(b"a", flags=dcp.OpenFlag.NOTIFIER)
    assert brief(ask(peer, 1, end=0, vbucket_uuid=uuid_of(node))) == ["success"]
    assert written(node, peer, b"b") == ["end 0"]
    node.create_vbucket(1)
    assert brief(ask(peer, vbucket=1, end=0)) == ["success"]


def test_a_notifier_ends_as_soon_as_there_is_something() -> None:
    node, peer = node_with_peer(b"a", flags=dcp.OpenFlag.NOTIFIER)
    assert brief(ask(peer)) == ["success", "end 0"]
    assert brief(ask(peer, 1, vbucket_uuid=uuid_of(node))) == ["success"]
    assert written(node, peer, b"b") == ["end 0"]


# What it holds


def test_a_mutation_in_both_dialects() -> None:
    node, peer = node_with_peer()
    node.vbucket(0).set(b"k", b"value", flags=0xDEADBEEF, datatype=1)
    (mutation,) = ask(peer)[2:]
    assert isinstance(mutation, dcp.Mutation)
    assert (mutation.value, mutation.flags, mutation.rev_seqno, mutation.datatype) == (b"value", 0xDEADBEEF, 1, 1)
    peer.send(upr.CloseStream())
    (plain,) = ask_upr(peer)[2:]
    assert len(plain.encode()) == 24 + 30 + 1 + 5
    assert (plain.value, plain.flags, plain.cas) == (b"value", 0xDEADBEEF, mutation.cas)  # type: ignore[attr-defined]


def expired(node: FakeNode) -> None:
    vbucket = node.vbucket(0)
    vbucket.set(b"e", b"x", expiry=1)
    node.pass_by(5)
    vbucket.expire(b"e")


@pytest.mark.parametrize(
    ("controls", "flags", "expected"),
    [
        ((), 1, "-e@2"),
        ((b"enable_expiry_opcode",), 1, "!e@2"),
        ((), 1 | dcp.OpenFlag.DELETE_TIMES, "-e@2"),
        ((b"enable_expiry_opcode",), 1 | dcp.OpenFlag.DELETE_TIMES, "!e@2"),
    ],
)
def test_an_expiration_is_a_deletion_unless_its_opcode_was_asked_for(
    controls: tuple[bytes, ...], flags: int, expected: str
) -> None:
    node, peer = node_with_peer(flags=flags)
    for name in controls:
        control(peer, name)
    expired(node)
    message = ask(peer)[2]
    assert brief([message]) == [expected]
    if flags & dcp.OpenFlag.DELETE_TIMES:
        assert abs(message.delete_time - node.clock()) <= 10  # type: ignore[attr-defined]


def test_upr_always_tells_an_expiration() -> None:
    node, peer = node_with_peer()
    expired(node)
    assert brief(ask_upr(peer)) == ["success", "marker", "!e@2"]


def test_deletions_say_when_if_that_was_asked_for() -> None:
    node, peer = node_with_peer(b"a", flags=1 | dcp.OpenFlag.DELETE_TIMES)
    node.vbucket(0).delete(b"a")
    (deletion,) = ask(peer)[2:]
    assert isinstance(deletion, dcp.Deletion)
    assert deletion.delete_time == int(node.clock())


@pytest.mark.shows("open_issues:keys-only")
@pytest.mark.parametrize("way", ["open flag", "control"])
def test_keys_without_values(way: str) -> None:
    _, peer = node_with_peer(b"a", flags=1 | (dcp.OpenFlag.NO_VALUE if way == "open flag" else 0))
    if way == "control":
        control(peer, b"keys_only")
    mutation = ask(peer)[2]
    assert isinstance(mutation, dcp.Mutation)
    assert (mutation.key, mutation.value) == (b"a", b"")


def test_every_version_with_the_history() -> None:
    _, peer = node_with_peer(b"a", b"a", b"b")
    control(peer, b"history")
    _, marker, *changes = ask(peer)
    assert isinstance(marker, dcp.SnapshotMarker)
    assert marker.flags & (dcp.MarkerFlag.HISTORY | dcp.MarkerFlag.MAY_DUPLICATE_KEYS) == 0x30
    assert brief(changes) == ["a@1", "a@2", "b@3"]


@pytest.mark.shows("open_issues:filters")
def test_a_filter_on_keys_and_the_position_that_advances() -> None:
    node, peer = node_with_peer(b"user:1", b"x", b"user:2")
    assert control(peer, b"key_filter", b"^user:") is Status.SUCCESS
    assert brief(ask(peer)) == ["success", "(0,3]", "user:1@1", "user:2@3"]
    assert written(node, peer, b"y") == ["(3,4]", "advanced 4"]
    assert written(node, peer, b"user:3", b"z") == ["(4,6]", "user:3@5", "advanced 6"]


def test_upr_says_with_the_next_marker_how_far_it_is() -> None:
    node, peer = node_with_peer(b"x")
    control(peer, b"key_filter", b"^user:")
    assert brief(ask_upr(peer)) == ["success", "marker"]
    assert written(node, peer, b"user:1") == ["marker", "user:1@2"]


# What happens to the vbucket


@pytest.mark.parametrize("state", [VbucketState.REPLICA, VbucketState.PENDING, VbucketState.DEAD])
def test_a_state_change_ends_the_stream(state: VbucketState) -> None:
    node, peer = node_with_peer(b"a")
    ask(peer)
    set_state(node, state)
    node.settle()
    assert brief(peer.take()) == ["end 2"]
    assert brief(peer.send(upr.CloseStream())) == ["key_enoent"]


def test_on_upr_the_reason_has_another_number() -> None:
    node, peer = node_with_peer(b"a")
    ask_upr(peer)
    set_state(node, VbucketState.REPLICA)
    node.settle()
    assert brief(peer.take()) == ["end 1"]


def test_a_state_change_in_mid_snapshot() -> None:
    node, peer = node_with_peer(b"a", b"b")
    control(peer, b"connection_buffer_size", b"1")
    ask(peer)
    set_state(node, VbucketState.REPLICA)
    assert brief(peer.send(dcp.BufferAck(bytes_processed=100))) == ["end 2"]


def test_a_vbucket_that_is_deleted_ends_the_stream() -> None:
    node, peer = node_with_peer(b"a")
    ask(peer)
    node.delete_vbucket(0)
    node.settle()
    assert brief(peer.take()) == ["end 2"]


@pytest.mark.parametrize("asks", [ask, ask_upr])
@pytest.mark.parametrize("window", [b"1", b"0"], ids=["in a snapshot", "between two"])
def test_a_dead_vbucket_that_is_deleted_ends_the_stream(
    asks: Callable[[FakePeer], list[Message]], window: bytes
) -> None:
    """It is streamed as others are; what the consumer has not got is gone, and must not count as sent."""
    node, peer = node_with_peer(b"a", b"b")
    set_state(node, VbucketState.DEAD)
    control(peer, b"connection_buffer_size", window)
    asks(peer)
    node.delete_vbucket(0)
    (end,) = peer.send(dcp.BufferAck(bytes_processed=100))
    assert brief([end]) == [f"end {2 if asks is ask else 1}"]
    node.create_vbucket(0)
    assert brief(asks(peer)) == ["success"]


def test_a_flush_is_told_and_ends_the_stream() -> None:
    node, peer = node_with_peer(b"a", b"b")
    ask(peer, opaque=9)
    node.flush()
    node.settle()
    flush, end = peer.take()
    assert brief([flush, end]) == ["flush", "end 2"]
    assert (flush.opaque, flush.vbucket, end.opaque) == (9, 0, 9)  # type: ignore[attr-defined]
    assert brief(ask(peer)) == ["success"]


def test_a_flush_comes_packet_by_packet_too() -> None:
    node, peer = node_with_peer(b"a")
    control(peer, b"connection_buffer_size", b"1")
    ask(peer)
    node.flush()
    ack = dcp.BufferAck(bytes_processed=100)
    assert [brief(peer.send(ack)) for _ in range(3)] == [["flush"], ["end 2"], []]


def test_a_rollback_ends_the_stream() -> None:
    node, peer = node_with_peer(b"a", b"b")
    set_state(node, VbucketState.REPLICA)
    ask(peer)
    node.vbucket(0).roll_back(1)
    node.settle()
    assert brief(peer.take()) == ["end 6"]


def test_a_history_that_cannot_be_read_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    _, peer = node_with_peer(b"a")

    def fail(*_: Any) -> bytes:
        raise CorruptData("here", "it is damaged")

    monkeypatch.setattr("tests.support.fake_source.FakeCursor.read_into", fail)
    assert brief(ask(peer)) == ["success", "(0,1]", "end 5"]
    assert not peer.closed


# Filters


@pytest.mark.parametrize("window", [b"0", b"100"])
@pytest.mark.parametrize(
    ("name", "value"), [(b"key_filter", b"^zzz"), (b"value_filter", b'{"field": "city", "equals": "Oslo"}')]
)
@pytest.mark.parametrize("dialect", ["dcp", "upr"])
def test_a_filter_that_lets_nothing_pass_delays_no_other_stream(
    dialect: str, name: bytes, value: bytes, window: bytes
) -> None:
    node, peer = node_with_peer()
    node.write(0, *(b"key-%05d" % number for number in range(10_000)), value=b'{"city": "Bern"}')
    control(peer, b"connection_buffer_size", window)
    control(peer, name, value)
    peer.put(dcp.StreamRequest(end_seqno=10_000) if dialect == "dcp" else upr.StreamRequest(end_seqno=10_000))
    (cursor,) = node.vbucket(0).cursors.values()
    steps = []
    while cursor.end_reason is None:
        before = cursor.seqno
        peer.collect()
        steps.append(cursor.seqno - before)
    assert max(steps) < 1000, "a turn looks at a bounded number of changes"
    assert len(steps) < 50, "also if the window is small"
    node.settle()
    rest = ["advanced 10000", "end 0"] if dialect == "dcp" else ["end 0"]
    assert brief(peer.take()) == ["success", "(0,10000]" if dialect == "dcp" else "marker", *rest]


def test_live_changes_go_before_what_a_filter_looks_at() -> None:
    node, peer = node_with_peer()
    node.create_vbucket(1)
    node.write(0, *(b"key-%05d" % number for number in range(10_000)))
    ask(peer, vbucket=1)
    control(peer, b"key_filter", b"^zzz")
    peer.put(dcp.StreamRequest())
    peer.collect()
    assert brief(peer.take()) == ["success", "(0,10000]"]
    node.write(1, b"live")
    peer.collect()
    assert brief(peer.take()) == ["(0,1]", "live@1"]
    (cursor,) = node.vbucket(0).cursors.values()
    assert cursor.seqno < 3000
    node.settle()
    assert brief(peer.take()) == ["advanced 10000"]


@pytest.mark.parametrize("dialect", ["dcp", "upr"])
def test_what_passes_a_filter_waits_for_the_window(dialect: str) -> None:
    node, peer = node_with_peer(*(b"%d-%d" % (number % 2, number) for number in range(1, 101)))
    control(peer, b"connection_buffer_size", b"200")
    control(peer, b"key_filter", b"^0")
    got = ask(peer) if dialect == "dcp" else ask_upr(peer)
    while came := peer.send(dcp.BufferAck(bytes_processed=1000)):
        assert sum(len(message.encode()) for message in came) < 400
        got += came
    expected = ["(0,100]" if dialect == "dcp" else "marker", *(f"0-{number}@{number}" for number in range(2, 101, 2))]
    assert brief(got) == ["success", *expected]
    assert node.vbucket(0).cursors["peer:0"].seqno == 100


# Takeover


class Taker:
    """A consumer that takes a vbucket over, one answer at a time."""

    def __init__(self, *keys: bytes, end: int = END) -> None:
        self.node, self.peer = node_with_peer(*keys)
        self.vbucket = self.node.vbucket(0)
        self.first = ask(self.peer, end=end, flags=dcp.StreamFlag.TAKEOVER)

    @property
    def state(self) -> str:
        return self.vbucket.state.value

    def answer(self, *messages: Message, status: Status = Status.SUCCESS) -> list[Message]:
        return self.peer.send(*(answer_to(message, status) for message in messages))

    def write(self, *keys: bytes) -> list[Message]:
        self.node.write(0, *keys)
        self.node.settle()
        return self.peer.take()


def test_a_takeover_step_by_step() -> None:
    taker = Taker(b"a", b"b")
    _, marker, *_ = taker.first
    assert brief(taker.first) == ["success", "(0,2]", "a@1", "b@2"]
    assert isinstance(marker, dcp.SnapshotMarker)
    assert marker.flags == dcp.MarkerFlag.MEMORY | dcp.MarkerFlag.CHECKPOINT | dcp.MarkerFlag.ACK
    second, change = taker.write(b"c")  # the first marker is not acknowledged yet
    assert brief([second, change]) == ["(2,3]", "c@3"]
    assert taker.answer(marker) == []
    (pending,) = taker.answer(second)
    assert brief([pending]) == ["state pending"]
    assert taker.write(b"d") == []
    assert taker.state == "active"
    taker.node.disk_works = False
    rest = taker.answer(pending)
    assert brief(rest) == ["(3,4]", "d@4"]
    assert taker.state == "dead"
    with pytest.raises(NotMyVbucket):
        taker.vbucket.set(b"e", b"v")
    assert taker.answer(rest[0]) == [], "the dead state is not on disk yet"
    taker.node.disk_works = True
    taker.node.settle()
    (active,) = taker.peer.take()
    assert brief([active]) == ["state active"]
    assert brief(taker.answer(active)) == ["end 0"]
    assert taker.state == "dead"


def test_the_dead_state_on_disk_does_not_replace_the_acknowledgement_of_the_rest() -> None:
    taker = Taker(b"a")
    (pending,) = taker.answer(taker.first[1])
    taker.write(b"b")
    rest = taker.answer(pending)
    assert brief(rest) == ["(1,2]", "b@2"]
    assert brief(taker.answer(rest[0])) == ["state active"]


def test_a_takeover_of_an_empty_vbucket_whatever_end_it_names() -> None:
    for taker in (Taker(), Taker(end=0)):
        assert brief(taker.first) == ["success", "state pending"]
        (active,) = taker.answer(taker.first[1])
        assert brief([active]) == ["state active"]
        assert brief(taker.answer(active)) == ["end 0"]


def test_upr_has_no_acknowledgements_of_markers() -> None:
    node, peer = node_with_peer(b"a")
    messages = ask_upr(peer, flags=upr.StreamFlag.TAKEOVER)
    assert brief(messages) == ["success", "marker", "a@1", "state pending"]
    node.write(0, b"b")
    *rest, active = peer.send(answer_to(messages[-1]))
    assert brief([*rest, active]) == ["marker", "b@2", "state active"]
    assert brief(peer.send(answer_to(active))) == ["end 0"]


def test_writes_stop_only_when_the_backlog_is_small() -> None:
    taker = Taker(b"a")
    (pending,) = taker.answer(taker.first[1])
    control(taker.peer, b"connection_buffer_size", b"1")
    taker.write(*(b"key-%d" % number for number in range(2000)))
    assert brief(taker.answer(pending)) == ["(1,2001]"]
    assert taker.state == "active"
    taker.peer.send(dcp.Control(key=b"connection_buffer_size", value=b"0"))
    assert taker.state == "dead"


def test_writes_stop_also_if_they_are_faster_than_the_stream() -> None:
    """Each time what was there is sent, as much has come in again."""
    taker = Taker(b"a")
    written, asked = 0, taker.first[1:]
    while not any(isinstance(message, dcp.StreamEnd) for message in asked):
        if taker.state == "active":
            assert written < 20, "it never ends"
            taker.node.write(0, *(b"key-%d" % number for number in range(2000)))
            written += 1
        due = [message for message in asked if isinstance(message, dcp.SnapshotMarker | dcp.SetVbucketState)]
        asked = taker.answer(*due)
    assert taker.state == "dead"


def test_writes_that_never_pause_do_not_keep_markers_unacknowledged_for_ever() -> None:
    """However little it is that comes in: between two acknowledgements there is always something new."""
    taker = Taker(b"a")
    markers = deque([taker.first[1]])
    for number in range(100):
        came = taker.write(b"key-%d" % number)
        if markers and (number % 2 or not came):  # slower than the writes
            came += taker.answer(markers.popleft())
        if any(isinstance(message, dcp.SetVbucketState) for message in came):
            break
        markers += [message for message in came if isinstance(message, dcp.SnapshotMarker)]
    else:
        pytest.fail("it never asks for the next state")


def test_a_refusal_ends_the_takeover() -> None:
    taker = Taker(b"a")
    (pending,) = taker.answer(taker.first[1])
    assert brief(taker.answer(pending, status=Status.NOT_MY_VBUCKET)) == ["end 2"]
    assert taker.state == "active"


def test_a_consumer_that_is_lost_after_the_source_is_dead_leaves_it_dead() -> None:
    taker = Taker(b"a")
    (pending,) = taker.answer(taker.first[1])
    messages = taker.answer(pending)
    assert brief(messages) == ["state active"]
    taker.peer.lose()
    assert taker.state == "dead"


def test_a_consumer_that_is_lost_before_leaves_everything_as_it_was() -> None:
    taker = Taker(b"a")
    taker.answer(taker.first[1])
    taker.peer.lose()
    assert taker.state == "active"
    assert not taker.vbucket.cursors


def test_a_state_change_from_outside_ends_a_takeover() -> None:
    taker = Taker(b"a")
    taker.answer(taker.first[1])  # told to be pending, not answered
    taker.vbucket.set_state(VbucketState.REPLICA)
    taker.node.settle()
    assert brief(taker.peer.take()) == ["end 2"]


def test_a_flush_ends_a_takeover() -> None:
    taker = Taker(b"a")
    taker.answer(taker.first[1])
    taker.node.flush()
    taker.node.settle()
    assert brief(taker.peer.take()) == ["flush", "end 2"]


def test_only_the_active_copy_or_a_dead_one_is_taken_over() -> None:
    node, peer = node_with_peer(b"a")
    set_state(node, VbucketState.REPLICA)
    assert brief(ask(peer, flags=dcp.StreamFlag.TAKEOVER)) == ["not_my_vbucket"]
    set_state(node, VbucketState.DEAD)
    assert brief(ask(peer, flags=dcp.StreamFlag.TAKEOVER)) == ["success", "(0,1]", "a@1"]


@pytest.mark.parametrize("way", ["persisted_only", "disk only"])
def test_a_takeover_of_what_is_not_on_disk_yet_goes_on_when_it_is(way: str) -> None:
    node, peer = node_with_peer()
    node.disk_works = False
    node.write(0, b"a", b"b")
    if way == "persisted_only":
        control(peer, b"persisted_only")
    flags = dcp.StreamFlag.TAKEOVER | (0 if way == "persisted_only" else dcp.StreamFlag.DISK_ONLY)
    accepted, pending = ask(peer, flags=flags)
    assert brief([accepted, pending]) == ["success", "state pending"]
    assert peer.send(answer_to(pending)) == []
    node.disk_works = True
    node.settle()
    marker, *changes = peer.take()
    assert brief([marker, *changes]) == ["(0,2]", "a@1", "b@2"]
    (active,) = peer.send(answer_to(marker))
    assert brief([active]) == ["state active"]
    assert brief(peer.send(answer_to(active))) == ["end 0"]


def _take_over(peer: FakePeer) -> list[str]:
    """Take vbucket 0 over and answer everything: what came."""
    came, due = [], ask(peer, flags=dcp.StreamFlag.TAKEOVER)
    while due:
        came += brief(due)
        asked = [message for message in due if isinstance(message, dcp.SnapshotMarker | dcp.SetVbucketState)]
        due = peer.send(*map(answer_to, asked)) if asked else []
    return came


def _two_takers(dead_before: bool) -> tuple[FakePeer, FakePeer]:
    """Two connections to a node with one item, which may have been made dead already."""
    node, peer = node_with_peer(b"a")
    if dead_before:
        set_state(node, VbucketState.DEAD)
    return peer, node.connect("other").open(b"other")


@pytest.mark.parametrize("dead_before", [False, True])
def test_no_other_connection_takes_over_what_one_has(dead_before: bool) -> None:
    peer, other = _two_takers(dead_before)
    whole = ["success", "(0,1]", "a@1", "state pending", "state active", "end 0"]
    assert _take_over(peer) == whole
    assert _take_over(other) == ["not_my_vbucket"]
    assert _take_over(peer) == ["not_my_vbucket"], "who has it has handed it on, for all that is known here"


def test_a_destination_that_has_not_answered_active_may_ask_again() -> None:
    peer, other = _two_takers(dead_before=False)
    (pending,) = peer.send(answer_to(ask(peer, flags=dcp.StreamFlag.TAKEOVER)[1]))
    assert brief(peer.send(answer_to(pending))) == ["state active"]
    assert _take_over(other) == ["not_my_vbucket"]
    peer.lose()
    again = peer.node.connect("again").open(b"peer")
    assert _take_over(again)[-2:] == ["state active", "end 0"]


def test_a_takeover_ends_when_it_is_on_disk_that_it_is_over() -> None:
    peer, _ = _two_takers(dead_before=False)
    node = peer.node
    (pending,) = peer.send(answer_to(ask(peer, flags=dcp.StreamFlag.TAKEOVER)[1]))
    (active,) = peer.send(answer_to(pending))
    node.disk_works = False
    assert peer.send(answer_to(active)) == []
    node.disk_works = True
    node.settle()
    assert brief(peer.take()) == ["end 0"]
    assert node.vbucket(0).taken_over


@pytest.mark.parametrize("dead_before", [False, True])
def test_of_two_that_take_over_at_once_one_is_told_to_be_active(dead_before: bool) -> None:
    peer, other = _two_takers(dead_before)
    pending = []
    for taker in (peer, other):
        marker = ask(taker, flags=dcp.StreamFlag.TAKEOVER)[1]
        pending += taker.send(answer_to(marker))
    assert brief(pending) == ["state pending"] * 2
    assert brief(other.send(answer_to(pending[1]))) == ["state active"]
    assert brief(peer.send(answer_to(pending[0]))) == ["end 2"]
    assert peer.node.vbucket(0).successor == "other"


@pytest.mark.parametrize("way", ["key_filter", "value_filter", "keys_only", "no value", "notifier"])
@pytest.mark.parametrize("dialect", ["dcp", "upr"])
def test_nothing_is_left_out_of_a_takeover(dialect: str, way: str) -> None:
    opened = {"no value": dcp.OpenFlag.NO_VALUE, "notifier": dcp.OpenFlag.NOTIFIER}
    node, peer = node_with_peer(b"a", flags=1 | opened.get(way, 0))
    values = {"key_filter": b"^a", "value_filter": b'{"field": "a", "equals": 1}', "keys_only": b"true"}
    if way in values:
        control(peer, way.encode(), values[way])
    (refusal,) = (ask if dialect == "dcp" else ask_upr)(peer, flags=1)
    assert isinstance(refusal, AnyResponse)
    assert refusal.status is Status.EINVAL
    assert b"hands over everything" in refusal.value
    assert node.vbucket(0).state is VbucketState.ACTIVE


def test_the_answers_of_a_takeover_are_its_own() -> None:
    """An answer names no vbucket: its opaque alone tells whose it is."""
    node, peer = node_with_peer(b"a")
    node.create_vbucket(1)
    ask(peer, flags=dcp.StreamFlag.TAKEOVER)
    assert brief(ask(peer, vbucket=1, flags=dcp.StreamFlag.TAKEOVER)) == ["key_eexists"]
    assert brief(ask(peer, vbucket=1, flags=dcp.StreamFlag.TAKEOVER, opaque=8)) == ["success", "state pending"]


def test_a_takeover_out_of_range_is_refused_for_that_first() -> None:
    node, peer = node_with_peer(b"a")
    node.create_vbucket(1)
    ask(peer, flags=dcp.StreamFlag.TAKEOVER)
    assert brief(ask(peer, vbucket=1, start=2, end=1, flags=dcp.StreamFlag.TAKEOVER)) == ["erange"]
    control(peer, b"keys_only", b"true")
    assert brief(ask(peer, vbucket=1, start=2, end=1, flags=dcp.StreamFlag.TAKEOVER, opaque=8)) == ["erange"]


def test_answers_without_a_request_do_nothing() -> None:
    node, peer = node_with_peer(b"a")
    messages = ask(peer)
    assert peer.send(answer_to(messages[1]), answer_to(upr.SetVbucketState(state=upr.VbucketState.DEAD))) == []
    assert not peer.closed
    assert node.vbucket(0).state is VbucketState.ACTIVE


# Checkpoints


def test_a_snapshot_does_not_reach_beyond_its_checkpoint() -> None:
    node, peer = node_with_peer(b"a")
    ask(peer)
    node.write(0, b"a", b"b")
    node.vbucket(0).create_checkpoint()
    node.write(0, b"a", b"c")
    node.settle()
    first, *_, second, _, _ = messages = peer.take()
    assert brief(messages) == ["(1,3]", "a@2", "b@3", "(3,5]", "a@4", "c@5"]
    assert isinstance(first, dcp.SnapshotMarker)
    assert isinstance(second, dcp.SnapshotMarker)
    assert (first.flags, second.flags) == (0x1, 0x5)


def test_the_first_snapshot_reaches_the_high_seqno_whatever_checkpoints_there_are() -> None:
    node, peer = node_with_peer(b"a", b"b")
    node.vbucket(0).create_checkpoint()
    node.write(0, b"a")
    assert brief(ask(peer)) == ["success", "(0,3]", "b@2", "a@3"]
