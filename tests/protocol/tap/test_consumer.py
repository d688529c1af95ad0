"""What a peer's TAP messages do to a store, and which of them are answered."""

from typing import Any

import pytest

from upriver.errors import InvalidArguments, KeyExists, NotMyVbucket
from upriver.model import Event, VbucketState
from upriver.protocol.tap.consumer import ReceivedChange, TapConsumer
from upriver.protocol.tap.flush_mark import FlushMark, marked
from upriver.wire import Request, Response, memcached, tap
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import Control, TapFlag


class Recorder:
    """A store that remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.refuse = False
        #: The vbuckets that do not become copies.
        self.active: set[int] = set()

    def store(self, change: ReceivedChange, peer: object) -> None:
        if self.refuse:
            raise NotMyVbucket(vbucket=change.vbucket)
        self.calls.append(change)

    def start_over(self, vbucket: int, peer: object) -> None:
        if self.refuse:
            raise NotMyVbucket(vbucket=vbucket)
        self.calls.append(("start over", vbucket))

    def flush(self, mark: FlushMark | None, spared: frozenset[int], ttl: int, peer: object) -> None:
        self.calls.append(("flush", mark, spared, ttl))

    def set_state(self, vbucket: int, state: VbucketState, peer: object) -> None:
        if self.refuse:
            raise NotMyVbucket(vbucket=vbucket)
        if vbucket in self.active:
            raise KeyExists(vbucket=vbucket)
        self.calls.append((state, vbucket))

    def online_update(self, control: Control) -> None:
        self.calls.append(control)


@pytest.fixture
def sink() -> Recorder:
    return Recorder()


@pytest.fixture
def consumer(sink: Recorder) -> TapConsumer:
    return TapConsumer(sink, 0.0)


def control(which: Control, vbucket: int = 3) -> tap.Opaque:
    return tap.Opaque(vbucket=vbucket, control=which)


def test_a_change_keeps_everything_and_has_one_hop_less(consumer: TapConsumer, sink: Recorder) -> None:
    consumer.receive(
        tap.Mutation(
            vbucket=3, cas=5, datatype=1, ttl=9, flags=7, expiration=8, rev_seqno=6, nru=1, key=b"k", value=b"v"
        )
    )
    consumer.receive(tap.Delete(vbucket=3, cas=6, rev_seqno=7, key=b"k", ttl=1))
    consumer.receive(tap.Mutation(vbucket=4, key=b"old", value=b"w"))
    assert sink.calls == [
        ReceivedChange(
            vbucket=3,
            event=Event.MUTATION,
            key=b"k",
            value=b"v",
            flags=7,
            expiry=8,
            datatype=1,
            cas=5,
            rev_seqno=6,
            ttl=8,
        ),
        ReceivedChange(vbucket=3, event=Event.DELETION, key=b"k", cas=6, rev_seqno=7, ttl=0),
        ReceivedChange(vbucket=4, event=Event.MUTATION, key=b"old", value=b"w", ttl=254),
    ]
    assert (consumer.messages, consumer.changes, consumer.fed) == (3, 3, {3, 4})


MESSAGES = [
    tap.Mutation(key=b"k", rev_seqno=1, nru=0),
    tap.Delete(key=b"k", rev_seqno=1),
    tap.Flush(),
    tap.Opaque(control=Control.CLOSE_BACKFILL),
    tap.SetVbucket(state=memcached.VbucketState.PENDING),
    tap.CheckpointStart(checkpoint=4),
    tap.CheckpointEnd(checkpoint=4),
    tap.NamedCheckpointStart(checkpoint=4, rev_seqno=1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_only_what_asks_for_it_is_answered(consumer: TapConsumer, message: Any) -> None:
    message.opaque = 99
    message.tap_flags = TapFlag(0)
    assert consumer.receive(message) is None
    message.tap_flags = TapFlag.ACK
    answer = consumer.receive(message)
    assert answer is not None
    assert (answer.code, answer.opaque, answer.status) == (message.code, 99, Status.SUCCESS)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_without_hops_left_everything_is_refused(consumer: TapConsumer, sink: Recorder, message: Any) -> None:
    message.ttl = 0
    try:
        with pytest.raises(InvalidArguments, match="hops"):
            consumer.receive(message)
    finally:
        message.ttl = 255
    assert (sink.calls, consumer.refused) == ([], 1)


def test_a_refusal_of_the_store_is_the_answer(consumer: TapConsumer, sink: Recorder) -> None:
    sink.refuse = True
    with pytest.raises(NotMyVbucket):
        consumer.receive(tap.Mutation(vbucket=3, key=b"k"))
    assert consumer.fed == {3}


def test_what_the_controls_do(consumer: TapConsumer, sink: Recorder) -> None:
    consumer.receive(control(Control.ENABLE_AUTO_NACK))
    consumer.receive(control(Control.ENABLE_CHECKPOINT_SYNC))
    assert (consumer.peer_nacks, consumer.peer_sends_checkpoints, sink.calls) == (True, True, [])
    consumer.receive(control(Control.INITIAL_VBUCKET_STREAM))
    assert (sink.calls, consumer.backfilling) == ([("start over", 3)], {3})
    consumer.receive(control(Control.CLOSE_BACKFILL))
    assert consumer.backfilling == set()
    consumer.receive(tap.Opaque(vbucket=5, control=Control.CLOSE_BACKFILL))
    assert consumer.fed == {3, 5}
    consumer.receive(control(Control.OPEN_CHECKPOINT))
    online = [Control.START_ONLINEUPDATE, Control.STOP_ONLINEUPDATE, Control.REVERT_ONLINEUPDATE]
    for which in online:
        consumer.receive(control(which))
    assert sink.calls[1:] == online
    assert not consumer.finished
    consumer.receive(control(Control.CLOSE_TAP_STREAM))
    assert consumer.finished


def test_states_and_checkpoints(consumer: TapConsumer, sink: Recorder) -> None:
    consumer.receive(tap.SetVbucket(vbucket=3, state=memcached.VbucketState.PENDING))
    consumer.receive(tap.SetVbucket(vbucket=3, state=memcached.VbucketState.REPLICA))
    assert sink.calls == [(VbucketState.PENDING, 3), (VbucketState.REPLICA, 3)]
    consumer.receive(tap.CheckpointStart(vbucket=3, checkpoint=8))
    consumer.receive(tap.CheckpointEnd(vbucket=3, checkpoint=8))
    consumer.receive(tap.NamedCheckpointStart(vbucket=4, checkpoint=9))
    assert consumer.checkpoints == {3: 8, 4: 9}


def test_a_flush_means_everything_unless_it_is_ours_and_lists_its_vbuckets(
    consumer: TapConsumer, sink: Recorder
) -> None:
    consumer.receive(tap.Mutation(vbucket=3, key=b"k"))
    consumer.receive(tap.Flush())
    consumer.receive(tap.Flush(ttl=7, private=marked(9, {4, 5})))
    assert sink.calls[1:] == [("flush", None, set(), 254), ("flush", (9, {4, 5}), set(), 6)]


def test_a_flush_does_not_reach_what_stays_active(consumer: TapConsumer, sink: Recorder) -> None:
    sink.active = {3}
    with pytest.raises(KeyExists):
        consumer.receive(tap.SetVbucket(vbucket=3, state=memcached.VbucketState.PENDING))
    consumer.receive(tap.Flush())
    assert sink.calls == [("flush", None, {3}, 254)]


def test_what_has_become_a_copy_after_all_takes_what_comes(consumer: TapConsumer, sink: Recorder) -> None:
    pending, change = tap.SetVbucket(vbucket=3, state=memcached.VbucketState.PENDING), tap.Mutation(vbucket=3, key=b"k")
    sink.active = {3}
    for message in (pending, change):
        with pytest.raises(KeyExists):
            consumer.receive(message)
    sink.active = set()
    consumer.receive(pending)
    consumer.receive(change)
    assert [getattr(call, "key", call) for call in sink.calls] == [(VbucketState.PENDING, 3), b"k"]


@pytest.mark.parametrize("unknown", [None, Control(77)])
def test_an_unknown_control_is_ignored_and_told(sink: Recorder, unknown: Control | None) -> None:
    told: list[Control | None] = []
    consumer = TapConsumer(sink, 0.0, told.append)
    for _ in range(2):
        answer = consumer.receive(tap.Opaque(control=unknown, tap_flags=TapFlag.ACK, vbucket=1023))
        assert isinstance(answer, Response)
        assert answer.status is Status.SUCCESS
    assert (told, sink.calls, consumer.fed) == ([unknown] * 2, [], set())


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (tap.SetVbucket(state=memcached.VbucketState(9)), "9"),
        (tap.Mutation(key=b"k", tap_flags=TapFlag.NO_VALUE), "value"),
    ],
)
def test_nonsense_is_refused(consumer: TapConsumer, message: Request, why: str) -> None:
    with pytest.raises(InvalidArguments, match=why):
        consumer.receive(message)
