"""Whatever a client asks for when it comes back: what it was promised before it gets, and nothing old stays with it.

A promise is all that is at least as new as the earliest date that was asked for, and all that came since the first
time. So in the end a client holds those keys, and may hold others, but each as the node has it.
"""

from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.depth import examples
from tests.support.in_memory_node import InMemoryNode
from tests.support.tap_consumer_model import (
    AT_THE_NODE,
    KEYS,
    SETTINGS,
    VBUCKETS,
    VERDICTS,
    TapConsumerModel,
    take_step,
)
from tests.support.tap_peer import ACK, BACKFILL, DUMP, KEYS_ONLY, LIST, REGISTERED, connect
from upriver.engine.maintenance import Retention
from upriver.wire import Message, tap
from upriver.wire.dialects.tap import Control, TapFlag

#: What a consumer holds of a key whose value it did not ask for.
NO_VALUE = b"?"
NEVER = 2**64
#: Beginning with these a consumer is fed with a vbucket: a flush is meant for it too.
_NAMING = (Control.INITIAL_VBUCKET_STREAM, Control.CLOSE_BACKFILL, Control.OPEN_CHECKPOINT)


@dataclass
class Wishing(TapConsumerModel):
    """A consumer that asks for something else each time, and remembers what it may count on."""

    #: By vbucket: the seqno from which on it was promised everything, and the second.
    from_seqno: dict[int, int] = field(default_factory=dict)
    from_second: dict[int, int] = field(default_factory=dict)
    #: From this second on the present connection brings the values.
    values_from: int = NEVER
    _fed: set[int] = field(default_factory=set)

    def connect(self) -> None:
        self._fed, self.finished = set(), False
        request, now = self.request, self.node.clock()
        date = 0 if request.backfill_date is None and int(request.flags) & DUMP else request.backfill_date
        second = NEVER if date is None or date > now else date
        for vbucket in request.vbuckets or VBUCKETS:
            self.from_seqno.setdefault(vbucket, self.node.bucket.vbucket(vbucket).high_seqno)
            self.from_second[vbucket] = min(second, self.from_second.get(vbucket, NEVER))
        self.values_from = NEVER if int(request.flags) & KEYS_ONLY else second
        super().connect()

    def ask(self, date: int | None, flags: int, vbuckets: tuple[int, ...]) -> None:
        """What it asks for the next time; the date from now on."""
        flags |= ACK | REGISTERED | (LIST if vbuckets else 0) | (0 if date is None else BACKFILL)
        self.request = connect(b"client", flags, max(0, int(self.node.clock()) + (date or 0)), vbuckets)

    def cut(self, kept: int) -> None:
        """The connection breaks; if nothing of it is kept, perhaps before the node has begun to send."""
        if self.peer is not None and kept < 0:
            self.peer.session.closing = True
            if self.peer.session.stream is not None:
                self.peer.session.stream.lose()
            self.peer = None
        super().cut(kept)

    def _judge(self, message: Message, verdict: object) -> None:
        self._feed(message)
        super()._judge(message, verdict)  # type: ignore[arg-type]

    def _feed(self, message: Message) -> None:
        if isinstance(message, tap.Mutation | tap.Delete) or (
            isinstance(message, tap.Opaque) and message.control in _NAMING
        ):
            self._fed.add(message.vbucket)

    def _apply(self, message: Message) -> None:
        self._feed(message)
        if isinstance(message, tap.Flush):
            for vbucket in self._fed or VBUCKETS:
                self.held[vbucket].clear()
        elif isinstance(message, tap.Mutation) and TapFlag.NO_VALUE in message.tap_flags:
            self.held[message.vbucket][message.key] = NO_VALUE
        else:
            super()._apply(message)

    def check(self) -> None:
        """Compare what it holds with the node."""
        for vbucket, held in self.held.items():
            table = self.node.bucket.vbucket(vbucket).table
            items = {key: item for key in table.live_keys() if (item := table.find(key)) is not None}
            for key, value in held.items():
                assert key in items
                assert value in (items[key].value, NO_VALUE)
            for key, item in items.items():
                if item.seqno > self.from_seqno[vbucket] or item.time >= self.from_second[vbucket]:
                    assert key in held
                if item.time >= self.values_from:
                    assert held[key] == item.value


DATES = st.sampled_from([None, 0, 0, 3, 3, -1, -6, -50, -(2**40)])
WISHES = st.tuples(DATES, st.sampled_from([0, 0, 0, KEYS_ONLY, DUMP]), st.sampled_from([(), VBUCKETS, (1,), (2,)]))
STEPS = st.lists(
    st.one_of(
        *AT_THE_NODE,
        st.tuples(st.just("roll back"), st.sampled_from(VBUCKETS), st.integers(0, 6)),
        st.tuples(st.just("read"), VERDICTS),
        st.tuples(st.just("come back"), st.integers(-1, 8), WISHES),
        st.tuples(st.just("come back"), st.integers(-1, 8), WISHES),
        st.tuples(st.just("time"), st.sampled_from([1.0, 6.0])),
        st.tuples(st.just("purge")),
    ),
    max_size=30,
)
NOW, TO_COME, ALL = (0, 0, ()), (None, 0, ()), (-(2**40), 0, ())


@settings(max_examples=examples(300), deadline=None)
@example(  # what was not acknowledged, and is older than a date that comes after "what comes"
    first=TO_COME,
    steps=[("set", 1, b"a"), ("time", 6.0), ("come back", 0, TO_COME), ("come back", 0, NOW)],
    last=NOW,
)
@example(  # what was sent without values, in a vbucket that was not asked for in between
    first=(None, KEYS_ONLY, ()),
    steps=[("set", 2, b"a"), ("come back", 0, (None, 0, (1,)))],
    last=TO_COME,
)
@example(  # a history that breaks after a connection that came to nothing
    first=TO_COME,
    steps=[
        ("set", 1, b"a"),
        ("set", 1, b"b"),
        ("read", []),
        ("come back", 0, (-50, 0, ())),
        ("come back", -1, TO_COME),
        ("roll back", 1, 3),
    ],
    last=TO_COME,
)
@given(first=WISHES, steps=STEPS, last=st.tuples(DATES, st.just(0), st.just(())))
def test_a_client_with_another_request_gets_what_it_was_promised(
    first: tuple[int | None, int, tuple[int, ...]],
    steps: list[tuple[object, ...]],
    last: tuple[int | None, int, tuple[int, ...]],
) -> None:
    node = InMemoryNode(tap_settings=SETTINGS)
    node.bucket.maintenance.retention = Retention(history_s=0, history_bytes=0, tombstone_s=1)
    for vbucket in VBUCKETS:
        node.bucket.create_vbucket(vbucket)
        for key in KEYS[2:]:
            node.bucket.vbucket(vbucket).set(key, b"old")
            node.pass_by(3)
    consumer = Wishing(node, connect(), acks=True)
    consumer.ask(*first)
    consumer.connect()
    for number, step in enumerate(steps):
        match step:
            case ("come back", int(kept), (int() | None as date, int(flags), tuple(vbuckets))):
                consumer.cut(kept)
                consumer.ask(date, flags, vbuckets)
                consumer.connect()
            case _:
                take_step(node, consumer, step, number)
    consumer.cut(100)
    consumer.ask(*last)
    for _ in range(4):
        consumer.read([])
        node.pass_by(6)
    consumer.check()
