"""Whatever is written, refused, cut off and tried again: in the end a consumer of TAP holds what the node holds.

The consumer here is a dictionary for each vbucket that follows the messages to the letter. It takes or refuses them at
will, acknowledges late or not at all, loses its connection with messages on the way, and comes back under its name.
"""

import dataclasses
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
from tests.support.tap_peer import ACK, BACKFILL, CHECKPOINT, DUMP, LIST, REGISTERED, connect
from upriver.engine.maintenance import Retention
from upriver.wire import AnyResponse, Message, Request
from upriver.wire.codes import Status
from upriver.wire.dialects.tap import TapFlag


def contents(node: InMemoryNode) -> dict[int, dict[bytes, bytes]]:
    out: dict[int, dict[bytes, bytes]] = {}
    for vbucket in VBUCKETS:
        table = node.bucket.vbucket(vbucket).table
        found = {key: table.find(key) for key in table.live_keys()}
        out[vbucket] = {key: item.value for key, item in found.items() if item is not None}
    return out


STEPS = st.lists(
    st.one_of(
        *AT_THE_NODE,
        st.tuples(st.just("roll back"), st.sampled_from(VBUCKETS), st.integers(0, 6)),
        st.tuples(st.just("read"), VERDICTS),
        st.tuples(st.just("read"), VERDICTS),
        st.tuples(st.just("cut"), st.integers(0, 8)),
        st.tuples(st.just("time"), st.sampled_from([1.0, 6.0, 40.0])),
        st.tuples(st.just("purge")),
    ),
    max_size=30,
)


#: A client that asks for future changes while the vbucket is empty gets everything, as long as the node knows it.
FLAGS = st.sampled_from(
    [
        BACKFILL,
        BACKFILL | ACK,
        BACKFILL | ACK | CHECKPOINT,
        BACKFILL | ACK | REGISTERED,
        REGISTERED,
        ACK | REGISTERED,
        ACK | REGISTERED | CHECKPOINT,
    ]
)


@settings(max_examples=examples(300), deadline=None)
@example(  # a deletion that was sent and never arrived is purged; the client has acknowledged nothing and is at 0
    steps=[
        ("set", 1, b"a"),
        ("read", []),
        ("delete", 1, b"a"),
        ("set", 1, b"d"),
        ("cut", 0),
        ("purge",),
    ],
    flags=REGISTERED,
    listed=True,
)
@given(steps=STEPS, flags=FLAGS, listed=st.booleans())
def test_in_the_end_the_consumer_holds_what_the_node_holds(
    steps: list[tuple[object, ...]], flags: int, listed: bool
) -> None:
    node = InMemoryNode(tap_settings=SETTINGS)
    node.bucket.maintenance.retention = Retention(history_s=0, history_bytes=0, tombstone_s=1)
    for vbucket in VBUCKETS:
        node.bucket.create_vbucket(vbucket)
    request = connect(b"client", flags | (LIST if listed else 0), vbuckets=VBUCKETS)
    consumer = TapConsumerModel(node, request, bool(flags & ACK))
    consumer.connect()
    for number, step in enumerate(steps):
        take_step(node, consumer, step, number)
    for _ in range(4):  # what was refused is tried again, and what was not answered is sent again after a reconnect
        consumer.read([])
        node.pass_by(6)
    consumer.cut(100)
    consumer.read([])
    node.pass_by(6)
    consumer.read([])
    assert consumer.held == contents(node)


