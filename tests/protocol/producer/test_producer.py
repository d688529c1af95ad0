"""The producer's side of a connection over a fake store: requests, answers, turns, windows, noops."""

import gc
import weakref
from typing import Any

import pytest

from tests.support.fake_node import FakeNode, FakePeer, node_with_peer
from tests.support.fake_source import FakeSource
from tests.support.stream_requests import END, ask, ask_upr, brief, control, set_state, uuid_of
from upriver.errors import RollbackRequired
from upriver.model import FailoverLog, VbucketState
from upriver.protocol.producer.dialects import STREAM_DIALECTS, opaque_of, put_opaque
from upriver.protocol.producer.stream_scheduler import PIECE_BYTES, TURN_BYTES_MIN
from upriver.wire import AnyResponse, Message, Response, dcp, upr
from upriver.wire.codes import Status

# The checks on a stream request, in their order


def test_an_accepted_request_is_answered_with_the_failover_log() -> None:
    node, peer = node_with_peer(b"a", b"b")
    answer, *rest = ask(peer, opaque=0xDEADBEEF)
    assert isinstance(answer, upr.StreamRequestResponse)
    assert [(entry.vbucket_uuid, entry.seqno) for entry in answer.log] == [(uuid_of(node), 0)]
    assert brief(rest) == ["(0,2]", "a@1", "b@2"]
    assert {message.opaque for message in (answer, *rest)} == {0xDEADBEEF}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("vbucket", "state", "start", "end", "fields", "status"),
    [
        (9, None, 4, 2, {}, Status.NOT_MY_VBUCKET),  # there is none, whatever else is wrong
        (1, VbucketState.REPLICA, 4, 2, {}, Status.ETMPFAIL),  # nothing to stream, before the range
        (1, VbucketState.DEAD, 0, END, {}, Status.ETMPFAIL),
        (1, VbucketState.PENDING, 0, END, {}, Status.ETMPFAIL),
        (0, None, 4, 2, {"vbucket_uuid": 0xBAD}, Status.ERANGE),  # the range, before a stream that is there
        (0, None, 2, END, {"snapshot_start": 3, "snapshot_end": 4}, Status.ERANGE),
        (0, None, 2, END, {"snapshot_start": 1, "snapshot_end": 1}, Status.ERANGE),
        (0, None, 2, END, {"snapshot_start": 4, "snapshot_end": 1}, Status.ERANGE),
        (0, None, 2, END, {"vbucket_uuid": 0xBAD}, Status.KEY_EEXISTS),  # a stream that is there, before the uuid
    ],
)
def test_the_first_thing_that_is_wrong_is_named(
    vbucket: int, state: VbucketState | None, start: int, end: int, fields: dict[str, int], status: Status
) -> None:
    node, peer = node_with_peer(b"a", b"b")
    if state is not None:
        node.create_vbucket(vbucket, state)
    ask(peer)
    (answer,) = ask(peer, start, end, vbucket, **fields)
    assert isinstance(answer, AnyResponse)
    assert answer.status is status
    assert answer.text


def test_a_copy_that_was_active_once_streams() -> None:
    for state in (VbucketState.REPLICA, VbucketState.PENDING, VbucketState.DEAD):
        node, peer = node_with_peer(b"a")
        set_state(node, state)
        assert brief(ask(peer)) == ["success", "(0,1]", "a@1"]


def test_an_empty_active_vbucket_streams() -> None:
    _, peer = node_with_peer()
    assert brief(ask(peer)) == ["success"]


def test_active_only_refuses_every_other_copy() -> None:
    node, peer = node_with_peer(b"a")
    set_state(node, VbucketState.REPLICA)
    assert brief(ask(peer, flags=dcp.StreamFlag.ACTIVE_ONLY)) == ["not_my_vbucket"]


