"""Acknowledgements, refusals, windows and noops of a TAP connection."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_node import FakeNode, FakePeer
from tests.support.tap_peer import ACK, BACKFILL, DUMP, LIST, TapPeer, brief, connect, keys
from upriver.protocol.tap import acknowledgements, producer, retry_queue
from upriver.protocol.tap.acknowledgements import key_of
from upriver.protocol.tap.connect_plan import TapSettings
from upriver.protocol.tap.producer import BEGIN_MAX
from upriver.wire import AnyResponse, Message, memcached, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import Control, TapFlag

ACKED = BACKFILL | LIST | ACK


def node_with_peer(
    *written: bytes, settings: TapSettings | None = None, flags: int = ACKED
) -> tuple[FakeNode, TapPeer[FakePeer]]:
    node = FakeNode(tap_settings=settings)
    for vbucket in (1, 2):
        node.create_vbucket(vbucket)
    node.write(1, *written)
    return node, TapPeer(node, connect(b"client", flags, vbuckets=(1, 2)))


def acks_asked(messages: list[Message]) -> list[bool]:
    return [TapFlag.ACK in message.tap_flags for message in messages if isinstance(message, tap.Mutation)]


def number(peer: TapPeer[FakePeer]) -> int:
    return peer.peer.tap_producer.window.messages


# Acknowledgements


def test_every_control_every_nth_and_the_last_message_ask_for_an_answer() -> None:
    _, peer = node_with_peer(*(b"k%02d" % i for i in range(10)), settings=TapSettings(ack_interval=4))
    messages = peer.run()
    assert acks_asked(messages) == [False, False, False, True] * 2 + [False, True]
    controls = [m for m in messages if isinstance(m, tap.Opaque)]
    assert len(controls) == 5
    assert all(TapFlag.ACK in control.tap_flags for control in controls)
    opaques = [message.opaque for message in messages]  # type: ignore[attr-defined]
    assert opaques == list(range(1, len(messages) + 1))


def test_a_client_without_acknowledgements_is_not_asked_for_them() -> None:
    node, peer = node_with_peer(b"a", flags=BACKFILL | LIST)
    messages = peer.run()
    assert not any(TapFlag.ACK in message.tap_flags for message in messages)  # type: ignore[attr-defined]
    node.write(1, *(b"n%d" % i for i in range(50)))
    assert len(keys(peer.run())) == 50


def test_the_window_of_unacknowledged_messages_is_bounded() -> None:
    settings = TapSettings(ack_interval=5, window_messages_max=20)
    node, peer = node_with_peer(*(b"k%02d" % i for i in range(60)), settings=settings)
    peer.judge = lambda _: None
    first = peer.run()
    assert len(first) == 20
    assert number(peer) == 20
    node.write(1, b"new")
    assert peer.run() == []
    # One answer, to the last message, covers all of them.
    peer.judge = lambda _: Status.SUCCESS
    last = first[-1]
    assert isinstance(last, tap.Mutation)
    assert TapFlag.ACK in last.tap_flags
    peer.peer.put(AnyResponse(opcode=last.code, opaque=last.opaque))
    rest = peer.run()
    assert Counter(keys(first + rest)) == Counter([f"k{i:02d}" for i in range(60)] + ["new"])
    assert number(peer) == 0


def test_the_window_counts_bytes_too() -> None:
    node = FakeNode(tap_settings=TapSettings(window_bytes_max=100_000))
    node.create_vbucket(1)
    node.write(1, *(b"k%d" % i for i in range(100)), value=bytes(40_000))
    peer = TapPeer(node, connect(b"c", ACKED, vbuckets=(1,)))
    peer.judge = lambda _: None
    assert 1 <= len(keys(peer.run())) <= 10
    peer.judge = lambda _: Status.SUCCESS
    for message in peer.received:
        peer._answer(message)
    peer.run()
    assert len(set(keys(peer.received))) == 100


def test_answers_to_nothing_are_ignored() -> None:
    node, peer = node_with_peer(b"a")
    peer.run()
    for opaque in (0, 999, 2**32 - 1, 3):
        peer.peer.put(AnyResponse(opcode=0x41, opaque=opaque, status=Status.EINVAL))
    node.write(1, b"b")
    assert brief(peer.run()) == ["b=v"]
    assert not peer.closed


# Refusals


def test_a_temporary_failure_is_sent_again_later_and_the_rest_goes_on() -> None:
    node, peer = node_with_peer(*(b"k%d" % i for i in range(6)), settings=TapSettings(ack_interval=1))
    refused = {b"k1": [Status.ETMPFAIL, Status.EBUSY], b"k3": [Status.ENOMEM]}

    def judge(message: Message) -> Status:
        left = refused.get(getattr(message, "key", b""))
        return left.pop(0) if left else Status.SUCCESS

    peer.judge = judge
    first = peer.run()
    assert keys(first) == [f"k{i}" for i in range(6)]
    node.write(1, b"live")
    assert keys(peer.run()) == ["live"]
    node.pass_by(4.9)
    assert peer.run() == []
    node.pass_by(0.2)
    again = peer.run()
    assert keys(again) == ["k1", "k3"]
    highest = max(message.opaque for message in first)  # type: ignore[attr-defined]
    assert all(message.opaque > highest for message in again)  # type: ignore[attr-defined]
    node.pass_by(5.1)
    assert keys(peer.run()) == ["k1"]
    node.pass_by(60)
    assert keys(peer.run()) == []
    assert not peer.closed


def test_a_message_in_the_middle_of_a_piece_can_be_refused() -> None:
    node, peer = node_with_peer(b"a", b"b", b"c")
    tried: list[bytes] = []

    def judge(message: Message) -> Status:
        if getattr(message, "key", b"") == b"b" and not tried:
            tried.append(b"b")
            return Status.ETMPFAIL
        return Status.SUCCESS

    peer.judge = judge
    assert keys(peer.run()) == ["a", "b", "c"]
    node.pass_by(6)
    assert keys(peer.run()) == ["b"]


def test_a_message_that_is_refused_over_and_over_waits_once() -> None:
    node, peer = node_with_peer(b"a", b"b", b"c")
    peer.judge = lambda _: None
    messages = peer.run()
    (refused,) = [message for message in messages if brief([message]) == ["b=v"]]
    nack = AnyResponse(opcode=0x41, opaque=refused.opaque, status=Status.ETMPFAIL).encode()  # type: ignore[attr-defined]
    peer.peer.put(nack * 1000)
    assert producer_of(peer).retrying == 1
    peer.judge = lambda _: Status.SUCCESS
    for message in messages:
        peer._answer(message)
    peer.peer.put(nack * 1000)
    peer.run()
    node.write(1, b"b", value=b"newer")  # makes the one that waits needless, and leaves no twin behind
    assert "b=newer" in brief(peer.run())
    node.pass_by(20)
    assert keys(peer.run()) == []
    peer.leave()
    assert keys(TapPeer(node, connect(b"client", ACKED, vbuckets=(1, 2))).run()) == []


def test_what_waits_never_overtakes_a_newer_change_of_its_key() -> None:
    node, peer = node_with_peer(b"k", b"l", settings=TapSettings(ack_interval=1))
    refused = [Status.ETMPFAIL]
    peer.judge = lambda m: refused.pop() if refused and getattr(m, "key", b"") == b"k" else Status.SUCCESS
    peer.run()
    node.write(1, b"k", value=b"newer")
    assert brief(peer.run()) == ["k=newer", "#close_backfill"]  # nothing of the backfill is missing now
    node.pass_by(20)
    assert keys(peer.run()) == []


def test_a_refusal_that_comes_after_a_newer_change_went_out_is_settled() -> None:
    node, peer = node_with_peer()
    peer.run()
    peer.judge = lambda _: None
    node.write(1, b"k")
    first = peer.run()
    node.write(1, b"k", value=b"newer")
    second = peer.run()
    peer.judge = lambda _: Status.SUCCESS
    for message in first + second:
        status = Status.ETMPFAIL if brief([message]) == ["k=v"] else Status.SUCCESS
        peer.peer.put(AnyResponse(opcode=message.code, opaque=message.opaque, status=status))  # type: ignore[attr-defined]
    node.pass_by(20)
    assert keys(peer.run()) == []
    assert number(peer) == 0


def test_not_my_vbucket_stops_that_vbucket_with_a_log_line() -> None:
    node, peer = node_with_peer(b"a", b"b", settings=TapSettings(ack_interval=1))
    peer.run()
    peer.judge = lambda m: Status.NOT_MY_VBUCKET if getattr(m, "vbucket", 0) == 1 else Status.SUCCESS
    node.write(1, b"c")
    peer.run()
    assert node.warnings == ["vbucket 1 is no longer sent: the consumer answered NOT_MY_VBUCKET"]
    node.write(1, b"d")
    node.write(2, b"e")
    assert keys(peer.run()) == ["e"]
    assert not peer.closed


def test_what_was_taken_behind_a_refusal_does_not_hide_what_was_refused() -> None:
    node, peer = node_with_peer(*(b"k%02d" % i for i in range(20)), settings=TapSettings(ack_interval=5))
    peer.judge = lambda m: Status.NOT_MY_VBUCKET if b"k00" < getattr(m, "key", b"") < b"k08" else Status.SUCCESS
    peer.run()
    peer.leave()
    again = TapPeer(node, connect(b"client", ACKED, vbuckets=(1, 2)))
    assert set(keys(again.run())) >= {f"k{i:02d}" for i in range(1, 20)}


@pytest.mark.parametrize("flags", [ACK | LIST, ACKED])
def test_a_consumer_that_refuses_to_start_over_is_told_again(flags: int) -> None:
    node, peer = node_with_peer(flags=flags)
    peer.run()
    node.write(1, b"held")
    peer.run()
    peer.judge = lambda m: Status.NOT_MY_VBUCKET if "initial_vbucket_stream" in brief([m])[0] else Status.SUCCESS
    node.write(2, b"kept")
    node.vbucket(1).flush()
    node.write(1, b"new")
    peer.run()
    peer.leave()
    again = TapPeer(node, connect(b"client", flags, vbuckets=(1, 2))).run()
    assert "#initial_vbucket_stream" in brief(again)
    assert "new" in keys(again)


@pytest.mark.parametrize("refusal", [Status.NOT_MY_VBUCKET, Status.ETMPFAIL])
def test_a_flush_that_is_refused_is_told_again(refusal: Status) -> None:
    node, peer = node_with_peer(b"a", flags=ACK | LIST)
    peer.run()
    node.write(1, b"b")
    peer.run()
    peer.judge = lambda m: refusal if isinstance(m, tap.Flush) else Status.SUCCESS
    node.flush()
    node.write(1, b"c")
    peer.run()
    assert peer.closed
    again = TapPeer(node, connect(b"client", ACK | LIST, vbuckets=(1, 2))).run()
    assert brief(again)[1:] == ["#initial_vbucket_stream", "c=v", "#close_backfill"]


def test_not_my_vbucket_to_what_belongs_to_none_is_a_log_line() -> None:
    node, peer = node_with_peer(b"a")
    peer.judge = lambda m: Status.NOT_MY_VBUCKET if brief([m]) == ["#enable_auto_nack"] else Status.SUCCESS
    peer.run()
    node.write(1, b"b")
    assert keys(peer.run()) == ["b"]
    assert "belongs to no vbucket" in str(node.warnings)


@pytest.mark.parametrize("status", [Status.EINVAL, Status.E2BIG, Status.UNKNOWN_COMMAND])
@pytest.mark.parametrize("flags", [ACKED, BACKFILL | LIST])
def test_another_failure_drops_the_connection(status: Status, flags: int) -> None:
    _, peer = node_with_peer(b"a", flags=flags)
    peer.judge = lambda m: status if isinstance(m, tap.Mutation) else Status.SUCCESS
    peer.run()
    assert peer.closed


def test_what_waits_for_a_second_try_counts_as_not_acknowledged() -> None:
    settings = TapSettings(ack_interval=1, window_messages_max=20)
    node, peer = node_with_peer(*(b"k%03d" % i for i in range(100)), settings=settings)
    peer.judge = lambda m: Status.ETMPFAIL if isinstance(m, tap.Mutation) else Status.SUCCESS
    assert len(keys(peer.run())) == 20
    node.pass_by(5.1)
    assert len(set(keys(peer.run()) + keys(peer.received))) == 20
    peer.judge = lambda _: Status.SUCCESS
    node.pass_by(5.1)
    peer.run()
    assert len(set(keys(peer.received))) == 100


def test_a_refusal_does_not_look_at_everything_that_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: Counter[str] = Counter()

    def counted(message: bytes, found: Callable[[bytes], tuple[int, bytes] | None] = key_of) -> Any:
        looked["at"] += 1
        return found(message)

    for module in (acknowledgements, producer, retry_queue):
        monkeypatch.setattr(module, "key_of", counted)
    node, peer = node_with_peer(*(b"k%04d" % i for i in range(1000)))
    peer.judge = lambda m: Status.ETMPFAIL if isinstance(m, tap.Mutation) else Status.SUCCESS
    peer.run()
    node.pass_by(5.1)
    peer.judge = lambda _: Status.SUCCESS
    peer.run()
    assert len(set(keys(peer.received))) == 1000
    assert looked["at"] < 20_000


def test_a_dump_waits_for_what_was_refused() -> None:
    node, peer = node_with_peer(b"a", b"b", flags=DUMP | LIST | ACK)
    refused = [Status.ETMPFAIL]
    peer.judge = lambda m: refused.pop() if refused and getattr(m, "key", b"") == b"b" else Status.SUCCESS
    assert "#close_tap_stream" not in brief(peer.run())
    node.pass_by(6)
    peer.run()
    assert peer.closed
    of_1 = [message for message in peer.received if message.vbucket == 1]  # type: ignore[attr-defined]
    assert brief(of_1) == ["#initial_vbucket_stream", "a=v", "b=v", "b=v", "#close_backfill"]
    assert brief(peer.received)[-1] == "#close_tap_stream"


def test_a_backfill_is_not_closed_before_all_of_it_is_taken_and_what_comes_does_not_wait() -> None:
    node, peer = node_with_peer(b"a", b"b", flags=ACK | BACKFILL | LIST, settings=TapSettings(ack_interval=1))
    refused = [Status.ETMPFAIL] * 2
    peer.judge = lambda m: refused.pop() if refused and getattr(m, "key", b"") == b"a" else Status.SUCCESS
    peer.run()
    for number in range(3):  # answers to what comes say nothing of the backfill
        node.write(1, b"live%d" % number)
        assert brief(peer.run()) == [f"live{number}=v"]
    node.pass_by(5.1)
    assert brief(peer.run()) == ["a=v"]
    node.pass_by(5.1)
    assert brief(peer.run()) == ["a=v", "#close_backfill"]


def test_a_backfill_is_not_closed_while_answers_are_on_their_way() -> None:
    node, peer = node_with_peer(b"a", b"b", flags=ACK | BACKFILL | LIST)
    peer.judge = lambda _: None
    told = peer.run()
    assert brief([m for m in told if m.vbucket == 1]) == ["#initial_vbucket_stream", "a=v", "b=v"]  # type: ignore[attr-defined]
    node.write(1, b"c")
    assert peer.run() == []
    peer.judge = lambda _: Status.SUCCESS
    for message in told:
        peer._answer(message)
    assert brief(peer.run()) == ["#close_backfill", "c=v"]


def test_what_came_in_two_checkpoints_while_answers_were_awaited_comes_as_a_whole() -> None:
    node, peer = node_with_peer(b"a", flags=ACK | BACKFILL | LIST)
    peer.judge = lambda _: None
    told = peer.run()
    node.write(1, b"b")
    node.vbucket(1).create_checkpoint()
    node.write(1, b"c")
    assert peer.run() == []
    peer.judge = lambda _: Status.SUCCESS
    for message in told:
        peer._answer(message)
    assert brief(peer.run()) == ["#close_backfill", "b=v", "c=v"]


# Noops


def test_an_idle_client_need_not_answer_noops_but_must_acknowledge() -> None:
    node, peer = node_with_peer(b"a", settings=TapSettings(noop_interval_s=50))
    peer.run()
    peer.judge = lambda m: None if isinstance(m, memcached.Noop) else Status.SUCCESS
    for _ in range(5):
        node.pass_by(51)
        assert [type(message) for message in peer.run()] == [memcached.Noop]
    node.pass_by(40)
    peer.judge = lambda _: None
    node.write(1, b"b")
    assert keys(peer.run()) == ["b"]
    node.pass_by(10)  # the next noop is due, but the client has had no time to acknowledge
    peer.run()
    assert not peer.closed
    node.pass_by(51)
    peer.run()
    assert peer.closed
    assert peer.peer.close_reason.startswith("the peer acknowledged nothing for 50 s")


def test_a_client_without_acknowledgements_need_not_answer_noops() -> None:
    node, peer = node_with_peer(b"a", flags=BACKFILL | LIST, settings=TapSettings(noop_interval_s=50))
    peer.judge = lambda _: None
    peer.run()
    node.pass_by(501)
    assert [type(message) for message in peer.run()] == [memcached.Noop] * 10
    assert not peer.closed


def test_noops_can_be_switched_off() -> None:
    node, peer = node_with_peer(b"a", settings=TapSettings(noop_interval_s=0))
    peer.run()
    node.pass_by(10_000)
    assert peer.run() == []
    assert not peer.closed


# What is packed without a declared message


@given(
    st.sampled_from([*Control]),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([TapFlag(0), TapFlag.ACK]),
    st.integers(0, 255),
)
def test_a_packed_control_is_what_its_declaration_says(
    control: Control, vbucket: int, opaque: int, flags: TapFlag, ttl: int
) -> None:
    message = tap.Opaque(control=control, vbucket=vbucket, opaque=opaque, tap_flags=flags, ttl=ttl)
    assert producer.packed(message) == message.encode()


# Beginning


def producer_of(peer: TapPeer[FakePeer]) -> producer.TapProducer:
    return peer.peer.tap_producer


@pytest.mark.parametrize("flags", [BACKFILL, BACKFILL | ACK, DUMP, 0])
def test_a_turn_begins_only_some_of_many_streams(flags: int) -> None:
    node = FakeNode()
    node.create_vbuckets(256)
    for vbucket in range(256):
        node.write(vbucket, b"old")
    peer = TapPeer(node, connect(b"client", flags))
    producer = producer_of(peer)
    assert (len(producer.streams), producer.beginning, producer.has_output) == (0, True, True)
    producer.produce()
    assert len(producer.streams) == BEGIN_MAX
    node.write(255, b"new")
    again = TapPeer(node, connect(b"again", flags))  # what the first turn sent is lost
    node.write(255, b"newer")
    found = keys(again.run())
    assert found.count("old") == (256 if flags else 0)
    assert found.count("newer") == 1
    assert again.closed == (flags == DUMP)


def test_a_turn_looks_for_only_some_of_many_that_are_not_there() -> None:
    node = FakeNode()
    node.create_vbucket(1023)
    peer = TapPeer(node, connect(b"client", DUMP | LIST, vbuckets=tuple(range(1024))))
    producer = producer_of(peer)
    for _ in range(1024 // BEGIN_MAX - 1):
        assert producer.produce() == b""
        assert (producer.beginning, producer.has_output) == (True, True)
    assert brief(peer.run()) == ["#initial_vbucket_stream", "#close_backfill", "#close_tap_stream"]


@pytest.mark.parametrize(("flags", "date"), [(0, 0), (BACKFILL, 5), (BACKFILL, 0)])
def test_a_history_that_breaks_before_its_stream_has_begun_is_not_missed(flags: int, date: int) -> None:
    node = FakeNode()
    for vbucket in (1, 2):
        node.create_vbucket(vbucket)
        node.write(vbucket, b"old")
    peer = TapPeer(node, connect(b"client", flags | ACK, date))
    node.flush()
    node.write(2, b"new")
    messages = peer.run()
    assert brief(messages).count("#initial_vbucket_stream") == 2
    assert keys(messages) == ["new"]


def test_a_flush_of_what_has_begun_leaves_alone_what_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.protocol.tap.producer.BEGIN_MAX", 1)
    node = FakeNode()
    for vbucket in (1, 2):
        node.create_vbucket(vbucket)
        node.write(vbucket, b"old")
    peer = TapPeer(node, connect(b"client", ACK))
    producer = producer_of(peer)
    producer.produce()
    assert list(producer.streams) == [1]
    node.vbucket(1).flush()
    assert "flush" not in brief(peer.run())


def test_a_client_that_leaves_before_all_streams_have_begun_misses_nothing() -> None:
    node = FakeNode()
    node.create_vbucket(1)
    node.write(1, b"old")
    TapPeer(node, connect(b"client", ACK)).leave()
    node.write(1, b"meanwhile")
    assert keys(TapPeer(node, connect(b"client", ACK)).run()) == ["meanwhile"]


def test_a_vbucket_is_followed_as_soon_as_it_can_be_without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    node, peer = node_with_peer(flags=LIST)
    asked: Counter[int] = Counter()
    follow = producer.TapProducer._follow
    monkeypatch.setattr(
        producer.TapProducer, "_follow", lambda self, number: (asked.update([number]), follow(self, number))
    )
    everything = TapPeer(node, connect(b"all"))
    for each in (peer, everything):
        each.run()
    asked.clear()
    node.pass_by(10)
    assert not asked
    node.create_vbucket(3)
    node.write(3, b"new")
    assert (keys(everything.run()), keys(peer.run()), asked) == (["new"], [], Counter({3: 1}))