@dataclass
class LateConsumer(TapConsumerModel):
    """Takes everything that it does not refuse for the moment, and answers in the end, though late: never losing its
    connection it must get everything too."""

    _owed: list[bytes] = field(default_factory=list)

    def connect(self) -> None:
        self._owed = []
        super().connect()

    def read(self, verdicts: list[Status | None]) -> None:
        """Answer what is owed, and then as the verdicts say: None is success, in the next call."""
        if self.peer is not None and not self.peer.closed:
            self.peer.put(*self._owed)
        self._owed = []
        super().read(verdicts)

    def _judge(self, message: Message, verdict: Status | None) -> None:
        assert self.peer is not None
        if verdict is not None and not self._owed:
            super()._judge(message, verdict)
            return
        if verdict in (None, Status.SUCCESS):
            self._apply(message)
        assert isinstance(message, Request)
        if verdict not in (None, Status.SUCCESS) or TapFlag.ACK in message.tap_flags:  # type: ignore[attr-defined]
            status = verdict or Status.SUCCESS
            self._owed.append(AnyResponse(opcode=message.code, opaque=message.opaque, status=status).encode())


LATE = st.lists(st.sampled_from([Status.SUCCESS, Status.SUCCESS, Status.ETMPFAIL, None, None]), max_size=8)
LATE_STEPS = st.lists(
    st.one_of(
        *AT_THE_NODE,
        st.tuples(st.just("read"), LATE),
        st.tuples(st.just("read"), LATE),
        st.tuples(st.just("time"), st.sampled_from([1.0, 6.0])),
    ),
    max_size=30,
)


@settings(max_examples=examples(200), deadline=None)
@example(  # of two checkpoints that came while an answer was awaited, the second
    steps=[
        ("set", 1, b"a"),
        ("read", [None] * 8),
        ("set", 1, b"b"),
        ("checkpoint", 1),
        ("set", 1, b"c"),
        ("time", 1.0),
    ],
    flags=BACKFILL | ACK,
    window=10_000,
)
@example(  # what came behind a flush that could not be done for the moment, before the next flush
    steps=[("read", []), ("flush", 0), ("set", 1, b"a"), ("read", [Status.ETMPFAIL]), ("flush", 0)],
    flags=ACK | REGISTERED,
    window=5,
)
@given(steps=LATE_STEPS, flags=FLAGS, window=st.sampled_from([1, 3, 5, 10_000]))
def test_a_client_that_answers_late_gets_everything_without_another_connection(
    steps: list[tuple[object, ...]], flags: int, window: int
) -> None:
    node = InMemoryNode(tap_settings=dataclasses.replace(SETTINGS, window_messages_max=window))
    for vbucket in VBUCKETS:
        node.bucket.create_vbucket(vbucket)
    consumer = LateConsumer(node, connect(b"client", flags), bool(flags & ACK))
    consumer.connect()
    for number, step in enumerate(steps):
        take_step(node, consumer, step, number)
    for _ in range(6):
        consumer.read([])
        node.pass_by(6)
    consumer.read([])
    assert consumer.held == contents(node)


TEMPORARY = st.lists(st.sampled_from([Status.SUCCESS, Status.ETMPFAIL, Status.EBUSY]), max_size=6)


@settings(max_examples=examples(100), deadline=None)
@given(
    written=st.lists(st.tuples(st.sampled_from(VBUCKETS), st.sampled_from(KEYS)), max_size=12),
    refused=st.lists(TEMPORARY, max_size=5),
)
def test_a_client_that_is_told_that_nothing_more_comes_holds_all_of_a_dump(
    written: list[tuple[int, bytes]], refused: list[list[Status | None]]
) -> None:
    node = InMemoryNode(tap_settings=SETTINGS)
    for vbucket in VBUCKETS:
        node.bucket.create_vbucket(vbucket)
    for number, (vbucket, key) in enumerate(written):
        node.bucket.vbucket(vbucket).set(key, b"%d" % number)
    consumer = TapConsumerModel(node, connect(b"client", DUMP | ACK), acks=True)
    consumer.connect()
    for verdicts in refused:
        if not consumer.finished:
            consumer.read(list(verdicts))
            node.pass_by(6)
    for _ in range(3):
        if not consumer.finished:
            consumer.read([])
            node.pass_by(6)
    assert consumer.finished
    assert consumer.held == contents(node)