def test_two_dialects_share_a_connection() -> None:
    node, peer = node_with_peer(b"a")
    node.create_vbucket(1)
    node.write(1, b"b")
    assert brief(ask(peer)) == ["success", "(0,1]", "a@1"]
    assert brief(ask_upr(peer, vbucket=1)) == ["success", "marker", "b@1"]


# Rollback


@pytest.mark.parametrize("dialect", ["dcp", "dcp in a run", "upr", "upr_draft1", "upr_draft2", "upr_draft3"])
def test_a_purge_that_only_the_store_has_noticed_says_where_to_roll_back_to(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the producer's check and the store's the purge may pass: a text instead of the seqno would not help."""
    node, peer = node_with_peer(b"a", b"b")
    entry = node.vbucket(0).failover_log.newest

    def purged(*_: object) -> None:
        raise RollbackRequired("deletions in between were purged", seqno=1)

    monkeypatch.setattr(FakeSource, "cursor", purged)
    name = dialect.split()[0]
    fields: dict[str, Any] = {"vbucket": 0, "start_seqno": 2, "vbucket_uuid": entry.vbucket_uuid}
    if name == "dcp":
        request: Message = dcp.StreamRequest(**fields, snapshot_start=2, snapshot_end=2, opaque=7)
    else:
        request = STREAM_DIALECTS[name].request(**fields, high_seqno=entry.seqno)  # type: ignore[call-arg]
        put_opaque(request, 7)
        if name not in ("dcp", "upr"):
            peer = node.connect(dialect=name)
    data = request.encode()
    answer = peer.send(data * 2 if dialect == "dcp in a run" else data)[0]
    assert answer.title() == "rollback required"
    assert (answer.seqno, opaque_of(answer)) == (1, 7)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("start", "snapshot", "uuid", "back"),
    [
        (0, (0, 0), "unknown", None),  # a consumer at 0 has nothing to roll back
        (2, (2, 2), "newest", None),
        (2, (2, 2), "unknown", 0),
        (9, (9, 9), "newest", 4),  # beyond what there is
        (3, (1, 9), "newest", 1),  # in mid-snapshot, to its start
        (3, (1, 4), "newest", None),
        (3, (3, 9), "newest", None),  # not begun
        (2, (2, 2), "older", None),  # before the branch
        (3, (3, 3), "older", 2),
        (2, (1, 3), "older", 1),
    ],
)
def test_rollback_on_dcp(start: int, snapshot: tuple[int, int], uuid: str, back: int | None) -> None:
    node, peer = node_with_peer(b"a", b"b")
    older = uuid_of(node)
    set_state(node, VbucketState.REPLICA)
    set_state(node, VbucketState.ACTIVE)
    node.write(0, b"c", b"d")
    uuids = {"unknown": 0xBAD, "newest": uuid_of(node), "older": older}
    answer = ask(peer, start, vbucket_uuid=uuids[uuid], snapshot_start=snapshot[0], snapshot_end=snapshot[1])[0]
    if back is None:
        assert isinstance(answer, upr.StreamRequestResponse)
        assert [entry.seqno for entry in answer.log] == [2, 0]
    else:
        assert isinstance(answer, dcp.RollbackRequired)
        assert (answer.seqno, answer.opaque) == (back, 7)
        assert answer.encode()[4] == 0, "the seqno is in the value"


@pytest.mark.parametrize(
    ("start", "entry", "expected"),
    [
        (0, ("unknown", 0), "success"),
        (2, ("unknown", 0), "key_enoent"),
        (4, ("newest", 2), "success"),
        (2, ("older", 0), "success"),
        (3, ("older", 0), 2),
        (2, ("newest", 1), 0),  # no entry of the log
        (9, ("newest", 2), "erange"),
    ],
)
def test_rollback_on_upr(start: int, entry: tuple[str, int], expected: str | int) -> None:
    node, peer = node_with_peer(b"a", b"b")
    older = uuid_of(node)
    set_state(node, VbucketState.REPLICA)
    set_state(node, VbucketState.ACTIVE)
    node.write(0, b"c", b"d")
    uuids = {"unknown": 0xBAD, "newest": uuid_of(node), "older": older}
    answer = ask_upr(peer, start, vbucket_uuid=uuids[entry[0]], high_seqno=entry[1])[0]
    if isinstance(expected, str):
        assert brief([answer]) == [expected]
    else:
        assert isinstance(answer, Response)
        assert answer.status is Status.ROLLBACK
        packet = answer.encode()
        assert int.from_bytes(packet[24:], "big") == expected


def test_the_rollback_of_upr_stands_in_the_extras() -> None:
    node, peer = node_with_peer(b"a", b"b")
    peer.put(upr.StreamRequest(start_seqno=2, vbucket_uuid=uuid_of(node), high_seqno=1))
    data = peer.producer.answers()
    assert (data[4], data[7], len(data)) == (8, Status.ROLLBACK, 32)


def test_a_consumer_below_the_purge_seqno_starts_over() -> None:
    node, peer = node_with_peer(b"a", b"b", b"c")
    node.vbucket(0).purge_seqno = 2
    for answer in (
        ask(peer, 1, vbucket_uuid=uuid_of(node))[0],
        ask_upr(peer, 1, vbucket_uuid=uuid_of(node))[0],
    ):
        assert isinstance(answer, Response)
        assert answer.status is Status.ROLLBACK
        assert answer.seqno == 0  # type: ignore[attr-defined]
    assert brief(ask(peer, 2, vbucket_uuid=uuid_of(node))) == ["success", "(2,3]", "c@3"]


@pytest.mark.parametrize(("uuid", "expected"), [("unknown", "rollback"), ("newest", "success"), ("none", "success")])
def test_a_strict_uuid_counts_at_the_beginning_too(uuid: str, expected: str) -> None:
    node, peer = node_with_peer(b"a")
    uuids = {"unknown": 0xBAD, "newest": uuid_of(node), "none": 0}
    assert brief(ask(peer, vbucket_uuid=uuids[uuid], flags=dcp.StreamFlag.STRICT_UUID))[0] == expected


# Other requests


def test_the_failover_log() -> None:
    node, peer = node_with_peer(b"a")
    node.vbucket(0).failover_log = FailoverLog.fresh(5).branch(6, 1)
    (answer,) = peer.send(upr.FailoverLogRequest(opaque=3))
    assert isinstance(answer, upr.FailoverLogResponse)
    assert [(entry.vbucket_uuid, entry.seqno) for entry in answer.log] == [(6, 1), (5, 0)]
    assert brief(peer.send(upr.FailoverLogRequest(vbucket=9))) == ["not_my_vbucket"]


def test_close_answers_and_says_nothing_more() -> None:
    node, peer = node_with_peer(b"a")
    ask(peer)
    assert brief(peer.send(upr.CloseStream(opaque=0x99))) == ["success"]
    node.write(0, b"b")
    node.settle()
    assert peer.take() == []
    assert not node.vbucket(0).cursors
    assert brief(peer.send(upr.CloseStream())) == ["key_enoent"]
    assert brief(ask(peer)) == ["success", "(0,2]", "a@1", "b@2"]


def test_close_with_a_stream_end_if_that_was_agreed_on() -> None:
    _, peer = node_with_peer(b"a")
    assert control(peer, b"send_stream_end_on_client_close_stream") is Status.SUCCESS
    ask(peer, opaque=7)
    answer, end = peer.send(upr.CloseStream(opaque=8))
    assert brief([answer, end]) == ["success", "end 1"]
    assert (answer.opaque, end.opaque) == (8, 7)  # type: ignore[attr-defined]
    ask_upr(peer)
    assert brief(peer.send(upr.CloseStream())) == ["success"]


def test_the_end_of_a_stream_that_the_consumer_closes_counts_in_the_window() -> None:
    _, peer = node_with_peer(b"a")
    control(peer, b"send_stream_end_on_client_close_stream")
    control(peer, b"connection_buffer_size", b"1000")
    ask(peer)
    before = peer.producer.window.unacked_bytes
    _, end = peer.send(upr.CloseStream())
    assert peer.producer.window.unacked_bytes == before + len(end.encode())


def test_a_stream_that_is_closed_while_it_waits_for_a_window_ends_once() -> None:
    _, peer = node_with_peer(*(b"%03d" % n for n in range(50)))
    control(peer, b"send_stream_end_on_client_close_stream")
    control(peer, b"connection_buffer_size", b"1000")
    ask(peer, opaque=7)
    assert brief(peer.send(upr.CloseStream(opaque=8))) == ["success", "end 1"]
    assert brief(ask(peer, opaque=7)) == ["success"]
    got = []
    while sent := peer.send(dcp.BufferAck(bytes_processed=1000)):
        got += brief(sent)
    assert got == ["(0,50]", *(f"{n:03d}@{n + 1}" for n in range(50))]


def test_streams_that_are_closed_while_they_wait_for_a_window_leave_nothing_behind() -> None:
    _, peer = node_with_peer(*(b"%03d" % n for n in range(50)))
    control(peer, b"connection_buffer_size", b"1000")
    ask(peer)
    gone: weakref.WeakSet[object] = weakref.WeakSet()
    for _ in range(10):
        gone.update(peer.producer.streams.values())
        assert brief(peer.send(upr.CloseStream())) == ["success"]
        assert brief(ask(peer)) == ["success"]
    gc.collect()
    assert len(gone) == 0


def test_what_was_unacknowledged_when_a_window_was_lifted_does_not_fill_the_next() -> None:
    node, peer = node_with_peer(*(b"%03d" % n for n in range(50)))
    control(peer, b"connection_buffer_size", b"1000")
    ask(peer)
    peer.send(dcp.Control(key=b"connection_buffer_size", value=b"0"))
    control(peer, b"connection_buffer_size", b"1000")
    node.write(0, b"live")
    node.settle()
    assert brief(peer.take()) == ["(50,51]", "live@51"]


def test_close_and_request_again_before_anything_was_sent() -> None:
    _, peer = node_with_peer(b"a")
    request = dcp.StreamRequest(opaque=1)
    again = dcp.StreamRequest(opaque=3)
    messages = peer.send(request, upr.CloseStream(opaque=2), again)
    assert brief(messages) == ["success", "success", "success", "(0,1]", "a@1"]
    assert [message.opaque for message in messages] == [1, 2, 3, 3, 3]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "message",
    [
        dcp.Open(name=b"again", flags=dcp.OpenFlag.PRODUCER),
        upr.AddStream(),
        dcp.Mutation(by_seqno=1, key=b"k"),
        upr.StreamEnd(),
        upr.SetVbucketState(state=upr.VbucketState.ACTIVE),
    ],
    ids=lambda message: str(message.title()),
)
def test_what_a_producer_does_not_expect_closes_the_connection(message: upr.AddStream) -> None:
    node, peer = node_with_peer(b"a")
    ask(peer)
    assert peer.send(message) == []
    assert peer.closed
    assert not node.vbucket(0).cursors


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"key_filter", b"("),
        (b"value_filter", b"{"),
        (b"unknown", b"1"),
    ],
)
def test_a_control_that_makes_no_sense_changes_nothing(name: bytes, value: bytes) -> None:
    _, peer = node_with_peer(b"a")
    assert control(peer, name, value) is Status.EINVAL
    assert peer.producer.controls["key_filter"] == peer.producer.controls["value_filter"] == ""


# Flow control


def test_a_buffer_of_one_byte_sends_one_packet_at_a_time() -> None:
    _, peer = node_with_peer(b"a", b"b")
    assert control(peer, b"connection_buffer_size", b"1") is Status.SUCCESS
    assert brief(ask(peer, end=2)) == ["success", "(0,2]"]
    ack = dcp.BufferAck(bytes_processed=1000)
    assert [brief(peer.send(ack)) for _ in range(4)] == [["a@1"], ["b@2"], ["end 0"], []]
    window = peer.producer.window
    assert (window.unacked_bytes, window.acked_bytes_total) == (0, 44 + 2 * (24 + 31 + 2) + 28)


def test_whole_packets_count_and_an_answer_does_not() -> None:
    node, peer = node_with_peer(b"a", b"b", b"c")
    control(peer, b"connection_buffer_size", b"101")
    assert brief(ask(peer)) == ["success", "(0,3]", "a@1"]  # 44 + 57 bytes
    assert brief(peer.send(dcp.BufferAck(bytes_processed=0))) == []
    assert brief(peer.send(upr.FailoverLogRequest())) == ["success"]
    assert brief(peer.send(dcp.BufferAck(bytes_processed=1))) == ["b@2"]
    assert brief(peer.send(dcp.BufferAck(bytes_processed=57))) == ["c@3"]
    assert node.vbucket(0).cursors


def test_a_size_of_zero_opens_the_window_for_good() -> None:
    _, peer = node_with_peer(b"a", b"b")
    control(peer, b"connection_buffer_size", b"1")
    assert brief(ask(peer)) == ["success", "(0,2]"]
    assert brief(peer.send(dcp.Control(key=b"connection_buffer_size", value=b"0"))) == ["success", "a@1", "b@2"]


def test_a_closed_window_reads_nothing_from_the_history() -> None:
    node, peer = node_with_peer(b"a")
    control(peer, b"connection_buffer_size", b"1")
    ask(peer)
    (cursor,) = node.vbucket(0).cursors.values()
    node.write(0, *(b"%d" % number for number in range(1000)))
    node.settle()
    assert cursor.changes_read == 0


# Noops


def test_noops_are_sent_and_a_consumer_without_answers_is_lost() -> None:
    node, peer = node_with_peer(b"a")
    control(peer, b"set_noop_interval", b"10")
    control(peer, b"enable_noop")
    ask(peer)
    node.pass_by(9.9)
    assert peer.take() == []
    node.pass_by(0.1)
    (noop,) = peer.take()
    assert isinstance(noop, dcp.Noop)
    peer.send(AnyResponse(opcode=noop.code, opaque=noop.opaque))
    node.pass_by(10)
    assert brief(peer.take()) == ["noop"]
    node.pass_by(9.9)
    assert not peer.closed
    node.pass_by(0.1)
    assert peer.closed
    assert not node.vbucket(0).cursors


def test_a_consumer_that_acknowledges_bytes_is_alive() -> None:
    node, peer = node_with_peer(b"a")
    control(peer, b"set_noop_interval", b"10")
    control(peer, b"enable_noop")
    for _ in range(5):
        node.pass_by(10)
        assert brief(peer.send(dcp.BufferAck(bytes_processed=1))) == ["noop"]
    assert not peer.closed


def test_the_other_side_may_ask_too() -> None:
    _, peer = node_with_peer()
    (answer,) = peer.send(dcp.Noop(opaque=5))
    assert isinstance(answer, AnyResponse)
    assert (answer.opcode, answer.status, answer.opaque) == (0x5C, Status.SUCCESS, 5)


# Turns


def test_streams_take_turns_and_a_backfill_does_not_hold_up_a_live_change() -> None:
    node = FakeNode()
    node.create_vbuckets(2)
    node.write(0, *(b"key-%d" % number for number in range(5000)), value=b"v" * 2000)
    peer = node.connect().open()
    ask(peer, vbucket=1, opaque=1)
    peer.put(dcp.StreamRequest(vbucket=0, opaque=2))
    peer.producer.produce()
    node.write(1, b"live")
    piece = b"".join(peer.producer.produce() for _ in range(2))
    assert b"live" in piece
    assert len(piece) <= 3 * PIECE_BYTES


def test_each_of_many_streams_gets_its_share() -> None:
    node = FakeNode()
    node.create_vbuckets(64)
    for vbucket in range(64):
        node.write(vbucket, *(b"%d" % number for number in range(300)), value=b"v" * 4000)
    peer = node.connect().open()
    peer.put(*(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket) for vbucket in range(64)))
    while peer.producer.bytes_sent_total < 1.5 * 64 * TURN_BYTES_MIN:
        assert peer.producer.produce()
    sent = [stream.changes_sent for stream in peer.producer.streams.values()]
    assert min(sent) > 0
    assert max(sent) <= 5 * min(sent)


def test_a_stream_that_wakes_up_does_not_wait_for_all_that_are_busy() -> None:
    node = FakeNode()
    node.create_vbuckets(64)
    for vbucket in range(1, 64):
        node.write(vbucket, *(b"%d" % number for number in range(300)), value=b"v" * 4000)
    peer = node.connect().open()
    ask(peer, vbucket=0, opaque=0)
    peer.put(*(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket) for vbucket in range(1, 64)))
    while peer.producer.bytes_sent_total < 1.5 * 64 * TURN_BYTES_MIN:
        assert peer.producer.produce()
    node.write(0, b"live")
    assert b"live" in peer.producer.produce(), "in the very next piece"


def order_of_first_and_last(node: FakeNode, peer: FakePeer) -> list[int]:
    """The vbuckets of the changes that came, each run of them once."""
    node.settle()
    runs: list[int] = []
    for message in peer.take():
        if isinstance(message, dcp.Mutation) and (not runs or runs[-1] != message.vbucket):
            runs.append(message.vbucket)
    return runs


@pytest.mark.parametrize("order", ["round-robin", "sequential"])
def test_backfills_take_turns_or_follow_each_other(order: str) -> None:
    node = FakeNode()
    node.create_vbuckets(4)
    for vbucket in range(4):
        node.write(vbucket, *(b"%d" % number for number in range(300)), value=b"v" * 4000)
    peer = node.connect().open()
    assert control(peer, b"backfill_order", order.encode()) is Status.SUCCESS
    peer.put(*(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket) for vbucket in (2, 0, 3, 1)))
    runs = order_of_first_and_last(node, peer)
    if order == "sequential":
        assert runs == [2, 0, 3, 1]
    else:
        assert len(runs) > 8, "none is finished before all have begun"
        assert set(runs[:5]) == {0, 1, 2, 3}


@pytest.mark.parametrize("late", [False, True])
def test_nor_does_the_first_change_of_who_had_everything(late: bool) -> None:
    """Neither that of a vbucket which was empty, nor if others were busy already when it asked."""
    node = FakeNode()
    node.create_vbuckets(4)
    node.write(1, *(b"%d" % number for number in range(1200)), value=b"v" * 4000)
    peer = node.connect().open()
    control(peer, b"backfill_order", b"sequential")
    if late:
        peer.put(dcp.StreamRequest(vbucket=1, opaque=1))
        peer.producer.produce()
        peer.put(dcp.StreamRequest(vbucket=0, opaque=0))
    else:
        ask(peer, vbucket=0)
        peer.put(dcp.StreamRequest(vbucket=1, opaque=1))
    peer.producer.produce()
    node.write(0, b"live")
    assert b"live" in peer.producer.produce()


def test_a_live_change_does_not_wait_for_backfills_in_line() -> None:
    node = FakeNode()
    node.create_vbuckets(4)
    for vbucket in range(1, 4):
        node.write(vbucket, *(b"%d" % number for number in range(600)), value=b"v" * 2000)
    node.write(0, b"first")
    peer = node.connect().open()
    control(peer, b"backfill_order", b"sequential")
    ask(peer, vbucket=0)
    peer.put(*(dcp.StreamRequest(vbucket=vbucket, opaque=vbucket) for vbucket in (1, 2, 3)))
    peer.producer.produce()
    node.write(0, b"live")
    assert b"live" in peer.producer.produce()
